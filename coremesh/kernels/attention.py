"""Attention without its scores in HBM, on all TensorCores of a device."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coremesh import _compat
from coremesh.kernels import checks, costs
from coremesh.kernels._attention import backward, forward, masks
from coremesh.kernels._attention import call as attention_call
from coremesh.kernels._attention.blocks import Blocks
from coremesh.kernels._attention.call import Call, Operands, Window, problem_of
from coremesh.spec import Case, KernelSpec

_INFINITY = float("inf")


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  bias: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  kv_segment_ids: jax.Array | None = None,
  kv_lengths: jax.Array | None = None,
  is_causal: bool = False,
  window: Window | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  return_lse: bool = False,
  blocks: Blocks | None = None,
) -> Any:
  """softmax(q @ k.T * scale) @ v, whose scores never go through HBM.

  1. Blocks of rows go round the TensorCores, with the keys of their head in
     VMEM; keys of which no score counts are neither copied nor multiplied.
  2. Tiles of scores are exponentiated against the largest score of each row so
     far, and add to the row's sum and output in float32, which are rescaled
     when a larger score comes.
  3. At the end the output is divided by the sum. The backward kernels compute
     the scores once more, from the log of that sum.

  Where the heads that share keys have few rows in all, as when one query is
  decoded, these are one block that the keys go by: each is read once.

  Reads q once, k and v once for each block of rows that needs them and writes
  the output once. VMEM holds two blocks of rows of q and of the output and two
  of keys and values.

  Source: Rabe and Staats, arXiv 2112.05682; Dao et al., arXiv 2205.14135.

  Args:
    q: [..., heads, q_len, d_qk], float32 or bfloat16, in HBM as all arrays;
      d_qk is at most 256.
    k: [..., kv_heads, kv_len, d_qk] of the same dtype; each head of keys serves
      heads / kv_heads heads of q that follow each other.
    v: [..., kv_heads, kv_len, d_v] of the same dtype; d_v is at most 256.
    bias: added to the scores after scale and cap; broadcasts to [..., heads,
      q_len, kv_len]. Where it is -inf a score does not count.
    segment_ids: int32 [..., q_len]; a score counts where the ids of row and key
      are equal and not negative.
    kv_segment_ids: int32 [..., kv_len]; default `segment_ids`.
    kv_lengths: int32 [...], data: how many keys of each element are valid.
    is_causal: whether row i counts the keys up to i + kv_len - q_len only, so
      that the last row counts all.
    window: how many keys left and right of that diagonal count beside the one
      on it; None on either side for all.
    scale: of the scores; default d_qk^-0.5.
    soft_cap: scores become soft_cap * tanh(score / soft_cap).
    return_lse: whether to return the log-sum-exp of each row too.
    blocks: sizes of the blocks; they change rounding only. Of few rows no block
      has more than `keys`, and nothing else counts.

  Returns:
    [..., heads, q_len, d_v] of q's dtype; with `return_lse` also float32
    [..., heads, q_len], natural logarithms. A row in which no score counts is
    0 and -inf, and its gradients are 0. Keys and values that no row may count
    (beyond kv_lengths, of negative segments) may hold NaN.

  Raises:
    ShapeError: shapes that do not fit each other, heads that do not divide; an
      option that is not as above.
    DTypeError: dtypes that differ, or that are not those above.

  Example:
    y = kernels.attention(q, k, v, is_causal=True, window=(1023, 0))
  """
  attention_call.check_arrays(q, k, v)
  return_lse = checks.checked_flag("return_lse of attention", return_lse)
  call = attention_call.checked_call(
    d_qk=q.shape[-1],
    is_causal=is_causal,
    window=window,
    scale=scale,
    soft_cap=soft_cap,
    blocks=blocks,
  )
  operands = attention_call.checked_operands(
    q,
    k,
    bias=bias,
    segments=segment_ids,
    kv_segments=kv_segment_ids,
    lengths=kv_lengths,
  )
  given = operands.given
  q, k, v, *arrays = _compat.varying_together((q, k, v, *given.values()))
  operands = Operands(**dict(zip(given, arrays, strict=True)))
  if problem_of(call, q, k, v, operands).is_empty:
    out, lse = _of_nothing(q, v)
  else:
    out, lse = _attention(call, q, k, v, operands)
  return (out, lse) if return_lse else out


def attention_reference(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  bias: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  kv_segment_ids: jax.Array | None = None,
  kv_lengths: jax.Array | None = None,
  is_causal: bool = False,
  window: Window | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  return_lse: bool = False,
) -> Any:
  """What `attention` computes, in plain `jnp`; arguments as there."""
  q_len, kv_len = q.shape[-2], k.shape[-2]
  shape = *q.shape[:-1], kv_len
  wide = jnp.promote_types(q.dtype, jnp.float32)
  k, v = (jnp.repeat(a, q.shape[-3] // k.shape[-3], axis=-3) for a in (k, v))
  scores = jnp.einsum("...qd,...kd->...qk", q.astype(wide), k.astype(wide))
  scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
  if soft_cap is not None:
    scores = jnp.tanh(scores / soft_cap) * soft_cap
  if bias is not None:
    scores = scores + jnp.broadcast_to(bias.astype(wide), shape)
  offset = jnp.arange(kv_len)[None] - jnp.arange(q_len)[:, None]
  offset -= kv_len - q_len
  left, right = window or (None, None)
  counted = jnp.ones((q_len, kv_len), bool)
  if is_causal:
    counted &= offset <= 0
  if left is not None:
    counted &= offset >= -left
  if right is not None:
    counted &= offset <= right
  counted = jnp.broadcast_to(counted, shape)
  known = jnp.ones((*q.shape[:-3], kv_len), bool)
  if segment_ids is not None:
    keys = segment_ids if kv_segment_ids is None else kv_segment_ids
    known &= keys >= 0
    same = segment_ids[..., :, None] == keys[..., None, :]
    counted &= same[..., None, :, :]
  if kv_lengths is not None:
    known &= (
      jnp.broadcast_to(jnp.arange(kv_len), known.shape)
      < (kv_lengths[..., None])
    )
  counted &= known[..., None, None, :]
  v = jnp.where(known[..., None, :, None], v.astype(wide), 0)
  scores = jnp.where(counted, scores, -_INFINITY)
  largest = jnp.max(scores, axis=-1, keepdims=True, initial=-_INFINITY)
  base = jax.lax.stop_gradient(jnp.where(largest == -_INFINITY, 0.0, largest))
  terms = jnp.exp(scores - base)
  total = terms.sum(-1, keepdims=True)
  is_empty = total == 0
  total = jnp.where(is_empty, 1, total)
  out = jnp.einsum("...qk,...kd->...qd", terms, v) / total
  lse = jnp.where(is_empty, -_INFINITY, base + jnp.log(total))[..., 0]
  return (out.astype(q.dtype), lse) if return_lse else out.astype(q.dtype)


def _of_nothing(q: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The results where no score counts."""
  out = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
  lse = jnp.full(q.shape[:-1], -_INFINITY, jnp.float32)
  like = jax.typeof(q)
  return _compat.varying_as(like, out), _compat.varying_as(like, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
  call: Call, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array]:
  return forward.forward(call, q, k, v, operands)


