"""How to simulate: the parameters that choose coremesh's simulator."""

import contextlib
import dataclasses
from typing import Any, Literal

import jax

from coremesh import errors
from coremesh._compat import kernel_ir
from coremesh.simulate import launch
from coremesh.simulate.session import Simulation
from coremesh.simulate.transfer import DMA_MODES, DmaMode


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatorParams(kernel_ir.KernelSimulator):
  """Interpret parameters that run a kernel in coremesh's simulator.

  They go wherever `pltpu.InterpretParams` go: `interpret=` of `pl.kernel`,
  `pl.core_map`, `pl.pallas_call` and `cm.kernel`, and
  `pltpu.force_tpu_interpret_mode`. Of the fields they inherit, `detect_races`
  and `random_seed` (the same as `seed`) count.

  Attributes:
    seed: decides every interleaving; the same seed gives the same run.
    dma: when a DMA moves its bytes: "late", as late as the waits allow;
      "early", when it starts; or "random".
    detect_races: whether to look for data races and for memory touched outside
      its scope.
    detect_uninitialised: whether to look for reads of memory that nobody wrote.
    on_finding: "raise" raises `SimulationError` when the kernel ends; "record"
      only notes it in `session`. What ends a kernel raises all the same.
    session: where to note what was run, None for nowhere.
    max_turns: turns of workers after which a kernel counts as endless, None for
      no limit. A worker that polls a semaphore takes turns for ever.
    timeline: whether to model when each worker does what, for the `timeline` of
      `session`.
  """

  seed: int = 0
  dma: DmaMode = "late"
  detect_races: bool = True
  detect_uninitialised: bool = True
  on_finding: Literal["raise", "record"] = "raise"
  session: Simulation | None = None
  max_turns: int | None = None
  timeline: bool = False

  def __post_init__(self):
    super().__post_init__()
    if isinstance(self.seed, bool) or not isinstance(self.seed, int):
      raise errors.UnsupportedError(f"seed must be an int; got {self.seed!r}.")
    if self.dma not in DMA_MODES:
      raise errors.UnsupportedError(
        f"dma must be 'late', 'early' or 'random'; got {self.dma!r}."
      )
    if self.on_finding not in ("raise", "record"):
      raise errors.UnsupportedError(
        f"on_finding must be 'raise' or 'record'; got {self.on_finding!r}."
      )
    if not isinstance(self.timeline, bool):
      raise errors.UnsupportedError(
        f"timeline must be True or False; got {self.timeline!r}."
      )

  def now(self) -> "SimulatorParams":
    """What holds for a kernel that runs now."""
    return self

  def compile_kernel(self, program: Any) -> kernel_ir.HostFunction:
    """Prepares a kernel to be simulated; see `kernel_ir.KernelSimulator`."""
    return launch.Launch(program, self)


def reset() -> None:
  """Keeps the error of one kernel from being raised again by the next."""
  with contextlib.suppress(Exception):
    jax.effects_barrier()
