"""Tests for coremesh.compiler.workers: real workers, killed and replaced."""

import concurrent.futures
import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh.compiler import workers
from coremesh.errors import CompileError, UnsupportedError

_F32 = jnp.float32
_X = jax.ShapeDtypeStruct((512, 512), _F32)
_KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")


def _compile(number: float = 0.0, chip="v5p", **options) -> cm.Compiled:
  """Compiles a program of its own for each number, so that none is cached."""

  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] + x_ref[...].T * number

  kernel = pl.pallas_call(body, out_shape=_X)
  return cm.compile(kernel, _X, chip=chip, **options)


@pytest.fixture(autouse=True)
def _no_cache(tmp_path, monkeypatch):
  monkeypatch.setenv("COREMESH_CACHE_DIR", str(tmp_path))


@pytest.fixture(autouse=True, scope="module")
def _no_workers():
  workers.pool().end()  # Those of other tests in this process.


def _pid() -> int:
  return workers.pool().pids()[()]


def _is_there(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
  return state.split()[0] != "Z"


def _wait_until(holds, seconds: float = 20.0) -> bool:
  end = time.monotonic() + seconds
  while time.monotonic() < end:
    if holds():
      return True
    time.sleep(0.05)
  return False


# --- shared ----------------------------------------------------------------


def test_chips_and_programs_share_a_worker():
  _compile(1.0)
  pid = _pid()
  for chip in ("v6e:2x2", "tpu7x", "v5p:4x4x4"):
    assert _compile(1.0, chip=chip).code_bytes
  assert _pid() == pid


def test_threads_share_a_worker():
  with concurrent.futures.ThreadPoolExecutor(4) as threads:
    found = list(threads.map(_compile, map(float, range(10, 16))))
  assert not any(c.from_cache for c in found)
  for number, compiled in enumerate(found, start=10):  # each its own answer
    mosaic = compiled.text("mosaic")
    assert f"arith.constant 1.{number % 10}00000e+01 : f32" in mosaic
  assert len(workers.pool().pids()) == 1


def test_a_set_of_flags_takes_a_worker_of_its_own_and_is_heeded():
  assert _compile(2.0).code_bytes
  with pytest.raises(CompileError, match=r"1\.00M are allowed"):
    _compile(2.0, flags={"xla_tpu_scoped_vmem_limit_kib": 1024})
  pids = workers.pool().pids()
  assert len(pids) == 2 and len(set(pids.values())) == 2
  workers.pool().end()  # One worker at a time in the rest of the tests.


def test_a_pool_ends_the_worker_unused_for_longest():
  pool = workers.Pool(most=1)
  try:
    for flag in ("--xla_tpu_scoped_vmem_limit_kib=2048", "--v=0"):
      answer = pool.ask({"topology": None}, flags=[flag], seconds=60)
      assert isinstance(answer, dict) and "KeyError" in answer["failed"]
      [(flags, pid)] = pool.pids().items()
      assert flags == (flag,)
  finally:
    pool.end()
  assert not _is_there(pid)


# --- replaced --------------------------------------------------------------


def test_a_worker_that_ended_between_programs_is_replaced_unseen():
  _compile(3.0)
  pid = _pid()
  os.kill(pid, signal.SIGKILL)
  assert _wait_until(lambda: not workers.pool().pids())
  assert _compile(3.5).code_bytes
  assert _pid() != pid


def _killed_at_work(number: float) -> CompileError:
  """The error of a program whose worker dies."""
  pid = _pid()
  os.kill(pid, signal.SIGSTOP)  # so that it is at work for long
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    answer = thread.submit(_compile, number)
    time.sleep(0.5)
    assert not answer.done()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CompileError) as caught:
      answer.result(30)
  return caught.value


def test_a_worker_killed_at_work_is_an_error_and_is_replaced():
  _compile(4.0)
  pid = _pid()
  assert "died of SIGKILL" in str(_killed_at_work(4.5))
  assert _compile(4.5).code_bytes
  assert _pid() != pid


def test_a_worker_that_dies_on_a_full_disk_says_which(monkeypatch):
  _compile(4.0)
  usage = shutil.disk_usage(".")._replace(free=3 * 1024)
  monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
  text = str(_killed_at_work(4.6))
  assert f"{tempfile.gettempdir()} must have room" in text
  assert "3 KiB are free" in text and "set TMPDIR" in text


