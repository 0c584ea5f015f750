"""From compiled programs to the figures that are guarded."""

from collections.abc import Iterable, Sequence
import re

from coremesh import errors
from coremesh.compiler import digests
from coremesh.compiler.compiled import Compiled, Operation
from coremesh.guard.figures import OTHERS, Figures, OperationFigures
from coremesh.guard.outcomes import Outcome
from coremesh.profile import bundles, hlo
from coremesh.profile.prediction import Prediction

# The program around all operations; it is not one of them.
_AROUND = frozenset(["TLP", "<late-initialization>", "<late-finalization>"])
_SPARSE_BUNDLE = re.compile(r"^0x[0-9a-f]+: \{", re.MULTILINE)


def figures_of(found: Outcome) -> Figures | None:
  """The figures of what became of a program; None if it was refused."""
  if found.compiled is None:
    return None
  prediction = found.prediction
  return Figures(
    code_bytes=found.compiled.code_bytes,
    arguments=digests.of_arguments(found.args),
    operations=tuple(_operations(found.compiled, prediction)),
    unpredicted=found.unpredicted,
    num_assumed=len(prediction.assumed) if prediction else 0,
  )


def vmem_bytes_per_core(compiled: Compiled, kernel: str) -> int | None:
  """VMEM of a kernel: used, if libtpu says so, else predicted."""
  named = [one for one in compiled.ledgers if one.kernel == kernel]
  amounts = [
    one.predicted("VMEM")
    if one.used_vmem_bytes is None
    else one.used_vmem_bytes
    for one in named
  ]
  return max(amounts, default=None)


def _operations(
  compiled: Compiled, prediction: Prediction | None
) -> Iterable[OperationFigures]:
  predicted = prediction.operations if prediction else ()
  cycles = {o.name: o.cycles.central for o in predicted}
  found = [o for o in compiled.operations if o.name not in _AROUND]
  kernels = sorted(
    (o for o in found if o.kernel is not None),
    key=lambda o: (str(o.kernel), len(o.name), o.name),
  )
  beside = _beside(compiled, found)
  seen: dict[str, int] = {}
  for operation in kernels:
    kernel = str(operation.kernel)
    seen[kernel] = number = seen.get(kernel, 0) + 1
    at = cycles.pop(operation.name, None)
    yield OperationFigures(
      name=kernel if number == 1 else f"{kernel} #{number}",
      bundles=_num_bundles(operation),
      code=digests.of_code([operation]),
      cycles=None if at is None else round(at),
      vmem_bytes_per_core=vmem_bytes_per_core(compiled, kernel),
      operations_beside=beside.get(operation.name),
    )
  others = sorted(
    (o for o in found if o.kernel is None), key=lambda o: (len(o.name), o.name)
  )
  if others or cycles:
    yield OperationFigures(
      name=OTHERS,
      bundles=sum(map(_num_bundles, others)),
      code=digests.of_code(others),
      cycles=round(sum(cycles.values())) if prediction else None,
    )


def _num_bundles(operation: Operation) -> int:
  """Bundles of its code; one of an unknown form is an error."""
  total = 0
  if text := operation.texts.get("bundles"):
    total += len(bundles.parse(text).bundles)
  if text := operation.texts.get("sparsecore"):
    found = len(_SPARSE_BUNDLE.findall(text))
    if not found:
      raise errors.UnsupportedError(
        f"The SparseCore code of {operation.name!r} must have lines such as"
        f" '0x1f: {{ ... }}'; it starts with {text[:60]!r}. libtpu may be of a"
        " version that coremesh does not know."
      )
    total += found
  return total


def _beside(compiled: Compiled, found: Sequence[Operation]) -> dict[str, int]:
  """For each operation that is started and awaited: what runs meanwhile.

  The instructions of a compiled program are in the order in which they run.
  """
  program = hlo.parse(compiled.text("hlo"))
  with_code = {o.name for o in found if o.kernel is None}
  beside: dict[str, int] = {}
  awaited: dict[str, str] = {}  # by instruction, the start it goes back to
  count, at_start = 0, {}
  for name, instruction in program.items():
    count += name in with_code
    if instruction.opcode in ("call-start", "async-start"):
      awaited[name], at_start[name] = name, count
    for operand in instruction.operands:
      if operand in awaited:
        awaited[name] = start = awaited[operand]
        if instruction.opcode.endswith("-done"):
          beside[start] = count - at_start[start]
  return beside