def _forward(call, q, k, v, operands):
  out, lse = forward.forward(call, q, k, v, operands)
  return (out, lse), (q, k, v, operands, out, lse)


def _backward(call, residuals, gradients):
  return backward.gradients(call, residuals, *gradients)


_attention.defvjp(_forward, _backward)


def _num_flops(q, k, v, *_, **options) -> int:
  """Of the two products, for the pairs of row and key that count."""
  call = attention_call.checked_call(
    d_qk=q.shape[-1],
    is_causal=options.get("is_causal", False),
    window=options.get("window"),
    scale=None,
    soft_cap=None,
    blocks=None,
  )
  problem = problem_of(call, q, k, v, Operands())
  rows = np.arange(problem.q_len)
  band = masks.band(problem)
  last = problem.kv_len - 1 if band.last is None else rows + band.last
  first = 0 if band.first is None else rows + band.first
  stop = np.clip(last + 1, 0, problem.kv_len) + 0 * rows
  pairs = int(np.maximum(stop - np.maximum(first, 0), 0).sum())
  heads = problem.batch * problem.heads
  return 2 * heads * pairs * (problem.d_qk + problem.d_v)


def _num_bytes(q, k, v, *more, **_) -> int:
  out = math.prod(q.shape[:-1]) * v.shape[-1] * q.dtype.itemsize
  return out + costs.bytes_of(q, k, v, *more)


