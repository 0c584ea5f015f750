"""The forward kernel of attention: its blocks, and what a step does."""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import launch, place
from coremesh.kernels import attention_masks as masks
from coremesh.kernels import batching
from coremesh.kernels.attention_blocks import Blocks
from coremesh.kernels.attention_call import (
  Call,
  Operands,
  Problem,
  joined,
  problem_of,
)
from coremesh.kernels.attention_masks import Span
from coremesh.kernels.attention_units import Unit, Units
from coremesh.kernels.blocks import iota

_INFINITY = float("inf")
_LOG2_E = math.log2(math.e)


def forward(
  call: Call, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array]:
  """The output [..., heads, q_len, d_v] and the LSE [..., heads, q_len]."""
  given = operands.given

  def run(q, k, v, *arrays):
    operands = Operands(**dict(zip(given, arrays, strict=True)))
    return _run(call, q, k, v, operands)

  out, lse = batching.one_launch(run, q, k, v, *given.values(), repeats=False)
  return out, lse


def _run(call, q, k, v, operands) -> list[jax.Array]:
  problem = problem_of(call, q, k, v, operands)
  lead = q.shape[:-3]
  chip = place.current_chip()
  blocks = call.blocks or Blocks()
  plan = Plan(
    problem=problem,
    rows=blocks.rows,
    keys=blocks.keys,
    part=blocks.part,
    num_cores=chip.tensor_cores_per_device,
  )
  heads = problem.batch, problem.heads
  kernel = launch.kernel(
    functools.partial(_body, plan),
    mesh=chip.tensor_cores("core"),
    out=(
      jax.ShapeDtypeStruct((*heads, problem.q_len, problem.d_v), q.dtype),
      jax.ShapeDtypeStruct((*heads, 1, problem.q_len), jnp.float32),
    ),
    scratch=[
      pltpu.VMEM((problem.d_v, plan.rows), jnp.float32),
      pltpu.VMEM((2, plan.rows), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      vmem_limit_bytes=chip.vmem_bytes_per_tensor_core * 9 // 10
    ),
    num_links=0,
    name="attention",
  )
  arrays = [joined(a, lead) for a in (q, k, v, *operands.given.values())]
  if "num_keys" in problem.operands:
    arrays[-1] = arrays[-1].reshape(-1)
  out, lse = kernel(*arrays)
  return [
    out.reshape(*lead, *out.shape[1:]),
    lse.reshape(*lead, problem.heads, problem.q_len),
  ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
  """How the forward pass is computed.

  Attributes:
    problem: what is asked for.
    rows: of a block.
    keys: of a block.
    part: of a block of keys whose scores are computed at once.
    num_cores: of a device.
  """

  problem: Problem
  rows: int
  keys: int
  part: int
  num_cores: int

  @property
  def units(self) -> Units:
    """The blocks of rows of all cores."""
    return Units(
      problem=self.problem,
      blocks=pl.cdiv(self.problem.q_len, self.rows),
      num_cores=self.num_cores,
    )

  @property
  def steps(self) -> int:
    """Blocks of keys."""
    return pl.cdiv(self.problem.kv_len, self.keys)

  def rows_of(self, unit: Unit) -> Span:
    """The rows of a unit."""
    start = unit.block * self.rows
    return Span(start, masks.smaller(start + self.rows, self.problem.q_len))

  def keys_of(self, unit: Unit, num_keys: Any) -> Span:
    """The keys that its rows may count."""
    span = masks.band(self.problem).some_keys(self.rows_of(unit))
    return span if num_keys is None else span.cut(Span(0, num_keys))

  def unmasked_keys_of(self, unit: Unit, num_keys: Any) -> Span:
    """The keys that every one of its rows counts."""
    if "row_segments" in self.problem.operands:
      return Span(0, 0)
    span = masks.band(self.problem).all_keys(self.rows_of(unit))
    return span if num_keys is None else span.cut(Span(0, num_keys))


def _body(plan: Plan, *refs: Any) -> None:
  """All units of a core."""
  problem = plan.problem
  count = 3 + len(problem.operands)
  inputs, (out, lse), scratch = refs[:count], refs[count : count + 2], refs[-2:]
  if "num_keys" not in problem.operands:
    _pipeline(plan, inputs, (out, lse), scratch, None)
    return

  def with_lengths(num_keys_smem):
    pltpu.sync_copy(inputs[-1], num_keys_smem)
    _pipeline(plan, inputs[:-1], (out, lse), scratch, num_keys_smem)

  pl.run_scoped(with_lengths, pltpu.SMEM(inputs[-1].shape, jnp.int32))


def _pipeline(plan: Plan, inputs, outs, scratch, num_keys_smem) -> None:
  core = jax.lax.axis_index("core")
  units = plan.units

  def unit_at(index) -> Unit:
    return units.unit(core, index)

  def num_keys_of(unit: Unit) -> Any:
    if num_keys_smem is None:
      return None
    single = num_keys_smem.shape == (1,)
    return jnp.clip(
      num_keys_smem[0 if single else unit.batch], 0, plan.problem.kv_len
    )

  def block_of_keys(unit: Unit, step: Any) -> Any:
    """The block at a step; where that counts nowhere, one that is there."""
    keys = plan.keys_of(unit, num_keys_of(unit))
    if plan.steps == 1:
      return 0
    last = masks.greater(_block(keys.stop - 1, plan.keys), 0)
    first = masks.smaller(_block(keys.start, plan.keys), last)
    return masks.greater(masks.smaller(step, last), first)

  def by_name(name: str, ref: Any) -> pl.BlockSpec:
    return _spec(plan, name, ref, unit_at, block_of_keys)

  names = (
    "q",
    "k",
    "v",
    *(n for n in plan.problem.operands if n != "num_keys"),
  )

  def step(*refs):
    unit = unit_at(pl.program_id(0))
    blocks = dict(zip((*names, "out", "lse"), refs, strict=True))
    _step(plan, unit, num_keys_of(unit), blocks, scratch)

  pltpu.emit_pipeline(
    step,
    grid=(units.count(core), plan.steps),
    in_specs=[by_name(n, r) for n, r in zip(names, inputs, strict=True)],
    out_specs=[by_name("out", outs[0]), by_name("lse", outs[1])],
  )(*inputs, *outs)


def _block(index: Any, size: int) -> Any:
  return (
    index // size
    if isinstance(index, int)
    else jax.lax.div(index, np.int32(size))
  )


def _spec(plan, name, ref, unit_at, block_of_keys) -> pl.BlockSpec:
  """The blocks of an array; those of size 1 broadcast."""
  by_head = {"q": "head", "out": "head", "lse": "head", "bias": "head"}
  rows_axis = {"q": 2, "out": 2, "lse": 3, "bias": 2, "row_segments": 3}
  keys_axis = {"k": 2, "v": 2, "bias": 3, "key_segments": 3}
  shape = list(ref.shape)
  sizes: list[Any] = [None, None, *shape[2:]]
  rows, keys = rows_axis.get(name), keys_axis.get(name)
  is_bias = name == "bias"
  if rows is not None and not (is_bias and shape[rows] == 1):
    sizes[rows] = plan.rows
  else:
    rows = None
  if keys is not None and not (is_bias and shape[keys] == 1):
    sizes[keys] = plan.keys
  else:
    keys = None

  def index_map(index, step):
    unit = unit_at(index)
    head = unit.head if name in by_head else unit.kv_head
    at = [unit.batch, head, 0, 0]
    if shape[0] == 1:
      at[0] = 0
    if shape[1] == 1:
      at[1] = 0
    if rows is not None:
      at[rows] = unit.block
    if keys is not None:
      at[keys] = block_of_keys(unit, step)
    return tuple(at)

  return pl.BlockSpec(tuple(sizes), index_map)


def _step(plan: Plan, unit, num_keys, refs, scratch) -> None:
  """The scores of a unit with a block of keys."""
  sums_vmem, state_vmem = scratch
  step = pl.program_id(1)

  @pl.when(step == 0)
  def _():
    sums_vmem[...] = jnp.zeros_like(sums_vmem)
    state_vmem[0:1] = jnp.full((1, plan.rows), -_INFINITY)
    state_vmem[1:2] = jnp.zeros((1, plan.rows))

  first = step * plan.keys
  some = plan.keys_of(unit, num_keys)
  every = plan.unmasked_keys_of(unit, num_keys)

  def part(index, is_masked):
    _part(plan, unit, num_keys, refs, scratch, index, is_masked=is_masked)

  def local(key, rounding):
    return jnp.clip(
      jax.lax.div(jnp.int32(key - first + rounding), np.int32(plan.part)),
      0,
      plan.keys // plan.part,
    )

  start = local(some.start, 0)
  stop = jnp.where(
    some.stop > some.start, local(some.stop, plan.part - 1), start
  )
  inner = jnp.clip(local(every.start, plan.part - 1), start, stop)
  outer = jnp.clip(local(every.stop, 0), inner, stop)
  for low, high, is_masked in (
    (start, inner, True),
    (inner, outer, False),
    (outer, stop, True),
  ):

    def turn(i, _, is_masked=is_masked):
      part(i, is_masked)

    jax.lax.fori_loop(low, high, turn, None)

  @pl.when(step == plan.steps - 1)
  def _():
    largest, total = state_vmem[0:1], state_vmem[1:2]
    scale = jnp.where(total == 0, 0.0, 1 / total)
    refs["out"][...] = (sums_vmem[...] * scale).T.astype(refs["out"].dtype)
    refs["lse"][...] = jnp.where(
      total == 0, -_INFINITY, largest / _LOG2_E + jnp.log(total)
    )


def _part(plan, unit, num_keys, refs, scratch, index, *, is_masked) -> None:
  sums_vmem, state_vmem = scratch
  problem, call = plan.problem, plan.problem.call
  here = pl.ds(pl.multiple_of(index * plan.part, plan.part), plan.part)
  scores = jax.lax.dot_general(
    refs["k"][here],
    refs["q"][...],
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  if call.soft_cap is None:
    scores = scores * (call.scale * _LOG2_E)
  else:
    capped = jnp.tanh(scores * (call.scale / call.soft_cap))
    scores = capped * (call.soft_cap * _LOG2_E)
  if "bias" in refs:
    bias = refs["bias"]
    bias = bias[:, here] if bias.shape[1] > 1 else bias[...]
    scores = scores + bias.astype(jnp.float32).T * _LOG2_E
  v = refs["v"][here]
  if is_masked:
    first = pl.program_id(1) * plan.keys + index * plan.part
    keys = first + iota((plan.part, 1), 0)
    segments = {}
    if "row_segments" in refs:
      segments["row_segments"] = refs["row_segments"][...]
      key_segments = refs["key_segments"][:, here]
      key_segments = jnp.broadcast_to(key_segments, (8, plan.part)).T[:, :1]
      segments["key_segments"] = key_segments
    counted = masks.counted(
      problem,
      rows=unit.block * plan.rows + iota((1, plan.rows), 1),
      keys=keys,
      num_keys=num_keys,
      **segments,
    )
    scores = jnp.where(counted, scores, -_INFINITY)
    segments.pop("row_segments", None)
    known = masks.counted_keys(problem, keys, num_keys=num_keys, **segments)
    v = jnp.where(known, v, jnp.zeros_like(v))
  largest, total = state_vmem[0:1], state_vmem[1:2]
  new = jnp.maximum(largest, jnp.max(scores, axis=0, keepdims=True))
  base = jnp.where(new == -_INFINITY, 0.0, new)
  terms = jnp.exp2(scores - base)
  shrink = jnp.exp2(largest - base)
  state_vmem[0:1] = new
  state_vmem[1:2] = total * shrink + jnp.sum(terms, axis=0, keepdims=True)
  sums_vmem[...] = sums_vmem[...] * shrink + jax.lax.dot_general(
    v,
    terms.astype(v.dtype),
    (((0,), (0,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
