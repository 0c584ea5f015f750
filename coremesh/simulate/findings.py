"""What a simulation finds wrong, and the errors it raises."""

from collections.abc import Sequence
import dataclasses
from typing import Literal

from coremesh import errors

type Kind = Literal[
  "unstable",
  "endless",
  "race",
  "deadlock",
  "check",
  "leftover",
  "unwaited",
  "out of bounds",
  "scope",
  "input written",
  "uninitialised",
  "negative count",
  "memory",
  "barrier reuse",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
  """One fault of a kernel.

  Attributes:
    kind: what sort of fault.
    kernel: the kernel's name.
    text: who, where, and what to do.
    is_warning: whether it may go well on a TPU, depending on what ran before;
      a warning is noted, and not raised.
  """

  kind: Kind
  kernel: str
  text: str
  is_warning: bool = False

  def __str__(self) -> str:
    return f"[{self.kind}] kernel {self.kernel!r}: {self.text}"


class SimulationError(errors.CoreMeshError, RuntimeError):
  """A simulated kernel did what it must not do on a TPU."""

  def __init__(self, findings: Sequence[Finding]):
    self.findings = tuple(sorted(findings, key=lambda f: f.is_warning))
    shown = "\n".join(map(str, self.findings[:_MAX_SHOWN]))
    more = len(self.findings) - _MAX_SHOWN
    super().__init__(shown + (f"\n... and {more} more." if more > 0 else ""))


class DeadlockError(SimulationError):
  """All workers wait, and nothing under way could wake one."""


def error_of(found: Sequence[Finding]) -> SimulationError:
  """The error that findings are raised as."""
  is_deadlock = any(f.kind == "deadlock" for f in found)
  return (DeadlockError if is_deadlock else SimulationError)(found)


_MAX_SHOWN = 8
