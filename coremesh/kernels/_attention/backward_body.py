"""The backward kernel of attention: dq, dk and dv in one pass.

1. A core holds a head of keys and values, and goes through blocks of rows of
   all heads that use it.
2. Of each pair of a block of rows and one of keys that count for each other the
   weights are computed again from the LSE, keys along sublanes: five products.
3. dk and dv are summed in VMEM over all rows, dq over all keys held.

Reads q, k, v, out and d_out once, and writes dq, dk and dv once.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from coremesh.kernels._attention import scalars
from coremesh.kernels._attention.backward_plan import Plan
from coremesh.kernels._attention.backward_step import Step

# The axes of rows and of keys of the arrays that have them.
_ROWS = {
  **{"q": 2, "out": 2, "d_out": 2, "dq": 2, "bias": 2},
  **{"lse": 3, "d_lse": 3, "row_values": 3, "row_segments": 3},
}
_KEYS = {"k": 2, "v": 2, "dk": 2, "dv": 2, "key_segments": 3, "bias": 3}
_OF_KEYS = ("k", "v", "dk", "dv")


def body(plan: Plan, *refs: Any) -> None:
  """All rounds of a core."""
  count = 7 + len(plan.problem.operands)
  inputs, outs, scratch = refs[:count], refs[count:-4], refs[-4:]
  run = functools.partial(_pipeline, plan, outs, scratch)
  scalars.with_num_keys(plan.problem, inputs, run)


def _pipeline(plan: Plan, outs, scratch, inputs, num_keys_smem) -> None:
  core = jax.lax.axis_index("core")
  rounds = plan.rounds
  grid = rounds.num_heads(core), rounds.num_items(core)

  def step(*refs):
    unit = rounds.unit(core, pl.program_id(0), pl.program_id(1))
    num_keys = scalars.num_keys_of(plan.problem, num_keys_smem, unit.batch)
    item = pl.program_id(1)
    Step(
      plan=plan,
      unit=unit,
      num_keys=num_keys,
      refs=dict(zip((*plan.names, *plan.out_names), refs, strict=True)),
      sums=dict(zip(plan.scratch(), scratch, strict=True)),
    ).run(is_first=item == 0, is_last=item == grid[1] - 1)

  def spec(name: str, ref: Any) -> pl.BlockSpec:
    return _spec(plan, name, ref, core)

  pltpu.emit_pipeline(
    step,
    grid=grid,
    in_specs=[spec(n, r) for n, r in zip(plan.names, inputs, strict=True)],
    out_specs=[spec(n, r) for n, r in zip(plan.out_names, outs, strict=True)],
  )(*inputs, *outs)


def _spec(plan: Plan, name: str, ref: Any, core: Any) -> pl.BlockSpec:
  """The blocks of an array; where it is 1 long, it broadcasts."""
  is_sum = len(ref.shape) == 5  # Of each core.
  shape = ref.shape[is_sum:]
  sizes: list[Any] = [None, None, *shape[2:]]
  rows, keys = _ROWS.get(name), _KEYS.get(name)
  if rows is not None and (name != "bias" or shape[rows] > 1):
    sizes[rows] = plan.blocks.held_rows
  else:
    rows = None
  if keys is not None and (name != "bias" or shape[keys] > 1):
    sizes[keys] = plan.blocks.held_keys
  else:
    keys = None

  def index_map(head, item):
    unit = plan.rounds.unit(core, head, item)
    at = [unit.batch, unit.kv_head if name in _OF_KEYS else unit.head, 0, 0]
    at[:2] = (0 if n == 1 else i for n, i in zip(shape, at[:2], strict=False))
    if rows is not None:
      at[rows] = unit.block
    if keys is not None and name not in ("dk", "dv"):
      at[keys] = plan.share
    return (*[core] * is_sum, *at)

  return pl.BlockSpec((*[None] * is_sum, *sizes), index_map)
