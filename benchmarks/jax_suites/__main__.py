r"""JAX's own TPU test suites, run on the CPU in coremesh's simulator.

JAX skips these tests without a TPU. Here each file is run as on each chip: the
CPU devices say that they are the chip's, and `pltpu.force_tpu_interpret_mode`
gives every kernel to the simulator, which notes races and other findings and
goes on. A test passes if its own assertions hold. What is skipped on four
devices is tried on two and on one. Tests that expect the compiler to refuse a
kernel are run once more with `cm.compile` in the simulator's place.

Every test runs in a worker process, and ends there after --seconds: a hang is
one test that timed out. Hypothesis draws 5 examples for each of its tests, the
same each time.

PATH is a checkout of JAX's sources of the version installed (they are not in
the wheel), or a folder that holds some of the files.

To run:
  git clone --depth 1 --branch jax-v0.12.0 https://github.com/jax-ml/jax
  python -m benchmarks.jax_suites jax --chip=v5p --chip=v6e --chip=tpu7x
"""

from collections.abc import Sequence
import dataclasses
import itertools
import json
import pathlib
import sys
from typing import Any

from absl import app, flags
import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from benchmarks.jax_suites import reasons, report, runner, suites
from benchmarks.jax_suites.report import Runs
from benchmarks.jax_suites.runner import Suite

_SLICES = {
  "v4": "v4:2x2x1",
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "tpu7x": "tpu7x:2x2x1",
}

_CHIPS = flags.DEFINE_multi_enum(
  "chip", ["v5p"], list(_SLICES), "As on which chips; may be repeated."
)
_FILES = flags.DEFINE_multi_string(
  "file", None, "Which files of the suites; all if left out."
)
_SECONDS = flags.DEFINE_float(
  "seconds", 60.0, "How long a test may take.", lower_bound=1.0
)
_JSON = flags.DEFINE_string(
  "json", "benchmarks/out/jax_suites.json", "Where to write the results."
)


def _run_all(
  files: Sequence[pathlib.Path], console: Console
) -> tuple[Runs, Sequence[str]]:
  """The tests by file and chip, and what cannot be run at all."""
  runs: dict[tuple[str, str], Sequence[suites.Explained]] = {}
  faults: list[str] = []
  columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
  with Progress(*columns, console=console, transient=True) as progress:
    for chip, file in itertools.product(_CHIPS.value, files):
      task = progress.add_task(f"{file.name} as on {chip}", total=None)

      def note(done: int, total: int, task=task) -> None:
        progress.update(task, completed=done, total=total)

      suite = Suite(file=file, chip=_SLICES[chip], seconds=_SECONDS.value)
      try:
        runs[file.name, chip] = suites.explained(suite, note)
      except runner.LoadError as error:
        faults.append(
          f"{file.name} cannot be run as on {chip}, with JAX"
          f" {jax.__version__}:\n{error}"
        )
      progress.remove_task(task)
  return runs, faults


def _as_json(runs: Runs) -> Any:
  return dict(
    jax=jax.__version__,
    how=__doc__,
    tests=[
      dict(file=file, chip=chip, reason=test.reason)
      | dataclasses.asdict(test.result)
      for (file, chip), tests in runs.items()
      for test in tests
    ],
  )


def _print(runs: Runs, console: Console) -> None:
  console.print(report.outcomes(runs))
  console.print(report.why(runs))
  for (file, chip), tests in runs.items():
    for test in tests:
      where = f"as on {chip}, {file}, {test.result.name}"
      if test.reason == reasons.UNEXPLAINED:
        last = test.result.error.strip().rpartition("\n")[2]
        console.print(f"unexplained {where}: {last}", markup=False)
      if test.reason == reasons.TEST_FAULT:
        text = reasons.fault(test.result)
        console.print(f"fault in the test {where}: {text}", markup=False)
  console.print(
    f"Run on the CPU with jax {jax.__version__}, as on one host of each chip,"
    f" {suites.DEVICES[0]} devices, or fewer where a test asks for fewer."
    " Findings are recorded, and do not fail a test. Why tests are skipped,"
    f" and the traceback of each that failed, is in {_JSON.value}.",
    markup=False,
  )


def main(argv: Sequence[str]) -> None:
  if len(argv) != 2:
    raise app.UsageError("Give one PATH, of a checkout of JAX's sources.")
  try:
    files = suites.find(pathlib.Path(argv[1]), _FILES.value or ())
  except suites.NoSuitesError as error:
    raise app.UsageError(str(error)) from None
  console = Console(width=120)
  runs, faults = _run_all(files, console)
  _print(runs, console)
  path = pathlib.Path(_JSON.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(_as_json(runs), indent=2))
  if faults:
    sys.exit("\n".join(faults))


if __name__ == "__main__":
  app.run(main)
