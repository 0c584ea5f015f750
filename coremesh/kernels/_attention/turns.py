"""In which order a block of keys is gone through: clear turns, then masked.

All positions are in tiles of keys, from the start of the block in VMEM.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from coremesh.kernels._attention import masks
from coremesh.kernels._attention.blocks import Blocks
from coremesh.kernels._attention.masks import Span
from coremesh.kernels._attention.scalars import quotient
from coremesh.kernels._attention.tiles import Tiles
from coremesh.kernels.blocks import loop


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
  """The turns through a block of keys; ints or int32 scalars.

  Masked turns are before the clear ones and after them, in one loop: the order
  of keys does not matter.

  Attributes:
    blocks: sizes.
    start, stop: the tiles of keys that some row counts.
    clear: the first of those in clear turns.
    num_clear: clear turns.
    has_masked: whether there may be masked turns; static.
  """

  blocks: Blocks
  start: Any
  stop: Any
  clear: Any
  num_clear: Any
  has_masked: bool

  @property
  def any(self) -> Any:
    """Whether there is something to do."""
    return self.stop > self.start

  @property
  def first(self) -> Any:
    """The first tile."""
    return _where(self.num_clear > 0, self.clear, self._after_clear)

  @property
  def _after_clear(self) -> Any:
    return self._masked_at(0) if self.has_masked else self.clear_stop

  def sweep(self, here: Tiles) -> None:
    """Runs all turns."""
    size = self.blocks.part // self.blocks.tile_keys

    def clear_turn(i, _):
      first = self.clear + i * size
      here.turn(
        first,
        size=size,
        is_masked=False,
        after=_where(i + 1 < self.num_clear, first + size, self._after_clear),
      )

    loop(self.num_clear, clear_turn, None)
    if not self.has_masked:
      return

    def masked_turn(i, _):
      first = self._masked_at(i)
      here.turn(
        first,
        size=self._masked_size,
        is_masked=True,
        after=self._masked_at(i + 1),
      )

    loop(self._num_left + self._num_right, masked_turn, None)

  @property
  def _masked_size(self) -> int:
    return self.blocks.masked_part // self.blocks.tile_keys

  @property
  def clear_stop(self) -> Any:
    """The tile after those in clear turns."""
    return self.clear + self.num_clear * (
      self.blocks.part // self.blocks.tile_keys
    )

  @property
  def _num_left(self) -> Any:
    return quotient(self.clear - self.start, self._masked_size)

  @property
  def _num_right(self) -> Any:
    return quotient(self.stop - self.clear_stop, self._masked_size)

  def _masked_at(self, i: Any) -> Any:
    size, left = self._masked_size, self._num_left
    return _where(
      i < left,
      self.start + i * size,
      self.clear_stop + (i - left) * size,
    )


def turns(
  blocks: Blocks,
  *,
  first_key: Any,
  some: Span,
  every: Span,
  has_masked: bool,
) -> Turns:
  """The turns through a block.

  Args:
    blocks: sizes.
    first_key: of the block.
    some: the keys that some of the rows count.
    every: the keys that every one of the rows counts.
    has_masked: whether there may be others than clear turns.
  """
  unit = blocks.masked_part

  def tiles(key: Any, rounding: int, low: Any) -> Any:
    """A key as a position, rounded to a masked turn."""
    inside = masks.smaller(masks.greater(key - first_key, 0), blocks.keys)
    count = quotient(inside + rounding, unit) * (unit // blocks.tile_keys)
    return masks.greater(count, low)

  start = tiles(some.start, 0, 0)
  stop = tiles(some.stop, unit - 1, start)
  stop = _where(some.stop > some.start, stop, start)
  clear = masks.smaller(tiles(every.start, unit - 1, start), stop)
  clear_stop = masks.smaller(tiles(every.stop, 0, clear), stop)
  size = blocks.part // blocks.tile_keys
  return Turns(
    blocks=blocks,
    start=start,
    stop=stop,
    clear=clear,
    num_clear=quotient(clear_stop - clear, size),
    has_masked=has_masked,
  )


def _where(condition: Any, a: Any, b: Any) -> Any:
  """`jnp.where` of scalars, or of ints if they are known."""
  if isinstance(condition, bool):
    return a if condition else b
  return jnp.where(condition, jnp.int32(a), jnp.int32(b))
