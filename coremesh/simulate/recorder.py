"""What the simulations inside a `with` leave behind."""

from collections import Counter
import dataclasses
from typing import Any

from coremesh.simulate import findings


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelRun:
  """One run of one kernel on all its devices.

  Attributes:
    kernel: its name.
    num_devices: devices that ran it together.
    num_workers: cores and subcores of all of them.
    findings: what was wrong.
    bytes_moved: by DMAs, by (from memory, from device, to memory, to device).
    seconds: time the simulation took.
  """

  kernel: str
  num_devices: int
  num_workers: int
  findings: tuple[findings.Finding, ...]
  bytes_moved: Counter[tuple[Any, ...]]
  seconds: float


class Recorder:
  """Collects the runs of kernels, in the order in which they ended."""

  def __init__(self):
    self.runs: list[KernelRun] = []

  def add(self, run: KernelRun) -> None:
    self.runs.append(run)
