"""The files of JAX's TPU tests, and what becomes of the tests of one."""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib

import jax

from benchmarks.jax_suites import reasons, runner
from benchmarks.jax_suites.runner import Result, Suite

FILES = (
  "tpu_sparsecore_pallas_test.py",
  "tpu_sparsecore_pallas_distributed_test.py",
  "tpu_pallas_mpmd_test.py",
  "tpu_pallas_pipeline_test.py",
  "tpu_pallas_distributed_test.py",
  "tpu_pallas_state_test.py",
  "tpu_pallas_async_test.py",
)
_FOLDERS = ("", "tests/pallas")
DEVICES = (4, 2, 1)  # What is skipped on the first is tried on the others.


class NoSuitesError(Exception):
  """A folder without JAX's TPU tests."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
  """What became of a test, and why if it failed."""

  result: Result
  reason: str | None = None


def find(path: pathlib.Path, names: Sequence[str]) -> list[pathlib.Path]:
  """The files of the suites in a checkout of JAX, or in a folder of files.

  Raises:
    NoSuitesError: some are nowhere, or there is none.
  """
  folders = [path / folder for folder in _FOLDERS]
  found = {
    name: file
    for name in names or FILES
    for file in [f / name for f in reversed(folders)]
    if file.is_file()
  }
  missing = [name for name in names if name not in found]
  if missing or not found:
    raise NoSuitesError(
      f"{path} holds no {', '.join(missing or FILES)}, and neither does its"
      " tests/pallas. PATH must be a checkout of JAX's sources, or a folder of"
      f" its TPU tests; the installed JAX is {jax.__version__}."
    )
  return list(found.values())


def explained(suite: Suite, report: runner.Report) -> list[Explained]:
  """Runs a file as on a chip and says why tests fail.

  Raises:
    LoadError: the file cannot be imported.
  """
  results = runner.run(suite, num_devices=DEVICES[0], report=report)
  for num_devices in DEVICES[1:]:
    skipped = [r.name for r in results.values() if r.outcome == "skipped"]
    if skipped:
      again = runner.run(suite, num_devices=num_devices, tests=skipped)
      results |= {n: r for n, r in again.items() if r.outcome != "skipped"}
  refusals = [r.name for r in results.values() if reasons.expects_refusal(r)]
  compiled: Mapping[str, Result] = {}
  if refusals:
    compiled = runner.run(
      suite, num_devices=1, tests=refusals, kernels="compile"
    )
  return [
    Explained(
      result=result,
      reason=reasons.reason(result, compiled.get(name))
      if result.outcome not in ("passed", "skipped")
      else None,
    )
    for name, result in results.items()
  ]
