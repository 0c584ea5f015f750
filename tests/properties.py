"""What holds for the machine code of every kernel that a test compiles.

Each read of a register finds the value that the compiler meant (the code of a
SparseCore does not number values: there each register that is read is written,
and before that decides nothing), checks of bounds hold, branches stay inside,
waits end, and a core clears no semaphore
that is not zero. Where data decide what is run, waits are not checked; what is
not checked at all is counted by its reason.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import functools
import re
import time
from typing import Any

import coremesh as cm
from coremesh.compiler import aot
from coremesh.compiler.compiled import Operation
from coremesh.profile import bundles, machine, sparse_cores, tensor_cores

# What is not checked and why, by the name of the kernel and the error of the
# predictor. Any other error is a fault, of the code or of its reader.
NOT_CHECKED = {
  "a test of deadlocks": r"^waits_for_ever: The kernel does not end",
  "a test whose signals stay": r"^leaves_signals: semaphores hold",
  "data decide what is waited for": r"does not end, or waits for.*Assumed:",
  # The tests predict these with sizes, which reads every register as well.
  "sizes of groups decide branches that go together": (
    r"^grouped_.* is not run as it is meant"
  ),
  "no rates of v4, nor its delay slots": r"chip must be one of v5p.*got v4",
  "copies that signal another subcore": r"it signals another subcore",
  "subcores of devices that differ": r"depends on the number of their device",
  "a copy whose strides say where it goes": r"holds dma\.general",
  "a loop until another core signals": r"Loops that read semaphores",
}


@dataclasses.dataclass
class Tally:
  """How many kernels were looked at.

  Attributes:
    checked: all of it held.
    decided_by_data: it ran, but which copies and waits are run, data decide.
    not_checked: how many for each reason of `NOT_CHECKED`.
    cpu_seconds: what looking took.
  """

  checked: int = 0
  decided_by_data: int = 0
  not_checked: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  cpu_seconds: float = 0.0

  def data(self) -> dict[str, Any]:
    """What another process can be sent."""
    return dataclasses.asdict(self) | {"not_checked": dict(self.not_checked)}

  def add(self, data: Mapping[str, Any]) -> None:
    """Counts what another process has looked at."""
    self.checked += data["checked"]
    self.decided_by_data += data["decided_by_data"]
    self.not_checked.update(data["not_checked"])
    self.cpu_seconds += data["cpu_seconds"]

  def __str__(self) -> str:
    reasons = "; ".join(f"{n} x {why}" for why, n in self.not_checked.items())
    return (
      f"machine code of {self.checked} kernels checked in"
      f" {self.cpu_seconds:.1f} s of CPU, {self.decided_by_data} decided by"
      f" data, {self.not_checked.total()} not checked: {reasons or 'none'}"
    )


def check(compiled: cm.Compiled, tally: Tally) -> None:
  """Raises AssertionError for a kernel whose code is not as it must be."""
  for operation in compiled.operations:
    if operation.kernel is None:
      continue
    try:
      assumed, left_over = _run(operation, compiled)
    except cm.CoreMeshError as error:
      reason = _reason(f"{operation.kernel}: {error}")
      assert reason is not None, (operation.name, str(error))
      tally.not_checked[reason] += 1
      continue
    if assumed:
      tally.decided_by_data += 1
      continue
    if left_over:
      text = f"semaphores hold {left_over} in the end"
      reason = _reason(f"{operation.kernel}: {text}")
      assert reason is not None, (operation.name, text)
      tally.not_checked[reason] += 1
      continue
    tally.checked += 1


def _reason(text: str) -> str | None:
  """Why a kernel with this error is not checked; None if it must be."""
  if machine.UNWRITTEN in text:
    return None
  for reason, pattern in NOT_CHECKED.items():
    if re.search(pattern, text, re.DOTALL):
      return reason
  return None


def _run(
  operation: Operation, compiled: cm.Compiled
) -> tuple[bool, list[dict[int, int]]]:
  """Whether data decide what is run, and what semaphores hold in the end."""
  chip, models = cm.chip(compiled.chip), ("central",)
  if "bundles" in operation.texts:
    found = tensor_cores.timed(
      operation, chip, {}, num_devices=compiled.num_devices, models=models
    )
  else:
    hlo = compiled.text("hlo")
    found = sparse_cores.timed(
      operation,
      chip,
      hlo=hlo,
      num_devices=compiled.num_devices,
      models=models,
    )
    _check_writers(found.program)
  assumed = {text for trace in found.traces for text in trace.assumed}
  assert not any(machine.UNWRITTEN in text for text in assumed), assumed
  cores = found.timings["central"]
  return bool(assumed), [dict(c.left_over) for c in cores if c.left_over]


def _check_writers(program: bundles.Program) -> None:
  """Each register that is read is written somewhere, where none is numbered."""
  read, written = set(), set()
  for slot in program.slots:
    if slot.result is not None:
      written.add((slot.result.bank, slot.result.number))
    for operand in (slot.predicate, *slot.operands):
      terms = operand.terms if isinstance(operand, bundles.Address) else ()
      for part in (operand, *terms):
        if isinstance(part, bundles.Register):
          read.add((part.bank, part.number))
  assert read <= written, f"{read - written} are read and never written"


def watch(tally: Tally) -> None:
  """Has `cm.compile` check what it compiles, but what the cache had."""
  compile_: Callable[..., Any] = aot.compile

  @functools.wraps(compile_)
  def checked(*args, **options):
    compiled = compile_(*args, **options)
    if not compiled.from_cache:
      start = time.process_time()
      check(compiled, tally)
      tally.cpu_seconds += time.process_time() - start
    return compiled

  aot.compile = checked
