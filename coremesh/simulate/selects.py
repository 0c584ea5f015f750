"""Which values of a program count wherever they are.

The elements of the others reach a result or an effect only through a select or
a mask, which may leave them out: `jnp.where(is_first, 0, acc[...])` does not
count on what `acc` holds at first, nor a masked store on what is in the lanes
that it leaves out.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
from typing import Any

import jax

from coremesh._compat import kernel_ir

_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}
# Operations of (ref, transforms, values or indices..., mask), and their tree.
_MASKED = {
  "pallas.swap": "args_tree",
  "sc.scatter": "tree",
  "sc.gather": "tree",
}


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
    elif is_value(eqn):
      operands = operands if any(counts) else []
    else:
      operands = _unmasked(eqn)
    found.update(_variables(operands))
  return found


def _unmasked(eqn: Any) -> Sequence[Any]:
  """The operands of an effect, but for those of which a mask chooses."""
  name, params = kernel_ir.qualified_name(eqn.primitive), eqn.params
  if name == "sc.swap" and params["has_mask"]:
    ref, _, *rest = eqn.invars
    return [ref, *rest]
  if name in _MASKED:
    ref, transforms, *_, mask = params[_MASKED[name]].unflatten(eqn.invars)
    if mask is not None:
      return jax.tree.leaves((ref, transforms, mask))
  return eqn.invars


def _variables(values: Iterable[Any]) -> list[Any]:
  return [v for v in values if not isinstance(v, kernel_ir.Literal)]
