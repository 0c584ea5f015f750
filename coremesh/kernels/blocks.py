"""How the kernels that only move memory see arrays, and cut them in blocks."""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

type Combine = Callable[[jax.Array, jax.Array], jax.Array]

SUBLANES = 8
LANES = 128

# Of one block in VMEM. The copy in of the first block and the copy out of the
# last overlap with nothing, which asks for small ones; each starts 375 ns late
# (see coremesh.profile.rates) and each step has its own cost, which ask for
# large ones. Two MiB take 0.9 us at the 2.46 TB/s of a v5p.
BLOCK_BYTES = 2**21
# A step on fewer bytes takes as long as one on this many.
_LEAST_BYTES = 2**20


def tile_rows(dtypes: Sequence[jax.typing.DTypeLike]) -> int:
  """Rows of a tile in VMEM of the narrowest of some dtypes."""
  return SUBLANES * 4 // min(jnp.dtype(d).itemsize for d in dtypes)


def copied_rows(rows: int, columns: int) -> int:
  """Rows an array must have for blocks of more rows to be copied.

  XLA gives an array of at most 4 rows shorter tiles. A copy is of whole tiles
  of the array, and what it takes of a longer block in VMEM is no whole tiles of
  that. Only those of a single column of tiles lie alike in both.
  """
  is_short = rows <= SUBLANES // 2 and columns > LANES
  return SUBLANES if is_short else rows


def with_copied_rows(array: jax.Array) -> jax.Array:
  """The array, rows of zeros added where `copied_rows` asks for more."""
  rows, columns = array.shape[-2:]
  more = copied_rows(rows, columns) - rows
  if not more:
    return array
  return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, more), (0, 0)])


def even_size(
  size: int,
  *,
  unit: int = 1,
  unit_bytes: int,
  block_bytes: int,
  num_cores: int = 1,
) -> int:
  """The size of the blocks of an axis: short, and as much for each core.

  Args:
    size: of the axis, at least 1.
    unit: what a block is a multiple of; the last may reach beyond the axis.
    unit_bytes: of that much of an array.
    block_bytes: a block is at most this long, unless one unit is longer.
    num_cores: that share the blocks.
  """
  units = pl.cdiv(size, unit)
  least = max(_LEAST_BYTES // unit_bytes, 1)

  def steps_of_busiest_core(block: int) -> int:
    return pl.cdiv(pl.cdiv(units, block), num_cores)

  def cost(block: int) -> tuple[int, int]:
    busy = steps_of_busiest_core(block) * max(block, least)
    return busy + block, -block  # The first copy, or the last, is not hidden.

  most = min(units, max(block_bytes // unit_bytes, 1))
  return unit * min(range(1, most + 1), key=cost)


def whole_or_even(
  size: int, *, unit: int, unit_bytes: int, block_bytes: int
) -> int:
  """All of an axis in one block if it fits, else as `even_size`."""
  units = pl.cdiv(size, unit)
  if units * unit_bytes <= block_bytes:
    return units * unit
  return even_size(
    size, unit=unit, unit_bytes=unit_bytes, block_bytes=block_bytes
  )


def as_matrices(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """Views of arrays as [batch, rows, columns] that move no bytes on a TPU.

  An array in HBM is tiled over its last two axes, so that leading ones can be
  joined, and be joined with the rows if those fill their tiles.

  Args:
    arrays: the first says the shape; the others broadcast to it.

  Returns:
    The views; a broadcast axis has size 1. Where only some of the leading axes
    of an array are broadcast, it is repeated along them.
  """
  *lead, rows, columns = _padded(arrays[0].shape, 2)
  rank = len(lead) + 2
  batch = math.prod(lead)
  shapes = []
  for array in arrays:
    *own_lead, own_rows, own_columns = _padded(array.shape, rank)
    own_batch = 1 if all(n == 1 for n in own_lead) else batch
    shapes.append((own_batch, own_rows, own_columns))
  unit = tile_rows([a.dtype for a in arrays])
  fills_tiles = rows % unit == 0 or rows == 1
  joins = fills_tiles and all(
    s[:2] == (batch, rows) or s[:2] == (1, 1) for s in shapes
  )
  views = []
  for array, shape in zip(arrays, shapes, strict=True):
    own = _padded(array.shape, rank)
    if shape[0] == batch:
      array = jnp.broadcast_to(array.reshape(own), (*lead, *own[-2:]))
    b, r, c = shape
    views.append(array.reshape((1, b * r, c) if joins else shape))
  return views


def _padded(shape: Sequence[int], rank: int) -> tuple[int, ...]:
  return (*(1,) * (rank - len(shape)), *shape)


def pairwise(
  combine: Combine, values: jax.Array, *, size: int, axis: int
) -> jax.Array:
  """Combines the parts of `size` elements along an axis, in pairs of pairs."""
  parts = [
    jax.lax.slice_in_dim(values, i, i + size, axis=axis)
    for i in range(0, values.shape[axis], size)
  ]
  while len(parts) > 1:
    pairs = zip(parts[::2], parts[1::2], strict=False)
    rest = parts[len(parts) // 2 * 2 :]
    parts = [*(combine(a, b) for a, b in pairs), *rest]
  return parts[0]


def part_size(size: int, most: int) -> int:
  """The size of the parts in which a block in VMEM is gone through.

  The largest that divides its size and `most`, a power of two of at least a
  tile. A block that is no multiple of 8 has no parts: they would not start
  where registers do. Only one of less than a tile of its dtype is that.
  """
  return size if size % SUBLANES else math.gcd(size, most)


def within(size: int, block: int, *, axis: int) -> Any:
  """How much of this step's block along a grid axis is in the array."""
  if size % block == 0:
    return block
  return jnp.minimum(block, size - pl.program_id(axis) * block)


def num_parts(size: Any, part: int) -> Any:
  """How many parts a size has, the last maybe partial: int32 if not static."""
  if isinstance(size, int):
    return pl.cdiv(size, part)
  return jax.lax.div(size + np.int32(part - 1), np.int32(part))


def loop(
  stop: Any, body: Callable[[Any, Any], Any], carry: Any, *, first: int = 0
) -> Any:
  """A loop; none where it is known to turn at most once."""
  if not isinstance(stop, int):
    return jax.lax.fori_loop(np.int32(first), stop, body, carry)
  if stop <= first:
    return carry
  if stop - first == 1:
    return body(first, carry)
  return jax.lax.fori_loop(np.int32(first), np.int32(stop), body, carry)


def iota(shape: Sequence[int], axis: int) -> jax.Array:
  """int32 indices along an axis, whether x64 is on or off."""
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
