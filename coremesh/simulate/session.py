"""The runs of kernels inside a `with cm.simulation()`."""

from collections import Counter
import dataclasses
import threading

from coremesh.simulate.findings import Finding, SimulationError, error_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelRun:
  """One run of one kernel on the devices that ran it together.

  Attributes:
    kernel: its name.
    devices: their indices in the device mesh.
    num_workers: cores and subcores of all of them.
    seed: what decided the interleaving.
    findings: what was wrong.
    bytes_moved: bytes of DMAs, by (from memory, from device, to memory, to
      device).
    seconds: how long the simulation took on the host.
    turns: how often a worker was given its turn.
  """

  kernel: str
  devices: tuple[int, ...]
  num_workers: int
  seed: int
  findings: tuple[Finding, ...]
  bytes_moved: Counter[tuple[str, int, str, int]]
  seconds: float
  turns: int = 0


class Simulation:
  """What `with cm.simulation() as run` gives: the kernels that ran inside.

  Attributes:
    runs: in the order in which they ended.
  """

  def __init__(self):
    self.runs: list[KernelRun] = []
    self._lock = threading.Lock()

  def add(self, run: KernelRun) -> None:
    """Notes a run; devices that run on their own may end at once."""
    with self._lock:
      self.runs.append(run)

  @property
  def findings(self) -> tuple[Finding, ...]:
    """What was wrong in all runs."""
    return tuple(f for run in self.runs for f in run.findings)

  def error(self) -> SimulationError | None:
    """What the last run raised, None if it ended well."""
    if not self.runs or not self.runs[-1].findings:
      return None
    return error_of(self.runs[-1].findings)
