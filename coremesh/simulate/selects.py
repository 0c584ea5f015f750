"""Which values of a program count wherever they are.

The elements of the others reach a result or an effect only through a select,
which may leave them out: `jnp.where(is_first, 0, acc[...])` does not count on
what `acc` holds at first.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
from typing import Any

from coremesh._compat import kernel_ir

_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}


def counted(
  jaxpr: Any,
  *,
  is_value: Callable[[Any], bool],
  results: Sequence[bool] | None = None,
) -> set[Any]:
  """The variables that count wherever they are.

  Args:
    jaxpr: a program.
    is_value: whether an equation does nothing but compute values.
    results: which of the program's results count; None for all.
  """
  if results is None:
    results = [True] * len(jaxpr.outvars)
  found = set(_variables(itertools.compress(jaxpr.outvars, results)))
  for eqn in reversed(jaxpr.eqns):
    counts = [v in found for v in eqn.outvars]
    operands = eqn.invars
    if eqn.primitive.name == "select_n":
      operands = operands[:1] if any(counts) else []
    elif eqn.primitive.name in _CALLS:
      inner = kernel_ir.custom_call_jaxpr(eqn)
      inside = counted(inner, is_value=is_value, results=counts)
      passed = operands[len(operands) - len(inner.invars) :]
      operands = itertools.compress(passed, (v in inside for v in inner.invars))
    elif is_value(eqn) and not any(counts):
      operands = []
    found.update(_variables(operands))
  return found


def _variables(values: Iterable[Any]) -> list[Any]:
  return [v for v in values if not isinstance(v, kernel_ir.Literal)]
