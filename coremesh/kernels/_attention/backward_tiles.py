"""What a block of rows and a block of keys of attention have to compute.

Whether a row counts a key depends, but for segments and lengths, on how far the
key is from the row. So the distance from the first row of a block to the first
key of another decides what is left of their scores: nothing, all, or, on an
edge of the band, strips that are known when the kernel is compiled:

    rows ->              keys go down in strips of `part`; under a causal mask
    |xxxxxxxx            the rows before a strip's first key are not computed
    |  xxxxxx
    |    xxxx
    |      xx
"""

import dataclasses
import math
from typing import Any, NamedTuple

from coremesh.kernels._attention.masks import Band, Span
from coremesh.tiles import LANES

_MOST_EDGES = 4


class Strip(NamedTuple):
  """Keys of a block and the rows of another that count some of them."""

  keys: Span
  rows: Span


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
  """Pairs of a block of rows and a block of keys, by their distance.

  Attributes:
    band: which keys a row counts.
    rows, keys: of the blocks.
    part: keys of a strip.
    edge_part: keys of a strip on an edge.
  """

  band: Band
  rows: int
  keys: int
  part: int
  edge_part: int

  def is_full(self, distance: Any) -> Any:
    """Whether every row counts every key: a bool, or one of a kernel."""
    first, last = self._span(distance)
    result = True
    if self.band.first is not None:
      result = first >= self.band.first
    if self.band.last is not None:
      result = (last <= self.band.last) & result
    return result

  @property
  def full(self) -> tuple[Strip, ...]:
    """The strips of a pair in which all count."""
    return self._strips(self.part, lambda keys: Span(0, self.rows))

  @property
  def edges(self) -> dict[int, tuple[Strip, ...]]:
    """The strips of pairs that lie on an edge of the band, by distance.

    Each is code of its own, so that if there are many, none is listed.
    """
    return {} if self.has_many_edges else self._edges

  @property
  def has_many_edges(self) -> bool:
    """Whether there are too many edges to list."""
    return len(self._edges) > _MOST_EDGES

  @property
  def _edges(self) -> dict[int, tuple[Strip, ...]]:
    step = math.gcd(self.rows, self.keys)
    distances = set()
    for limit in (self.band.first, self.band.last):
      if limit is not None:
        low = -(-(limit - self.keys) // step) * step
        distances |= set(range(low, limit + self.rows + 1, step))
    edges = {d: self._edge(d) for d in sorted(distances)}
    return {d: s for d, s in edges.items() if s and not self.is_full(d)}

  def _span(self, distance: Any) -> tuple[Any, Any]:
    """The least and the greatest distance from a row to a key."""
    return distance - (self.rows - 1), distance + (self.keys - 1)

  def _edge(self, distance: int) -> tuple[Strip, ...]:
    def rows_of(keys: Span) -> Span:
      start, stop = 0, self.rows
      if self.band.last is not None:
        start = max(start, keys.start + distance - self.band.last)
      if self.band.first is not None:
        stop = min(stop, keys.stop + distance - self.band.first)
      return Span(start // LANES * LANES, -(-stop // LANES) * LANES)

    return self._strips(self.edge_part, rows_of)

  def _strips(self, part, rows_of) -> tuple[Strip, ...]:
    strips = []
    for start in range(0, self.keys, part):
      keys = Span(start, min(start + part, self.keys))
      rows = rows_of(keys)
      if rows.start < rows.stop:
        strips.append(Strip(keys, rows))
    return tuple(strips)
