"""Ready epilogues of `kernels.matmul`: what is done to a block of the product.

Each is a plain function of a block [m, n] of float32 (of int32 for `scale`),
and of a block of each operand, to such a block. They can be given to jax.grad
and called outside a kernel as well; `chain` puts several one after the other:

    y = kernels.matmul(
      x, w, b, epilogue=epilogues.chain(epilogues.bias, epilogues.gelu)
    )
"""

from collections.abc import Callable
import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from coremesh import errors
from coremesh.kernels._matmul import normal

type Function = Callable[..., jax.Array]


def bias(total: jax.Array, bias: jax.Array) -> jax.Array:
  """total + bias, for a bias of shape [n], [m, 1] or any that broadcasts."""
  return total + bias.astype(total.dtype)


def residual(total: jax.Array, residual: jax.Array) -> jax.Array:
  """total + residual, for an array of the shape of the output."""
  return total + residual.astype(total.dtype)


def scale(total: jax.Array, scale: jax.Array) -> jax.Array:
  """total * scale in float32: of a row, a column or all that broadcasts.

  Of an int32 total too, which it makes float32: so a product of int8 is brought
  back to the size of what was quantised.
  """
  return total.astype(jnp.float32) * scale.astype(jnp.float32)


def relu(total: jax.Array) -> jax.Array:
  """max(total, 0); its derivative at 0 is 0."""
  return jax.nn.relu(total)


def silu(total: jax.Array) -> jax.Array:
  """total * sigmoid(total)."""
  return total * jax.nn.sigmoid(total)


def gelu(total: jax.Array) -> jax.Array:
  """total * Phi(total), not the approximation of it by tanh.

  Off by at most |total| * 2^-22 in float32, and by one part in 50,000 down to a
  total of -12.9; from -13 it is 0. Source: `_matmul/normal.py`.
  """
  return normal.gelu(total.astype(jnp.float32))


def gelu_tanh(total: jax.Array) -> jax.Array:
  """The approximation of `gelu` by tanh, off from it by at most 5e-4.

  Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2.
  """
  return jax.nn.gelu(total, approximate=True)


def gated(activation: Function) -> Function:
  """A gated linear unit of two products: activation(first) * second.

  Args:
    activation: a function of a block, such as `silu`.

  Returns:
    An epilogue for `w` of two weights, the gate's first; equal to another of
    the same activation, so that jax.jit compiles it once.
  """
  return _Gated(activation=activation)


def chain(*functions: Function) -> Function:
  """Epilogues one after the other.

  Args:
    *functions: the first takes the products; each takes as many operands as it
      has further positional arguments, in the order in which they are given to
      `kernels.matmul`, and its result goes to the next.

  Returns:
    An epilogue, equal to another of the same functions.

  Raises:
    ShapeError: when it is called with too few or too many operands.
  """
  return _Chain(functions=functions)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Gated:
  activation: Function

  def __call__(self, gate: jax.Array, value: jax.Array) -> jax.Array:
    return self.activation(gate) * value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Chain:
  functions: tuple[Function, ...]

  def __call__(self, *blocks: jax.Array) -> jax.Array:
    if not self.functions:
      raise errors.ShapeError(
        "chain must be of at least one function; got none."
      )
    counts = [_num_arguments(f) for f in self.functions]
    needed = sum(counts) - len(counts) + 1
    if len(blocks) != needed:
      raise errors.ShapeError(
        f"This chain must be given {needed} blocks, of products and operands;"
        f" got {len(blocks)}. Its functions take {counts}, of which each but"
        " the first takes one result."
      )
    rest = list(blocks)
    taken, rest = rest[: counts[0]], rest[counts[0] :]
    result = self.functions[0](*taken)
    for function, count in zip(self.functions[1:], counts[1:], strict=True):
      taken, rest = rest[: count - 1], rest[count - 1 :]
      result = function(result, *taken)
    return result


def _num_arguments(function: Any) -> int:
  """How many arguments a function needs."""
  parameters = inspect.signature(function).parameters.values()
  return sum(
    p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    and p.default is p.empty
    for p in parameters
  )
