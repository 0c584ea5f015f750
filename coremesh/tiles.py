"""How the arrays of a TensorCore are padded: to tiles of rows and lanes."""

import math
from typing import Any

import jax
import numpy as np

LANES = 128
SUBLANES = 8


def packing(dtype: Any) -> int:
  """How many elements share a word of 32 bits: 1 of float32, 8 of int4.

  An element of more bits has words of its own: 1.
  """
  return max(1, 32 // jax.dtypes.itemsize_bits(dtype))


def tile_rows(rows: int, dtype: Any) -> int:
  """The rows of a tile of an array with that many rows before its last axis.

  They are 8, or fewer if the array has fewer, but make up whole words. Where
  XLA chooses longer tiles, it does so only if these divide the array.
  """
  needed = 1 << max(0, rows - 1).bit_length()
  return max(packing(dtype), min(SUBLANES, needed))


def padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
  """Bytes of a VMEM or SMEM buffer of a TensorCore, padded to whole tiles.

  The last axis is padded to 128 lanes; the one before to whole words, and to a
  power of two of at most 8 or a multiple of 8 rows. A buffer of one axis is
  padded to 128 words. An element of less than 8 bits takes a byte, and a bool a
  word: so libtpu allocates them (0.0.50.1; for v5p, v6e and tpu7x).
  """
  if jax.dtypes.issubdtype(dtype, np.bool_):
    dtype = np.int32
  element_bytes = max(1, jax.dtypes.itemsize_bits(dtype) // 8)
  if len(shape) == 1:
    return rounded_up(shape[0], LANES * packing(dtype)) * element_bytes
  *leading, rows, columns = (1, 1, *shape)
  full_rows = rounded_up(rows, tile_rows(rows, dtype))
  elements = math.prod(leading) * full_rows * rounded_up(columns, LANES)
  return elements * element_bytes


def rounded_up(size: int, multiple: int) -> int:
  """The least multiple that is no less than `size`."""
  return -(-size // multiple) * multiple
