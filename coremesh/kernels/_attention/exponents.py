"""From products of q and k to exponents of 2: scaled and capped."""

import math

import jax
import jax.numpy as jnp

from coremesh.kernels._attention.call import Call

INFINITY = float("inf")
LOG2_E = math.log2(math.e)


def of_products(
  call: Call, products: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
  """The scores times log2(e), and their slope.

  Returns:
    What is raised to a power of 2, without bias; and the derivative of a score
    with respect to products * scale, None where it is 1.
  """
  if call.soft_cap is None:
    return products * (call.scale * LOG2_E), None
  capped = jnp.tanh(products * (call.scale / call.soft_cap))
  return capped * (call.soft_cap * LOG2_E), 1 - capped * capped
