"""How the kernels of attention of few rows see arrays, and cut them in blocks.

Heads that share keys are joined along rows. An array whose last two axes XLA
lays out exchanged is seen so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from coremesh.kernels import layouts
from coremesh.kernels._attention.call import in_blocks, joined
from coremesh.kernels._attention.few_rows import OF_KEYS, OF_ROWS, Plan

# Two copies must be under way while a block is computed with. Three would do,
# but by a power of two the scalar core need not divide to find the next.
_BUFFERS = 4


def as_rows(
  plan: Plan, name: str, array: jax.Array, lead: Sequence[int]
) -> jax.Array:
  """An array of all heads as one of heads of keys, with all rows of each.

  Args:
    plan: the plan.
    name: of q, k, v, out, d_out, lse, d_lse, or of one of `Operands`.
    array: [..., heads, queries, .] or what broadcasts to it.
    lead: leading axes of q.

  Returns:
    Four axes: batch, heads of keys, rows, and the last; `num_keys` has one.
  """
  problem = plan.problem
  if plan.is_turned(name):
    return layouts.transposed(joined(array, lead))
  if name in ("k", "v", "num_keys", "key_segments"):
    return in_blocks(name, array, lead)
  array = joined(array, lead)
  batch, heads, queries, size = array.shape
  if name == "row_segments":
    return jnp.tile(array, problem.group)
  if name in ("lse", "d_lse"):
    return array.reshape(batch, problem.kv_heads, 1, plan.rows)
  if name == "bias":
    if heads == queries == 1:
      return array
    shape = batch, problem.heads, problem.q_len, size
    array = jnp.broadcast_to(array, shape)
  return array.reshape(batch, problem.kv_heads, plan.rows, size)


def as_given(plan: Plan, name: str, array: jax.Array) -> jax.Array:
  """What the kernel wrote, [batch, heads, queries or keys, d].

  [batch, heads, 1, queries] of what is one number a row.
  """
  problem = plan.problem
  if plan.is_turned(name):
    return layouts.transposed(array)
  if name in OF_KEYS:
    return array[:, :, : problem.kv_len]
  own = (problem.q_len, array.shape[-1])
  if name not in OF_ROWS:
    own = (1, problem.q_len)
  return array.reshape(problem.batch, problem.heads, *own)


def spec(
  plan: Plan,
  name: str,
  shape: Sequence[int],
  place_of: Callable[..., tuple[Any, Any, Any]],
) -> pl.BlockSpec:
  """The blocks of an array of `as_rows`.

  Args:
    plan: the plan.
    name: of the array.
    shape: of the array; axes of size 1 broadcast.
    place_of: of the grid's indices, a batch element, a head of keys and a block
      of keys.
  """
  keys = None
  if name in OF_KEYS:
    keys = 3 if plan.is_turned(name) else 2
  elif name == "key_segments" or (name == "bias" and shape[3] > 1):
    keys = 3
  sizes = [None, None, *shape[2:]]
  if keys is not None:
    sizes[keys] = plan.keys

  def index_map(*indices):
    batch, head, block = place_of(*indices)
    at = [0 if shape[0] == 1 else batch, 0 if shape[1] == 1 else head, 0, 0]
    if keys is not None:
      at[keys] = block
    return tuple(at)

  is_deep = keys is not None and name not in ("dk", "dv")
  mode = pl.Buffered(_BUFFERS) if is_deep else None
  return pl.BlockSpec(tuple(sizes), index_map, pipeline_mode=mode)
