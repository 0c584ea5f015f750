"""Which blocks of keys a core visits, where heads have few rows.

All blocks between the first and the last key that count, of one head after the
other. Where the number of keys is data, the scalar core lists them in SMEM, so
that no step is spent on a block of which nothing counts, and the copies of the
next head are under way while the last block of one is computed with.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import errors, place
from coremesh.kernels._attention import scalars
from coremesh.kernels._attention.few_rows import Plan
from coremesh.kernels.blocks import loop


class Visit(NamedTuple):
  """A block of keys: int32 scalars of a kernel, or ints.

  Attributes:
    batch: the element.
    head: of keys.
    block: of its keys.
  """

  batch: Any
  head: Any
  block: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Visits:
  """The visits of a core, in order.

  Attributes:
    grid: of which each point is a visit.
    at: the visit at indices of the grid.
  """

  grid: tuple[Any, ...]
  at: Callable[..., Visit]


def with_visits(
  plan: Plan, num_keys_smem: Any, run: Callable[[Visits], None]
) -> None:
  """Calls run(visits) with those of this core.

  Args:
    plan: says what there is to visit.
    num_keys_smem: how many keys of each element are valid; None for all.

  Raises:
    ShapeError: there are more visits than SMEM holds.
  """
  core = jax.lax.axis_index("core")
  if num_keys_smem is None or plan.num_blocks == 1:
    run(_known(plan, core))
    return
  heads = plan.problem.batch * plan.problem.kv_heads
  most = pl.cdiv(heads, plan.num_cores) * plan.num_blocks
  limit = place.current_chip().smem_bytes_per_tensor_core
  if 2 * 4 * most >= limit:
    raise errors.ShapeError(
      f"attention with kv_lengths lists {most} blocks of {plan.keys} keys in"
      f" SMEM, of which a core has {limit} bytes. Call it for some of the"
      " leading axes at a time, or with larger blocks."
    )

  def listed(units_smem, blocks_smem):
    count = _list(plan, core, num_keys_smem, units_smem, blocks_smem)

    def at(index):
      unit = plan.units.unit(core, units_smem[index])
      return Visit(unit.batch, unit.kv_head, blocks_smem[index])

    run(Visits(grid=(count,), at=at))

  table = pltpu.SMEM((most + 1,), jnp.int32)
  pl.run_scoped(listed, table, table)


def _known(plan: Plan, core: Any) -> Visits:
  first, last = plan.blocks_of(None)

  def at(index, step):
    unit = plan.units.unit(core, index)
    block = first if first == last else first + step
    return Visit(unit.batch, unit.kv_head, block)

  return Visits(grid=(plan.units.count(core), last - first + 1), at=at)


def _list(plan: Plan, core: Any, num_keys_smem, units_smem, blocks_smem) -> Any:
  """Writes the tables; returns how many visits there are."""

  def add_unit(index, visit):
    batch = plan.units.unit(core, index).batch
    num_keys = scalars.num_keys_of(plan.problem, num_keys_smem, batch)
    first, last = plan.blocks_of(num_keys)

    def add_block(block, visit):
      # One of which nothing counts is written over by the next that is visited.
      units_smem[visit] = index
      blocks_smem[visit] = block
      return visit + jnp.int32((first <= block) & (block <= last))

    return loop(plan.num_blocks, add_block, visit)

  return jax.lax.fori_loop(
    np.int32(0), jnp.int32(plan.units.count(core)), add_unit, np.int32(0)
  )
