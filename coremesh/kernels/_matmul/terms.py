"""Products of blocks in VMEM, of what is inside the arrays."""

from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from coremesh import tiles
from coremesh.kernels._matmul.call import sum_dtype


def dot(
  x: jax.Array, w: jax.Array, *, axes: tuple[int, int], precision: Any
) -> jax.Array:
  """x [M, K] times w [K, N], either transposed where its axis of K says so.

  Pallas takes a single row on the right for a vector, and then fails to lower
  what is no float32: that row is multiplied as a tile of such rows.
  """
  is_vector = axes == (1, 1) and w.shape[0] == 1 and w.dtype != jnp.float32
  if is_vector:
    w = jnp.broadcast_to(w, (tiles.SUBLANES, w.shape[1]))
  product = jax.lax.dot_general(
    x,
    w,
    (((axes[0],), (axes[1],)), ((), ())),
    precision=precision,
    preferred_element_type=sum_dtype(x.dtype),
  )
  return product[:, :1] if is_vector else product


def inside(
  ref: Any, axis: int, size: int, *, start: int = 0, other: Any = slice(None)
) -> jax.Array:
  """What of a block is to be summed, followed by zeros up to a tile.

  Args:
    ref: [rows, columns] in VMEM, of which one axis is K.
    axis: that axis.
    size: of K, all of it inside the arrays.
    start: where in the block it begins.
    other: what of the other axis to take.
  """

  def part(start: int, size: int) -> jax.Array:
    along = pl.ds(start, size)
    return ref[(along, other) if axis == 0 else (other, along)]

  tail = size % tiles.LANES
  if not tail or start + size == ref.shape[axis]:
    return part(start, size)
  last = part(start + size - tail, tiles.LANES)
  position = jax.lax.broadcasted_iota(jnp.int32, last.shape, axis)
  last = jnp.where(position < tail, last, jnp.zeros_like(last))
  if size == tail:
    return last
  return jnp.concatenate([part(start, size - tail), last], axis)
