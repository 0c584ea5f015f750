"""Source for operations on what a core keeps: its PRNG and its matrix units."""

from typing import Any

from coremesh._compat import kernel_ir
from coremesh.simulate import emitter, hardware_random, matrix_unit


def _with(state: str, rules: Any, name: str) -> Any:
  """The rule of an operation that changes a state of the core."""

  def emit(em: emitter.Emitter, eqn: Any) -> None:
    in_types, out_types = kernel_ir.eqn_types(eqn)
    if any(map(hardware_random.is_foreign, (*in_types, *out_types))):
      em.value(eqn, name)  # Of keys that JAX's own software knows.
      return
    function = rules[name](eqn.params, in_types, out_types)
    values = [_value(em, v) for v in eqn.invars]
    site = em.site(name.removeprefix("tpu."))
    operands = ", ".join([f"{state}(w)", *values])
    call = f"checked(m, w, {site}, {em.constant(function, 'f')}, {operands})"
    if eqn.primitive.multiple_results:
      em.bind(eqn, em.unpack(call, len(eqn.outvars)))
    else:
      em.bind(eqn, [em.let(call)])

  return emit


def _value(em: emitter.Emitter, var: Any) -> str:
  """An operand; of a ref its elements, which the operation changes in place."""
  atom = em.atom(var)
  if em.is_ref(atom):
    ref = kernel_ir.split_ref(atom)[0]
    em.line(f"{ref}.unwritten = None")
    return f"{ref}.values()"
  return str(atom)


def checked(m: Any, w: Any, site: Any, function: Any, *operands: Any) -> Any:
  """What an operation gives; its misuse is a fault of the kernel."""
  try:
    return function(*operands)
  except ValueError as error:
    return m.fail_check(w, str(error), site)


def prng(worker: Any) -> hardware_random.Prng:
  """The hardware PRNG of a core."""
  if worker.prng is None:
    worker.prng = hardware_random.Prng()
  return worker.prng


def mxu(worker: Any) -> matrix_unit.Mxu:
  """The matrix units of a core."""
  if worker.mxu is None:
    worker.mxu = matrix_unit.Mxu()
  return worker.mxu


RULES = {
  **{
    name: _with("prng", hardware_random.STATEFUL, name)
    for name in hardware_random.STATEFUL
  },
  **{
    name: _with("mxu", matrix_unit.STATEFUL, name)
    for name in matrix_unit.STATEFUL
  },
}

HELPERS = {"checked": checked, "prng": prng, "mxu": mxu}