def _case(
  *q_shape: int,
  kv_heads: int | None = None,
  kv_len: int | None = None,
  with_segments: bool = False,
  **options: Any,
) -> Case:
  """Attention of bfloat16 with q [batch, heads, q_len, d]."""
  batch, heads, q_len, d = q_shape
  kv_shape = batch, kv_heads or heads, kv_len or q_len, d
  shapes = q_shape, kv_shape, kv_shape
  arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
  if with_segments:
    arrays.append(jax.ShapeDtypeStruct((batch, q_len), jnp.int32))
  return Case(args=tuple(arrays), options=options)


def _with_segments(q, k, v, segment_ids, **options):
  return attention(q, k, v, segment_ids=segment_ids, **options)


def _with_segments_reference(q, k, v, segment_ids, **options):
  return attention_reference(q, k, v, segment_ids=segment_ids, **options)


_SEARCHED = (
  None,
  *(
    Blocks(rows=rows, part=part, tile_rows=tile_rows, tile_keys=tile_keys)
    for rows in (1024, 2048)
    for part in (512, 1024)
    for tile_rows in (256, 512)
    for tile_keys in (128, 256)
  ),
)

SPEC = KernelSpec(
  name="attention",
  function=attention,
  reference=attention_reference,
  cases={
    "4x200 of 300": _case(1, 4, 200, 64, kv_len=300, is_causal=True),
    "16x16384": _case(1, 16, 16384, 128),
    "16x16384 causal": _case(1, 16, 16384, 128, is_causal=True),
    "4x16x4096 causal": _case(4, 16, 4096, 128, is_causal=True),
    "2x32/8x8192 causal": _case(2, 32, 8192, 128, kv_heads=8, is_causal=True),
    "4x32/8x2048 causal": _case(4, 32, 2048, 128, kv_heads=8, is_causal=True),
    "32/8x32768 causal": _case(1, 32, 32768, 128, kv_heads=8, is_causal=True),
    "16x8192 window 1024": _case(
      1, 16, 8192, 128, is_causal=True, window=(1023, 0)
    ),
    "16x4096 soft cap": _case(1, 16, 4096, 128, soft_cap=50.0),
    "32x4096 d 64": _case(1, 32, 4096, 64, is_causal=True),
    "8x4096 d 256": _case(1, 8, 4096, 256, is_causal=True),
    "8x1024 causal": _case(1, 8, 1024, 128, is_causal=True),
    "8x32/8x1 of 8192": _case(8, 32, 1, 128, kv_heads=8, kv_len=8192),
    "8x32/8x4 of 8192 causal": _case(
      8, 32, 4, 128, kv_heads=8, kv_len=8192, is_causal=True
    ),
    "8x64/8x1 of 8192 d 64": _case(8, 64, 1, 64, kv_heads=8, kv_len=8192),
    "32/8x1 of 32768": _case(1, 32, 1, 128, kv_heads=8, kv_len=32768),
  },
  search_space={"blocks": _SEARCHED},
  num_flops=_num_flops,
  num_bytes=_num_bytes,
)
SEGMENTS = dataclasses.replace(
  SPEC,
  name="attention with segments",
  function=_with_segments,
  reference=_with_segments_reference,
  cases={
    "4x200 causal": _case(1, 4, 200, 64, with_segments=True, is_causal=True),
    "16x4096 causal": _case(
      1, 16, 4096, 128, with_segments=True, is_causal=True
    ),
  },
)
