"""Equations that the simulator has no rule for: JAX runs them itself."""

from collections.abc import Callable
from typing import Any

from coremesh._compat import kernel_ir


def by_jax(eqn: Any) -> Callable[..., Any]:
  """Runs an equation through JAX itself: right, and slow."""
  function = kernel_ir.rebound(eqn)
  multiple = eqn.primitive.multiple_results

  def call(*values):
    results = function(*values)
    if multiple:
      return [kernel_ir.stored(r) for r in results]
    return kernel_ir.stored(results)

  return call
