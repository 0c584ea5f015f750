"""Matrix products by others, of arrays [M, K] and [K, N]."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import matmul

from benchmarks.peers import installed

_BLOCKS = ((512, 1024, 512), (1024, 1024, 512), (1024, 1024, 1024))


def contenders(
  shapes: Sequence[Sequence[int]],
) -> dict[str, Sequence[Callable[..., Any]]]:
  """Those that take arrays of these shapes, beside XLA."""
  if any(n % 1024 for shape in shapes for n in shape):
    return {}
  return {"JAX's Pallas op": installed.settings(_pallas, _BLOCKS)}


def _pallas(blocks, x, w, **options: Any) -> jax.Array:
  rows, columns, inner = blocks
  return matmul.matmul(
    x, w, block_shape=(rows, columns), block_k=inner, **options
  )
