r"""Causal attention and its output projection, over a grid of devices.

Shows: two kernels of cm.kernels in one jax.shard_map, data parallel along one
axis of the devices and tensor parallel along the other. Each device has a share
of the batch and of the heads, projects what they give, and the partial sums are
added by jax.lax.psum. Queries share keys and values (GQA).

To run:
  python -m examples.flash_attention --config.length=1000 --compile
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from coremesh import kernels
from examples import common

_AXES = ("batch", "heads", "length", "head_dim")


def build(chip: cm.Chip, mesh: jax.sharding.Mesh):
  """Attention of q, k, v [batch, heads, length, head_dim], times w."""
  grid = common.grid(chip, mesh, ("data", "model"))

  def layer(q, k, v, w):
    heads = kernels.attention(q, k, v, is_causal=True)
    rows = jnp.swapaxes(heads, 1, 2).reshape(*q.shape[::2], -1)
    return jax.lax.psum(kernels.matmul(rows, w), "model")

  specs = (P("data", "model"),) * 3 + (P("model"),)
  mapped = jax.shard_map(layer, mesh=grid, in_specs=specs, out_specs=P("data"))
  return jax.jit(mapped)


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh simulate`."""
  batch = config.batch_per_row * common.grid_shape(chip.num_devices)[0]
  q_shape = (batch, config.heads, config.length, config.head_dim)
  kv_shape = (batch, config.kv_heads, *q_shape[2:])
  w_shape = (config.heads * config.head_dim, config.features)
  shapes = (q_shape, kv_shape, kv_shape, w_shape)
  arrays = (
    common.random_floats(s, config.seed + i) for i, s in enumerate(shapes)
  )
  return build, tuple(arrays)


def expected(*arrays: np.ndarray) -> np.ndarray:
  """The same in float64, on one device."""
  q, k, v, w = (a.astype(np.float64) for a in arrays)
  k, v = (np.repeat(a, q.shape[1] // k.shape[1], axis=1) for a in (k, v))
  scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
  terms = np.exp(np.where(np.tri(q.shape[2], dtype=bool), scores, -np.inf))
  weights = terms / terms.sum(axis=-1, keepdims=True)
  rows = np.einsum("bhqk,bhkd->bqhd", weights, v).reshape(*q.shape[::2], -1)
  return rows @ w


def main(config: Any) -> None:
  chip = common.chip()
  _, arrays = case(chip, config)

  # Sums of float32 products: a few roundings of 24 bits each.
  common.check_on_grid(chip, build, arrays, expected(*arrays), most=1e-5)
  common.compile_if_asked(build, *arrays)
  if common.is_compiling():
    shape = tuple(config[f"predicted_{n}"] for n in _AXES)
    common.print_times(
      chip,
      {"coremesh": kernels.attention, "XLA": _of_xla},
      *[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3,
      is_causal=True,
    )


def _of_xla(q, k, v, **options):
  """jax.nn.dot_product_attention of arrays with heads before length."""
  swap = lambda x: jnp.swapaxes(x, 1, 2)
  with jax.numpy_dtype_promotion("standard"):  # It mixes dtypes.
    return swap(jax.nn.dot_product_attention(*map(swap, (q, k, v)), **options))


if __name__ == "__main__":
  common.run(main, config="configs/flash_attention.py")
