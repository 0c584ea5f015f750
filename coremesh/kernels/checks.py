"""What the arguments of a kernel must be, in errors that name them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coremesh import errors

FLOATS = (jnp.float32, jnp.bfloat16)


def is_array(argument: str, value: Any) -> None:
  """Raises DTypeError if an argument is no array, of JAX or of numpy."""
  if not hasattr(value, "dtype") or not hasattr(value, "shape"):
    kind = "None" if value is None else f"a {type(value).__name__}"
    raise errors.DTypeError(
      f"{argument} must be an array; got {kind}. Make one of numbers by"
      " jnp.asarray."
    )


def dtype_is_one_of(
  argument: str, array: jax.Array, allowed: Sequence[Any] = FLOATS
) -> None:
  """Raises DTypeError if the dtype of an argument is another."""
  is_array(argument, array)
  names = [jnp.dtype(d).name for d in allowed]
  if array.dtype not in map(jnp.dtype, allowed):
    raise errors.DTypeError(
      f"{argument} must be {' or '.join(names)}; got {array.dtype}. Convert it"
      f" with .astype(jnp.{names[0]})."
    )


def has_last_axis(argument: str, array: jax.Array) -> None:
  """Raises ShapeError if an argument has no axis."""
  is_array(argument, array)
  if not array.ndim:
    raise errors.ShapeError(
      f"{argument} must have a last axis to work along; got shape ()."
    )


def broadcasts(argument: str, array: jax.Array, shape: Sequence[int]) -> None:
  """Raises ShapeError if an argument does not broadcast to a shape."""
  is_array(argument, array)
  own, shape = tuple(array.shape), tuple(shape)
  try:
    fits = np.broadcast_shapes(own, shape) == shape
  except ValueError:
    fits = False
  if not fits:
    raise errors.ShapeError(
      f"{argument} must broadcast to the shape {shape}; got {own}."
    )


def is_block_size(block_bytes: Any) -> None:
  """Raises ShapeError if `block_bytes` is neither None nor a positive int."""
  is_int = isinstance(block_bytes, int) and not isinstance(block_bytes, bool)
  if block_bytes is not None and not (is_int and block_bytes > 0):
    raise errors.ShapeError(
      f"block_bytes must be None or an int of at least 1; got {block_bytes!r}."
    )


def has_shape(argument: str, array: jax.Array, shape: Sequence[int]) -> None:
  """Raises ShapeError if an argument has another shape."""
  is_array(argument, array)
  if tuple(array.shape) != tuple(shape):
    raise errors.ShapeError(
      f"{argument} must have shape {tuple(shape)}; got {tuple(array.shape)}."
    )
