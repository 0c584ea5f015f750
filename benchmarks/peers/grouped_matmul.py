"""Grouped matrix products by others: x [M, K], w [groups, K, N], sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import megablox

from benchmarks.peers import installed

_TILES = ((512, 1024, 1024), (512, 2048, 1024), (1024, 1024, 1024))


def contenders() -> dict[str, Sequence[Callable[..., Any]]]:
  """All that are installed, by name."""
  found: dict[str, Sequence[Callable[..., Any]]] = {
    "XLA": [_xla],
    "JAX's megablox": installed.settings(_megablox, _TILES),
  }
  if installed.tokamax("_src.ops.ragged_dot.pallas_mosaic_tpu"):
    found["tokamax v1"] = installed.settings(_tokamax_v1, _TILES)
    found["tokamax v2"] = [_tokamax_v2]
  if installed.tpu_inference("kernels.megablox.gmm"):
    found["tpu-inference"] = installed.settings(_inference, (None, *_TILES))
  return found


def gradient_contenders() -> dict[str, Sequence[Callable[..., Any]]]:
  """Who can do the gradient of the weights: x [M, K], d [M, N], sizes."""
  return {"XLA": [_xla_gradient]}


def _xla(x, w, sizes) -> jax.Array:
  return jax.lax.ragged_dot(x, w, sizes)


def _xla_gradient(x, d, sizes) -> jax.Array:
  shape = sizes.shape[0], x.shape[1], d.shape[1]
  w = jax.ShapeDtypeStruct(shape, x.dtype)
  [d_w] = jax.linear_transpose(lambda w: _xla(x, w, sizes), w)(d)
  return d_w


def _fitting(tiles, x, w) -> tuple[int, int, int]:
  return (tiles[0], min(tiles[1], x.shape[1]), min(tiles[2], w.shape[2]))


def _megablox(tiles, x, w, sizes) -> jax.Array:
  return megablox.gmm(x, w, sizes, x.dtype, _fitting(tiles, x, w))


def _tokamax_v1(tiles, x, w, sizes) -> jax.Array:
  module: Any = installed.tokamax("_src.ops.ragged_dot.pallas_mosaic_tpu")
  tile_m, tile_k, tile_n = _fitting(tiles, x, w)
  config = module.Config(tile_m=tile_m, tile_k=tile_k, tile_n=tile_n)
  call = module.PallasMosaicTpuRaggedDot(
    config=config, bypass_device_check=True
  )
  return call(x, w, group_sizes=sizes)


def _tokamax_v2(x, w, sizes) -> jax.Array:
  module: Any = installed.tokamax("_src.ops.ragged_dot.pallas_mosaic_tpu_v2")
  call = module.PallasMosaicTpuV2RaggedDot(
    config=module.Config(), bypass_device_check=True
  )
  return call(x, w, group_sizes=sizes)


def _inference(tiles, x, w, sizes) -> jax.Array:
  module: Any = installed.tpu_inference("kernels.megablox.gmm")
  return module.gmm(
    x,
    w,
    sizes,
    x.dtype,
    tiling=tiles and _fitting(tiles, x, w),
  )
