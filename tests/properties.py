"""What holds for the machine code of every kernel that a test compiles.

Each read of a register finds the value that the compiler meant, checks of
bounds hold, branches stay inside, waits end, and a core clears no semaphore
that is not zero. What the predictor does not model, or data decide, is counted
and not checked.
"""

from collections.abc import Callable
import dataclasses
import functools
import re
import time
from typing import Any

import coremesh as cm
from coremesh.compiler import aot
from coremesh.compiler.compiled import Operation
from coremesh.profile import sparse_cores, tensor_cores

# Errors that no kernel may give, unlike those for what is not modelled.
_BROKEN = re.compile(
  r"reads .* and finds|but that register holds|The check at bundle"
  r"|Expected .*; found|must be as libtpu"
)
_ENDLESS = re.compile(r"does not end, or waits for")


@dataclasses.dataclass
class Tally:
  """How many kernels were looked at.

  Attributes:
    checked: all of it held.
    decided_by_data: it ran, but which copies and waits are run, data decide.
    unmodelled: how many for each reason.
    seconds: what looking took.
  """

  checked: int = 0
  decided_by_data: int = 0
  unmodelled: dict[str, int] = dataclasses.field(default_factory=dict)
  seconds: float = 0.0

  def __str__(self) -> str:
    reasons = "; ".join(f"{n} x {r}" for r, n in self.unmodelled.items())
    return (
      f"machine code of {self.checked} kernels checked in {self.seconds:.1f} s,"
      f" {self.decided_by_data} decided by data,"
      f" {sum(self.unmodelled.values())} not modelled: {reasons or 'none'}"
    )


def check(compiled: cm.Compiled, tally: Tally) -> None:
  """Raises AssertionError for a kernel whose code is not as it must be."""
  for operation in compiled.operations:
    if operation.kernel is None:
      continue
    try:
      assumed, left_over = _run(operation, compiled)
    except cm.CoreMeshError as error:
      text = str(error)
      is_assumed = "Assumed:" in text
      assert not _BROKEN.search(text), (operation.name, text)
      assert is_assumed or not _ENDLESS.search(text), (operation.name, text)
      reason = re.sub(r".*?holds |0x[0-9a-f]+|\d+", "", text)[:60]
      tally.unmodelled[reason] = tally.unmodelled.get(reason, 0) + 1
      continue
    if assumed:
      tally.decided_by_data += 1
      continue
    assert not left_over, (operation.name, left_over)
    tally.checked += 1


def _run(
  operation: Operation, compiled: cm.Compiled
) -> tuple[bool, list[dict[int, int]]]:
  """Whether data decide what is run, and what semaphores hold in the end."""
  chip = cm.chip(compiled.chip)
  if "bundles" in operation.texts:
    found = tensor_cores.timed(
      operation, chip, {}, num_devices=compiled.num_devices
    )
  else:
    found = sparse_cores.timed(operation, chip, hlo=compiled.text("hlo"))
  assumed = any(trace.assumed for trace in found.traces)
  cores = found.timings["central"]
  return assumed, [dict(c.left_over) for c in cores if c.left_over]


def watch(tally: Tally) -> None:
  """Has `cm.compile` check what it compiles, but what the cache had."""
  compile_: Callable[..., Any] = aot.compile

  @functools.wraps(compile_)
  def checked(*args, **options):
    compiled = compile_(*args, **options)
    if not compiled.from_cache:
      start = time.perf_counter()
      check(compiled, tally)
      tally.seconds += time.perf_counter() - start
    return compiled

  aot.compile = checked
