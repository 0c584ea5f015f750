"""Runs the tests of a file in worker processes, one after another.

A worker that hangs ends itself, its test counts as timed out, and a new worker
goes on with the next.
"""

from collections.abc import Callable, Collection, Iterator
import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
from typing import Any, Literal

from benchmarks.jax_suites import stand_in

type Outcome = Literal["passed", "failed", "skipped", "timed out", "crashed"]

_ROOT = pathlib.Path(__file__).parents[2]
_LOAD_SECONDS = 120.0  # To import JAX and the file.
_GRACE_SECONDS = 20.0  # After which a worker that should have ended is killed.
_TAIL_CHARACTERS = 6000


class LoadError(Exception):
  """A file of tests that cannot be imported."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
  """What became of one test.

  Attributes:
    name: its class and method.
    outcome: "timed out" if it took longer than it may, "crashed" if its process
      ended.
    error: the traceback, or why it was skipped.
    seconds: how long it took.
    kernels: how many runs of kernels were simulated.
    findings: the kinds of faults the simulator found.
    num_devices: on how many devices.
  """

  name: str
  outcome: Outcome
  error: str = ""
  seconds: float = 0.0
  kernels: int = 0
  findings: tuple[str, ...] = ()
  num_devices: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
  """A file of tests as on a chip.

  Attributes:
    file: the file.
    chip: the chip's name, such as "v5p:2x2x1".
    seconds: how long a test may take.
  """

  file: pathlib.Path
  chip: str
  seconds: float


type Report = Callable[[int, int], None]


def run(
  suite: Suite,
  *,
  num_devices: int,
  tests: Collection[str] | None = None,
  kernels: Literal["simulate", "compile"] = "simulate",
  report: Report = lambda done, total: None,
) -> dict[str, Result]:
  """Runs tests of a file.

  Args:
    suite: the file and the chip.
    num_devices: how many devices the tests see.
    tests: their names; None for all.
    kernels: whether they are simulated, or only compiled.
    report: called with how many tests of how many have ended.

  Returns:
    The results by name, in the order of the file.

  Raises:
    LoadError: the file cannot be imported.
  """
  results: dict[str, Result] = {}
  left = None if tests is None else list(tests)
  while left is None or left:
    worker = _Worker(
      suite, num_devices=num_devices, tests=left, kernels=kernels
    )
    for message in worker.messages():
      if "tests" in message:
        left = [n for n in message["tests"] if left is None or n in left]
      elif "ended" in message:
        assert left is not None
        result = _result(message, num_devices)
        results[result.name] = result
        left.remove(result.name)
        report(len(results), len(results) + len(left))
    if worker.running is not None:
      assert left is not None
      results[worker.running] = worker.failure(num_devices)
      left.remove(worker.running)
      report(len(results), len(results) + len(left))
    elif not worker.is_done:
      raise LoadError(worker.said)
  return results


def _result(message: dict[str, Any], num_devices: int) -> Result:
  return Result(
    name=message["ended"],
    outcome=message["outcome"],
    error=message["error"],
    seconds=message["seconds"],
    kernels=message["kernels"],
    findings=tuple(message["findings"]),
    num_devices=num_devices,
  )


class _Worker:
  """A worker process, from its start to its end.

  Attributes:
    running: the test that runs, None between tests.
    is_done: whether it has run all it was asked for.
    said: the end of what it printed, once it has ended.
  """

  def __init__(
    self, suite: Suite, *, num_devices: int, tests: Any, kernels: str
  ):
    self.running: str | None = None
    self.is_done = False
    self.said = ""
    self._suite = suite
    self._was_slow = False
    self._output = tempfile.TemporaryFile()
    self._answers, theirs = os.pipe()
    request = dict(
      file=str(suite.file.resolve()),
      chip=suite.chip,
      tests=tests,
      seconds=suite.seconds,
      kernels=kernels,
      answers=theirs,
    )
    environment = stand_in.environment(chip=suite.chip, num_devices=num_devices)
    self._process = subprocess.Popen(
      [sys.executable, "-m", "benchmarks.jax_suites.worker"],
      cwd=_ROOT,
      env=environment,
      stdin=subprocess.PIPE,
      stdout=self._output,
      stderr=subprocess.STDOUT,
      pass_fds=[theirs],
    )
    os.close(theirs)
    assert self._process.stdin is not None
    self._process.stdin.write(json.dumps(request).encode())
    self._process.stdin.close()

  def messages(self) -> Iterator[dict[str, Any]]:
    """What it says, until it ends or hangs."""
    limit = _LOAD_SECONDS
    buffer = b""
    with open(self._answers, "rb", buffering=0) as answers:
      while select.select([answers], [], [], limit)[0]:
        piece = answers.read(1 << 16)
        if not piece:
          break
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
          message = json.loads(line)
          self._note(message)
          yield message
        limit = self._suite.seconds + _GRACE_SECONDS
      else:
        self._was_slow = True
        self._process.kill()
    self._process.wait()
    self._output.seek(0)
    said = self._output.read().decode(errors="replace")
    self.said = said[-_TAIL_CHARACTERS:]
    self._output.close()

  def _note(self, message: dict[str, Any]) -> None:
    self.running = message.get("started")
    self.is_done = self.is_done or "done" in message

  def failure(self, num_devices: int) -> Result:
    """Of the test that ran when the process ended."""
    assert self.running is not None
    is_late = self._was_slow or "Timeout (" in self.said
    return Result(
      name=self.running,
      outcome="timed out" if is_late else "crashed",
      error=self.said,
      seconds=self._suite.seconds if is_late else 0.0,
      num_devices=num_devices,
    )
