"""The derivative of a loss with respect to a block of scores of attention.

Blocks hold keys along sublanes and rows along lanes, so that what is said of a
row is a row of lanes that broadcasts for nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coremesh.kernels._attention import exponents, masks
from coremesh.kernels._attention.call import Call, Problem
from coremesh.kernels._attention.exponents import INFINITY, LOG2_E
from coremesh.kernels.blocks import iota

# Which axes `dot` sums over: one of the first matrix, one of the second.
_AXES = {"mk,nk": (1, 1), "mk,kn": (1, 0), "km,kn": (0, 0)}


class Mask(NamedTuple):
  """What of a block is there; None: all.

  Attributes:
    counted: bool [keys, rows] or what broadcasts to it: the scores that count.
    rows: bool [rows, 1], those of q and d_out that hold numbers.
    keys: bool [keys, 1], those of k and v that do.
  """

  counted: jax.Array | None = None
  rows: jax.Array | None = None
  keys: jax.Array | None = None


class Inputs(NamedTuple):
  """Blocks of q and d_out [rows, .], and of k and v [keys, .]."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  d_out: jax.Array

  def known(self, mask: Mask) -> "Inputs":
    """With 0 for what may be NaN where it is summed: 0 times NaN is NaN."""

    def of(block, known):
      return block if known is None else jnp.where(known, block, 0)

    return Inputs(
      q=of(self.q, mask.rows),
      k=of(self.k, mask.keys),
      v=self.v,
      d_out=of(self.d_out, mask.rows),
    )


class Terms(NamedTuple):
  """float32 [keys, rows] of one block.

  Attributes:
    weights: what the rows weigh the values with.
    d_scores: with respect to the scores as softmax takes them.
    d_products: with respect to q @ k.T * scale.
  """

  weights: jax.Array
  d_scores: jax.Array
  d_products: jax.Array


def dot(pattern: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """A product of matrices, summed in float32; see `_AXES`."""
  left, right = _AXES[pattern]
  return jax.lax.dot_general(
    a,
    b,
    (((left,), (right,)), ((), ())),
    preferred_element_type=jnp.float32,
  )


def row_values(
  lse: jax.Array, products: jax.Array, d_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """What `terms` takes of each row.

  Args:
    lse: float32 of any shape, -inf where no key counts.
    products: the sum of out * d_out of each row, of the same shape.
    d_lse: the derivative with respect to `lse`.

  Returns:
    The base-2 logarithm of a row's total, and what its `d_scores` are less by.
    Where no key counts, those that give weights and derivatives of 0.
  """
  is_empty = lse == -INFINITY
  log_total = jnp.where(is_empty, INFINITY, lse * LOG2_E)
  return log_total, jnp.where(is_empty, 0.0, products - d_lse)


def mask(
  problem: Problem,
  *,
  shape: tuple[int, int],
  row: Any,
  key: Any,
  num_keys: Any = None,
  row_segments: jax.Array | None = None,
  key_segments: jax.Array | None = None,
) -> Mask:
  """The mask of a block that may reach beyond the arrays.

  Args:
    problem: the problem.
    shape: keys and rows of the block.
    row, key: the first of either, int32 scalars.
    num_keys: how many keys are valid; default all.
    row_segments, key_segments: int32 [1, rows] and [1, keys].
  """
  keys = key + iota((shape[0], 1), 0)
  rows = row + iota((1, shape[1]), 1)
  known_rows = row + iota((shape[1], 1), 0) < problem.q_len
  if row_segments is not None and key_segments is not None:
    known_rows &= turned(row_segments) >= 0
    key_segments = turned(key_segments)
  counted = masks.counted(
    problem,
    rows=rows,
    keys=keys,
    row_segments=row_segments,
    key_segments=key_segments,
    num_keys=num_keys,
  )
  known_keys = masks.counted_keys(
    problem, keys, key_segments=key_segments, num_keys=num_keys
  )
  return Mask(counted & (rows < problem.q_len), known_rows, known_keys)


def terms(
  call: Call,
  inputs: Inputs,
  *,
  log_total: jax.Array,
  less: jax.Array,
  bias: jax.Array | None = None,
  counted: jax.Array | None = None,
) -> Terms:
  """The weights and the derivatives of a block.

  Args:
    call: the static arguments of attention.
    inputs: the blocks.
    log_total, less: float32 [1, rows], from `row_values`.
    bias: [rows or 1, keys or 1].
    counted: of `Mask`.
  """
  products = dot("mk,nk", inputs.k, inputs.q)
  scores, slope = exponents.of_products(call, products)
  if bias is not None:
    scores = scores + turned(bias.astype(jnp.float32)) * LOG2_E
  weights = jnp.exp2(scores - log_total)
  d_scores = weights * (dot("mk,nk", inputs.v, inputs.d_out) - less)
  d_products = d_scores if slope is None else d_scores * slope
  if counted is None:
    return Terms(weights, d_scores, d_products)
  return Terms(
    *(jnp.where(counted, a, 0.0) for a in (weights, d_scores, d_products))
  )


def turned(block: jax.Array) -> jax.Array:
  """The transpose of 32-bit numbers, of which an axis may be 1 long."""
  m, n = block.shape
  if m == 1:
    block = jnp.broadcast_to(block, (8, n))
  if n == 1:
    block = jnp.broadcast_to(block, (block.shape[0], 128))
  return block.T[:n, :m]
