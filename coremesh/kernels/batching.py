"""jax.vmap of kernels that take leading axes: one launch for all elements."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def one_launch(
  fn: Callable[..., list[jax.Array]], *arrays: jax.Array, repeats: bool
) -> list[jax.Array]:
  """`fn(*arrays)`, which jax.vmap calls once, with one more leading axis.

  Args:
    fn: of arrays of any rank, to arrays with the leading axes of the first.
    *arrays: the others broadcast to the first.
    repeats: whether to repeat those that are not batched, for an `fn` that
      wants all of one shape.
  """
  call = jax.custom_batching.custom_vmap(fn)

  @call.def_vmap
  def batched(axis_size, in_batched, *arrays):
    rank = arrays[0].ndim - in_batched[0]

    def aligned(array: jax.Array, is_batched: bool, is_repeated: bool) -> Any:
      if is_batched:  # The new axis comes before all that the first has.
        missing = (1,) * (rank - (array.ndim - 1))
        return array.reshape(axis_size, *missing, *array.shape[1:])
      if is_repeated:
        return jnp.broadcast_to(array, (axis_size, *array.shape))
      return array

    pairs = enumerate(zip(arrays, in_batched, strict=True))
    results = one_launch(
      fn,
      *(aligned(a, flag, repeats or i == 0) for i, (a, flag) in pairs),
      repeats=repeats,
    )
    return results, [True] * len(results)

  return call(*arrays)
