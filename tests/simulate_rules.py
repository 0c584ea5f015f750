"""Evaluates traced programs with rules of the simulator, one after another."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import types
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

# Primitives whose name is not that of the attribute it is bound to.
_ATTRIBUTES = {"add_dependency": "touch"}


def tpu_context(kind: str = "TPU v5"):
  """A context in which JAX traces for a chip; v5 has 8 SparseCore lanes."""
  device = jax.sharding.AbstractDevice(
    device_kind=kind, num_cores=2, platform="tpu"
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  return jax.sharding.use_abstract_mesh(mesh)


def trace(fn: Callable[..., Any], *args: Any, kind: str = "TPU v5"):
  """The jaxpr of `fn` on these values, traced for a TPU."""
  with tpu_context(kind) if kind else contextlib.nullcontext():
    return jax.make_jaxpr(fn)(*args)


def run(
  rules: Mapping[str, Any], closed: Any, *args: Any, states: Sequence[Any] = ()
) -> list[Any]:
  """Evaluates a jaxpr: with `rules` where they know it, else with JAX.

  `states` maps tables of stateful rules to the state they take first. Checks
  that each rule gives the type JAX says, and leaves what it was given alone.
  """
  values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
  values |= dict(zip(closed.jaxpr.invars, args, strict=True))

  def read(atom):
    if isinstance(atom, jex_core.Literal):
      return np.asarray(atom.val, jax.typeof(atom.val).dtype)[()]
    return values[atom]

  for eqn in closed.jaxpr.eqns:
    operands = [read(v) for v in eqn.invars]
    if eqn.primitive.name == "run_scoped":
      results = _run_scoped(rules, eqn.params["jaxpr"], operands, states)
    elif "jaxpr" in eqn.params:
      results = run(rules, eqn.params["jaxpr"], *operands, states=states)
    else:
      results = _evaluate(rules, eqn, operands, states)
    values |= dict(zip(eqn.outvars, results, strict=True))
  return [read(v) for v in closed.jaxpr.outvars]


def _run_scoped(rules, jaxpr, captured, states):
  """Runs a body with zeros for the memory of each of its refs."""
  memory = [np.zeros(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
  closed = types.SimpleNamespace(jaxpr=jaxpr, consts=captured)
  return run(rules, closed, *memory, states=states)


def _evaluate(rules, eqn, operands, states):
  attribute = _ATTRIBUTES.get(eqn.primitive.name, eqn.primitive.name)
  avals = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
  for prefix in ("sc", "tpu", "pallas", "random"):
    name = f"{prefix}.{attribute}"
    for table, state in states:
      if name in table:
        results = table[name](eqn.params, *avals)(state, *operands)
        return _checked(eqn, results)
    if name in rules:
      kept = [np.array(x) for x in operands]
      function = rules[name](eqn.params, *avals)
      with np.errstate(all="ignore"):
        results = _checked(eqn, function(*operands))
      for before, after in zip(kept, operands, strict=True):
        assert before.tobytes() == np.asarray(after).tobytes(), name
      return results
  results = eqn.primitive.bind(*operands, **eqn.params)
  many = results if eqn.primitive.multiple_results else [results]
  return [np.asarray(x)[()] for x in many]


def _checked(eqn, results):
  many = results if eqn.primitive.multiple_results else [results]
  for var, value in zip(eqn.outvars, many, strict=True):
    if not jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended):
      assert np.shape(value) == var.aval.shape, eqn
      assert value.dtype == var.aval.dtype, eqn
  return list(many)
