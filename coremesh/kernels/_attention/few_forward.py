"""The forward kernel of attention of few rows."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from coremesh import place
from coremesh.kernels._attention import (
  exponents,
  few_blocks,
  few_layout,
  few_rows,
  few_visits,
  launches,
  scalars,
)
from coremesh.kernels._attention.backward_scores import Mask
from coremesh.kernels._attention.call import Operands, Problem
from coremesh.kernels._attention.exponents import INFINITY, LOG2_E
from coremesh.kernels._attention.few_rows import Plan
from coremesh.kernels._attention.scalars import when


def forward(
  problem: Problem,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  operands: Operands,
) -> list[jax.Array]:
  """The output [..., heads, q_len, d_v] and the LSE [..., heads, q_len]."""
  lead = q.shape[:-3]
  plan = few_rows.planned(problem, place.current_chip())
  kernel = launches.kernel(
    functools.partial(_body, plan),
    out=(
      jax.ShapeDtypeStruct(plan.shape("out"), q.dtype),
      jax.ShapeDtypeStruct(plan.shape("lse"), jnp.float32),
    ),
    scratch=_scratch(plan)._asdict(),
    name="attention_of_few_rows",
  )
  named = dict(q=q, k=k, v=v) | operands.given
  out, lse = kernel(
    *(few_layout.as_rows(plan, n, a, lead) for n, a in named.items())
  )
  out = few_layout.as_given(plan, "out", out)
  own = *lead, problem.heads, problem.q_len
  return [out.reshape(*own, problem.d_v), lse.reshape(own)]


class Scratch(NamedTuple):
  """What a core keeps in VMEM while keys go by.

  Attributes:
    sums: float32[rows, d_v], of terms @ v.
    largest: float32[rows, 1], the largest score times log2(e).
    total: float32[rows, 1], of terms.
  """

  sums: Any
  largest: Any
  total: Any


def _scratch(plan: Plan) -> Scratch:
  shapes = (plan.rows, plan.problem.d_v), (plan.rows, 1), (plan.rows, 1)
  return Scratch(*(pltpu.VMEM(shape, jnp.float32) for shape in shapes))


def _body(plan: Plan, *refs: Any, **scratch: Any) -> None:
  """All units of a core."""
  count = 3 + len(plan.problem.operands)
  inputs, outs = refs[:count], refs[count:]
  pipeline = functools.partial(_pipeline, plan, Scratch(**scratch), outs)

  def run(inputs, num_keys_smem):
    visited = functools.partial(pipeline, inputs, num_keys_smem)
    few_visits.with_visits(plan, num_keys_smem, visited)

  scalars.with_num_keys(plan.problem, inputs, run)


def _pipeline(
  plan: Plan, scratch: Scratch, outs, inputs, num_keys_smem, visits
) -> None:
  """Copies blocks in and out, for each visit."""
  operands = (n for n in plan.problem.operands if n != "num_keys")
  names = ("q", "k", "v", *operands, "out", "lse")

  def step(*blocks):
    visit = visits.at(*map(pl.program_id, range(len(visits.grid))))
    Step(
      plan=plan,
      refs=dict(zip(names, blocks, strict=True)),
      scratch=scratch,
      block=visit.block,
      num_keys=scalars.num_keys_of(plan.problem, num_keys_smem, visit.batch),
    ).run()

  specs = [
    few_layout.spec(plan, name, ref.shape, visits.at)
    for name, ref in zip(names, (*inputs, *outs), strict=True)
  ]
  pltpu.emit_pipeline(
    step, grid=visits.grid, in_specs=specs[:-2], out_specs=specs[-2:]
  )(*inputs, *outs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
  """All rows of a head of keys with a block of them.

  Attributes:
    plan: how it is computed.
    refs: the blocks in VMEM, by name.
    scratch: see there.
    block: of keys.
    num_keys: that are valid, None if all are.
  """

  plan: Plan
  refs: dict[str, Any]
  scratch: Scratch
  block: Any
  num_keys: Any

  def run(self) -> None:
    """Adds the block; the first one starts, the last one ends a head."""
    first, last = self.plan.blocks_of(self.num_keys)
    when(self.block == first, self._clear)
    few_blocks.add_masked(
      self.plan, "v", self.block, self.num_keys, self.refs, self._add
    )
    when(self.block == last, self._write)

  def _clear(self) -> None:
    scratch = self.scratch
    scratch.sums[...] = jnp.zeros_like(scratch.sums)
    scratch.largest[...] = jnp.full_like(scratch.largest, -INFINITY)
    scratch.total[...] = jnp.zeros_like(scratch.total)

  def _add(self, mask: Mask) -> None:
    scratch = self.scratch
    scores, values = self._scores(), self.refs["v"][...]
    if mask.counted is not None:
      scores = jnp.where(mask.counted, scores, -INFINITY)
    if mask.keys is not None:
      values = jnp.where(mask.keys, values, jnp.zeros_like(values))
    largest = scratch.largest[...]
    new = jnp.maximum(largest, jnp.max(scores, axis=1, keepdims=True))
    # Without scores any finite number will do: what is left is exp(-inf) = 0.
    base = jnp.where(new == -INFINITY, 0.0, new)
    terms = jnp.exp2(scores - base)
    shrink = jnp.exp2(largest - base)
    scratch.largest[...] = new
    scratch.total[...] = scratch.total[...] * shrink + jnp.sum(
      terms, axis=1, keepdims=True
    )
    terms = terms.astype(values.dtype)
    more = few_blocks.over_keys(self.plan, "v", terms, values)
    scratch.sums[...] = scratch.sums[...] * shrink + more

  def _scores(self) -> jax.Array:
    """The exponents of all scores of the block, [rows, keys]."""
    refs = self.refs
    products = few_blocks.with_keys(
      self.plan, "k", few_blocks.rows_of(self.plan, "q", refs), refs["k"][...]
    )
    scores, _ = exponents.of_products(self.plan.problem.call, products)
    if "bias" in refs:
      scores = scores + refs["bias"][...].astype(jnp.float32) * LOG2_E
    return scores

  def _write(self) -> None:
    total = self.scratch.total[...]
    is_empty = total == 0
    scale = jnp.where(is_empty, 0.0, 1 / total)
    sums = self.scratch.sums[...] * scale
    few_blocks.write_rows(self.plan, "out", self.refs, sums)
    log = self.scratch.largest[...] / LOG2_E + jnp.log(total)
    self.refs["lse"][...] = few_blocks.turned(
      jnp.where(is_empty, -INFINITY, log)
    )
