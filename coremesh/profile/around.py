"""What a program runs beside the operations that have machine code.

libtpu writes the code of equal operations once; copies into VMEM that it
starts ahead of time, and operations on single numbers, are part of the program
around all operations.
"""

from collections.abc import Mapping, Sequence
import dataclasses

from coremesh import chips
from coremesh.compiler.compiled import Compiled
from coremesh.profile import estimates, hlo, rates
from coremesh.profile.prediction import OperationPrediction

_FREE = frozenset(
  ["parameter", "constant", "bitcast", "tuple", "get-tuple-element"]
  + ["copy-done", "after-all", "optimization-barrier", "partition-id"]
  # Of what runs on SparseCores, its start has the code.
  + ["call-update", "call-done"]
)
# Their code is their own, or that of what they call.
_OWN_CODE = frozenset(["custom-call", "while", "conditional", "call"])


def of_program(
  program: dict[str, hlo.Instruction],
  compiled: Compiled,
  predicted: Sequence[OperationPrediction],
  *,
  chip: chips.Chip,
  counts: Mapping[str, int | None],
) -> tuple[list[OperationPrediction], list[str]]:
  """Predicts them.

  Args:
    program: the HLO.
    compiled: the same program, compiled.
    predicted: its operations that have machine code.
    chip: what for.
    counts: how often each instruction is run; see `loops`.

  Returns:
    What is predicted, and what is left out, in words.
  """
  with_code = {o.name for o in compiled.operations}
  of_name = {o.name: o for o in predicted}
  found, others = [], []
  for instruction in program.values():
    name, opcode = instruction.name, instruction.opcode
    times = counts.get(name)
    if not times or name in with_code or opcode in _FREE:
      continue
    other = None
    if opcode not in _OWN_CODE:
      other = hlo.twin(program, name, list(of_name))
    if opcode == "copy-start":
      found.append(_copy(instruction, chip, times))
    elif other is not None:
      text = f"it has no code of its own; assumed to run that of {other}"
      made = dataclasses.replace(of_name[other], name=name, times=times)
      found.append(dataclasses.replace(made, assumed=(text,)))
    else:
      others.append(
        f"{name}: {opcode} of XLA's, without machine code of its own"
      )
  return found, others


def _copy(
  instruction: hlo.Instruction, chip: chips.Chip, times: int
) -> OperationPrediction:
  """A copy between HBM and VMEM, taken to overlap with nothing."""
  rate = rates.rates(chip)
  num_bytes = hlo.first_bytes(instruction.shape)
  cycles = estimates.of_models(
    {
      w: num_bytes / rate.hbm(w).bytes_per_cycle + rate.hbm(w).latency_cycles
      for w in estimates.MODELS
    }
  )
  return OperationPrediction(
    name=instruction.name,
    kernel=None,
    cycles=cycles,
    microseconds=estimates.microseconds(cycles, rate),
    floor_microseconds=num_bytes / chip.hbm_bytes_per_second_per_device * 1e6,
    limit="DMA",
    shares={},
    cores=(),
    hottest=(),
    assumed=("XLA may let it overlap; assumed not to",),
    times=times,
  )
