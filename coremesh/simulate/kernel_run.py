"""What one run of one kernel did and got wrong."""

from collections import Counter
import dataclasses

from coremesh.simulate import kernel_timeline
from coremesh.simulate.findings import Finding
from coremesh.simulate.transfer import DmaMode


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
    dma: when DMAs moved their bytes.
    timeline: when each worker did what, modelled; None if not asked for.
    unwritten_outputs: outputs of which elements hold what nobody has written,
      in words. That is no fault if nobody reads them.
  """

  kernel: str
  devices: tuple[int, ...]
  num_workers: int
  seed: int
  findings: tuple[Finding, ...]
  bytes_moved: Counter[tuple[str, int, str, int]]
  seconds: float
  turns: int = 0
  dma: DmaMode = "late"
  timeline: kernel_timeline.KernelTimeline | None = None
  unwritten_outputs: tuple[str, ...] = ()
