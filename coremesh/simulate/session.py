"""The runs of kernels inside a `with cm.simulation()`."""

import threading

from coremesh import errors
from coremesh.simulate import kernel_timeline
from coremesh.simulate import report as reports
from coremesh.simulate import timeline as timelines
from coremesh.simulate.findings import Finding, SimulationError, error_of
from coremesh.simulate.kernel_run import KernelRun


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

  @property
  def report(self) -> reports.Report:
    """What was run, moved and found: print it, or take its `as_dict()`."""
    return reports.Report(tuple(self.runs))

  @property
  def timeline(self) -> timelines.Timeline:
    """When each worker did what, modelled.

    Raises:
      UnsupportedError: it was not asked for.
    """
    found = [r.timeline for r in self.runs if r.timeline is not None]
    if len(found) < len(self.runs) or not self.runs:
      what = "has no timeline" if self.runs else "has run no kernel"
      raise errors.UnsupportedError(
        f"This simulation {what}. Run its kernels in"
        " `with cm.simulation(timeline=True) as run:`, and take run.timeline"
        " afterwards."
      )
    return timelines.Timeline(kernel_timeline.in_sequence(found))

  def error(self) -> SimulationError | None:
    """What the last run that was wrong raised, None if none was.

    A device that runs on its own may end well after another has failed.
    """
    for run in reversed(self.runs):
      if any(not f.is_warning for f in run.findings):
        return error_of(run.findings)
    return None
