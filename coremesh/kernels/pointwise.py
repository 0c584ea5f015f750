"""Whether a function makes each element from those it is at, and no others.

A kernel applies such a function to one block after the other: what mixes the
elements of a block, such as a sum, would depend on where blocks end.
"""

from collections.abc import Callable, Sequence
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from coremesh import _compat, errors
from coremesh.kernels import checks

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
  check_signature(
    argument,
    function,
    num_blocks=num_products + num_operands,
    given="a block of each product and of each operand, here"
    f" {num_products} and {num_operands}",
  )


def check_signature(
  argument: str, function: Callable[..., Any], *, num_blocks: int, given: str
) -> None:
  """Raises ShapeError if a function takes more blocks, or fewer.

  Args:
    argument: its name in an error.
    function: of blocks.
    num_blocks: that it will be called with.
    given: what they are, in an error.
  """
  try:
    signature = inspect.signature(function)
  except ValueError:  # Functions of C have none: the call itself will say.
    return
  try:
    signature.bind(*[None] * num_blocks)
  except TypeError as error:
    name = getattr(function, "__name__", repr(function))
    raise errors.ShapeError(
      f"{argument}, {name}{signature}, is given {given}, and cannot take them:"
      f" {error}."
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
    DTypeError: it makes what is no array of real numbers.
  """

  def checked(*blocks: jax.Array) -> Any:
    results = function(*blocks)
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
      place = jax.tree_util.keystr(path)
      label = f"The result{place} of {argument}"
      checks.is_array(label, leaf)
      if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise errors.DTypeError(
          f"{label} must be real; got {leaf.dtype}. Take the real part, or"
          " make two results."
        )
    return results

  program, types = jax.make_jaxpr(checked, return_shape=True)(*blocks)
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
