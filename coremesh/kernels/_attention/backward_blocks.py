"""Sizes of the blocks of the backward kernel of attention."""

import dataclasses
import math

from jax.experimental import pallas as pl

from coremesh import chips
from coremesh.kernels._attention.call import Problem
from coremesh.tiles import LANES

# The rest of VMEM is for scores, which the compiler keeps there.
_VMEM_SHARE = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackwardBlocks:
  """How the backward pass is cut.

  Attributes:
    rows, keys: of a pair of blocks whose scores are one piece of code, each a
      multiple of 128 and one of them of the other.
    part, edge_part: keys whose scores are computed at once, in the middle of
      the band and on its edges, multiples of 128 (or of 16, if all `keys`).
    held_rows: of q in VMEM at once, a multiple of `_rows.rows`.
    held_keys: of k in VMEM at once, a multiple of `keys`. If these are not all,
      each share of the keys is a kernel of its own.
  """

  rows: int = 1024
  keys: int = 1024
  part: int = 256
  edge_part: int = 128
  held_rows: int = 1024
  held_keys: int = 1024

  def num_shares(self, problem: Problem) -> int:
    """Shares of the keys, each held by a kernel of its own."""
    return pl.cdiv(problem.kv_len, self.held_keys)


def vmem_bytes(problem: Problem, blocks: BackwardBlocks) -> int:
  """VMEM a core holds: two blocks of each array, and the sums."""
  size = problem.dtype.itemsize
  d_qk, d_v = (-(-d // LANES) * LANES for d in (problem.d_qk, problem.d_v))
  by_row = 2 * size * (2 * d_qk + 2 * d_v) + 4 * d_qk
  by_key = 2 * size * (2 * d_qk + 2 * d_v) + 4 * (d_qk + d_v)
  total = blocks.held_rows * by_row + blocks.held_keys * by_key
  if "bias" in problem.operands:
    total += 2 * 4 * blocks.held_rows * blocks.held_keys
  return total


def choose(problem: Problem, chip: chips.Chip) -> BackwardBlocks:
  """As many keys held as fit, and then as many rows."""
  is_wide = max(problem.d_qk, problem.d_v) > LANES
  most = 512 if is_wide or problem.call.window is not None else 1024
  rows = _block(problem.q_len, most)
  keys = _block(problem.kv_len, most)
  budget = _VMEM_SHARE * chip.vmem_bytes_per_tensor_core
  num_keys, num_rows = (
    pl.cdiv(problem.kv_len, keys),
    pl.cdiv(problem.q_len, rows),
  )
  candidates = [
    BackwardBlocks(
      rows=rows,
      keys=keys,
      part=min(256, keys),
      edge_part=min(128, keys),
      held_rows=min(held, num_rows) * rows,
      held_keys=pl.cdiv(num_keys, shares) * keys,
    )
    for shares in range(1, num_keys + 1)
    for held in (4, 2, 1)
  ]
  # Where none fits, the compiler says what is too much of the least.
  fitting = (b for b in candidates if vmem_bytes(problem, b) <= budget)
  return next(fitting, candidates[-1])


def _block(size: int, most: int) -> int:
  """A power of two times 128: the least that holds `size`, at most `most`."""
  tiles = pl.cdiv(size, LANES)
  return min(most, LANES * 2 ** math.ceil(math.log2(tiles)))
