"""What the kernels of attention of few rows do with blocks in VMEM.

A block of an array may lie with its last two axes exchanged; here that ends.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coremesh.kernels._attention import backward_scores as scores
from coremesh.kernels._attention import masks
from coremesh.kernels._attention.backward_scores import Mask
from coremesh.kernels._attention.few_rows import Plan
from coremesh.kernels._attention.scalars import both, negated, when
from coremesh.kernels.blocks import iota


def add_masked(
  plan: Plan,
  name: str,
  block: Any,
  num_keys: Any,
  refs: dict[str, Any],
  add: Callable[[Mask], None],
) -> None:
  """Adds what a block of keys gives, with no mask where all of it counts.

  Args:
    plan, name, block, num_keys, refs: as for `mask`.
    add: is called with the mask; not at all where nothing counts.
  """
  all_count = plan.all_count(block, num_keys)
  some_count = plan.some_count(block, num_keys)
  when(all_count, lambda: add(Mask()))
  when(
    both(some_count, negated(all_count)),
    lambda: add(mask(plan, name, block, num_keys, refs)),
  )


def mask(
  plan: Plan, name: str, block: Any, num_keys: Any, refs: dict[str, Any]
) -> Mask:
  """The mask of all rows with a block of keys; see `backward_scores.Mask`.

  Args:
    plan: the plan.
    name: "k" or "v", to whose block `Mask.keys` broadcasts.
    block: of keys.
    num_keys: how many are valid; None for all.
    refs: "row_segments" [1, rows] and "key_segments" [1, keys], if given.
  """
  rows, keys = iota((plan.rows, 1), 0), iota((1, plan.keys), 1)
  first = block * plan.keys
  of_rows: dict[str, jax.Array] = {}
  of_keys: dict[str, jax.Array] = {}
  known_rows = None
  if "row_segments" in refs:
    of_rows = dict(row_segments=turned(refs["row_segments"][...]))
    of_keys = dict(key_segments=refs["key_segments"][...])
    known_rows = of_rows["row_segments"] >= 0
  counted = masks.counted(
    plan.problem,
    rows=jax.lax.rem(rows, jnp.full_like(rows, plan.problem.q_len)),
    keys=first + keys,
    num_keys=num_keys,
    **of_rows,
    **of_keys,
  )
  if not plan.is_turned(name):
    keys = iota((plan.keys, 1), 0)
    of_keys = {n: scores.turned(a) for n, a in of_keys.items()}
  known_keys = masks.counted_keys(
    plan.problem, first + keys, num_keys=num_keys, **of_keys
  )
  return Mask(counted, known_rows, known_keys)


def rows_of(plan: Plan, name: str, refs: dict[str, Any]) -> jax.Array:
  """A block [rows, d] of q, out or d_out."""
  block = refs[name][...]
  return block.T if plan.is_turned(name) else block


def write_rows(
  plan: Plan, name: str, refs: dict[str, Any], rows: jax.Array
) -> None:
  """Writes float32 [rows, d] to the block of out or dq."""
  rows = rows.T if plan.is_turned(name) else rows
  refs[name][...] = rows.astype(refs[name].dtype)


def with_keys(plan: Plan, name: str, rows: jax.Array, block: Any) -> jax.Array:
  """The products of rows [rows, d] with a block of k or v: [rows, keys]."""
  pattern = "mk,kn" if plan.is_turned(name) else "mk,nk"
  return scores.dot(pattern, rows, block)


def over_keys(plan: Plan, name: str, terms: jax.Array, block: Any) -> jax.Array:
  """The sums of a block of k or v weighed by terms [rows, keys]: [rows, d]."""
  pattern = "mk,nk" if plan.is_turned(name) else "mk,kn"
  return scores.dot(pattern, terms, block)


def over_rows(
  plan: Plan, name: str, terms: jax.Array, rows: jax.Array
) -> jax.Array:
  """The sums of rows [rows, d] weighed by terms: a block of dk or dv."""
  if plan.is_turned(name):
    return scores.dot("km,kn", rows, terms)
  return scores.dot("km,kn", terms, rows)


def turned(vector: jax.Array) -> jax.Array:
  """[n, 1] of [1, n], or the reverse: n is few, and no multiple of a tile."""
  n = vector.size
  is_same = iota((n, n), 0) == iota((n, n), 1)
  axis = 0 if vector.shape[0] == n else 1
  return jnp.sum(jnp.where(is_same, vector, 0), axis=axis, keepdims=True)
