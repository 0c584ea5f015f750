"""Whether a function makes each element from those it is at, and no others.

A kernel applies such a function to one block after the other: what mixes the
elements of a block, such as a sum, would depend on where blocks end.
"""

from collections.abc import Callable, Sequence
import inspect
from typing import Any

import jax

from coremesh import _compat, errors

_MIXING = frozenset(
  "argmax argmin concatenate conv_general_dilated cumlogsumexp cummax cummin"
  " cumprod cumsum dot_general dynamic_slice dynamic_update_slice fft gather"
  " iota pad reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum"
  " reduce_xor rev scatter scatter-add scatter_add slice sort top_k"
  " transpose".split()
)


def check_takes(
  argument: str, function: Any, *, num_products: int, num_operands: int
) -> None:
  """Checks that a function can be called with its blocks.

  Args:
    argument: its name in an error.
    function: what was given for it.
    num_products: blocks of products, which come first.
    num_operands: blocks of operands.

  Raises:
    DTypeError: it is no function.
    ShapeError: it takes more arguments, or fewer.
  """
  if not callable(function):
    raise errors.DTypeError(
      f"{argument} must be None or a function of blocks; got {function!r}."
      " Ready ones are in coremesh.kernels.epilogues."
    )
  try:
    signature = inspect.signature(function)
  except ValueError:  # Functions of C have none: the call itself will say.
    return
  try:
    signature.bind(*[None] * (num_products + num_operands))
  except TypeError as error:
    name = getattr(function, "__name__", repr(function))
    raise errors.ShapeError(
      f"{argument}, {name}{signature}, is given a block of each product and of"
      f" each operand, here {num_products} and {num_operands}, and cannot take"
      f" them: {error}."
    ) from None


def traced(argument: str, function: Callable[..., Any], *blocks: Any) -> Any:
  """The types of what a function makes of blocks.

  Args:
    argument: the name of the function in an error.
    function: of arrays to a pytree of arrays.
    *blocks: the types of its arguments.

  Returns:
    That pytree, of jax.ShapeDtypeStruct.

  Raises:
    ShapeError: it mixes elements, or holds an array that is no argument.
  """
  program, types = jax.make_jaxpr(function, return_shape=True)(*blocks)
  for eqn in _compat.walk(program.jaxpr):
    values = (*eqn.invars, *eqn.outvars)
    if eqn.primitive.name in _MIXING and _is_any_large(values):
      raise errors.ShapeError(
        f"{argument} must make each element from those at its place, for it is"
        f" applied to blocks; got one with {eqn.primitive.name}, which mixes"
        " elements or counts them. Do that outside, on the whole array."
      )
  for value in program.consts:
    if getattr(value, "size", 1) > 1:
      raise errors.ShapeError(
        f"{argument} must not close over arrays, for it is applied to blocks;"
        f" got one that holds an array of shape {tuple(value.shape)}. Give it"
        " as an argument."
      )
  return types


def _is_any_large(values: Sequence[Any]) -> bool:
  return any(getattr(v.aval, "size", 1) > 1 for v in values)
