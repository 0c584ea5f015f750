"""Tests for coremesh.compiler.cache: one folder, many processes."""

import errno
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh._compat import aot
from coremesh.cli import main
from coremesh.compiler import cache, workers
from coremesh.errors import CompileError

_X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  found = tmp_path / "cache"
  monkeypatch.setenv("COREMESH_CACHE_DIR", str(found))
  return found


def _double(x_ref, o_ref):
  o_ref[...] = x_ref[...] * 2


def _halve(x_ref, o_ref):
  o_ref[...] = x_ref[...] / 2


def _compile(body=_double, chip="v6e", **options) -> cm.Compiled:
  return cm.compile(
    pl.pallas_call(body, out_shape=_X), _X, chip=chip, **options
  )


# --- of compiled programs --------------------------------------------------


def test_the_second_time_a_program_comes_from_the_disk(monkeypatch):
  first = _compile()
  monkeypatch.setattr(workers, "pool", None)  # Nobody is to be asked.
  second = _compile()
  assert (first.from_cache, second.from_cache) == (False, True)
  for name in ("chip", "kernels", "operations", "texts", "memory", "costs"):
    assert getattr(second, name) == getattr(first, name)


@pytest.mark.parametrize(
  "change",
  [
    dict(chip="v5p"),
    dict(chip="v6e:1x1"),
    dict(flags={"xla_tpu_scoped_vmem_limit_kib": 20000}),
    dict(body=_halve),
  ],
)
def test_another_program_chip_or_flag_is_compiled(change, folder):
  _compile()
  assert not _compile(**change).from_cache
  assert len(list(folder.iterdir())) == 2
  assert _compile().from_cache
  if "flags" in change:
    workers.pool().end()  # One worker at a time in the rest of the tests.


def test_another_version_of_the_compiler_compiles_again(monkeypatch):
  _compile()
  versions = aot.versions()
  assert {"jax", "jaxlib", "libtpu"} == set(versions)
  monkeypatch.setattr(aot, "versions", lambda: versions | {"libtpu": "0.0.1"})
  assert not _compile().from_cache


def test_a_flag_of_the_environment_is_part_of_the_key(monkeypatch):
  _compile()
  flag = "--xla_tpu_scoped_vmem_limit_kib=20001"
  monkeypatch.setenv("LIBTPU_INIT_ARGS", flag)
  assert not _compile().from_cache
  assert (flag,) in workers.pool().pids()
  workers.pool().end()


def test_a_failure_is_not_kept(folder):
  wide = jax.ShapeDtypeStruct((8, 256), jnp.float32)

  def strided(x_ref, o_ref):
    o_ref[...] = x_ref[:, ::2]

  with pytest.raises(CompileError):
    cm.compile(pl.pallas_call(strided, out_shape=_X), wide, chip="v6e")
  assert not folder.exists()


def _truncated(data: bytes) -> bytes:
  return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
  return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize(
  "spoil", [_truncated, _flipped, lambda data: b"", lambda data: b"{}"]
)
def test_a_corrupt_entry_is_reported_and_compiled_again(spoil, folder):
  first = _compile()
  [entry] = folder.iterdir()
  good = entry.read_bytes()
  entry.write_bytes(spoil(good))
  with pytest.warns(cm.CacheWarning, match=f"{entry.name} is corrupt"):
    second = _compile()
  assert not second.from_cache
  assert second.operations == first.operations
  assert _compile().from_cache  # The entry is whole again, and nobody warns.


_USER = """
  import jax
  import jax.numpy as jnp
  from jax.experimental import pallas as pl
  import coremesh as cm

  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

  x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
  compiled = cm.compile(pl.pallas_call(body, out_shape=x), x, chip="v6e")
  print(len(compiled.text("bundles")))
"""


