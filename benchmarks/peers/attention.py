"""Attention by others, of arrays [batch, heads, length, head_dim].

JAX's splash attention and tokamax's copy of it leave the scale of the scores to
the caller or multiply q by it; what the caller would have to do is left out.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)
import jax.numpy as jnp

from benchmarks.peers import installed

_QUERIES = (1024, 2048)
_KEYS = ((1024, 512), (2048, 512), (1024, 1024))


def contenders(
  options: Mapping[str, Any], q_len: int, *, gradients: bool
) -> dict[str, Sequence[Callable[..., Any]]]:
  """All that can do it, by name; none of them if an option is not theirs.

  Args:
    options: of `kernels.attention`.
    q_len: of the queries.
    gradients: whether derivatives are taken too.
  """
  found: dict[str, Sequence[Callable[..., Any]]] = {"XLA": [_xla]}
  if set(options) - {"is_causal"} or q_len < 1024:
    return found
  found["JAX's splash"] = installed.settings(_splash, _sizes(q_len))
  found["JAX's flash"] = installed.settings(_flash, [1024, 512])
  if installed.tokamax("_src.ops.attention.pallas_mosaic_tpu"):
    found["tokamax"] = installed.settings(_tokamax, _sizes(q_len))
  inference = installed.tpu_inference("kernels.flash_attention.kernel")
  if inference and not gradients:
    found["tpu-inference"] = installed.settings(_inference, [1024, 512])
  return found


def _sizes(q_len: int) -> list[tuple[int, int, int]]:
  return [
    (q, kv, compute)
    for q, (kv, compute) in itertools.product(_QUERIES, _KEYS)
    if max(q, kv) <= q_len
  ]


def _xla(q, k, v, *, is_causal: bool = False, **options: Any) -> jax.Array:
  swap = lambda x: jnp.swapaxes(x, -2, -3)
  return swap(
    jax.nn.dot_product_attention(
      *map(swap, (q, k, v)), is_causal=is_causal, implementation="xla"
    )
  )


def _splash(sizes, q, k, v, *, is_causal: bool = False) -> Any:
  block_q, block_kv, compute = sizes
  shape = (q.shape[-2], k.shape[-2])
  mask = masks.CausalMask(shape) if is_causal else masks.FullMask(shape)
  kernel = splash.make_splash_mha(
    masks.MultiHeadMask([mask] * q.shape[1]),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=splash.BlockSizes(
      block_q=block_q,
      block_kv=block_kv,
      block_kv_compute=compute,
      block_q_dkv=block_q,
      block_kv_dkv=block_kv,
      block_kv_dkv_compute=compute,
      use_fused_bwd_kernel=True,
    ),
  )
  return jax.vmap(kernel)(q, k, v)


def _flash(size: int, q, k, v, *, is_causal: bool = False) -> jax.Array:
  k, v = (_repeated(a, q.shape[1]) for a in (k, v))
  sizes = flash_attention.BlockSizes(
    block_q=size,
    block_k_major=size,
    block_k=size,
    block_b=1,
    **{
      f"block_{name}": size
      for name in (
        *("q_major_dkv", "k_major_dkv", "k_dkv", "q_dkv"),
        *("k_major_dq", "k_dq", "q_dq"),
      )
    },
  )
  return flash_attention.flash_attention(
    q, k, v, causal=is_causal, block_sizes=sizes
  )


def _repeated(array: jax.Array, num_heads: int) -> jax.Array:
  return jnp.repeat(array, num_heads // array.shape[1], axis=1)


def _tokamax(sizes, q, k, v, *, is_causal: bool = False) -> jax.Array:
  module: Any = installed.tokamax("_src.ops.attention.pallas_mosaic_tpu")
  layout = module.splash.QKVLayout.HEAD_DIM_MINOR
  block_q, block_kv, compute = sizes
  config = module.Config(
    block_q=block_q,
    block_kv=block_kv,
    block_kv_compute=compute,
    q_layout=layout,
    k_layout=layout,
    v_layout=layout,
    use_experimental_scheduler=True,
  )
  backward = module.pallas_mosaic_tpu_vjp
  gradients = backward.PallasMosaicTpuFlashAttentionVjp(
    config=backward.Config(
      block_q_dkv=block_q, block_kv_dkv=block_kv, block_kv_dkv_compute=compute
    ),
    bypass_device_check=True,
  )
  call = module.PallasMosaicTpuFlashAttention(
    config=config, vjp=gradients, bypass_device_check=True
  )
  swap = lambda x: jnp.swapaxes(x, -2, -3)
  return swap(call(*map(swap, (q, k, v)), is_causal=is_causal))


def _inference(size: int, q, k, v, *, is_causal: bool = False) -> jax.Array:
  module: Any = installed.tpu_inference("kernels.flash_attention.kernel")
  k, v = (_repeated(a, q.shape[1]) for a in (k, v))
  sizes = module.BlockSizes(
    block_q=size, block_k_major=size, block_k=size, block_b=1
  )
  return module.flash_attention(q, k, v, causal=is_causal, block_sizes=sizes)


def with_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
  """A function of q, k, v and the output's gradient to output and gradients."""

  def forward_and_backward(q, k, v, d_out, **options):
    out, pull = jax.vjp(functools.partial(call, **options), q, k, v)
    return out, *pull(d_out)

  return forward_and_backward
