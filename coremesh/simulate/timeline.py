"""The timeline of a simulation, and how it becomes a file: `run.timeline`."""

import dataclasses
import importlib
import os
import pathlib

from coremesh import errors
from coremesh.simulate import kernel_timeline, trace_events


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
  """The kernels of a simulation in model time.

  The times are modelled, not measured: see `assumptions`. A kernel starts when
  the last one of its devices has ended; what is between kernels takes no time.

  Attributes:
    runs: each kernel with the picosecond at which it starts.
  """

  runs: kernel_timeline.Runs

  @property
  def seconds(self) -> float:
    """From the start of the first kernel to the end of the last, modelled."""
    return kernel_timeline.seconds(self.runs)

  @property
  def assumptions(self) -> tuple[str, ...]:
    """What the model takes for granted."""
    return kernel_timeline.assumptions(self.runs)

  def save_png(self, path: str | os.PathLike[str]) -> tuple[pathlib.Path, ...]:
    """Draws a row for each worker.

    Workers of one kind that do the same at the same times share a row if there
    are more than 24. What is still more than 64 rows goes to further pages:
    `out.png`, `out-2.png`, ...

    Args:
      path: of the first page; ends in ".png".

    Returns:
      The pages.

    Raises:
      UnsupportedError: another ending, or matplotlib is not installed.
    """
    path = pathlib.Path(path)
    if path.suffix != ".png":
      raise errors.UnsupportedError(
        f"path must end in '.png'; got {str(path)!r}."
      )
    try:  # An extra: who draws nothing need not have it.
      picture = importlib.import_module("coremesh.simulate.picture")
    except ModuleNotFoundError as error:
      if (error.name or "").split(".")[0] != "matplotlib":
        raise
      raise errors.UnsupportedError(
        "save_png needs matplotlib: pip install 'coremesh[plot]'."
      ) from error
    return picture.save(self.runs, path)

  def save_trace(self, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes a trace that https://ui.perfetto.dev and chrome://tracing open.

    A process is a device and a thread a worker; arrows go from the signal or
    copy to the wait that it ends.

    Args:
      path: of the file, JSON.

    Returns:
      The path.
    """
    return trace_events.save(self.runs, pathlib.Path(path))
