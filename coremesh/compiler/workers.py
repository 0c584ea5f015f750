"""Processes that hold libtpu: started when needed, kept, shared, replaced."""

import atexit
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
from multiprocessing import connection
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from coremesh import topology
from coremesh.compiler import dumps

# libtpu reads its flags once, so every set of flags takes a process of its own.
_MOST_WORKERS = 3

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from coremesh.compiler import worker
worker.main(*map(int, sys.argv[2:5]), sys.argv[5])
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
  """What there is to say of a worker that gave no answer, and has ended.

  Attributes:
    is_late: whether it took too long; else it died.
    status: its exit code; negative for a signal.
    output: the end of what it printed.
    folder: where libtpu wrote.
    free_bytes: the room that was left there.
  """

  is_late: bool
  status: int | None
  output: str
  folder: str
  free_bytes: int


class Worker:
  """One process. It compiles one program at a time."""

  def __init__(self, flags: Sequence[str]):
    self.flags = tuple(flags)
    self.lock = threading.Lock()
    self.last_used = time.monotonic()
    self.is_ended = False
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix="coremesh-worker-"))
    self._output = self._folder / "output.txt"
    requests, self._requests = connection.Pipe(duplex=False)
    self._answers, answers = connection.Pipe(duplex=False)
    with requests, answers, self._output.open("wb") as output:
      given = (requests.fileno(), answers.fileno())
      words = [json.dumps(sys.path), *given, os.getpid(), self._folder]
      self._process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=self._environment(),
        pass_fds=given,
        start_new_session=True,  # Ctrl-C is the parent's to handle.
      )

  @property
  def pid(self) -> int:
    """The number of the process."""
    return self._process.pid

  @property
  def has_ended(self) -> bool:
    """Whether it can answer no more."""
    return self.is_ended or self._process.poll() is not None

  def _environment(self) -> dict[str, str]:
    """That of this process, with what libtpu needs where there is no TPU."""
    init_args = [*self.flags, *dumps.flags(self._folder)]
    return {
      **topology.OFFLINE_LIBTPU,
      **os.environ,
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
      "JAX_PLATFORMS": "cpu",
      "LIBTPU_INIT_ARGS": " ".join(init_args),
    }

  def ask(
    self, request: Mapping[str, Any], *, seconds: float
  ) -> dict[str, Any] | Silence:
    """The answer to a request, unless the worker is ended by it."""
    try:
      with contextlib.suppress(BrokenPipeError):  # It reads as an end below.
        self._requests.send_bytes(pickle.dumps(dict(request)))
      if not self._answers.poll(seconds):
        return self._silence(is_late=True)
      answer = pickle.loads(self._answers.recv_bytes())
    except (EOFError, ConnectionError):
      return self._silence(is_late=False)
    except BaseException:
      self.end()
      raise
    self.last_used = time.monotonic()
    return answer

  def _silence(self, *, is_late: bool) -> Silence:
    status = None
    if not is_late:
      with contextlib.suppress(subprocess.TimeoutExpired):
        status = self._process.wait(5)
    output = self._output.read_text(errors="replace")[-8000:]
    free_bytes = shutil.disk_usage(self._folder).free
    self.end()
    return Silence(
      is_late=is_late,
      status=status,
      output=output,
      folder=str(self._folder.parent),
      free_bytes=free_bytes,
    )

  def end(self) -> None:
    """Ends the process, whatever it does, and removes what it wrote."""
    if self.is_ended:
      return
    self.is_ended = True
    if self._process.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._process.pid, signal.SIGKILL)
      self._process.wait()
    self._requests.close()
    self._answers.close()
    shutil.rmtree(self._folder, ignore_errors=True)


class Pool:
  """The workers of this process, one for each set of flags."""

  def __init__(self, most: int = _MOST_WORKERS):
    self._most = most
    self._lock = threading.Lock()
    self._workers: dict[tuple[str, ...], Worker] = {}

  def ask(
    self, request: Mapping[str, Any], *, flags: Sequence[str], seconds: float
  ) -> dict[str, Any] | Silence:
    """Has a worker with these flags answer; waits while others use it.

    Args:
      request: what `worker.main` takes.
      flags: of libtpu, beyond those for its dumps.
      seconds: how long the worker may take, its start included.

    Returns:
      The answer. A `Silence` if the worker took longer or died; another takes
      its place next time.
    """
    while True:
      worker = self._worker(tuple(flags))
      with worker.lock:
        if not worker.has_ended:  # as it is if another's request ended it
          return worker.ask(request, seconds=seconds)

  def pids(self) -> dict[tuple[str, ...], int]:
    """The processes at work by their flags."""
    with self._lock:
      return {f: w.pid for f, w in self._workers.items() if not w.has_ended}

  def _worker(self, flags: tuple[str, ...]) -> Worker:
    with self._lock:
      found = self._workers.get(flags)
      if found is None or found.has_ended:
        if found is not None:
          self._drop(found)
        self._make_room()
        found = self._workers[flags] = Worker(flags)
      return found

  def _make_room(self) -> None:
    """Ends the workers unused for longest, but none that is at work."""
    idle = sorted(self._workers.values(), key=lambda w: w.last_used)
    for worker in idle:
      if len(self._workers) < self._most:
        return
      self._drop(worker, even_at_work=False)

  def _drop(self, worker: Worker, *, even_at_work: bool = True) -> None:
    """Forgets a worker, and ends it unless a thread awaits its answer."""
    is_idle = worker.lock.acquire(blocking=False)
    if is_idle:
      try:
        worker.end()
      finally:
        worker.lock.release()
    if is_idle or even_at_work:
      del self._workers[worker.flags]

  def end(self) -> None:
    """Ends all workers."""
    with self._lock:
      for worker in self._workers.values():
        worker.end()
      self._workers.clear()


_POOLS: dict[int, Pool] = {}
_POOLS_LOCK = threading.Lock()


def pool() -> Pool:
  """The pool of this process; a forked process has one of its own."""
  with _POOLS_LOCK:
    if os.getpid() not in _POOLS:
      _POOLS[os.getpid()] = found = Pool()
      atexit.register(_end, found, os.getpid())
    return _POOLS[os.getpid()]


def _end(ended: Pool, owner: int) -> None:
  if os.getpid() == owner:
    ended.end()
