"""What a step of the backward kernel of attention does: a block of rows."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from coremesh.kernels._attention import backward_scores as scores
from coremesh.kernels._attention import masks
from coremesh.kernels._attention.backward_plan import Plan
from coremesh.kernels._attention.backward_tiles import Strip
from coremesh.kernels._attention.masks import Span
from coremesh.kernels._attention.scalars import both, negated, when
from coremesh.kernels._attention.units import Unit
from coremesh.kernels.blocks import iota


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
  """A block of rows of one head with all keys held.

  Attributes:
    plan: how it is computed.
    unit: which rows of which head.
    num_keys: how many keys are valid, None if all.
    refs: the blocks in VMEM, by name.
    sums: scratch: "dq", "dk", "dv" and "row_values".
  """

  plan: Plan
  unit: Unit
  num_keys: Any
  refs: dict[str, Any]
  sums: dict[str, Any]

  def run(self, *, is_first: Any, is_last: Any) -> None:
    """Adds to the sums, of which dk and dv last for all steps of a head.

    Args:
      is_first, is_last: whether this is the first or the last of those.
    """
    sums, refs = self.sums, self.refs
    scale = self.plan.problem.call.scale

    @pl.when(is_first)
    def _():
      for name in ("dk", "dv"):
        sums[name][...] = jnp.zeros_like(sums[name])

    sums["dq"][...] = jnp.zeros_like(sums["dq"])
    self._fill_row_values()
    self._each_pair()
    if "row_values" in refs:
      refs["row_values"][...] = sums["row_values"][...]
    refs["dq"][...] = (sums["dq"][...] * scale).astype(refs["dq"].dtype)

    @pl.when(is_last)
    def _():
      refs["dk"][...] = (sums["dk"][...] * scale).astype(refs["dk"].dtype)
      refs["dv"][...] = sums["dv"][...].astype(refs["dv"].dtype)

  def _fill_row_values(self) -> None:
    refs, rows = self.refs, self.plan.blocks.rows

    def fill(i, _):
      here = _slice(i * rows, rows)
      out, d_out = (
        refs[name][here].astype(jnp.float32) for name in ("out", "d_out")
      )
      values = scores.row_values(
        refs["lse"][:, here],
        jnp.sum((out * d_out).T, axis=0, keepdims=True),
        refs["d_lse"][:, here],
      )
      self.sums["row_values"][:, here] = jnp.concatenate(values)

    _loop(0, self.plan.blocks.held_rows // rows, lambda i: fill(i, None))

  def _each_pair(self) -> None:
    """All pairs of a block of rows and one of keys that may count."""
    plan, size = self.plan, self.plan.blocks
    band = masks.band(plan.problem)
    first_row, first_key = self._row(0), self._key(0)
    last_row = masks.smaller(first_row + size.held_rows, plan.problem.q_len)
    rows = Span(first_row, last_row)
    keys = band.some_keys(rows).cut(plan.held_keys)
    if self.num_keys is not None:
      keys = keys.cut(Span(0, self.num_keys))

    def with_keys(j):
      key = self._key(j)
      stop = masks.smaller(key + size.keys, plan.held_keys.stop)
      some_rows = band.some_rows(Span(key, stop)).cut(rows)
      blocks = _blocks(some_rows, first_row, size.rows)
      _loop(*blocks, lambda i: self._pair(i, j))

    _loop(*_blocks(keys, first_key, size.keys), with_keys)

  def _row(self, i: Any) -> Any:
    """The first row of a block of these."""
    size = self.plan.blocks
    return self.unit.block * size.held_rows + i * size.rows

  def _key(self, j: Any) -> Any:
    """The first key of a block of those held."""
    return self.plan.held_keys.start + j * self.plan.blocks.keys

  def _pair(self, i: Any, j: Any) -> None:
    """Block i of these rows with block j of the keys held."""
    tiles = self.plan.tiles
    distance = self._key(j) - self._row(i)
    is_whole, may_count = self._of_pair(i, j)
    is_full = both(is_whole, tiles.is_full(distance))

    def strips(which, is_edge):
      for strip in which:
        self._strip(i, j, strip, is_edge=is_edge)

    when(is_full, lambda: strips(tiles.full, False))
    rest = both(may_count, negated(is_full))
    for edge, which in tiles.edges.items():
      is_edge = both(is_whole, distance == edge)
      when(is_edge, lambda which=which: strips(which, True))
      rest = both(rest, negated(is_edge))
    if self.plan.has_other_pairs:
      when(rest, lambda: self._masked_pair(i, j))

  def _of_pair(self, i: Any, j: Any) -> tuple[Any, Any]:
    """Whether all and whether any of a pair may count, but for the band."""
    problem, size = self.plan.problem, self.plan.blocks
    is_whole = may_count = True
    if problem.q_len % size.rows:
      is_whole = self._row(i) + size.rows <= problem.q_len
    if self.num_keys is not None or problem.kv_len % size.keys:
      limit = problem.kv_len if self.num_keys is None else self.num_keys
      is_whole = both(is_whole, self._key(j) + size.keys <= limit)
    if "row_segments" in self.refs:
      rows = self.refs["row_segments"][:, _slice(i * size.rows, size.rows)]
      keys = self.refs["key_segments"][:, _slice(j * size.keys, size.keys)]
      # What lies beyond the arrays could be any id: such a pair counts.
      first_row, last_row = jnp.min(rows), jnp.max(rows)
      first_key, last_key = jnp.min(keys), jnp.max(keys)
      is_one = (first_row == last_key) & (last_row == first_key)
      is_whole = both(is_whole, is_one & (first_row >= 0))
      may_count = (first_row <= last_key) & (first_key <= last_row)
    return is_whole, may_count

  def _strip(self, i: Any, j: Any, strip: Strip, *, is_edge: bool) -> None:
    """A strip of which all counts, or what is in the band."""
    size, band = self.plan.blocks, self.plan.tiles.band
    rows = Span(*(i * size.rows + n for n in strip.rows))
    keys = Span(*(j * size.keys + n for n in strip.keys))
    num_rows, num_keys = (s.stop - s.start for s in (strip.rows, strip.keys))
    mask = scores.Mask()
    if is_edge:
      row = self._row(0) + rows.start + iota((1, num_rows), 1)
      key = self._key(0) + keys.start + iota((num_keys, 1), 0)
      mask = mask._replace(counted=band.counts(row, key))
      if band.first is not None and band.first > 0:
        known = masks.counted_keys(self.plan.problem, key)
        mask = mask._replace(keys=known)
    self._add(_slice(rows.start, num_rows), _slice(keys.start, num_keys), mask)

  def _masked_pair(self, i: Any, j: Any) -> None:
    """A pair with any mask, of blocks that may reach beyond the arrays."""
    size, band = self.plan.blocks, self.plan.tiles.band
    rows = _slice(i * size.rows, size.rows)
    row = Span(self._row(i), self._row(i) + size.rows)

    def with_part(n):
      start = j * size.keys + n * size.part
      key = Span(self._key(0) + start, self._key(0) + start + size.part)
      some = band.some_rows(key)
      may_count = (some.start < row.stop) & (some.stop > row.start)
      if self.num_keys is not None:
        may_count = may_count & (key.start < self.num_keys)
      keys = _slice(start, size.part)
      when(may_count, lambda: self._masked(row.start, rows, key.start, keys))

    _loop(0, size.keys // size.part, with_part)

  def _masked(self, row: Any, rows: Any, key: Any, keys: Any) -> None:
    segments = {
      name: self.refs[name][:, here]
      for name, here in (("row_segments", rows), ("key_segments", keys))
      if name in self.refs
    }
    mask = scores.mask(
      self.plan.problem,
      shape=(keys.size, rows.size),
      row=row,
      key=key,
      num_keys=self.num_keys,
      **segments,
    )
    self._add(rows, keys, mask)

  def _add(self, rows: Any, keys: Any, mask: scores.Mask) -> None:
    """Adds to the sums what slices of the blocks give."""
    refs, sums = self.refs, self.sums
    q, k, v, d_out = inputs = scores.Inputs(
      q=refs["q"][rows],
      k=refs["k"][keys],
      v=refs["v"][keys],
      d_out=refs["d_out"][rows],
    ).known(mask)
    bias = refs.get("bias")
    if bias is not None:
      bias = bias[
        rows if bias.shape[0] > 1 else slice(None),
        keys if bias.shape[1] > 1 else slice(None),
      ]
    terms = scores.terms(
      self.plan.problem.call,
      inputs,
      log_total=sums["row_values"][0:1, rows],
      less=sums["row_values"][1:2, rows],
      bias=bias,
      counted=mask.counted,
    )
    weights = terms.weights.astype(v.dtype)
    d_products = terms.d_products.astype(q.dtype)
    sums["dv"][keys] += scores.dot("mk,kn", weights, d_out)
    sums["dk"][keys] += scores.dot("mk,kn", d_products, q)
    sums["dq"][rows] += scores.dot("km,kn", d_products, k)


def _slice(start: Any, size: int) -> Any:
  """Elements from a multiple of what `size` is one of, at most 128."""
  tile = min(128, size)
  start = start if isinstance(start, int) else pl.multiple_of(start, tile)
  return pl.ds(start, size)


def _blocks(span: Span, start: Any, size: int) -> tuple[Any, Any]:
  """The blocks from `start` on that hold some of a span: first and stop."""
  first = jnp.int32(masks.greater(span.start - start, 0))
  stop = jnp.int32(masks.greater(span.stop - start + (size - 1), 0))
  return jax.lax.div(first, np.int32(size)), jax.lax.div(stop, np.int32(size))


def _loop(start: Any, stop: Any, body: Callable[[Any], None]) -> None:
  """Calls `body` with each index, int32."""
  if isinstance(stop, int) and stop - start == 1:
    body(start)
    return

  def turn(i, _):
    body(i)

  jax.lax.fori_loop(jnp.int32(start), jnp.int32(stop), turn, None)
