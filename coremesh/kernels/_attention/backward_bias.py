"""The derivative with respect to the bias of attention, as a kernel.

1. A core takes blocks of the bias. Along the axes that the bias is broadcast
   along, it goes through all blocks of scores that one is added to.
2. Of each it computes the derivative again, as the backward kernel does: two
   products; it sums them in VMEM and writes them once.

Apart from the backward kernel, so that it is not run where nobody asks for its
result, and nothing as large as the scores is ever in HBM but the result.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import place
from coremesh.kernels import batching
from coremesh.kernels._attention import backward_scores as scores
from coremesh.kernels._attention import launches, masks, scalars
from coremesh.kernels._attention.call import (
  Call,
  Operands,
  Problem,
  in_blocks,
  problem_of,
)
from coremesh.kernels._attention.masks import Span

_MOST_ROWS = 512
_MOST_KEYS = 512
# Axes of each array that has one for its heads, its rows and its keys.
_ROWS = {"q": 2, "d_out": 2, "row_values": 3, "row_segments": 3}
_KEYS = {"k": 2, "v": 2, "key_segments": 3}


def gradient(
  call: Call, arrays: tuple[jax.Array, ...], operands: Operands
) -> jax.Array:
  """The derivative with respect to `operands.bias`, of its shape and dtype.

  Args:
    call: the static arguments.
    arrays: q, k, v, d_out, and the `scores.row_values` of each row,
      [..., heads, 2, q_len], float32.
    operands: those of attention.
  """
  given = operands.given

  def run(*arrays):
    operands = Operands(**dict(zip(given, arrays[5:], strict=True)))
    return [_run(call, arrays[:5], operands)]

  (d_bias,) = batching.one_launch(run, *arrays, *given.values(), repeats=True)
  return d_bias


def _run(call: Call, arrays, operands: Operands) -> jax.Array:
  q, k, v = arrays[:3]
  lead = q.shape[:-3]
  chip = place.current_chip()
  bias = operands.bias
  names = "q", "k", "v", "d_out", "row_values"
  named = dict(zip(names, arrays, strict=True)) | operands.given
  joint = {name: in_blocks(name, array, lead) for name, array in named.items()}
  lengths = [joint.pop("num_keys")] if "num_keys" in joint else []
  plan = Plan(
    problem=problem_of(call, q, k, v, operands),
    shape=joint["bias"].shape,
    names=tuple(joint),
    num_cores=chip.tensor_cores_per_device,
  )
  # Leading axes of which only some broadcast were repeated.
  own_lead = lead if plan.shape[0] > 1 else bias.shape[:-3]
  lost = [i for i, n in enumerate(own_lead) if bias.shape[i] != n]
  dtype = jnp.float32 if lost else bias.dtype
  kernel = launches.kernel(
    functools.partial(_body, plan),
    out=jax.ShapeDtypeStruct(plan.shape, dtype),
    scratch=[pltpu.VMEM(plan.block[::-1], jnp.float32)],
    name="attention_backward_bias",
  )
  d_bias = kernel(*joint.values(), *lengths)[:, :, : bias.shape[-2]]
  full = d_bias.reshape(*own_lead, *d_bias.shape[1:])
  return full.sum(lost, keepdims=True).astype(bias.dtype) if lost else full


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
  """How the derivative is computed.

  Attributes:
    problem: what is asked for.
    shape: of the bias, [batch, heads, q_len, kv_len] or 1 for any.
    names: of the arrays that go in blocks, in order.
    num_cores: of a device.
  """

  problem: Problem
  shape: tuple[int, ...]
  names: tuple[str, ...]
  num_cores: int

  @property
  def rows(self) -> int:
    """Of a block of scores."""
    return min(_MOST_ROWS, pl.cdiv(self.problem.q_len, 128) * 128)

  @property
  def keys(self) -> int:
    """Of a block of scores."""
    return min(_MOST_KEYS, pl.cdiv(self.problem.kv_len, 128) * 128)

  @property
  def block(self) -> tuple[int, int]:
    """Rows and keys of a block of the bias."""
    rows, keys = self.shape[2:]
    return 1 if rows == 1 else self.rows, 1 if keys == 1 else self.keys

  @property
  def scores(self) -> tuple[int, ...]:
    """Blocks of scores along each axis."""
    p = self.problem
    blocks = pl.cdiv(p.q_len, self.rows), pl.cdiv(p.kv_len, self.keys)
    return p.batch, p.heads, *blocks

  @property
  def own(self) -> tuple[int, ...]:
    """Blocks of the bias along each axis."""
    pairs = zip(self.scores, self.shape, strict=True)
    return tuple(1 if size == 1 else n for n, size in pairs)

  @property
  def summed(self) -> tuple[int, ...]:
    """Blocks of scores along each axis that one of the bias is added to."""
    pairs = zip(self.scores, self.own, strict=True)
    return tuple(n // own for n, own in pairs)

  def at(self, index: Any, item: Any) -> list[Any]:
    """The block of scores of an item of a block of the bias."""
    own, summed = _unraveled(index, self.own), _unraveled(item, self.summed)
    return [a + b for a, b in zip(own, summed, strict=True)]


def _unraveled(index: Any, shape: tuple[int, ...]) -> list[Any]:
  at = []
  for size in reversed(shape):
    at.append(jax.lax.rem(index, np.int32(size)) if size > 1 else 0)
    index = jax.lax.div(index, np.int32(size))
  return at[::-1]


def _body(plan: Plan, *refs: Any) -> None:
  *inputs, out, total = refs
  run = functools.partial(_pipeline, plan, out, total)
  scalars.with_num_keys(plan.problem, inputs, run)


def _pipeline(plan: Plan, out, total_vmem, inputs, num_keys_smem) -> None:
  core = jax.lax.axis_index("core")
  num_blocks, num_items = math.prod(plan.own), math.prod(plan.summed)
  mine = jax.lax.div(
    num_blocks - core + np.int32(plan.num_cores - 1), np.int32(plan.num_cores)
  )

  def at(index, item):
    return plan.at(index * plan.num_cores + core, item)

  def spec(name, ref):
    return _spec(plan, name, ref, at)

  def step(*refs):
    item = pl.program_id(1)
    place_ = at(pl.program_id(0), item)
    num_keys = scalars.num_keys_of(plan.problem, num_keys_smem, place_[0])
    blocks = dict(zip((*plan.names, "out"), refs, strict=True))

    @pl.when(item == 0)
    def _():
      total_vmem[...] = jnp.zeros_like(total_vmem)

    _add(plan, place_, blocks, num_keys, total_vmem)

    @pl.when(item == num_items - 1)
    def _():
      out = blocks["out"]
      out[...] = scores.turned(total_vmem[...]).astype(out.dtype)

  pltpu.emit_pipeline(
    step,
    grid=(mine, num_items),
    in_specs=[spec(n, r) for n, r in zip(plan.names, inputs, strict=True)],
    out_specs=[spec("bias", out)],
  )(*inputs, out)


def _spec(plan: Plan, name: str, ref: Any, at) -> pl.BlockSpec:
  shape = ref.shape
  rows, keys = _ROWS.get(name), _KEYS.get(name)
  sizes: list[Any] = [None, None, *shape[2:]]
  if name == "bias":
    sizes[2:] = plan.block
    rows, keys = 2, 3
  else:
    for axis, size in ((rows, plan.rows), (keys, plan.keys)):
      if axis is not None:
        sizes[axis] = size

  def index_map(index, item):
    batch, head, row, key = at(index, item)
    if name in ("k", "v"):
      head = jax.lax.div(head, np.int32(plan.problem.group))
    indices = [batch, head, 0, 0]
    if rows is not None:
      indices[rows] = row
    if keys is not None:
      indices[keys] = key
    pairs = zip(shape, indices, strict=True)
    return tuple(0 if n == 1 else i for n, i in pairs)

  return pl.BlockSpec(tuple(sizes), index_map)


def _add(plan: Plan, at, refs, num_keys, total_vmem) -> None:
  """Adds the derivative of a block of scores."""
  problem = plan.problem
  row, key = at[2] * plan.rows, at[3] * plan.keys
  keys = masks.band(problem).some_keys(
    Span(row, masks.smaller(row + plan.rows, problem.q_len))
  )
  if num_keys is not None:
    keys = keys.cut(Span(0, num_keys))
  may_count = (key < keys.stop) & (keys.start < key + plan.keys)

  @pl.when(may_count)
  def _():
    segments = {
      n: refs[n][...] for n in ("row_segments", "key_segments") if n in refs
    }
    mask = scores.mask(
      problem,
      shape=(plan.keys, plan.rows),
      row=row,
      key=key,
      num_keys=num_keys,
      **segments,
    )
    inputs = scores.Inputs(*(refs[n][...] for n in scores.Inputs._fields))
    d_scores = scores.terms(
      problem.call,
      inputs.known(mask),
      log_total=refs["row_values"][0:1],
      less=refs["row_values"][1:2],
      bias=refs["bias"][...],
      counted=mask.counted,
    ).d_scores
    for axis, size in enumerate(plan.block[::-1]):
      if size == 1:
        d_scores = d_scores.sum(axis, keepdims=True)
    total_vmem[...] += d_scores
