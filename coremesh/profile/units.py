"""Which unit each instruction keeps busy, and for how long."""

from collections import Counter
from collections.abc import Mapping
import dataclasses

import numpy as np

from coremesh.profile.bundles import Bundle, Program
from coremesh.profile.rates import Rates

_TRANSCENDENTAL = ("vexp", "vpow", "vlog", "vrcp", "vrsqrt", "vtanh", "verf")
# They move what a unit has computed, or the core's own state.
_MOVES = ("vpop", "vpush", "vtrace", "vset", "vwait", "vsync", "vdelay")

UNITS = ("MXU", "VPU", "XLU", "EUP", "load", "store", "scalar", "idle")


def unit(opcode: str) -> str | None:
  """The unit of a vector instruction, None if it keeps none busy."""
  if opcode.startswith("vmat"):
    return "MXU" if opcode.startswith("vmatmul") else None
  if ".xlu" in opcode and not opcode.startswith("vpop"):
    return "XLU"
  if opcode.startswith("vld"):
    return "load"
  if opcode.startswith("vst"):
    # vstv moves a scalar into a vector register; it stores nothing.
    return "VPU" if opcode == "vstv" else "store"
  if opcode.startswith(_MOVES):
    return None
  if opcode.startswith(_TRANSCENDENTAL):
    return "EUP"
  return "VPU"


def cycles(opcode: str, rates: Rates) -> float:
  """How long an instruction holds all units of its kind together."""
  match unit(opcode):
    case "MXU":
      return _matmul_cycles(opcode, rates) / rates.mxus
    case "XLU":
      held = rates.xlu_cycles if ".xlane" in opcode else 1
      return held / rates.xlus
    case "VPU":
      return 1 / rates.vector_slots
    case "load":
      return 1 / rates.load_slots
    case "store":
      return 1 / rates.store_slots
    case "EUP":
      return 1.0
  return 0.0


def _matmul_cycles(opcode: str, rates: Rates) -> float:
  """How long a `vmatmul` holds its unit.

  No two on one unit are nearer in what libtpu 0.0.50 schedules, and most are as
  near as that: bundles between neighbours in kernels.matmul and
  kernels.attention, its gradient included, of all types that they take:

      opcode                v5e, v5p   v6e   tpu7x
      vmatmul.f32                  8     4       4
      vmatmul.bf16                16     8       8
      vmatmul.s8                  16     8
      vmatmul.lmr.bf16             8
      vmatmul.f8*.bf16            32    16
      vmatmul.f8*                                8

  8-bit floats that the unit takes as bf16 are 32 rows of it, where bf16 itself
  has 16 to a register.
  """
  if ".f32" in opcode:
    return rates.matmul_cycles_f32
  if ".lmr" in opcode:
    return rates.matmul_cycles_bf16 / 2
  is_widened = ".f8" in opcode and ".bf16" in opcode
  return rates.matmul_cycles_bf16 * (2 if is_widened else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Busy:
  """Cycles for which a program keeps each unit busy, bundle by bundle.

  Attributes:
    by_unit: an array over bundles for each of `UNITS`; "scalar" counts bundles
      of scalar instructions alone, "idle" empty ones.
  """

  by_unit: Mapping[str, np.ndarray]

  def of(self, executions: np.ndarray) -> dict[str, float]:
    """Cycles of each unit, given how often each bundle is issued."""
    return {u: float(a @ executions) for u, a in self.by_unit.items()}


def busy(program: Program, rates: Rates) -> Busy:
  """What each bundle of a program keeps busy."""
  arrays = {u: np.zeros(len(program.bundles)) for u in UNITS}
  known: dict[str, tuple[str | None, float]] = {}
  for bundle in program.bundles:
    for slot in bundle.slots:
      if not slot.is_vector:
        continue
      if slot.opcode not in known:
        known[slot.opcode] = (unit(slot.opcode), cycles(slot.opcode, rates))
      name, held = known[slot.opcode]
      if name is not None:
        arrays[name][bundle.index] += held
    if kind := _without_vectors(bundle):
      arrays[kind][bundle.index] = 1
  return Busy(by_unit=arrays)


def _without_vectors(bundle: Bundle) -> str | None:
  if not bundle.slots:
    return "idle"
  return None if any(s.is_vector for s in bundle.slots) else "scalar"


def sources(program: Program, start: int, end: int) -> tuple[str, ...]:
  """Up to three lines a range of bundles comes from, the most frequent first.

  Args:
    program: the machine code.
    start: the first bundle.
    end: the bundle after the last.
  """
  found = Counter(
    slot.source
    for bundle in program.bundles[start:end]
    for slot in bundle.slots
    if slot.source
  )
  return tuple(source for source, _ in found.most_common(3))
