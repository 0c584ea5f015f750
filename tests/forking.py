"""Programs that run as if started afresh, without each importing JAX again."""

from collections.abc import Sequence
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

# It imports what all programs do, but starts nothing of JAX, so that it may
# fork. A child runs a module as `python -m` does.
_SERVER = """
import importlib, json, os, runpy, sys, warnings
for name in sys.argv[1:]:
  importlib.import_module(name)
for line in sys.stdin:
  module, arguments, *files = json.loads(line)
  with warnings.catch_warnings():
    # numpy has threads for products; they take no part in a fork.
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
  if not child:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, file in enumerate(files, 1):
      os.dup2(os.open(file, os.O_WRONLY), descriptor)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()
  status = os.waitpid(child, 0)[1]
  print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Done(NamedTuple):
  """How a program ended, and what it printed."""

  returncode: int
  stdout: str
  stderr: str


class Server:
  """A process that has imported modules, and forks for each program.

  Args:
    modules: what is imported; without effects, as imports should be.
    cwd: where the programs run.
    env: all of their environment.
  """

  def __init__(
    self, modules: Sequence[str], *, cwd: pathlib.Path, env: dict[str, str]
  ):
    self._process = subprocess.Popen(
      [sys.executable, "-c", _SERVER, *modules],
      cwd=cwd,
      env=env,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      start_new_session=True,
    )

  def run(self, module: str, arguments: Sequence[str]) -> Done:
    """What `python -m module *arguments` does."""
    assert self._process.stdin and self._process.stdout
    with tempfile.TemporaryDirectory() as folder:
      files = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
      for file in files:
        file.touch()
      asked = [module, list(arguments), *map(str, files)]
      print(json.dumps(asked), file=self._process.stdin, flush=True)
      code = int(self._process.stdout.readline())
      return Done(code, *(file.read_text() for file in files))

  def end(self) -> None:
    """Ends it, and the program that it runs."""
    os.killpg(self._process.pid, signal.SIGKILL)
    self._process.communicate()
