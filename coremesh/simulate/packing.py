"""Values as bits: widths, bitcasts and several narrow values in one word.

A value narrower than a byte, such as an int4, takes one byte of a numpy array,
and only its low bits count.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def bits_of(dtype: Any) -> int:
  """The width of one value of `dtype`, in bits; 4 for int4."""
  return jax.dtypes.itemsize_bits(dtype)


def is_floating(dtype: Any) -> bool:
  """Whether `dtype` is a float, those of `ml_dtypes` included."""
  return jnp.issubdtype(dtype, jnp.floating)


def is_integer(dtype: Any) -> bool:
  """Whether `dtype` is an integer of any width, signed or not."""
  return jnp.issubdtype(dtype, jnp.integer)


def signed(dtype: Any) -> np.dtype:
  """The signed integer of the same width for an integer, else `dtype`."""
  if not is_integer(dtype):
    return np.dtype(dtype)
  return jnp.dtype(f"int{bits_of(dtype)}")


def container(dtype: Any) -> np.dtype:
  """The unsigned numpy integer that holds one value of `dtype`, >= 8 bits."""
  return np.dtype(f"uint{max(8, bits_of(dtype))}")


def raw(x: np.ndarray) -> np.ndarray:
  """The bits of `x` as unsigned integers, of the same shape."""
  unsigned = x.view(container(x.dtype))
  width = bits_of(x.dtype)
  return unsigned & np.uint8((1 << width) - 1) if width < 8 else unsigned


def bitcast(x: np.ndarray, dtype: Any, dim: int) -> np.ndarray:
  """Reads the bits of `x` as `dtype`; axis `dim` grows or shrinks.

  Little-endian: of the narrow values that make up a wide one along `dim`, the
  first is its lowest bits.

  Args:
    x: [..., n, ...] with n along `dim`, any dtype.
    dtype: the new dtype.
    dim: the axis to scale, not negative.

  Returns:
    [..., n * bits(x) // bits(dtype), ...] of `dtype`.
  """
  old_bits, new_bits = bits_of(x.dtype), bits_of(dtype)
  if old_bits == new_bits:
    return x.view(dtype)
  # numpy views only scale the last axis, and only where that is contiguous.
  last = np.ascontiguousarray(np.moveaxis(x, dim, -1))
  width = min(old_bits, new_bits)
  if width >= 8:
    result = last.view(dtype)
  else:
    result = _joined(_split(last, width), width, dtype)
  return np.moveaxis(result, -1, dim)


def _split(x: np.ndarray, width: int) -> np.ndarray:
  """The last axis of `x` in pieces of `width` < 8 bits, one in a byte."""
  used_bits = min(8, bits_of(x.dtype))
  shifts = np.arange(0, used_bits, width, dtype=np.uint8)
  pieces = x.view(np.uint8)[..., None] >> shifts & np.uint8((1 << width) - 1)
  return pieces.reshape(*x.shape[:-1], -1)


def _joined(pieces: np.ndarray, width: int, dtype: Any) -> np.ndarray:
  """Undoes `_split`: the pieces that fill one value of `dtype`, joined."""
  used_bits = min(8, bits_of(dtype))
  shifts = np.arange(0, used_bits, width, dtype=np.uint8)
  grouped = pieces.reshape(*pieces.shape[:-1], -1, len(shifts))
  return np.bitwise_or.reduce(grouped << shifts, axis=-1).view(dtype)


def narrow(x: np.ndarray, dtype: Any) -> np.ndarray:
  """`x` in a narrower type of its kind: floats round, integers truncate."""
  # astype rounds floats to nearest, ties to even, and wraps integers.
  return x.astype(dtype)
