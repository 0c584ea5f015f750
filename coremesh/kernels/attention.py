"""Attention without its scores in HBM, on all TensorCores of a device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from coremesh import _compat
from coremesh.kernels import (
  attention_backward,
  attention_call,
  attention_forward,
)
from coremesh.kernels.attention_blocks import Blocks
from coremesh.kernels.attention_call import Call, Operands, Window, problem_of

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
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """softmax(q @ k.T * scale) @ v."""
  attention_call.check_arrays(q, k, v)
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
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """What `attention` computes, in plain `jnp`; arguments as there."""
  q_len, kv_len = q.shape[-2], k.shape[-2]
  group = q.shape[-3] // k.shape[-3]
  wide = jnp.promote_types(q.dtype, jnp.float32)
  q_, k_, v_ = (a.astype(wide) for a in (q, k, v))
  k_, v_ = (jnp.repeat(a, group, axis=-3) for a in (k_, v_))
  scores = jnp.einsum("...qd,...kd->...qk", q_, k_)
  scores = scores * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
  if soft_cap is not None:
    scores = jnp.tanh(scores / soft_cap) * soft_cap
  if bias is not None:
    scores = scores + bias.astype(wide)
  offset = jnp.arange(kv_len) - jnp.arange(q_len)[:, None] - (kv_len - q_len)
  left, right = window or (None, None)
  counted = jnp.ones((q_len, kv_len), bool)
  known = jnp.ones(kv_len, bool)
  if is_causal:
    counted &= offset <= 0
  if left is not None:
    counted &= offset >= -left
  if right is not None:
    counted &= offset <= right
  if segment_ids is not None:
    keys = segment_ids if kv_segment_ids is None else kv_segment_ids
    same = segment_ids[..., :, None] == keys[..., None, :]
    counted = counted & (same & (keys >= 0)[..., None, :])[..., None, :, :]
    known = known & (keys >= 0)
  if kv_lengths is not None:
    valid = jnp.arange(kv_len) < kv_lengths[..., None]
    counted = counted & valid[..., None, None, :]
    known = known & valid
  scores = jnp.where(counted, scores, -_INFINITY)
  largest = jnp.max(scores, axis=-1, keepdims=True, initial=-_INFINITY)
  base = jax.lax.stop_gradient(jnp.where(largest == -_INFINITY, 0.0, largest))
  terms = jnp.exp(scores - base)
  total = terms.sum(-1, keepdims=True)
  if known.ndim > 1:
    known = known[..., None, :]
  v_ = jnp.where(known[..., None], v_, 0)
  out = jnp.einsum("...qk,...kd->...qd", terms, v_)
  is_empty = total == 0
  total = jnp.where(is_empty, 1, total)
  out = (out / total).astype(q.dtype)
  lse = jnp.where(is_empty, -_INFINITY, base + jnp.log(total))[..., 0]
  return (out, lse) if return_lse else out


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
  return attention_forward.forward(call, q, k, v, operands)


def _forward(call, q, k, v, operands):
  out, lse = attention_forward.forward(call, q, k, v, operands)
  return (out, lse), (q, k, v, operands, out, lse)


def _backward(call, residuals, gradients):
  return attention_backward.gradients(call, residuals, *gradients)


_attention.defvjp(_forward, _backward)