def test_a_worker_that_cannot_start_is_an_error(monkeypatch):
  def full(**_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(tempfile, "mkdtemp", full)
  with pytest.raises(CompileError, match="set TMPDIR.*\n.*No space left"):
    _compile(4.7, flags={"xla_tpu_scoped_vmem_limit_kib": 12344})


def test_a_worker_that_takes_too_long_is_ended_and_replaced():
  _compile(5.0)
  pid = _pid()
  os.kill(pid, signal.SIGSTOP)
  start = time.monotonic()
  late = r"within timeout_seconds=0\.5\. It"
  with pytest.raises(CompileError, match=late) as found:
    _compile(5.5, timeout_seconds=0.5)
  assert "on v5p:2x2x1, each core:\n  VMEM" in found.value.advice
  assert "The compiler:" not in str(found.value)
  assert time.monotonic() - start < 10
  assert not _is_there(pid)
  assert _compile(5.5).code_bytes


def test_a_program_libtpu_dies_of_is_an_error_that_says_so():
  any_space = pl.BlockSpec(memory_space=pl.ANY)

  def body(x_hbm, empty_hbm, o_hbm):
    pltpu.sync_copy(x_hbm, o_hbm)

  kernel = pl.pallas_call(
    body, out_shape=_X, in_specs=[any_space] * 2, out_specs=any_space
  )
  empty = jax.ShapeDtypeStruct((0, 128), _F32)
  with pytest.raises(CompileError, match="at least one element.*SIG") as caught:
    cm.compile(kernel, _X, empty, chip="v5p")
  assert caught.value.source.startswith(__file__)
  assert _compile(6.0).code_bytes


def test_a_flag_that_libtpu_has_not_is_named():
  with pytest.raises(CompileError, match="has no flag 'xla_no_such_flag'"):
    _compile(7.0, flags={"xla_no_such_flag": True})


@pytest.mark.parametrize("flags", [{"a b": 1}, {"--a": 1}, {"a": "b --c=d"}])
def test_a_flag_that_is_none_is_refused(flags):
  with pytest.raises(UnsupportedError, match="flags must map names"):
    _compile(flags=flags)


# --- the user's process ----------------------------------------------------

_USER = """
  import os, pathlib, signal, sys
  import jax
  import jax.numpy as jnp
  from jax.experimental import pallas as pl

  devices, config = jax.devices(), dict(jax.config.values)
  before = dict(os.environ)
  import coremesh as cm
  from coremesh.compiler import workers

  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

  x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
  fn = pl.pallas_call(body, out_shape=x)
  compiled = cm.compile(fn, x, chip="v6e:2x2")
  assert compiled.code_bytes and not compiled.from_cache
"""


def _start(program: str, tmp_path, **options) -> subprocess.Popen[str]:
  kept = {k: os.environ[k] for k in _KEPT if k in os.environ}
  places = dict(
    COREMESH_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path)
  )
  return subprocess.Popen(
    [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=kept | {"JAX_PLATFORMS": "cpu"} | places,
    **options,
  )


def test_the_users_process_is_left_as_it_was(tmp_path):
  program = """
    assert dict(os.environ) == before
    assert dict(jax.config.values) == config
    assert jax.devices() == devices
    assert devices[0].platform == "cpu"
    assert "libtpu" not in pathlib.Path("/proc/self/maps").read_text()
    assert float(jnp.ones(3).sum()) == 3
    [pid] = workers.pool().pids().values()
    assert "libtpu" in pathlib.Path(f"/proc/{pid}/maps").read_text()
  """
  process = _start(textwrap.dedent(_USER) + textwrap.dedent(program), tmp_path)
  out, err = process.communicate(timeout=90)
  assert (process.returncode, out, err) == (0, "", "")
  assert not list(tmp_path.glob("coremesh-worker-*"))


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_workers_end_with_the_process_that_started_them(end, tmp_path):
  program = """
    print(*workers.pool().pids().values(), flush=True)
    sys.stdin.read()
  """
  process = _start(
    textwrap.dedent(_USER) + textwrap.dedent(program),
    tmp_path,
    stdin=subprocess.PIPE,
  )
  try:
    pid = int(process.stdout.readline())
    assert _is_there(pid)
    assert list(tmp_path.glob("coremesh-worker-*"))
    if end == "kill":
      process.kill()
  finally:
    process.communicate("", timeout=60)
  assert _wait_until(lambda: not _is_there(pid))
  assert _wait_until(lambda: not list(tmp_path.glob("coremesh-worker-*")))
