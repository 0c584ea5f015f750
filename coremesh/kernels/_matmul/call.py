"""What a matrix product is asked for, and whether it can be."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coremesh import errors
from coremesh.kernels import checks, pointwise
from coremesh.kernels._matmul.blocks import Blocks

type Epilogue = Callable[..., jax.Array]

DTYPES = tuple(
  map(
    jnp.dtype,
    (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2),
  )
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
  """The static arguments of a call."""

  epilogue: Epilogue | None = None
  out_dtype: Any = None
  transpose_x: bool = False
  transpose_w: bool = False
  precision: Any = None
  blocks: Blocks | None = None
  num_weights: int = 1

  def product(self, x: Any, w: Any) -> tuple[tuple[int, ...], int, int, int]:
    """Leading axes of the output, and M, N, K."""
    m, k = x.shape[-2:][:: -1 if self.transpose_x else 1]
    n = w.shape[-2 if self.transpose_w else -1]
    return np.broadcast_shapes(x.shape[:-2], w.shape[:-2]), m, n, k


def sum_dtype(dtype: Any) -> np.dtype:
  whole = jnp.issubdtype(dtype, jnp.integer)
  return jnp.dtype(jnp.int32 if whole else jnp.float32)


def default_out_dtype(x: Any) -> np.dtype:
  whole = jnp.issubdtype(x.dtype, jnp.integer)
  return jnp.dtype(jnp.int32) if whole else jnp.dtype(x.dtype)


def as_weights(w: jax.Array | Sequence[jax.Array]) -> tuple[jax.Array, ...]:
  """The weights, one or several, as a tuple."""
  return tuple(w) if isinstance(w, list | tuple) else (w,)  # type: ignore


def parted(call: Call, arrays: Sequence[Any]) -> tuple[Any, Any, Any]:
  """x, the weights and the operands."""
  return (
    arrays[0],
    arrays[1 : 1 + call.num_weights],
    arrays[1 + call.num_weights :],
  )


def check(call: Call, x, weights, operands) -> None:
  """Checks that the arrays of a call fit each other.

  Raises:
    ShapeError, DTypeError: they do not; see `kernels.matmul`.
  """
  for label, array in (
    ("x", x),
    *((f"w[{i}]", w) for i, w in enumerate(weights)),
  ):
    checks.is_array(f"{label} of matmul", array)
    if array.ndim < 2:
      raise errors.ShapeError(
        f"{label} of matmul must have at least 2 axes; got shape {array.shape}."
        " Add an axis of size 1 to a vector: x[None, :]."
      )
    if jnp.dtype(array.dtype) not in DTYPES:
      raise errors.DTypeError(
        f"{label} of matmul must be one of {', '.join(map(str, DTYPES))}; got"
        f" {array.dtype}."
      )
    if array.dtype != x.dtype:
      raise errors.DTypeError(
        f"x and w of matmul must be of one dtype; got {x.dtype} and"
        f" {array.dtype} of {label}. Convert one: w.astype(x.dtype)."
      )
  if not weights:
    raise errors.ShapeError("w of matmul must be at least one array; got none.")
  shapes = {w.shape for w in weights}
  if len(shapes) > 1:
    raise errors.ShapeError(
      f"All of w must have one shape; got {', '.join(map(str, shapes))}."
    )
  if len(weights) > 1 and call.epilogue is None:
    raise errors.ShapeError(
      f"{len(weights)} arrays in w make as many products: give an epilogue"
      " that makes one block of them, such as lambda a, b: jax.nn.silu(a) * b."
    )
  x_k = x.shape[-2 if call.transpose_x else -1]
  w_k = weights[0].shape[-1 if call.transpose_w else -2]
  if x_k != w_k:
    raise errors.ShapeError(
      f"x of shape {x.shape} and w of shape {weights[0].shape} differ along the"
      f" axis that is summed: {x_k} and {w_k}"
      f" (transpose_x={call.transpose_x}, transpose_w={call.transpose_w})."
    )
  try:
    batch, m, n, _ = call.product(x, weights[0])
  except ValueError as error:
    raise errors.ShapeError(
      f"The leading axes of x {x.shape} and w {weights[0].shape} do not"
      " broadcast."
    ) from error
  for i, operand in enumerate(operands):
    checks.broadcasts(f"operands[{i}] of matmul", operand, (*batch, m, n))
  if operands and call.epilogue is None:
    raise errors.ShapeError(
      f"{len(operands)} operands are given and no epilogue that takes them."
    )
  if call.epilogue is not None:
    total = jax.ShapeDtypeStruct((m, n), sum_dtype(x.dtype))
    check_epilogue("matmul", call.epilogue, [total] * len(weights), operands)


def check_epilogue(
  kernel: str,
  epilogue: Any,
  totals: Sequence[jax.ShapeDtypeStruct],
  operands: Sequence[Any] = (),
) -> None:
  """Checks that an epilogue makes a block of one shape, element by element.

  Args:
    kernel: whose, in an error.
    epilogue: what was given for it.
    totals: the type [M, N] of each product.
    operands: arrays that broadcast to [..., M, N].

  Raises:
    ShapeError, DTypeError: it does not, or takes other arguments.
  """
  argument = f"epilogue of {kernel}"
  pointwise.check_takes(
    argument,
    epilogue,
    num_products=len(totals),
    num_operands=len(operands),
  )
  shapes = [(1, 1, *a.shape)[-2:] for a in operands]
  blocks = [
    jax.ShapeDtypeStruct(s, a.dtype)
    for s, a in zip(shapes, operands, strict=True)
  ]
  result = pointwise.traced(argument, epilogue, *totals, *blocks)
  checks.has_shape(f"The result of {argument}", result, totals[0].shape)


def of_rank(rank: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """The arrays with at least `rank` axes, those they lack of size 1."""
  return [a.reshape((1,) * (rank - a.ndim) + a.shape) for a in arrays]
