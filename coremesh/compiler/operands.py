"""What kernels are given, where it follows from the values of arguments.

A kernel may be steered by integers that XLA works out from an argument: the
tiles of a grouped matmul follow from the sizes of its groups. Such operations
are run here, on the CPU, and nothing else is.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from coremesh import _compat
from coremesh._compat import aot as jax_aot

# SMEM holds no more than this; nothing larger steers a kernel.
MOST_BYTES = 1 << 20
# They run their program once, as it is.
_CALLS = (
  *("jit", "closed_call", "core_call", "checkpoint", "eval_jaxpr"),
  *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
)
# They change what is known of devices, and no values.
_RETYPED = ("pvary", "pcast")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOperands:
  """The operands of one kernel of which the values are known.

  Attributes:
    kernel: its name.
    values: by the number of the operand; integers, as its arrays.
  """

  kernel: str
  values: Mapping[int, np.ndarray]


def of_kernels(
  jaxpr: jex_core.Jaxpr, args: Sequence[Any]
) -> tuple[KernelOperands, ...]:
  """What the kernels of a program are given.

  Args:
    jaxpr: the program.
    args: its arguments, flat; those without values are not known.

  Returns:
    For each kernel outside loops and branches, in order, what is known. () if
    no argument is an array of integers: constants stand in the program.
  """
  known = [_value(arg) for arg in args]
  if len(known) != len(jaxpr.invars) or all(v is None for v in known):
    return ()
  return _Run(jaxpr, known).kernels()


def _value(arg: Any) -> np.ndarray | None:
  if not isinstance(arg, jax.Array | np.ndarray | np.generic | int):
    return None
  value = np.asarray(jax.numpy.asarray(arg))
  return value if value.dtype.kind in "iub" else None


class _Run:
  """Finds out what is known, then works it out as one program of JAX's."""

  def __init__(self, jaxpr: jex_core.Jaxpr, known: Sequence[np.ndarray | None]):
    self._jaxpr = jaxpr
    self._known = known
    # Filled in while JAX traces: kernel, and the numbers of its operands.
    self._found: list[tuple[str, list[int]]] = []

  def kernels(self) -> tuple[KernelOperands, ...]:
    """Works it out."""
    given = [value for value in self._known if value is not None]
    with jax.default_device(jax.devices("cpu")[0]):
      results = jax.jit(self._outputs)(given)
    left = iter(results)
    return tuple(
      KernelOperands(
        kernel=name, values={i: np.asarray(next(left)) for i in at}
      )
      for name, at in self._found
    )

  def _outputs(self, given: Sequence[jax.Array]) -> list[jax.Array]:
    left = iter(given)
    values = [None if v is None else next(left) for v in self._known]
    self._found.clear()
    outputs: list[jax.Array] = []
    consts = [None] * len(self._jaxpr.constvars)
    self._walk(jex_core.ClosedJaxpr(self._jaxpr, consts), values, outputs)
    return outputs

  def _walk(
    self,
    program: jex_core.ClosedJaxpr,
    values: Sequence[Any],
    outputs: list[jax.Array],
  ) -> list[Any]:
    """The results of a program; None for those that are not known."""
    jaxpr = program.jaxpr
    at = dict(zip(jaxpr.invars, values, strict=True))
    at.update(zip(jaxpr.constvars, program.consts, strict=True))

    def read(atom: Any) -> Any:
      return atom.val if isinstance(atom, jex_core.Literal) else at.get(atom)

    for eqn in jaxpr.eqns:
      operands = [read(atom) for atom in eqn.invars]
      if eqn.primitive.name in jax_aot.KERNEL_PRIMITIVES:
        self._keep(eqn, operands, outputs)
        continue
      results = self._results(eqn, operands, outputs)
      at.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def _results(
    self,
    eqn: jex_core.JaxprEqn,
    operands: Sequence[Any],
    outputs: list[jax.Array],
  ) -> Sequence[Any]:
    unknown = [None] * len(eqn.outvars)
    if called := _called(eqn):
      return self._walk(called, operands, outputs)
    if eqn.primitive.name == "shard_map":
      self._walk(*_of_a_device(eqn, operands), outputs)
      return unknown
    if eqn.primitive.name in _RETYPED:
      return operands
    if any(value is None for value in operands) or eqn.effects:
      return unknown
    inner = [e for j in _compat.inner_jaxprs(eqn) for e in _compat.walk(j)]
    if any(e.primitive.name in jax_aot.KERNEL_PRIMITIVES for e in inner):
      return unknown
    results = eqn.primitive.bind(*operands, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]

  def _keep(
    self,
    eqn: jex_core.JaxprEqn,
    operands: Sequence[Any],
    outputs: list[jax.Array],
  ) -> None:
    places = [i for i, v in enumerate(operands) if v is not None and _steers(v)]
    outputs.extend(jax.numpy.asarray(operands[i]) for i in places)
    self._found.append((jax_aot.body_name(eqn), places))


def _called(eqn: jex_core.JaxprEqn) -> jex_core.ClosedJaxpr | None:
  """The program an equation runs once, as it is."""
  if eqn.primitive.name not in _CALLS:
    return None
  for value in eqn.params.values():
    if isinstance(value, jex_core.ClosedJaxpr):
      return value
    if isinstance(value, jex_core.Jaxpr):
      return jex_core.ClosedJaxpr(value, [None] * len(value.constvars))
  return None


def _of_a_device(
  eqn: jex_core.JaxprEqn, operands: Sequence[Any]
) -> tuple[jex_core.ClosedJaxpr, list[Any]]:
  """What every device runs, and what all of them are given alike."""
  sizes = eqn.params["mesh"].shape
  jaxpr = eqn.params["jaxpr"]

  def is_whole(spec: Any) -> bool:
    names = jax.tree.leaves([names for names in spec if names is not None])
    return all(sizes[name] == 1 for name in names)

  known = [
    value if is_whole(spec) else None
    for value, spec in zip(operands, eqn.params["in_specs"], strict=True)
  ]
  consts = [None] * len(jaxpr.constvars)
  return jex_core.ClosedJaxpr(jaxpr, consts), known


def _steers(value: Any) -> bool:
  dtype = np.dtype(value.dtype if hasattr(value, "dtype") else type(value))
  size = math.prod(np.shape(value))
  return dtype.kind in "iu" and size * dtype.itemsize <= MOST_BYTES
