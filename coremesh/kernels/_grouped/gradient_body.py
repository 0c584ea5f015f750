"""The kernel of the gradient of grouped weights: its blocks and its steps."""

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh.kernels._grouped.body import AHEAD
from coremesh.kernels._grouped.visits import (
  Rows,
  Visits,
  for_each_piece,
  share,
  with_offsets,
)
from coremesh.partition import num_blocks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
  """How the gradient of grouped weights is computed.

  Attributes:
    rows: of x and d.
    inner, columns: of a block of the output, along K and N.
    split: whether the cores share its blocks along K ("rows") or N.
    num_cores: of a device.
    precision: of float32 products.
  """

  rows: Rows
  inner: int
  columns: int
  split: str
  num_cores: int
  precision: Any


def gradient(plan: Plan, sizes_hbm, x, d, out, *scratch) -> None:
  """The body of the kernel: all steps of a core."""
  *tables, total = scratch
  visits = with_offsets(plan.rows, sizes_hbm, tables)
  num_visits = visits.write_groups(
    np.int32(0), np.int32(plan.rows.num_blocks), empty=True
  )
  last_used = jax.lax.max(visits.num_used - np.int32(1), np.int32(0))
  core = jax.lax.axis_index("core")
  inner = num_blocks(out.shape[1], plan.inner)
  columns = num_blocks(out.shape[2], plan.columns)
  own_inner, own_columns = (0, inner), (0, columns)
  if plan.split == "rows":
    own_inner = share(inner, core, plan.num_cores)
  else:
    own_columns = share(columns, core, plan.num_cores)

  def block(visit):  # That of an empty group may be beyond the used ones.
    return jax.lax.min(visits.blocks[visit], last_used)

  pltpu.emit_pipeline(
    functools.partial(_step, plan, visits, total),
    grid=(
      own_inner[1] - own_inner[0],
      own_columns[1] - own_columns[0],
      num_visits,
    ),
    in_specs=[
      pl.BlockSpec(
        (plan.rows.block, plan.inner),
        lambda i, _, v: (block(v), i + own_inner[0]),
        pipeline_mode=AHEAD,
      ),
      pl.BlockSpec(
        (plan.rows.block, plan.columns),
        lambda _, j, v: (block(v), j + own_columns[0]),
        pipeline_mode=AHEAD,
      ),
    ],
    out_specs=[
      pl.BlockSpec(
        (None, plan.inner, plan.columns),
        lambda i, j, v: (
          visits.groups[v],
          i + own_inner[0],
          j + own_columns[0],
        ),
      )
    ],
  )(x, d, out)


def _step(plan: Plan, visits: Visits, total, x, d, out) -> None:
  """Adds the products of the rows of a group that are in a block."""
  visit = pl.program_id(2)
  start, stop = visits.span(visit)
  is_first = visits.is_first(visit)

  def add(row, size):
    product = jax.lax.dot_general(
      _masked(x, row, size, start, stop),
      _masked(d, row, size, start, stop),
      (((0,), (0,)), ((), ())),
      precision=plan.precision,
      preferred_element_type=total.dtype,
    )
    # Only the first piece of a group starts at or before its first row.
    is_fresh = is_first & (row <= start)
    total[...] = jnp.where(is_fresh, product, total[...] + product)

  for_each_piece(start, stop, add, rows=plan.rows)

  @pl.when(visits.is_last(visit) & (stop > start))
  def _():
    out[...] = total[...].astype(out.dtype)

  @pl.when(stop <= start)
  def _():
    out[...] = jnp.zeros(out.shape, out.dtype)


def _masked(ref, row, size: int, start, stop) -> jax.Array:
  """Rows of a block, those outside [start, stop) as zeros."""
  value = ref[pl.ds(row, size), :]
  position = jax.lax.broadcasted_iota(jnp.int32, value.shape, 0) + row
  inside = (position >= start) & (position < stop)
  return jnp.where(inside, value, jnp.zeros_like(value))
