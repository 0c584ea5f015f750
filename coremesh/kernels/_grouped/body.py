"""The kernel of a grouped matrix product: its blocks, and what a step does."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh.kernels._grouped.call import Call
from coremesh.kernels._grouped.visits import (
  Rows,
  Visits,
  for_each_piece,
  share,
  with_offsets,
)
from coremesh.kernels._matmul.call import sum_dtype
from coremesh.kernels._matmul.terms import inside
from coremesh.partition import num_blocks

# A block is copied as soon as there is room, not one step ahead: a short visit
# cannot hide the copy of a whole block.
AHEAD = pl.Buffered(2, use_lookahead=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
  """How a grouped product is computed.

  Attributes:
    call: what is asked for.
    rows: of x and of the output.
    columns, inner: of a block.
    size: K.
    split: whether the cores share the blocks of rows or those of columns.
    num_cores: of a device.
  """

  call: Call
  rows: Rows
  columns: int
  inner: int
  size: int
  split: str
  num_cores: int

  @property
  def num_steps(self) -> int:
    """Blocks of K."""
    return num_blocks(self.size, self.inner)

  @property
  def x_block(self) -> tuple[int, int]:
    return self.rows.block, self.inner

  @property
  def w_block(self) -> tuple[int | None, int, int]:
    if self.call.transpose_w:
      return None, self.columns, self.inner
    return None, self.inner, self.columns

  @property
  def out_block(self) -> tuple[int, int]:
    return self.rows.block, self.columns


def product(plan: Plan, sizes_hbm: Any, x: Any, *refs: Any) -> None:
  """The body of the kernel: all steps of a core."""
  count = plan.call.num_weights
  weights, out, rest = refs[:count], refs[count], refs[count + 1 :]
  tables, sums = rest[:4], rest[4:]
  visits = with_offsets(plan.rows, sizes_hbm, tables)
  first, stop = _columns_of_core(plan, out)
  num_visits = _write_visits(plan, visits)
  last_used = jax.lax.max(visits.num_used - np.int32(1), np.int32(0))

  def inner_index(k):  # A single block need not be in whole tiles.
    return k if plan.num_steps > 1 else 0

  def x_index(_, visit, k):  # Of a visit without rows any block will do.
    return jax.lax.min(visits.blocks[visit], last_used), inner_index(k)

  def w_index(column, visit, k):
    at = inner_index(k), first + column
    return visits.groups[visit], *(at[::-1] if plan.call.transpose_w else at)

  def out_index(column, visit, _):
    return visits.blocks[visit], first + column

  pltpu.emit_pipeline(
    functools.partial(_step, plan, visits, sums),
    grid=(stop - first, num_visits, plan.num_steps),
    in_specs=[
      pl.BlockSpec(plan.x_block, x_index, pipeline_mode=AHEAD),
      *[pl.BlockSpec(plan.w_block, w_index, pipeline_mode=AHEAD)] * count,
    ],
    out_specs=[pl.BlockSpec(plan.out_block, out_index)],
  )(x, *weights, out)


def _columns_of_core(plan: Plan, out: Any) -> tuple[Any, Any]:
  """The blocks of columns, from the first to before another, of this core."""
  count = num_blocks(out.shape[1], plan.columns)
  if plan.split == "rows":
    return 0, count
  return share(count, jax.lax.axis_index("core"), plan.num_cores)


def _write_visits(plan: Plan, visits: Visits) -> Any:
  """Lists the visits of this core; returns how many."""
  used = visits.num_used
  unused = np.int32(plan.rows.num_blocks) - used
  with_groups, without = (np.int32(0), used), (np.int32(0), unused)
  if plan.split == "rows":
    core = jax.lax.axis_index("core")
    with_groups = share(used, core, plan.num_cores)
    without = share(unused, core, plan.num_cores)
  num_visits = visits.write_groups(*with_groups)
  return visits.write_rest(used + without[0], used + without[1], num_visits)


def _step(plan: Plan, visits: Visits, sums: Sequence[Any], x, *refs) -> None:
  """A block of K of the rows of a group that are in a block."""
  *weights, out = refs
  visit = pl.program_id(1)
  start, stop = visits.span(visit)
  end = visits.within(visits.total - visits.base(visit))
  last = plan.num_steps - 1

  def multiply(row, size):
    rows = pl.ds(row, size)

    def totals(inner):
      return [_dot(plan, x, w, rows, inner) for w in weights]

    def begin():
      for total, part in zip(sums, totals(plan.inner), strict=True):
        total[rows, :] = part

    def add():
      for total, part in zip(sums, totals(plan.inner), strict=True):
        total[rows, :] += part

    def finish():
      parts = totals(plan.size - last * plan.inner)
      if last:
        parts = [s[rows, :] + p for s, p in zip(sums, parts, strict=True)]
      _store(plan, out, parts, row, start)

    if last == 0:
      finish()
      return
    step = pl.program_id(2)
    pl.when(step == 0)(begin)
    if last > 1:
      pl.when((step > 0) & (step < last))(add)
    pl.when(step == last)(finish)

  def clear(row, size):
    rows = pl.ds(row, size)
    out[rows, :] = _select(row, size, end, out[rows, :], 0, out)

  for_each_piece(start, stop, multiply, rows=plan.rows)
  # No later visit writes what of the block is beyond the groups.
  is_cleared = (stop == end) & (pl.program_id(2) == last)
  block = np.int32(plan.rows.block)
  first = jax.lax.select(is_cleared, end, block)
  for_each_piece(first, block, clear, rows=plan.rows, pieces=(plan.rows.unit,))


def _store(plan: Plan, out, parts, row, start) -> None:
  """Stores rows from `start` on; those before are of groups before."""
  result = parts[0]
  if plan.call.epilogue is not None:
    result = plan.call.epilogue(*parts)
  size = parts[0].shape[0]
  rows = pl.ds(row, size)
  out[rows, :] = _select(row, size, start, out[rows, :], result, out)


def _select(row, size: int, limit, before, after, out) -> jax.Array:
  """`before` in rows before `limit`, else `after`, in the dtype of `out`."""
  wide = sum_dtype(out.dtype)
  shape = size, out.shape[1]
  position = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + row
  before, after = (
    jnp.broadcast_to(jnp.asarray(a).astype(wide), shape)
    for a in (before, after)
  )
  return jnp.where(position < limit, before, after).astype(out.dtype)


def _dot(plan: Plan, x, w, rows, inner: int) -> jax.Array:
  """Rows of a block times a weight, of which `inner` of K are in the arrays."""
  axis = 1 if plan.call.transpose_w else 0
  return jax.lax.dot_general(
    inside(x.at[rows, :], 1, inner),
    inside(w, axis, inner),
    (((1,), (axis,)), ((), ())),
    precision=plan.call.precision,
    preferred_element_type=sum_dtype(x.dtype),
  )
