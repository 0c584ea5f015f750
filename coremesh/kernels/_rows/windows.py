"""Strips of the blocks in VMEM, gone through chunk by chunk."""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from coremesh.kernels import blocks
from coremesh.kernels._rows.operations import (
  Chunk,
  Numbers,
  RowOperation,
  Sweep,
)

# Columns of a strip that are one turn of a loop.
CHUNK_COLUMNS = 512


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Window:
  """A strip of the blocks in VMEM.

  Attributes:
    inputs: the blocks, [batch, rows, columns].
    outputs: likewise.
    sums_vmem: float32[sums * 8, all columns], if there are sums over rows.
    batch: which of the block it is in.
    row: its first.
    num_rows: of it.
    first_column: of the block, in the array.
    num_columns: of the block, in the array.
    block_width: of the block.
    in_array: see `Chunk`.
  """

  inputs: tuple[Any, ...]
  outputs: tuple[Any, ...]
  sums_vmem: Any
  batch: Any
  row: Any
  num_rows: int
  first_column: Any
  num_columns: Any
  block_width: int
  in_array: jax.Array | None

  def start(self, sweep: Sweep) -> Numbers:
    """The accumulators of a sweep that begins."""
    shape = self.num_rows, blocks.LANES
    return tuple(jnp.full(shape, s, jnp.float32) for s in sweep.start)

  def fold(self, sweep: Sweep, known: Numbers, so_far: Numbers) -> Numbers:
    """The accumulators after the columns of this block."""

    def fold_chunk(chunk, _, so_far):
      return sweep.fold(chunk, known, so_far)

    return self._over_chunks(fold_chunk, so_far)

  def write(self, operation: RowOperation, known: Numbers) -> None:
    """Writes the outputs, and adds to the sums over rows."""

    def write_chunk(chunk, columns, _):
      outs, terms = operation.write(chunk, known)
      for ref, out in zip(self.outputs, outs, strict=True):
        ref[self.batch, self._rows, columns] = out.astype(ref.dtype)
      for i, term in enumerate(terms):
        self._add(i, columns, term)

    self._over_chunks(write_chunk, None)

  @property
  def _rows(self):
    return pl.ds(self.row, self.num_rows)

  def _over_chunks(self, body, carry):
    size = min(CHUNK_COLUMNS, self.block_width)

    def part(size, is_whole):
      def on_chunk(i, carry):
        columns = pl.ds(i * size, size)
        return body(self._chunk(columns, is_whole), columns, carry)

      return on_chunk

    if not isinstance(self.num_columns, int):
      count = blocks.num_parts(self.num_columns, size)
      return blocks.loop(count, part(size, False), carry)
    count, rest = divmod(self.block_width, size)
    whole = min(count, self.num_columns // size)
    carry = blocks.loop(whole, part(size, True), carry)
    carry = blocks.loop(count, part(size, False), carry, first=whole)
    if rest:
      columns = pl.ds(count * size, rest)
      is_whole = self.num_columns == self.block_width
      carry = body(self._chunk(columns, is_whole), columns, carry)
    return carry

  def _chunk(self, columns, is_whole: bool) -> Chunk:
    in_row = None
    if not is_whole:
      in_row = (
        blocks.iota((1, columns.size), 1) < self.num_columns - columns.start
      )
    values = tuple(self._load(ref, columns) for ref in self.inputs)
    return Chunk(values=values, in_row=in_row, in_array=self.in_array)

  def _load(self, ref, columns):
    batch, rows, width = ref.shape
    value = ref[
      self.batch if batch > 1 else 0,
      self._rows if rows > 1 else pl.ds(0, 1),
      columns if width > 1 else pl.ds(0, 1),
    ]
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return value.astype(jnp.float32 if is_float else jnp.int32)

  def _add(self, i: int, columns, term) -> None:
    if self.in_array is not None:
      term = jnp.where(self.in_array, term, 0.0)
    if self.num_rows % blocks.SUBLANES:
      term = jnp.sum(term, axis=0, keepdims=True)
    else:
      term = blocks.pairwise(jnp.add, term, size=blocks.SUBLANES, axis=0)
    rows = pl.ds(i * blocks.SUBLANES, term.shape[0])
    columns = pl.ds(self.first_column + columns.start, columns.size)
    self.sums_vmem[rows, columns] += term
