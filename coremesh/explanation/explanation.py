"""What `cm.explain` returns."""

from collections.abc import Mapping
import importlib
import os
import pathlib
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from coremesh import errors
from coremesh.explanation import compare, page, record
from coremesh.explanation.compare import Comparison
from coremesh.explanation.findings import Findings


class Explanation(Findings):
  """What libtpu made of a function, and how long it would take.

  `print` shows it on a page, `rich.print` in colour; the times are predicted,
  not measured.

  Attributes:
    name: of the function.
    chip: what it was compiled for.
    versions: of jax, jaxlib, libtpu and coremesh.
    arguments: a digest of their types, and of integers, which may steer.
    codes: a digest of the machine code of each operation.
    compile_seconds: wall time on this machine.
    is_from_cache: whether the disk had the compiled program.
    memory_bytes_per_device: HBM, and the code, as libtpu counts them.
    ledgers: the buffers of each kernel.
    prediction: the time of each operation; those of `unpredicted` are not in
      it.
    unpredicted: kernels without a time and why, by operation.
    dropped: kernels of the function that the compiled program does without.
    labels: what to call each kernel, by operation.
    rooflines: by operation.
    hot_lines: by operation, of its slowest core.
    activities: what each core does when, by operation.
  """

  def as_dict(self) -> dict[str, Any]:
    """All of it as lists, dicts, numbers and strings, for JSON.

    The keys "format" and "version" say how it is laid out; a key that goes, or
    that means something else, raises the version. Units are in the names.
    """
    return record.of(self)

  def compare(self, before: "Explanation | Mapping[str, Any]") -> Comparison:
    """Sets this beside an earlier one: another kernel, chip or version.

    Args:
      before: an explanation, or what was kept of `as_dict`.

    Raises:
      UnsupportedError: it is neither.
    """
    is_kept = isinstance(before, Mapping)
    kept = before if is_kept else before.as_dict()
    return compare.compare(kept, self.as_dict())

  def save(self, folder: str | os.PathLike[str]) -> tuple[pathlib.Path, ...]:
    """Writes a report, its pictures, the data and a trace into a folder.

    Args:
      folder: made if it is not there.

    Returns:
      The files: `report.html`, which needs no other file; `*.png`;
      `explanation.json`, that is `as_dict()`; `trace.json`, for
      https://ui.perfetto.dev.

    Raises:
      UnsupportedError: the folder cannot be written to, or matplotlib or
        jinja2 is not installed.
    """
    try:  # An extra: who draws nothing need not have it.
      files = importlib.import_module("coremesh.explanation.files")
    except ModuleNotFoundError as error:
      if (error.name or "").split(".")[0] not in ("matplotlib", "jinja2"):
        raise
      raise errors.UnsupportedError(
        f"save needs {error.name}: pip install 'coremesh[plot]'."
      ) from error
    return files.save(self, pathlib.Path(folder))

  def __rich_console__(
    self, console: Console, options: ConsoleOptions
  ) -> RenderResult:
    yield from page.parts(self)

  def __str__(self) -> str:
    return page.text(page.parts(self))
