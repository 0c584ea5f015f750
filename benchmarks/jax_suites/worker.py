"""Runs the tests of one file one after another; a process of its own.

The request is JSON on standard input: the file, the chip, the tests to run
(None for all), what to do with kernels and how long a test may take. The
answers are lines of JSON on the file descriptor it names: the names of all
tests, then each test when it starts and when it has ended.
"""

from collections.abc import Iterator
import contextlib
import faulthandler
import importlib.util
import json
import os
import pathlib
import sys
import time
import traceback
from typing import Any
import unittest

from jax.experimental.pallas import tpu as pltpu

from benchmarks.jax_suites import opinion, stand_in
import coremesh as cm
from coremesh.simulate import params as simulator
from coremesh.simulate.session import Simulation

_ERROR_CHARACTERS = 6000


class _Outcome(unittest.TestResult):
  """What one test gave: the first failure counts."""

  def __init__(self):
    super().__init__()
    self.outcome = "passed"
    self.error = ""

  def _failed(self, error: Any) -> None:
    if self.outcome != "failed":
      self.outcome = "failed"
      lines = traceback.format_exception(*error)
      self.error = "".join(lines)[-_ERROR_CHARACTERS:]

  def addError(self, test, err):  # noqa: N802  unittest's names.
    self._failed(err)

  def addFailure(self, test, err):  # noqa: N802
    self._failed(err)

  def addSubTest(self, test, subtest, err):  # noqa: N802
    if err is not None:
      self._failed(err)

  def addSkip(self, test, reason):  # noqa: N802
    self.outcome, self.error = "skipped", reason


def _load(path: pathlib.Path) -> dict[str, unittest.TestCase]:
  """The tests of a file by "Class.method", in order."""
  spec = importlib.util.spec_from_file_location(path.stem, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[path.stem] = module
  spec.loader.exec_module(module)
  suite = unittest.defaultTestLoader.loadTestsFromModule(module)
  return {_name(case): case for case in _cases(suite)}


def _name(case: unittest.TestCase) -> str:
  # Its id() shows the parameters, some with their addresses.
  return f"{type(case).__name__}.{case._testMethodName}"


def _cases(suite: Any) -> Iterator[unittest.TestCase]:
  for item in suite:
    if isinstance(item, unittest.TestSuite):
      yield from _cases(item)
    else:
      yield item


def _treated(kernels: str, session: Simulation, chip: cm.Chip) -> Any:
  """The context in which kernels are simulated, or only compiled."""
  if kernels == "compile":
    opinion.compile_kernels(chip)
    return contextlib.nullcontext()
  params = cm.SimulatorParams(on_finding="record", session=session)
  return pltpu.force_tpu_interpret_mode(params)


def _run(case: unittest.TestCase, session: Simulation) -> dict[str, Any]:
  outcome = _Outcome()
  first = len(session.runs)
  start = time.perf_counter()
  case.run(outcome)
  seconds = time.perf_counter() - start
  simulator.reset()  # The error of one kernel is not the next one's.
  runs = session.runs[first:]
  found = sorted({f.kind for r in runs for f in r.findings if not f.is_warning})
  return dict(
    outcome=outcome.outcome,
    error=outcome.error,
    seconds=seconds,
    kernels=len(runs),
    findings=found,
  )


def main() -> None:
  request = json.load(sys.stdin)
  answers = os.fdopen(request["answers"], "w", buffering=1)

  def answer(**fields: Any) -> None:
    print(json.dumps(fields), file=answers)

  chip = cm.chip(request["chip"])
  stand_in.pretend(chip)
  session = Simulation()
  with _treated(request["kernels"], session, chip):
    cases = _load(pathlib.Path(request["file"]))
    answer(tests=list(cases))
    for name, case in cases.items():
      if request["tests"] is not None and name not in request["tests"]:
        continue
      answer(started=name)
      # Ends the process, whatever its threads wait for, and shows where.
      faulthandler.dump_traceback_later(request["seconds"], exit=True)
      result = _run(case, session)
      faulthandler.cancel_dump_traceback_later()
      answer(ended=name, **result)
  answer(done=True)


if __name__ == "__main__":
  main()
