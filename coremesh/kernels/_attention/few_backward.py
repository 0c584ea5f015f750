"""The backward kernel of attention of few rows.

1. A core goes through its heads of keys, block by block, all rows at once.
2. Of each block the weights are computed again from the LSE. As all rows are
   there, its dk and dv are complete, and leave; dq is summed over blocks.

Reads q, k, v, out and d_out once, and writes dq, dk and dv once.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from coremesh import place
from coremesh.kernels._attention import backward_scores as scores
from coremesh.kernels._attention import (
  exponents,
  few_blocks,
  few_layout,
  few_rows,
  launches,
  masks,
  scalars,
)
from coremesh.kernels._attention.call import Operands, Problem
from coremesh.kernels._attention.exponents import LOG2_E
from coremesh.kernels._attention.few_rows import Plan
from coremesh.kernels._attention.few_visits import Visit
from coremesh.kernels._attention.scalars import negated, when

_NAMES = "q", "k", "v", "out", "d_out", "lse", "d_lse"
# What `backward_scores.terms` takes of each row.
_ROW_VALUES = "log_total", "less"


def gradients(
  problem: Problem, arrays: tuple[jax.Array, ...], operands: Operands
) -> list[jax.Array]:
  """The derivatives with respect to q, k and v, and the row values.

  Args:
    problem: what attention was asked for.
    arrays: q, k, v, out and d_out; lse and d_lse [..., heads, 1, q_len].
    operands: those of attention.

  Returns:
    dq, dk, dv; where there is a bias also the `backward_scores.row_values`
    [..., heads, 2, q_len].
  """
  plan = few_rows.planned(problem, place.current_chip())
  lead = arrays[0].shape[:-3]
  named = dict(zip(_NAMES, arrays, strict=True)) | operands.given
  found = _kernel(plan)(
    *(few_layout.as_rows(plan, n, a, lead) for n, a in named.items())
  )
  results = []
  for name, array in zip(_out_names(plan), found, strict=True):
    array = few_layout.as_given(plan, name, array)
    results.append(array.reshape(*lead, *array.shape[1:]))
  if "bias" not in operands.given:
    return results
  return [*results[:3], jnp.concatenate(results[3:], axis=-2)]


def _out_names(plan: Plan) -> tuple[str, ...]:
  """The derivative of a bias is made of the last two."""
  names = "dq", "dk", "dv"
  return (*names, *_ROW_VALUES) if "bias" in plan.problem.operands else names


def _kernel(plan: Plan) -> Any:
  shapes = (plan.rows, plan.problem.d_qk), (plan.rows, 1), (plan.rows, 1)
  return launches.kernel(
    functools.partial(_body, plan),
    out=tuple(
      jax.ShapeDtypeStruct(
        plan.shape(name),
        jnp.float32 if name in _ROW_VALUES else plan.problem.dtype,
      )
      for name in _out_names(plan)
    ),
    scratch=[pltpu.VMEM(shape, jnp.float32) for shape in shapes],
    name="attention_of_few_rows_backward",
  )


def _body(plan: Plan, *refs: Any) -> None:
  """All units of a core."""
  count = len(_NAMES) + len(plan.problem.operands)
  inputs, outs, scratch = refs[:count], refs[count:-3], refs[-3:]
  run = functools.partial(_pipeline, plan, outs, scratch)
  scalars.with_num_keys(plan.problem, inputs, run)


def _pipeline(plan: Plan, outs, scratch, inputs, num_keys_smem) -> None:
  """Copies blocks in and out: all of dk and dv, of k and v what counts."""
  core = jax.lax.axis_index("core")
  operands = (n for n in plan.problem.operands if n != "num_keys")
  out_names = _out_names(plan)
  names = (*_NAMES, *operands, *out_names)

  def visit_at(index, step) -> Visit:
    unit = plan.units.unit(core, index)
    return Visit(unit.batch, unit.kv_head, step)

  def num_keys_of(visit: Visit) -> Any:
    return scalars.num_keys_of(plan.problem, num_keys_smem, visit.batch)

  def input_at(index, step) -> Visit:
    visit = visit_at(index, step)
    first, last = plan.blocks_of(num_keys_of(visit))
    block = masks.smaller(masks.greater(step, first), last)
    return visit._replace(block=block)

  def step(*blocks):
    at = pl.program_id(0), pl.program_id(1)
    visit = visit_at(at[0], 0 if plan.num_blocks == 1 else at[1])
    Step(
      plan=plan,
      refs=dict(zip(names, blocks, strict=True)),
      dq_vmem=scratch[0],
      row_values_vmem=scratch[1:],
      block=visit.block,
      num_keys=num_keys_of(visit),
    ).run()

  specs = [
    few_layout.spec(
      plan, name, ref.shape, visit_at if name in out_names else input_at
    )
    for name, ref in zip(names, (*inputs, *outs), strict=True)
  ]
  pltpu.emit_pipeline(
    step,
    grid=(plan.units.count(core), plan.num_blocks),
    in_specs=specs[: -len(outs)],
    out_specs=specs[-len(outs) :],
  )(*inputs, *outs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
  """All rows of a head of keys with a block of them.

  Attributes:
    plan: how it is computed.
    refs: the blocks in VMEM, by name.
    dq_vmem: float32[rows, d_qk], a sum over blocks.
    row_values_vmem: two float32[rows, 1]; see `backward_scores.row_values`.
    block: of keys.
    num_keys: that are valid, None if all are.
  """

  plan: Plan
  refs: dict[str, Any]
  dq_vmem: Any
  row_values_vmem: Any
  block: Any
  num_keys: Any

  def run(self) -> None:
    """Writes dk and dv of the block; the last one writes dq."""
    some_count = self.plan.some_count(self.block, self.num_keys)
    when(self.block == 0, self._start)
    few_blocks.add_masked(
      self.plan, "k", self.block, self.num_keys, self.refs, self._add
    )
    when(negated(some_count), self._write_nothing)
    when(self.block == self.plan.num_blocks - 1, self._write_dq)

  def _start(self) -> None:
    refs = self.refs
    self.dq_vmem[...] = jnp.zeros_like(self.dq_vmem)
    out, d_out = (
      few_blocks.rows_of(self.plan, name, refs).astype(jnp.float32)
      for name in ("out", "d_out")
    )
    lse, d_lse = (few_blocks.turned(refs[n][...]) for n in ("lse", "d_lse"))
    products = jnp.sum(out * d_out, axis=1, keepdims=True)
    values = scores.row_values(lse, products, d_lse)
    for i, name in enumerate(_ROW_VALUES):
      self.row_values_vmem[i][...] = values[i]
      if name in refs:
        refs[name][...] = few_blocks.turned(values[i])

  def _add(self, mask: scores.Mask) -> None:
    plan, refs, call = self.plan, self.refs, self.plan.problem.call
    q, k, v, d_out = scores.Inputs(
      q=few_blocks.rows_of(plan, "q", refs),
      k=refs["k"][...],
      v=refs["v"][...],
      d_out=few_blocks.rows_of(plan, "d_out", refs),
    ).known(mask)
    log_total, less = (ref[...] for ref in self.row_values_vmem)
    products = few_blocks.with_keys(plan, "k", q, k)
    exponent, slope = exponents.of_products(call, products)
    if "bias" in refs:
      exponent = exponent + refs["bias"][...].astype(jnp.float32) * LOG2_E
    weights = jnp.exp2(exponent - log_total)
    d_products = weights * (few_blocks.with_keys(plan, "v", d_out, v) - less)
    if slope is not None:
      d_products = d_products * slope
    if mask.counted is not None:
      weights = jnp.where(mask.counted, weights, 0.0)
      d_products = jnp.where(mask.counted, d_products, 0.0)
    weights, d_products = (a.astype(q.dtype) for a in (weights, d_products))
    dk = few_blocks.over_rows(plan, "dk", d_products, q) * call.scale
    refs["dk"][...] = dk.astype(refs["dk"].dtype)
    dv = few_blocks.over_rows(plan, "dv", weights, d_out)
    refs["dv"][...] = dv.astype(refs["dv"].dtype)
    self.dq_vmem[...] += few_blocks.over_keys(plan, "k", d_products, k)

  def _write_nothing(self) -> None:
    for name in ("dk", "dv"):
      self.refs[name][...] = jnp.zeros_like(self.refs[name])

  def _write_dq(self) -> None:
    dq = self.dq_vmem[...] * self.plan.problem.call.scale
    few_blocks.write_rows(self.plan, "dq", self.refs, dq)
