"""How long operations of SparseCores run beside those of TensorCores.

XLA hands an operation to the SparseCores, goes on with others and waits for it
later. Until then both sides share HBM: together they take as long as the longer
of them, and no less than all their bytes.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses

from coremesh.profile import estimates, hlo, rates
from coremesh.profile.prediction import OperationPrediction


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
  """Operations between which nothing waits.

  Attributes:
    sparse: those of SparseCores, one after the other.
    dense: those of TensorCores, one after the other.
  """

  sparse: tuple[str, ...]
  dense: tuple[str, ...]


def groups(
  program: Mapping[str, hlo.Instruction],
  sparse: Collection[str],
  dense: Collection[str],
) -> list[Beside]:
  """What runs at the same time, in the order of the program.

  Args:
    program: the HLO, as it is scheduled.
    sparse: operations of SparseCores, each by the instruction that starts it.
    dense: operations of TensorCores.
  """
  found: list[Beside] = []
  handed: dict[str, str] = {}
  under_way: set[str] = set()
  ran: list[str] = []
  beside: list[str] = []
  for name, instruction in program.items():
    if not instruction.is_entry:
      continue
    first = instruction.operands[0] if instruction.operands else ""
    if instruction.opcode == "call-update" and first in sparse:
      # Only now it has its operands.
      handed[name] = first
      under_way.add(first)
      ran.append(first)
    elif instruction.opcode == "call-done":
      under_way.discard(handed.get(first, ""))
    elif name in dense and under_way:
      beside.append(name)
    if ran and not under_way:
      if beside:
        found.append(Beside(sparse=tuple(ran), dense=tuple(beside)))
      ran, beside = [], []
  return found


def hidden(
  group: Beside,
  times: Mapping[str, float],
  *,
  num_bytes: Mapping[str, int],
  bytes_per_time: float,
) -> float:
  """For how long both sides work, in the unit of the times.

  Args:
    group: what runs at the same time.
    times: of each operation.
    num_bytes: of each operation, to and from HBM.
    bytes_per_time: of HBM.
  """
  sides = [sum(times[n] for n in side) for side in (group.sparse, group.dense)]
  moved = sum(num_bytes[n] for n in (*group.sparse, *group.dense))
  together = max(*sides, moved / bytes_per_time)
  return max(0.0, sum(sides) - together)


def microseconds(
  found: Sequence[Beside],
  operations: Sequence[OperationPrediction],
  rate: rates.Rates,
) -> rates.Spread:
  """What the sum of all operations counts twice.

  Args:
    found: what runs at the same time.
    operations: of the program.
    rate: of its chip.
  """
  of_name = {o.name: o.microseconds for o in operations}
  num_bytes = {o.name: bytes_of(o) for o in operations}

  def of_model(which: str, part: str) -> float:
    bandwidth = getattr(rate.hbm_bytes_per_second_per_device, which)
    times = {n: getattr(e, part) for n, e in of_name.items()}
    return sum(
      hidden(g, times, num_bytes=num_bytes, bytes_per_time=bandwidth * 1e-6)
      for g in found
    )

  parts = zip(estimates.MODELS, ("low", "central", "high"), strict=True)
  return rates.Spread(**{which: of_model(which, part) for which, part in parts})


def bytes_of(operation: OperationPrediction) -> int:
  """What an operation reads and writes once."""
  return sum(c.read_bytes + c.written_bytes for c in operation.cores)
