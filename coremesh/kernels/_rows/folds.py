"""How two numbers become one: sums that lose little, and maxima."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from coremesh.kernels import blocks

type Numbers = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
  """How two numbers become one.

  Attributes:
    name: of the kernels.
    combine: two arrays, element by element.
    is_sum: whether what rounding loses is to be carried along.
  """

  name: str
  combine: blocks.Combine
  is_sum: bool

  def identity(self, dtype: Any) -> Any:
    """What changes nothing when it is combined."""
    if self.is_sum:
      return 0
    if jnp.issubdtype(dtype, jnp.floating):
      return -math.inf
    return int(jnp.iinfo(dtype).min)

  def num_parts(self, dtype: Any) -> int:
    """How many numbers an accumulator is."""
    return 2 if self.is_sum and jnp.issubdtype(dtype, jnp.floating) else 1

  def add(self, so_far: Numbers, value: jax.Array) -> Numbers:
    """The accumulator with one more value."""
    if len(so_far) == 1:
      return (self.combine(so_far[0], value),)
    total, lost = so_far
    new = total + value
    part = new - total
    error = (total - (new - part)) + (value - part)
    # Of an infinity nothing is lost; infinity - infinity would be NaN.
    error = jnp.where(jnp.abs(new) < math.inf, error, 0.0)
    return new, lost + error

  def result(self, so_far: Numbers) -> jax.Array:
    """An accumulator as one number."""
    return functools.reduce(self.combine, so_far)

  def down(self, values: jax.Array, *, size: int, axis: int) -> jax.Array:
    """Combines parts of `size` elements along an axis, pairwise."""
    return blocks.pairwise(self.combine, values, size=size, axis=axis)


SUM = Fold(name="sum", combine=jnp.add, is_sum=True)
MAXIMUM = Fold(name="max", combine=jnp.maximum, is_sum=False)


def dtype_of(x: Any) -> Any:
  """The dtype in which an array is reduced: float32 or int32."""
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  return jnp.dtype(jnp.float32 if is_float else jnp.int32)
