"""The derivatives of attention, without its scores in HBM."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coremesh import place
from coremesh.kernels import batching
from coremesh.kernels._attention import (
  backward_bias,
  backward_blocks,
  backward_body,
  few_backward,
  few_rows,
  launches,
)
from coremesh.kernels._attention.backward_blocks import BackwardBlocks
from coremesh.kernels._attention.backward_plan import Plan
from coremesh.kernels._attention.call import (
  Call,
  Operands,
  in_blocks,
  problem_of,
)
from coremesh.kernels.blocks import copied_rows

type Residuals = tuple[
  jax.Array, jax.Array, jax.Array, Operands, jax.Array, jax.Array
]


def gradients(
  call: Call,
  residuals: Residuals,
  d_out: jax.Array,
  d_lse: jax.Array,
  *,
  blocks: BackwardBlocks | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Operands]:
  """The derivatives of a loss with respect to what attention was given.

  Args:
    call: the static arguments.
    residuals: q, k, v, the operands, the output and the LSE.
    d_out: with respect to the output, of its shape and dtype.
    d_lse: with respect to the LSE, float32 of its shape.
    blocks: sizes of blocks; default by the sizes of the arrays and the chip.

  Returns:
    With respect to q, k, v, of their shapes and dtypes, and the operands.
  """
  q, k, v, operands, out, lse = residuals
  given = operands.given
  names = tuple(given)
  row = (*lse.shape[:-1], 1, lse.shape[-1])
  arrays = q, k, v, out, d_out, lse.reshape(row), d_lse.reshape(row)

  def run(*arrays):
    operands = Operands(**dict(zip(names, arrays[7:], strict=True)))
    return _run(call, blocks, arrays[:7], operands)

  dq, dk, dv, *row_values = batching.one_launch(
    run, *arrays, *given.values(), repeats=False
  )
  d_given: dict[str, Any] = {
    name: np.zeros(array.shape, jax.dtypes.float0)
    for name, array in given.items()
  }
  if "bias" in given:
    d_given["bias"] = backward_bias.gradient(
      call, (q, k, v, d_out, *row_values), operands
    )
  return dq, dk, dv, Operands(**d_given)


def _run(call, blocks, arrays, operands) -> list[jax.Array]:
  q, k, v = arrays[:3]
  lead = q.shape[:-3]
  problem = problem_of(call, q, k, v, operands)
  if blocks is None and few_rows.are_few(problem):
    return few_backward.gradients(problem, arrays, operands)
  chip = place.current_chip()
  if blocks is None:
    blocks = backward_blocks.choose(problem, chip)
  names = "q", "k", "v", "out", "d_out", "lse", "d_lse"
  named = dict(zip(names, arrays, strict=True)) | operands.given
  joint = [in_blocks(name, array, lead) for name, array in named.items()]
  row_values = []
  d_queries, d_keys, d_values = [], [], []
  for share in range(blocks.num_shares(problem)):
    plan = Plan(
      problem=problem,
      blocks=blocks,
      share=share,
      num_cores=chip.tensor_cores_per_device,
    )
    dq, dk, dv, *row_values = _kernel(plan)(*joint)
    num_keys = plan.held_keys.stop - plan.held_keys.start
    dq = dq[..., : problem.q_len, :]
    dk, dv = (d[..., :num_keys, :] for d in (dk, dv))
    d_queries.append(dq)
    d_keys.append(_summed(dk, plan))
    d_values.append(_summed(dv, plan))
  dq = functools.reduce(jnp.add, d_queries).astype(q.dtype)
  dk, dv = (jnp.concatenate(d, axis=2) for d in (d_keys, d_values))
  return [d.reshape(*lead, *d.shape[1:]) for d in (dq, dk, dv, *row_values)]


def _summed(d_keys: jax.Array, plan: Plan) -> jax.Array:
  """The sum of what each core has, if they share heads of keys."""
  if plan.rounds.num_sums > 1:
    d_keys = d_keys.sum(0, dtype=jnp.float32)
  return d_keys.astype(plan.problem.dtype)


def _kernel(plan: Plan) -> Any:
  problem = plan.problem
  num_keys = plan.held_keys.stop - plan.held_keys.start
  num_sums = plan.rounds.num_sums
  # What is a part of a sum yet stays float32.
  is_sum = num_sums > 1
  is_all_keys = num_keys == problem.kv_len
  dq_dtype = problem.dtype if is_all_keys else jnp.float32

  def of_keys(dimensions: int) -> jax.ShapeDtypeStruct:
    rows = copied_rows(num_keys, dimensions)
    shape = problem.batch, problem.kv_heads, rows, dimensions
    if is_sum:
      return jax.ShapeDtypeStruct((num_sums, *shape), jnp.float32)
    return jax.ShapeDtypeStruct(shape, problem.dtype)

  heads = problem.batch, problem.heads
  rows = copied_rows(problem.q_len, problem.d_qk)
  outs = {
    "dq": jax.ShapeDtypeStruct((*heads, rows, problem.d_qk), dq_dtype),
    "dk": of_keys(problem.d_qk),
    "dv": of_keys(problem.d_v),
    "row_values": jax.ShapeDtypeStruct((*heads, 2, problem.q_len), jnp.float32),
  }
  return launches.kernel(
    functools.partial(backward_body.body, plan),
    out=tuple(outs[name] for name in plan.out_names),
    scratch=list(plan.scratch().values()),
    name="attention_backward",
  )
