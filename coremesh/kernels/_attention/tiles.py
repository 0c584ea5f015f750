"""The scores of a block of rows, tile by tile: what keeps the MXUs busy.

A tile is the scores of some keys (sublanes) with some rows (lanes). It passes
three stages: its scores k @ q.T; its terms exp2(scores - largest); v.T @ terms,
added to the sums. The stages of consecutive tiles overlap, by hand: while the
terms of one are computed, the MXUs make the scores of the next but one and the
sums of the one before. What is under way goes through VMEM from one turn of a
loop to the next, so that a turn neither fills nor drains.

With keys on sublanes the largest score and the sum of a row are sums over
registers, and what is known of a row is one number a lane.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh.kernels._attention import exponents, masks
from coremesh.kernels._attention.blocks import Blocks
from coremesh.kernels._attention.call import Problem
from coremesh.kernels._attention.exponents import INFINITY, LOG2_E
from coremesh.kernels.blocks import iota

# Tiles whose scores are there before the terms of one are computed.
_AHEAD = 2


class Tile(NamedTuple):
  """A tile of scores.

  Attributes:
    keys: which of the block, in tiles; an int32 scalar.
    rows: which of the block, in tiles; static.
    is_masked: whether some of its scores may not count; static.
  """

  keys: Any
  rows: int
  is_masked: bool


class UnderWay(NamedTuple):
  """Terms that have still to be added to the sums.

  Attributes:
    rows: their tile of rows; static.
    values: v.T of their keys.
    terms: [tile of keys, tile of rows].
    shrink: float32[1, tile of rows], what the sums must be multiplied by first.
  """

  rows: int
  values: jax.Array
  terms: jax.Array
  shrink: jax.Array


class Scratch(NamedTuple):
  """What a kernel keeps in VMEM, transposed: rows are on lanes.

  Attributes:
    sums: float32[d_v, rows], of v.T @ terms.
    largest: float32[1, rows], the largest score times log2(e).
    total: float32[1, rows], of terms.
    values: [2, d_v, tile of keys], v.T of the tile whose terms are under way,
      and of the first tile of the next turn; 0 where a key counts nowhere.
    scores: float32[tiles ahead, tile of keys, tile of rows].
    terms: [tile of keys, tile of rows], to be multiplied with `values[0]`.
    shrink: float32[1, tile of rows], what `sums` must be multiplied by first.
  """

  sums: Any
  largest: Any
  total: Any
  values: Any
  scores: Any
  terms: Any
  shrink: Any


def scratch_types(problem: Problem, blocks: Blocks) -> Scratch:
  """The memory types of the scratch."""
  tile = blocks.tile_keys, blocks.tile_rows

  def row(size):
    return pltpu.VMEM((1, size), jnp.float32)

  return Scratch(
    sums=pltpu.VMEM((problem.d_v, blocks.rows), jnp.float32),
    largest=row(blocks.rows),
    total=row(blocks.rows),
    values=pltpu.VMEM((2, problem.d_v, blocks.tile_keys), problem.dtype),
    scores=pltpu.VMEM((_AHEAD, *tile), jnp.float32),
    terms=pltpu.VMEM(tile, problem.dtype),
    shrink=row(blocks.tile_rows),
  )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
  """The scores of a block of rows with a block of keys, in VMEM.

  Attributes:
    problem: what is asked for.
    blocks: sizes.
    refs: blocks of the arrays, by name.
    scratch: see there.
    first_row: of the block, in the array.
    first_key: of the block, in the array.
    num_keys: that are valid, None if all are.
  """

  problem: Problem
  blocks: Blocks
  refs: dict[str, Any]
  scratch: Scratch
  first_row: Any
  first_key: Any
  num_keys: Any

  @property
  def columns(self) -> int:
    """Tiles of rows."""
    return self.blocks.rows // self.blocks.tile_rows

  def clear(self) -> None:
    """Forgets all scores."""
    self.scratch.sums[...] = jnp.zeros_like(self.scratch.sums)
    self.scratch.largest[...] = jnp.full_like(self.scratch.largest, -INFINITY)
    self.scratch.total[...] = jnp.zeros_like(self.scratch.total)

  @property
  def some_keys_count_nowhere(self) -> bool:
    """Whether keys may be padding."""
    is_whole = self.problem.kv_len % self.blocks.keys == 0
    first = masks.band(self.problem).first
    is_cut = first is not None and first > 0
    return (
      not is_whole
      or is_cut
      or bool({"key_segments", "num_keys"} & set(self.problem.operands))
    )

  def start(self, first: Any) -> None:
    """Makes the scores of the first tiles of a turn."""
    self._begin(self._after(first))

  def turn(self, first: Any, *, size: int, is_masked: bool, after: Any) -> None:
    """All rows with some tiles of keys.

    Args:
      first: tile of keys.
      size: of keys, in tiles.
      is_masked: whether some scores may not count.
      after: the tile of keys that comes after this turn.
    """
    tiles = [
      Tile(keys, column, is_masked)
      for keys in [first + i for i in range(size)]
      for column in range(self.columns)
    ]
    self._run(tiles, self._after(after))

  def last_edge(self, first: Any) -> None:
    """All rows with the keys that end at a diagonal, the last of the block.

    Args:
      first: tile of keys; row r of the block counts its keys up to r.
    """
    height, width = self.blocks.tile_keys, self.blocks.tile_rows
    tiles = self._cut_by(
      first,
      counts_some=lambda key, row: key < row + width,
      counts_all=lambda key, row: key + height - 1 <= row,
    )
    self._run(tiles, [])

  def first_edge(self, first: Any, *, after: Any) -> None:
    """All rows with the keys that start at a diagonal; begins a block.

    Args:
      first: tile of keys; row r of the block counts its keys from r + 1 on.
      after: the tile of keys that comes after them.
    """
    height, width = self.blocks.tile_keys, self.blocks.tile_rows
    tiles = self._cut_by(
      first,
      counts_some=lambda key, row: key + height - 1 > row,
      counts_all=lambda key, row: key >= row + width,
    )
    self._begin(tiles)
    self._run(tiles, self._after(after))

  def _cut_by(
    self,
    first: Any,
    *,
    counts_some: Callable[[int, int], bool],
    counts_all: Callable[[int, int], bool],
  ) -> list[Tile]:
    """As many keys as rows, of the tiles those that count at all.

    Args:
      first: tile of keys.
      counts_some: of the first key and row of a tile, counted from those of the
        first: whether any of its scores counts.
      counts_all: likewise, whether all do.
    """
    height, width = self.blocks.tile_keys, self.blocks.tile_rows
    return [
      Tile(keys, row // width, not counts_all(key, row))
      for key, keys in [
        (i * height, first + i) for i in range(self.blocks.rows // height)
      ]
      for row in range(0, self.blocks.rows, width)
      if counts_some(key, row)
    ]

  def finish(self) -> None:
    """Adds what is under way."""
    self._add(self._under_way())

  def write(self) -> None:
    """Writes the output and the LSE."""
    out, lse = self.refs["out"], self.refs["lse"]
    total = self.scratch.total[...]
    is_empty = total == 0
    scale = jnp.where(is_empty, 0.0, 1 / total)
    out[...] = (self.scratch.sums[...] * scale).T.astype(out.dtype)
    log = self.scratch.largest[...] / LOG2_E + jnp.log(total)
    lse[...] = jnp.where(is_empty, -INFINITY, log)

  def _begin(self, tiles: Sequence[Tile]) -> None:
    """Makes the scores of the first of some tiles, with nothing under way."""
    scratch = self.scratch
    for i, tile in enumerate(tiles[:_AHEAD]):
      scratch.scores[i] = self._scores(tile)
    # What is added is 0, times any values but NaN.
    scratch.terms[...] = jnp.zeros_like(scratch.terms)
    scratch.shrink[...] = jnp.ones_like(scratch.shrink)
    scratch.values[0] = jnp.zeros_like(scratch.values[0])
    scratch.values[1] = self._values(tiles[0].keys)

  def _after(self, first: Any) -> list[Tile]:
    """The first tiles of a turn that starts at a tile of keys."""
    return [
      Tile(first + i // self.columns, i % self.columns, False)
      for i in range(_AHEAD)
    ]

  def _run(self, tiles: Sequence[Tile], after: Sequence[Tile]) -> None:
    """Takes tiles through their stages; those after it through the first."""
    scratch = self.scratch
    scores = [scratch.scores[i] for i in range(_AHEAD)]
    under_way, values = self._under_way(), scratch.values[1]
    segments = self._segments_of(tiles[0].keys)
    coming = [*tiles, *after][_AHEAD:]
    for i, tile in enumerate(tiles):
      if i < len(coming):
        scores.append(self._scores(coming[i]))
      if i and tile.keys is not tiles[i - 1].keys:
        segments = self._segments_of(tile.keys)
        values = self._values(tile.keys)
      self._add(under_way)
      terms, shrink = self._terms(tile, segments, scores.pop(0))
      under_way = UnderWay(tile.rows, values, terms, shrink)
    scratch.values[0] = under_way.values
    scratch.terms[...] = under_way.terms
    scratch.shrink[...] = under_way.shrink
    if after:
      scratch.values[1] = self._values(after[0].keys)
      for i, value in enumerate(scores):
        scratch.scores[i] = value

  def _under_way(self) -> UnderWay:
    """What the turn before has left to add."""
    scratch = self.scratch
    return UnderWay(
      self.columns - 1,
      scratch.values[0],
      scratch.terms[...],
      scratch.shrink[...],
    )

  def _keys(self, index: Any) -> Any:
    """Where a tile of keys is in the block; one that is there, if beyond."""
    size = self.blocks.tile_keys
    most = np.int32(self.blocks.keys // size - 1)
    index = jnp.clip(jnp.int32(index), np.int32(0), most)
    return pl.ds(pl.multiple_of(index * np.int32(size), size), size)

  def _rows(self, index: int) -> Any:
    size = self.blocks.tile_rows
    return pl.ds(index * size, size)

  def _values(self, index: Any) -> jax.Array:
    """v.T of a tile of keys, 0 for those that count nowhere."""
    here = self._keys(index)
    v = self.refs["v"][here]
    if self.some_keys_count_nowhere:
      size = self.blocks.tile_keys
      known = masks.counted_keys(
        self.problem,
        self.first_key + here.start + iota((size, 1), 0),
        num_keys=self.num_keys,
        **self._segments_of(index),
      )
      v = jnp.where(known, v, jnp.zeros_like(v))
    return v.T

  def _scores(self, tile: Tile) -> jax.Array:
    """k @ q.T."""
    return jax.lax.dot_general(
      self.refs["k"][self._keys(tile.keys)],
      self.refs["q"][self._rows(tile.rows)],
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )

  def _terms(
    self, tile: Tile, segments: dict[str, Any], scores: jax.Array
  ) -> tuple[Any, Any]:
    """The terms of a tile, and what sums before it must be multiplied by."""
    scratch, rows = self.scratch, self._rows(tile.rows)
    scores = self._as_exponents(tile, scores)
    if tile.is_masked:
      scores = jnp.where(self._counted(tile, segments), scores, -INFINITY)
    largest = scratch.largest[:, rows]
    new = jnp.maximum(largest, jnp.max(scores, axis=0, keepdims=True))
    # Without scores any finite number will do: what is left is exp(-inf) = 0.
    base = jnp.where(new == -INFINITY, 0.0, new)
    terms = jnp.exp2(scores - base)
    shrink = jnp.exp2(largest - base)
    scratch.largest[:, rows] = new
    scratch.total[:, rows] = scratch.total[:, rows] * shrink + jnp.sum(
      terms, axis=0, keepdims=True
    )
    return terms.astype(self.problem.dtype), shrink

  def _add(self, what: UnderWay) -> None:
    """Adds v.T @ terms to the sums."""
    rows = self._rows(what.rows)
    more = jax.lax.dot_general(
      what.values,
      what.terms,
      (((1,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    sums = self.scratch.sums
    sums[:, rows] = sums[:, rows] * what.shrink + more

  def _as_exponents(self, tile: Tile, scores: jax.Array) -> jax.Array:
    """The scores as exponents of 2: scaled, capped, with their bias."""
    scores, _ = exponents.of_products(self.problem.call, scores)
    if "bias" not in self.refs:
      return scores
    bias = self.refs["bias"]
    rows = self._rows(tile.rows) if bias.shape[0] > 1 else slice(None)
    keys = self._keys(tile.keys) if bias.shape[1] > 1 else slice(None)
    return scores + bias[rows, keys].astype(jnp.float32).T * LOG2_E

  def _counted(self, tile: Tile, segments: dict[str, Any]) -> jax.Array:
    """Which scores of a tile count, given the segments of its keys."""
    height, width = self.blocks.tile_keys, self.blocks.tile_rows
    if segments:
      rows = self.refs["row_segments"][:, self._rows(tile.rows)]
      segments = dict(segments, row_segments=rows)
    return masks.counted(
      self.problem,
      rows=self.first_row + tile.rows * width + iota((1, width), 1),
      keys=self.first_key + tile.keys * height + iota((height, 1), 0),
      num_keys=self.num_keys,
      **segments,
    )

  def _segments_of(self, index: Any) -> dict[str, jax.Array]:
    """The segments of a tile of keys, on sublanes, if there are segments."""
    if "key_segments" not in self.refs:
      return {}
    row = self.refs["key_segments"][:, self._keys(index)]
    column = jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]
    return {"key_segments": column}
