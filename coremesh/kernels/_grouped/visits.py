"""Which group meets which block of rows: tables made on the scalar core.

Rows lie group after group, and blocks of rows are cut without regard to that.
A visit is a group and a block that has rows of it; a block that two groups
share is visited twice, in sequence, so that both find it in VMEM.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh.kernels.blocks import num_parts
from coremesh.partition import num_blocks

# Rows that are multiplied at once. Of 64 rows and more the matrix units hide
# loading the weights, and fewer save nothing; many hide filling and draining.
LARGE_PIECES = (512, 128)
_UNIT = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
  """How many rows there are, in how many groups, blocks and tiles.

  Attributes:
    size: rows of the array.
    num_groups: of them.
    block: rows of a block. With a power of two the scalar core need not divide.
    tile: rows of a tile, which divides a block.
  """

  size: int
  num_groups: int
  block: int
  tile: int

  @property
  def num_blocks(self) -> int:
    """Blocks, the last maybe partial."""
    return num_blocks(self.size, self.block)

  @property
  def unit(self) -> int:
    """The least number of rows that is multiplied at once."""
    return math.gcd(self.block, _UNIT)

  @property
  def pieces(self) -> tuple[int, ...]:
    """The numbers of rows that may be multiplied at once, largest first."""
    large = (p for p in LARGE_PIECES if p <= self.block)
    return (*(p for p in large if p % self.unit == 0), self.unit)

  @property
  def scratch(self) -> list[Any]:
    """SMEM for `Visits`: sizes, offsets, and the tables of visits."""
    most = self.num_blocks + self.num_groups
    sizes = self.num_groups, self.num_groups + 1, most, most
    return [pltpu.SMEM((n,), jnp.int32) for n in sizes]

  @property
  def smem_bytes(self) -> int:
    """SMEM that `scratch` takes."""
    return sum(4 * math.prod(s.shape) for s in self.scratch)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Visits:
  """The visits of a core, in SMEM.

  Attributes:
    rows: what is visited.
    offsets: [groups + 1], where each group starts; the last is the total.
    groups: of each visit.
    blocks: of each visit.
  """

  rows: Rows
  offsets: Any
  groups: Any
  blocks: Any

  @property
  def total(self) -> Any:
    """Rows that are in groups."""
    return self.offsets[self.rows.num_groups]

  @property
  def num_used(self) -> Any:
    """Blocks that have rows of groups."""
    return num_parts(self.total, self.rows.block)

  def base(self, visit: Any) -> Any:
    """The first row of the block."""
    return self.blocks[visit] * np.int32(self.rows.block)

  def span(self, visit: Any) -> tuple[Any, Any]:
    """Where in the block the rows of the group start and stop."""
    group, base = self.groups[visit], self.base(visit)
    return (
      self.within(self.offsets[group] - base),
      self.within(self.offsets[group + 1] - base),
    )

  def within(self, row: Any) -> Any:
    """The nearest row of a block, or its end."""
    return jax.lax.clamp(np.int32(0), row, np.int32(self.rows.block))

  def is_first(self, visit: Any) -> Any:
    """Whether no visit of the group was before."""
    return self.offsets[self.groups[visit]] >= self.base(visit)

  def is_last(self, visit: Any) -> Any:
    """Whether no visit of the group follows."""
    stop = self.offsets[self.groups[visit] + 1]
    return stop <= self.base(visit) + np.int32(self.rows.block)

  def write_groups(self, first: Any, stop: Any, *, empty: bool = False) -> Any:
    """Lists the visits of blocks in [first, stop); returns how many.

    Args:
      first, stop: the blocks.
      empty: whether a group without rows is visited too, once.
    """
    block = self.rows.block

    def add_group(group, visit):
      begin, end = self.offsets[group], self.offsets[group + 1]
      # An empty group after all rows is in the last block too.
      here = jax.lax.div(begin, np.int32(block))
      here = jax.lax.min(here, np.int32(self.rows.num_blocks - 1))
      after = jax.lax.select(
        end > begin, num_parts(end, block), here + np.int32(empty)
      )
      return self._write(
        group, jax.lax.max(here, first), jax.lax.min(after, stop), visit
      )

    return _loop(0, self.rows.num_groups, add_group, np.int32(0))

  def write_rest(self, first: Any, stop: Any, visit: Any) -> Any:
    """Adds visits of blocks that have no rows of groups; returns how many."""
    return self._write(np.int32(self.rows.num_groups - 1), first, stop, visit)

  def _write(self, group, first, stop, visit) -> Any:
    def add_block(block, visit):
      self.groups[visit] = group
      self.blocks[visit] = block
      return visit + np.int32(1)

    return _loop(first, stop, add_block, visit)


def with_offsets(rows: Rows, sizes_hbm: Any, scratch: Sequence[Any]) -> Visits:
  """Visits of which the offsets are written, but no visit.

  A size below 0 counts as 0, and what exceeds the rows is cut off.
  """
  sizes, offsets, groups, blocks = scratch
  pltpu.sync_copy(sizes_hbm, sizes)

  def add(group, start):
    offsets[group] = start
    left = np.int32(rows.size) - start  # Never start + size: it may overflow.
    return start + jax.lax.clamp(np.int32(0), sizes[group], left)

  total = _loop(0, rows.num_groups, add, np.int32(0))
  offsets[rows.num_groups] = total
  return Visits(rows=rows, offsets=offsets, groups=groups, blocks=blocks)


def for_each_piece(
  first: Any,
  stop: Any,
  body: Callable[[Any, int], None],
  *,
  rows: Rows,
  pieces: Sequence[int] | None = None,
) -> None:
  """Calls `body(start, size)` on pieces that together cover rows of a block.

  They do not overlap, start at tiles and stay in the block; the first may start
  before the rows, and the last stop after them.

  Args:
    first, stop: the rows of the block, nothing if they are equal.
    body: is traced once for each size.
    rows: the sizes.
    pieces: sizes, largest first, the last one the unit; default all.
  """
  start = first & np.int32(-rows.tile)
  num_units = num_parts(stop - start, rows.unit)
  left = jax.lax.select(
    stop > first, num_units * np.int32(rows.unit), np.int32(0)
  )
  start = jax.lax.min(start, np.int32(rows.block) - left)
  for size in pieces or rows.pieces:
    count = jax.lax.div(left, np.int32(size))

    def step(_, row, size=size):
      body(pl.multiple_of(row, rows.tile), size)
      return row + np.int32(size)

    start = _loop(0, count, step, start)
    left -= count * np.int32(size)


def share(count: Any, core: Any, num_cores: int) -> tuple[Any, Any]:
  """The part of `count` things that a core does, as even as can be."""
  count = np.int32(count) if isinstance(count, int) else count
  cores = np.int32(num_cores)
  return jax.lax.div(count * core, cores), jax.lax.div(
    count * (core + np.int32(1)), cores
  )


def _loop(
  first: Any, stop: Any, body: Callable[[Any, Any], Any], carry: Any
) -> Any:
  first, stop = (
    np.int32(n) if isinstance(n, int) else n for n in (first, stop)
  )
  return jax.lax.fori_loop(first, stop, body, carry)
