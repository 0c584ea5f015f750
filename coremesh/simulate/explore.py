"""A function under many interleavings: the first that goes wrong."""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import Any

from coremesh.simulate import repeat
from coremesh.simulate.findings import Finding, error_of
from coremesh.simulate.progress import progress_bar
from coremesh.simulate.transfer import DMA_MODES, DmaMode


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FailingSeed:
  """A run that went wrong, and what to ask for to see it again.

  Attributes:
    seed: the seed.
    dma: when DMAs moved their bytes.
    findings: what was wrong.
  """

  seed: int
  dma: DmaMode
  findings: tuple[Finding, ...]

  def __str__(self) -> str:
    return f"seed={self.seed}, dma={self.dma!r}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exploration:
  """What `cm.explore` found.

  Attributes:
    name: the function's.
    num_runs: how many interleavings were tried.
    failures: those that went wrong, in the order in which they ran.
  """

  name: str
  num_runs: int
  failures: tuple[FailingSeed, ...] = ()

  @property
  def ok(self) -> bool:
    """Whether no run went wrong."""
    return not self.failures

  @property
  def first(self) -> FailingSeed | None:
    """The run that went wrong first."""
    return self.failures[0] if self.failures else None

  @property
  def smallest(self) -> FailingSeed | None:
    """The one with the smallest seed."""
    return min(self.failures, key=lambda f: f.seed, default=None)

  @property
  def findings(self) -> tuple[Finding, ...]:
    """What was wrong in all runs, each fault once."""
    found = (f for failure in self.failures for f in failure.findings)
    return tuple(dict.fromkeys(found))

  def raise_if_failed(self) -> None:
    """Raises what the first failing run found.

    Raises:
      SimulationError, DeadlockError: a run went wrong. A note says under which
        seed.
    """
    if self.first is not None:
      error = error_of(self.first.findings)
      error.add_note(self._how_to_see(self.first))
      raise error

  def __str__(self) -> str:
    runs = "1 interleaving" if self.num_runs == 1 else None
    runs = runs or f"{self.num_runs} interleavings"
    if self.first is None:
      return f"{self.name}: nothing wrong in {runs}."
    lines = [f"{self.name}: {len(self.failures)} of {runs} went wrong."]
    lines += [f"First: {self.first}"]
    lines += [f"  {finding}" for finding in self.first.findings[:_MAX_SHOWN]]
    if len(self.first.findings) > _MAX_SHOWN:
      lines += [f"  ... and {len(self.first.findings) - _MAX_SHOWN} more."]
    if self.smallest is not self.first:
      lines += [f"Smallest seed: {self.smallest}"]
    return "\n".join([*lines, self._how_to_see(self.first)])

  def _how_to_see(self, failure: FailingSeed) -> str:
    if any(f.kind == "unstable" for f in failure.findings):
      return f"To see it: compare the result under cm.simulation({failure})."
    return f"To see it again: with cm.simulation({failure}): ..."


def explore(
  fn: Callable[..., Any],
  *args: Any,
  seeds: int | Sequence[int] = 200,
  races: bool = True,
  dma: DmaMode | Iterable[DmaMode] = DMA_MODES,
  stop_at_first: bool = True,
  progress: bool | None = None,
) -> Exploration:
  """Simulates a function under many interleavings of its cores and DMAs.

  Each run has its own seed, and the next of the DMA modes. The function is
  compiled once. A run goes wrong if the simulator finds a fault, or if the
  result is not bit for bit that of the first run ("unstable").

  Args:
    fn: a function that contains kernels, jitted or not. It is called once for
      each seed, so it must not donate its arguments.
    *args: its arguments.
    seeds: how many seeds to try, from 0; or which, in that order.
    races: look for data races and for memory touched outside its scope.
    dma: when DMAs move their bytes: one mode, or several to take in turn.
    stop_at_first: end with the first run that goes wrong.
    progress: show how far it is; default on a terminal only.

  Returns:
    An `Exploration`: how many ran, and which went wrong.

  Raises:
    UnsupportedError: another value of an argument, or `fn` runs no kernel in
      coremesh's simulator.
    Exception: what `fn` raises itself, with a note of the seed.

  Example:
    cm.explore(swap, x, seeds=1000).raise_if_failed()
  """
  repeat.check_function(fn)
  chosen, modes = repeat.checked_seeds(seeds), repeat.checked_dma(dma)
  params = repeat.RepeatedParams(
    detect_races=races, on_finding="record", session=repeat.Repetition()
  )
  runner = repeat.Runner(fn, args, params)
  name, failures, num_runs = repeat.name_of(fn), [], 0
  reference: repeat.Outcome | None = None
  with progress_bar(f"exploring {name}", len(chosen), progress) as advance:
    for i, seed in enumerate(chosen):
      mode = modes[i % len(modes)]
      outcome = runner.run(seed, mode)
      num_runs += 1
      if reference is None and outcome.outputs is not None:
        reference = outcome
      found = (*outcome.faults, *repeat.unstable(outcome, reference))
      if found:
        failures.append(FailingSeed(seed=seed, dma=mode, findings=found))
        if stop_at_first:
          break
      advance()
  return Exploration(name=name, num_runs=num_runs, failures=tuple(failures))


_MAX_SHOWN = 8
