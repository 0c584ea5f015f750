"""What the arguments of a kernel must be, in errors that name them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coremesh import errors

FLOATS = (jnp.float32, jnp.bfloat16)


def is_array(argument: str, value: Any) -> None:
  """Raises DTypeError if an argument is no array, of JAX or of numpy.

  Nor is one of strings, of Python objects or of keys of jax.random.
  """
  if not hasattr(value, "dtype") or not hasattr(value, "shape"):
    kind = "None" if value is None else f"a {type(value).__name__}"
    raise errors.DTypeError(
      f"{argument} must be an array; got {kind}. Make one of numbers by"
      " jnp.asarray."
    )
  if not any(jnp.issubdtype(value.dtype, d) for d in (jnp.number, jnp.bool_)):
    raise errors.DTypeError(
      f"{argument} must be an array of numbers; got one of {value.dtype}."
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


def is_blocks(argument: str, blocks: Any, kind: type) -> None:
  """Raises ShapeError if sizes of blocks are neither None nor of a class."""
  if blocks is not None and not isinstance(blocks, kind):
    raise errors.ShapeError(
      f"{argument} must be None or a {kind.__name__} of {kind.__module__}; got"
      f" {blocks!r}. None lets the kernel choose."
    )


def checked_flag(argument: str, value: Any) -> bool:
  """A flag; raises ShapeError if it is neither True nor False."""
  if not isinstance(value, bool | np.bool_):
    raise errors.ShapeError(f"{argument} must be True or False; got {value!r}.")
  return bool(value)


def checked_out_dtype(argument: str, dtype: Any, *, default: Any) -> np.dtype:
  """The dtype of a result, or its default if it is None.

  Raises:
    DTypeError: it is no dtype, or not of real numbers of at most 32 bits.
  """
  if dtype is None:
    return jnp.dtype(default)
  try:
    found = jnp.dtype(dtype)
  except TypeError:
    found = jnp.dtype(object)
  kinds = jnp.integer, jnp.floating
  if found.itemsize > 4 or not any(jnp.issubdtype(found, k) for k in kinds):
    raise errors.DTypeError(
      f"{argument} must be None or a dtype of real numbers of at most 32 bits,"
      f" such as jnp.float32; got {dtype!r}."
    )
  return found


def checked_precision(argument: str, precision: Any) -> Any:
  """None or a jax.lax.Precision, which may be given by its name.

  Raises:
    ShapeError: it is neither. One for each operand, or an algorithm, is
      nothing that a kernel can be compiled with.
  """
  if precision is None:
    return None
  try:
    if isinstance(precision, str | jax.lax.Precision):
      return jax.lax.Precision(precision)
  except ValueError:
    pass
  raise errors.ShapeError(
    f"{argument} must be None, a jax.lax.Precision or its name, such as"
    f" 'highest'; got {precision!r}."
  )
