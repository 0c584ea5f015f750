"""Tables that index maps of a pipeline read: copied to SMEM, and clamped."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import errors, mesh
from coremesh.pipelines.blocks import Index, Operand

_WORD_BYTES = 4
# SMEM holds the last axis of a table of several axes in rows of this.
_ROW_WORDS = 128


def check_tables(tables: Sequence[Any]) -> None:
  """Checks that SMEM holds the tables.

  Raises:
    DTypeError: a table that is not int32.
    ShapeError: tables that are together larger than SMEM.
  """
  for position, table in enumerate(tables):
    if table.dtype != jnp.int32:
      raise errors.DTypeError(
        f"Prefetched table {position} must be int32, which is what SMEM and"
        f" index maps hold; got {table.dtype}."
      )
  size_bytes = sum(map(_smem_bytes, tables))
  limit_bytes = pltpu.get_tpu_info().smem_capacity_bytes
  if size_bytes >= limit_bytes:
    shapes = ", ".join(str(tuple(t.shape)) for t in tables)
    raise errors.ShapeError(
      f"The prefetched tables of shape {shapes} take {size_bytes} bytes of"
      f" SMEM, where rows are padded to {_ROW_WORDS} words, and a core has"
      f" {limit_bytes}, not all of them free. Prefetch the part that this core"
      " uses, run one pipeline for each chunk, or put the long axis last."
    )


def in_smem(
  tables: Sequence[Any], use: Callable[[Sequence[Any]], None]
) -> None:
  """Calls `use` with each table copied to SMEM."""

  def copied(*smem_tables):
    for table, smem_table in zip(tables, smem_tables, strict=True):
      if math.prod(table.shape):
        pltpu.sync_copy(table, smem_table)
    use(smem_tables)

  if not tables:
    use(())
    return
  if mesh.on_vector_subcore():
    raise errors.UnsupportedError(
      "num_prefetch copies tables to SMEM, and a vector subcore has no DMA from"
      " HBM to its SMEM. Copy the table to VMEM before the pipeline and read"
      " one entry at a time, or run the pipeline on chip.scalar_subcores()."
    )
  pl.run_scoped(copied, *(pltpu.SMEM(t.shape, jnp.int32) for t in tables))


def bound(operand: Operand, smem_tables: Sequence[Any]) -> Operand:
  """The operand with tables passed to its index map, and the result clamped."""
  if not smem_tables or not operand.has_blocks:
    return operand
  spec = dataclasses.replace(
    operand.spec,
    index_map=functools.partial(
      _clamped, operand, operand.num_indices, tuple(smem_tables)
    ),
  )
  return dataclasses.replace(operand, spec=spec, reads_tables=True)


def _clamped(
  operand: Operand,
  counts: tuple[int, ...],
  smem_tables: tuple[Any, ...],
  *point,
) -> Index:
  index = operand.index_at((*point, *smem_tables))
  return tuple(
    # Pallas itself cuts a slice that reaches beyond the array.
    pl.ds(_clamp(i.start, count), _clamp(i.size, size.block_size))
    if isinstance(i, pl.Slice)
    else _clamp(i, count - 1)
    for i, size, count in zip(index, operand.sizes, counts, strict=True)
  )


def _clamp(i: Any, most: int) -> Any:
  if isinstance(i, int):
    return min(max(i, 0), most)
  index = jax.lax.convert_element_type(i, np.int32)
  return jax.lax.max(jax.lax.min(index, np.int32(most)), np.int32(0))


def _smem_bytes(table: Any) -> int:
  *rows, last = table.shape
  if rows:
    last = pl.cdiv(last, _ROW_WORDS) * _ROW_WORDS
  return _WORD_BYTES * math.prod(rows) * last