def test_two_processes_compile_one_program_at_once(folder):
  start = lambda: subprocess.Popen(
    [sys.executable, "-W", "error", "-c", textwrap.dedent(_USER)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  both = [start(), start()]
  answers = [p.communicate(timeout=100) for p in both]
  assert [p.returncode for p in both] == [0, 0], answers
  assert answers[0] == answers[1] and answers[0][1] == ""
  [entry] = folder.iterdir()
  assert entry.suffix == ".compiled"


def test_a_folder_that_cannot_be_written_is_a_warning(folder):
  folder.write_text("a file")
  with pytest.warns(cm.CacheWarning) as caught:
    assert _compile().code_bytes
  assert "cannot keep" in str(caught[-1].message)


# --- of anything -----------------------------------------------------------


_WRITER = """
  import pathlib, sys, time
  from coremesh.compiler import cache

  folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
  disk = cache.Cache(folder=folder, most_bytes=2_000_000)
  end = time.monotonic() + 2
  while time.monotonic() < end:
    for name in ("a", "b"):
      disk.put(name, {"writer": number, "data": [number] * 20_000})
      found = disk.get(name)
      assert found is not None and found["data"] == [found["writer"]] * 20_000
"""


def test_processes_that_write_the_same_entries_read_whole_ones(folder):
  words = [sys.executable, "-W", "error", "-c", textwrap.dedent(_WRITER)]
  processes = [
    subprocess.Popen([*words, str(folder), str(n)], stderr=subprocess.PIPE)
    for n in range(3)
  ]
  printed = [p.communicate(timeout=60)[1] for p in processes]
  assert printed == [b""] * 3
  assert {p.name for p in folder.iterdir()} == {"a.compiled", "b.compiled"}


def _noise(num_bytes: int) -> str:
  return os.urandom(num_bytes // 2).hex()


def _age(folder: pathlib.Path, name: str, seconds: float) -> None:
  then = time.time() - seconds
  os.utime(folder / f"{name}.compiled", (then, then))


def test_the_least_recently_used_make_room(folder):
  disk = cache.Cache(folder=folder, most_bytes=60_000)
  for age, name in ((300, "a"), (200, "b"), (100, "c")):
    disk.put(name, _noise(30_000))  # about 15 kB compressed
    _age(folder, name, age)
  assert disk.contents().num_bytes < 60_000
  assert disk.get("a") is not None  # so that b is the oldest
  disk.put("d", _noise(40_000))
  names = {p.stem for p in folder.iterdir()}
  assert names == {"a", "c", "d"}
  assert disk.contents().num_bytes <= 60_000
  assert disk.get("b") is None


def test_what_is_larger_than_the_cache_is_not_kept(folder):
  disk = cache.Cache(folder=folder, most_bytes=1000)
  disk.put("a", _noise(10_000))
  assert disk.get("a") is None


def test_a_full_disk_is_a_warning_and_leaves_nothing(folder, monkeypatch):
  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, "replace", full)
  disk = cache.Cache(folder=folder)
  with pytest.warns(cm.CacheWarning, match="No space left"):
    disk.put("a", 1)
  assert not list(folder.iterdir())


def test_what_a_killed_writer_left_is_removed_in_time(folder):
  disk = cache.Cache(folder=folder)
  folder.mkdir()
  old, new = folder / "old.part", folder / "new.part"
  old.touch()
  new.touch()
  os.utime(old, (0, 0))
  disk.put("a", 1)
  assert not old.exists() and new.exists()
  disk.clear()
  assert not list(folder.iterdir())


def test_the_folder_is_that_of_the_environment_or_the_users(monkeypatch):
  assert cache.default_folder().name == "cache"
  monkeypatch.delenv("COREMESH_CACHE_DIR")
  monkeypatch.setenv("XDG_CACHE_HOME", "/x")
  assert cache.default_folder() == pathlib.Path("/x/coremesh/compiled")
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", "/home/u")
  expected = pathlib.Path("/home/u/.cache/coremesh/compiled")
  assert cache.default_folder() == expected


def test_keys_differ_where_a_part_moves_to_its_neighbour():
  keys = {
    cache.key({"a": "x", "b": "y"}),
    cache.key({"a": "xy", "b": ""}),
    cache.key({"a": "", "b": "xy"}),
    cache.key({"ab": "xy"}),
  }
  assert len(keys) == 4
  assert cache.key({"b": b"y", "a": "x"}) == cache.key({"a": b"x", "b": "y"})


# --- the command -----------------------------------------------------------


def test_the_command_shows_and_clears(folder, capsys, tmp_path):
  disk = cache.Cache()
  for name in ("a", "b"):
    disk.put(name, _noise(2**20))
  assert main.main(["cache", "show"]) == 0
  printed = capsys.readouterr().out
  size = disk.contents().num_bytes / 2**20
  assert f"{folder}: 2 compiled programs, {size:.1f} MiB." in printed
  assert "below 2048 MiB" in printed
  other = str(tmp_path / "other")
  assert main.main(["cache", "clear", "--dir", other]) == 0
  assert f"{other}: removed 0 compiled" in capsys.readouterr().out
  assert disk.get("a") is not None
  assert main.main(["cache", "clear"]) == 0
  assert "removed 2 compiled programs" in capsys.readouterr().out
  assert not list(folder.iterdir())
