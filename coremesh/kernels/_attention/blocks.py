"""Sizes of the blocks of attention: given, or chosen."""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from coremesh import errors

# The rest of VMEM is for what the compiler spills.
_VMEM_SHARE = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
  """How the scores are cut into blocks.

  Attributes:
    rows: of queries at once, a multiple of `tile_rows`.
    keys: held in VMEM at once, a multiple of `part`.
    part: keys that are one turn of the loop, a multiple of `tile_keys`.
    tile_rows: rows of a tile of scores, a multiple of 128.
    tile_keys: keys of a tile of scores, a multiple of 128.
  """

  rows: int = 2048
  keys: int = 16384
  part: int = 1024
  tile_rows: int = 256
  tile_keys: int = 128

  def __post_init__(self):
    for name, unit in (
      ("tile_rows", 128),
      ("tile_keys", 128),
      ("rows", self.tile_rows),
      ("part", self.tile_keys),
      ("keys", self.part),
    ):
      size = getattr(self, name)
      if not isinstance(size, int) or size < 1 or size % unit:
        raise errors.ShapeError(
          f"{name} of Blocks must be a positive multiple of {unit}; got"
          f" {size!r}."
        )

  @property
  def masked_part(self) -> int:
    """Keys that are one turn of the loop where some scores do not count.

    A quarter of `part` if it can be: there is more to do for each.
    """
    tiles = self.part // self.tile_keys
    return self.part // next(n for n in (4, 3, 2, 1) if tiles % n == 0)


def chosen(problem: Any, *, num_mxu_columns: int, vmem_bytes: int) -> Blocks:
  """The blocks for a problem: those asked for, cut to its size, or good ones.

  Args:
    problem: an `_attention.call.Problem`.
    num_mxu_columns: of a matrix unit: a tile has at least as many keys.
    vmem_bytes: of a core.
  """
  if problem.call.blocks is not None:
    return _cut(problem.call.blocks, problem)
  rows = _rows(problem.call.window)
  blocks = Blocks(rows=rows, part=min(rows, 1024), tile_keys=num_mxu_columns)
  blocks = _cut(blocks, problem)
  while _vmem_bytes(blocks, problem) > _VMEM_SHARE * vmem_bytes:
    half = dict(keys=_half(blocks.keys, blocks.part))
    if "bias" in problem.operands and blocks.rows > 2 * blocks.tile_rows:
      half |= dict(rows=_half(blocks.rows, blocks.tile_rows))
    smaller = dataclasses.replace(blocks, **half)
    if smaller == blocks:
      return blocks
    blocks = smaller
  return blocks


def _rows(window: Any) -> int:
  """Rows of a block: few if a row counts few keys, as others do not count.

  A window of as many keys starts and ends in the corners of blocks.
  """
  if window is None or window[0] is None:
    return 2048
  keys = window[0] + 1
  most = 1024 if keys >= 2048 else 512
  return next((n for n in (2048, 1024) if keys % n == 0), most)


def _half(size: int, unit: int) -> int:
  return max(size // 2 // unit, 1) * unit


def _cut(blocks: Blocks, problem: Any) -> Blocks:
  """The blocks, none larger than its array asks for."""

  def most(size: int, length: int, unit: int) -> int:
    return min(size, pl.cdiv(length, unit) * unit)

  tile_rows = most(blocks.tile_rows, problem.q_len, 128)
  tile_keys = most(blocks.tile_keys, problem.kv_len, 128)
  part = most(blocks.part, problem.kv_len, tile_keys)
  return Blocks(
    rows=most(blocks.rows, problem.q_len, tile_rows),
    keys=most(blocks.keys, problem.kv_len, part),
    part=part,
    tile_rows=tile_rows,
    tile_keys=tile_keys,
  )


def _vmem_bytes(blocks: Blocks, problem: Any) -> int:
  """VMEM a core needs: two blocks of each array, and the scratch."""
  size = problem.dtype.itemsize
  d_qk, d_v = (pl.cdiv(d, 128) * 128 for d in (problem.d_qk, problem.d_v))
  # Two of k and of v, and one of v transposed.
  keys = blocks.keys * size * (2 * d_qk + 3 * d_v)
  # Two of q and of the output, and the sums.
  rows = blocks.rows * (size * 2 * (d_qk + d_v) + 4 * d_v)
  bias = 8 * blocks.rows * blocks.keys if "bias" in problem.operands else 0
  return keys + rows + bias
