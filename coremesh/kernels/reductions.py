"""Sums, maxima and means along any axes."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coremesh import errors
from coremesh.kernels import checks, costs, layouts
from coremesh.kernels._rows import folds as folds
from coremesh.kernels._rows import passes as passes

_INTEGERS = (jnp.int8, jnp.int16, jnp.int32)
_DTYPES = (*checks.FLOATS, *_INTEGERS)

type Axes = int | Sequence[int] | None


def reduce_sum(
  x: jax.Array,
  axis: Axes = None,
  *,
  keepdims: bool = False,
  block_bytes: int | None = None,
) -> jax.Array:
  """The sum along some axes.

  One pass over HBM for each run of adjacent axes, the last axis at the end,
  when little is left. A pass adds up to 64 rows, or 512 columns, pairwise, and
  adds that to a sum which carries what is lost by rounding in a second number.

  So a float32 sum is off by at most 9 roundings of the sum of absolute values
  for each pass, however many terms there are; integers wrap around in 32 bits.
  Moves the bytes of `x` once; holds 2 * block_bytes in VMEM.

  Args:
    x: float32, bfloat16, int8, int16 or int32 of any shape, in HBM, of one
      device. NaN beyond its tails is never added.
    axis: which axes; None: all.
    keepdims: leave them in place with size 1.
    block_bytes: of `x` in VMEM at once; default `blocks.BLOCK_BYTES`.

  Returns:
    The dtype of `x`; int32 of integers. Sums of nothing are 0. The gradient is
    a broadcast, left to XLA, which fuses it into what reads it.

  Raises:
    ShapeError, DTypeError: an argument that is not as above.

  Source: Neumaier, "Rundungsfehleranalyse einiger Verfahren zur Summation
    endlicher Summen", ZAMM 54 (1974).
  """
  return _call("sum", x, axis, keepdims, block_bytes)


def reduce_mean(
  x: jax.Array,
  axis: Axes = None,
  *,
  keepdims: bool = False,
  block_bytes: int | None = None,
) -> jax.Array:
  """The mean along some axes: `reduce_sum` in 32 bits, divided once.

  The algorithm, arguments, errors, bytes and VMEM are those of `reduce_sum`.

  Returns:
    The dtype of `x`; float32 of integers. Means of nothing are NaN.
  """
  return _call("mean", x, axis, keepdims, block_bytes)


def reduce_max(
  x: jax.Array,
  axis: Axes = None,
  *,
  keepdims: bool = False,
  block_bytes: int | None = None,
) -> jax.Array:
  """The maximum along some axes, NaN where there is one.

  The algorithm, arguments, errors, bytes and VMEM are those of `reduce_sum`,
  but that nothing is rounded.

  Returns:
    The dtype of `x`. The gradient goes to the largest elements in equal parts.

  Raises:
    ShapeError: an axis without elements, too: it has no maximum.
  """
  return _call("max", x, axis, keepdims, block_bytes)


def reduce_sum_reference(
  x: jax.Array, axis: Axes = None, *, keepdims: bool = False
) -> jax.Array:
  """`reduce_sum` in plain `jnp`."""
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  total = jnp.sum(_wide(x), axis=_as_jnp(axis), keepdims=keepdims)
  return total.astype(x.dtype) if is_float else total


def reduce_mean_reference(
  x: jax.Array, axis: Axes = None, *, keepdims: bool = False
) -> jax.Array:
  """`reduce_mean` in plain `jnp`."""
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  wide = _wide(x) if is_float else x.astype(jnp.float32)
  mean = jnp.mean(wide, axis=_as_jnp(axis), keepdims=keepdims)
  return mean.astype(x.dtype) if is_float else mean


def reduce_max_reference(
  x: jax.Array, axis: Axes = None, *, keepdims: bool = False
) -> jax.Array:
  """`reduce_max` in plain `jnp`."""
  return jnp.max(x, axis=_as_jnp(axis), keepdims=keepdims)


def _wide(x):
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return x.astype(jnp.int32)
  return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _as_jnp(axis):
  return axis if axis is None or isinstance(axis, int) else tuple(axis)


# --- the functions ----------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Reduction:
  """Which reduction.

  Attributes:
    kind: "sum", "mean" or "max".
    axes: in order.
    shape: of the array.
    dtype: of the array.
    block_bytes: of `x` in VMEM at once, None for the default.
  """

  kind: str
  axes: tuple[int, ...]
  shape: tuple[int, ...]
  dtype: Any
  block_bytes: int | None


def _call(kind, x, axis, keepdims, block_bytes) -> jax.Array:
  """Checks the arguments and runs the kernels."""
  checks.dtype_is_one_of("x", x, _DTYPES)
  checks.is_block_size(block_bytes)
  keepdims = checks.checked_flag("keepdims", keepdims)
  axes = _checked_axes(x, axis)
  empty = [a for a in axes if not x.shape[a]]
  if kind == "max" and empty:
    raise errors.ShapeError(
      f"x must have elements along the axes of its maximum; got shape"
      f" {x.shape} and axis {empty[0]}."
    )
  reduction = _Reduction(
    kind=kind,
    axes=axes,
    shape=x.shape,
    dtype=x.dtype,
    block_bytes=block_bytes,
  )
  y = _reduce(reduction, x)
  return jnp.expand_dims(y, axes) if keepdims else y


def _checked_axes(x, axis) -> tuple[int, ...]:
  if axis is None:
    return tuple(range(x.ndim))
  given = tuple(axis) if isinstance(axis, Sequence) else (axis,)
  for a in given:
    is_int = isinstance(a, int | np.integer) and not isinstance(a, bool)
    if not is_int or not -x.ndim <= a < x.ndim:
      raise errors.ShapeError(
        f"axis must hold ints in [-{x.ndim}, {x.ndim}) for shape {x.shape};"
        f" got {axis!r}."
      )
  axes = sorted({int(a) % x.ndim for a in given})
  if len(axes) < len(given):
    raise errors.ShapeError(
      f"axis must name each axis once; got {axis!r} for shape {x.shape}."
    )
  return tuple(axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(reduction, x):
  fold = folds.MAXIMUM if reduction.kind == "max" else folds.SUM
  axes = reduction.axes
  if layouts.lies_transposed(x.shape):
    x, axes = layouts.transposed(x), tuple(1 - axis for axis in axes[::-1])
  y = passes.run(fold, x, axes=axes, block_bytes=reduction.block_bytes)
  if reduction.kind == "mean":
    num_terms = math.prod(reduction.shape[a] for a in reduction.axes)
    y = y.astype(jnp.float32)
    y = y / num_terms if num_terms else jnp.full_like(y, math.nan)
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  return y.astype(x.dtype) if is_float or reduction.kind == "max" else y


def _reduce_forward(reduction, x):
  y = _reduce(reduction, x)
  return y, (x, y) if reduction.kind == "max" else ()


def _reduce_backward(reduction, residuals, dy):
  if not jnp.issubdtype(reduction.dtype, jnp.floating):
    return (None,)
  axes, shape = reduction.axes, reduction.shape

  def over_axes(value):
    return jnp.broadcast_to(jnp.expand_dims(value, axes), shape)

  if reduction.kind == "sum":
    return (over_axes(dy),)
  if reduction.kind == "mean":
    num_terms = max(math.prod(shape[a] for a in axes), 1)
    dy = dy.astype(jnp.float32) / num_terms
    return (over_axes(dy.astype(reduction.dtype)),)
  x, y = residuals
  is_largest = x == over_axes(y)
  counted = dataclasses.replace(
    reduction, kind="sum", dtype=jnp.dtype(jnp.float32)
  )
  share = dy.astype(jnp.float32) / _reduce(
    counted, is_largest.astype(jnp.float32)
  )
  dx = jnp.where(is_largest, over_axes(share), 0.0)
  return (dx.astype(reduction.dtype),)


_reduce.defvjp(_reduce_forward, _reduce_backward)

_ARRAYS = {
  "8192x8192 f32 axis 0": costs.case((8192, 8192), axis=0),
  "8192x8192 f32 axis 1": costs.case((8192, 8192), axis=1),
  "8192x8192 f32": costs.case((8192, 8192)),
  "8192x8192 bf16 axis 1": costs.case((8192, 8192), dtype=jnp.bfloat16, axis=1),
  "64x1024x1024 f32 axis 0": costs.case((64, 1024, 1024), axis=0),
  "67108864 f32": costs.case((2**26,)),
  "1000x777 f32 axis 0": costs.case((1000, 777), axis=0),
}
SPECS = SUM, MEAN, MAX = tuple(
  costs.memory_bound_spec(
    function, reference, name=name, cases=_ARRAYS, flops_per_element=1
  )
  for name, function, reference in (
    ("reduce_sum", reduce_sum, reduce_sum_reference),
    ("reduce_mean", reduce_mean, reduce_mean_reference),
    ("reduce_max", reduce_max, reduce_max_reference),
  )
)
