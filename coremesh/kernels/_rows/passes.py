"""Reductions of arrays in HBM, pass by pass over runs of adjacent axes."""

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from coremesh import _compat, place
from coremesh.kernels import blocks
from coremesh.kernels._rows import folds as folds
from coremesh.kernels._rows import pass_kernels as pass_kernels
from coremesh.kernels._rows.folds import Fold

# A longer vector is first folded to one row of lanes.
_LONG_VECTOR = 2**14
# With fewer columns for each core the rows are shared over the cores.
_FEW_COLUMNS = 512


def run(
  fold: Fold,
  x: jax.Array,
  *,
  axes: Sequence[int],
  block_bytes: int | None = None,
) -> jax.Array:
  """Reduces an array along some axes.

  Args:
    fold: how.
    x: of any shape; floating point, or integers of at most 32 bits.
    axes: which axes, in order.
    block_bytes: of a block in VMEM; default `blocks.BLOCK_BYTES`.

  Returns:
    float32 or int32 of the axes that are left.
  """
  dtype = folds.dtype_of(x)
  if not x.size:
    shape = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    nothing = jnp.full(shape, fold.identity(dtype), dtype)
    return _compat.varying_as(jax.typeof(x), nothing)
  block_bytes = block_bytes or blocks.BLOCK_BYTES
  axes = list(axes)
  while axes:
    first, stop = _next_axes(x, axes)
    x = _pass(fold, x, first, stop, block_bytes)
    after = [a - (stop - first) for a in axes if a >= stop]
    axes = [a for a in axes if a < first] + after
  return x.astype(dtype)


def _next_axes(x, axes) -> tuple[int, int]:
  """The adjacent axes to reduce next: most elements first, the last axis last.

  Axes that end in the last but one are one run if their elements are adjacent
  rows of tiles.
  """
  last = x.ndim - 1
  runs: list[list[int]] = []
  for a in axes:
    if a == last:
      continue
    joins = a < last - 1 or x.shape[a] % blocks.tile_rows([x.dtype]) == 0
    if runs and runs[-1][1] == a and joins:
      runs[-1][1] = a + 1
    else:
      runs.append([a, a + 1])
  if not runs:
    return last, last + 1
  first, stop = max(runs, key=lambda r: math.prod(x.shape[slice(*r)]))
  return first, stop


def _pass(fold, x, first, stop, block_bytes) -> jax.Array:
  """Reduces the axes from `first` up to `stop`."""
  shape = x.shape
  chip = place.current_chip()
  options: dict[str, Any] = dict(block_bytes=block_bytes, chip=chip)
  kept = shape[:first] + shape[stop:]
  outer, n = math.prod(shape[:first]), math.prod(shape[first:stop])
  if stop == len(shape):
    if len(shape) == 1 and n > _LONG_VECTOR:
      x = _vector_pass(fold, x, **options)
    return pass_kernels.last_axis(fold, x, **options).reshape(kept)
  if stop == len(shape) - 1:
    cores = chip.tensor_cores_per_device
    parts = _num_parts(outer, n, shape[-1], x.dtype, cores)
    split = x.reshape(outer * parts, n // parts, shape[-1])
    y = pass_kernels.rows(fold, split, **options).reshape(
      outer, parts, shape[-1]
    )
    columns = (y[:, i] for i in range(parts))
    return functools.reduce(fold.combine, columns).reshape(kept)
  *middle, rows, columns = shape[stop:]
  view = x.reshape(outer, n, math.prod(middle), rows, columns)
  return pass_kernels.leading(fold, view, **options).reshape(kept)


def _num_parts(outer, n, columns, dtype, cores) -> int:
  """In how many parts to sum rows, so that each core has some."""
  is_shared = outer % cores == 0 or columns >= cores * _FEW_COLUMNS
  fills_tiles = n % (cores * blocks.tile_rows([dtype])) == 0
  return cores if fills_tiles and not is_shared else 1


def _vector_pass(fold, x, *, block_bytes, chip) -> jax.Array:
  """A long vector to one of 128 for each core."""
  cores = chip.tensor_cores_per_device
  unit = cores * blocks.tile_rows([x.dtype]) * blocks.LANES
  if x.size % unit:
    fill = jnp.asarray(fold.identity(x.dtype), x.dtype)
    x = jnp.pad(x, (0, -x.size % unit), constant_values=fill)
  rows = x.reshape(cores, -1, blocks.LANES)
  y = pass_kernels.rows(fold, rows, block_bytes=block_bytes, chip=chip)
  return y.reshape(-1)
