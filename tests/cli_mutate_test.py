"""Tests of the command `coremesh mutate`."""

import re
import sys

import pytest

from coremesh.cli import main

_TARGET = '''
"""A kernel with a barrier too many."""

import jax
import numpy as np

import coremesh as cm

_CHIP = cm.chip("v5p:2x2x1")


@cm.kernel(mesh=_CHIP.tensor_cores("core"), out=cm.like(0))
def copies(x_hbm, o_hbm):
  rows = cm.slab(x_hbm)
  cm.core_barrier("core")
  cm.copy(x_hbm.at[rows], o_hbm.at[rows])


_COPIES = jax.jit(
  jax.shard_map(
    copies,
    mesh=_CHIP.device_mesh("device", on="simulator"),
    in_specs=jax.P("device"),
    out_specs=jax.P("device"),
  )
)


def case():
  return _COPIES(np.ones((64, 128), np.float32))
'''


@pytest.fixture
def needless(tmp_path, monkeypatch):
  """The name of a target whose barrier nobody needs."""
  name = f"needless_{tmp_path.name}"
  (tmp_path / f"{name}.py").write_text(_TARGET)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("COLUMNS", "200")
  yield name
  sys.modules.pop(name)


def test_an_example_is_mutated_by_its_name(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "120")
  path = list(sys.path)
  assert main.main(["mutate", "swap_cores", "--seeds", "1"]) == 0
  assert sys.path == path
  printed = capsys.readouterr().out
  assert "Mutants of kernel swap_cores" in printed
  assert re.search(r"swap_cores\.py:\d+ │ #1 ", printed)
  assert "18 of 18 mutants caught under 1 seeds; 0 survive" in printed


def test_a_setting_of_an_example_can_be_changed(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "200")
  argv = ["mutate", "sum_blocks", "--seeds", "1"]
  assert main.main(argv) == 1
  assert "SURVIVES: no worker comes there" in _out(capsys)
  changes = ["--config", "rows_per_device=32", "--config", "columns=256"]
  assert main.main([*argv, *changes]) == 0


def _out(capsys) -> str:
  return capsys.readouterr().out


def test_a_survivor_fails_unless_it_is_allowed(needless, capsys):
  argv = ["mutate", f"{needless}:case"]
  assert main.main(argv) == 1
  printed = _out(capsys)
  assert "SURVIVES" in printed
  assert "3 survive that may not" in printed
  place = re.search(rf"({needless}\.py:\d+) │ all", printed)[1]
  assert main.main([*argv, "--allow", place]) == 0
  printed = _out(capsys)
  assert "SURVIVES (allowed)" in printed
  assert "0 survive that may not" in printed
  assert main.main([*argv, "--allow", f"{place} delete line"]) == 1
  assert "2 survive that may not" in _out(capsys)


@pytest.mark.parametrize(
  ("words", "reason"),
  [
    (["nothing"], "there is no module 'examples.nothing' here"),
    (["no_such_module:f"], "there is no module 'no_such_module' here"),
    (["examples.swap_cores:f"], "has no function 'f'"),
    (["swap_cores", "--config", "rowz=5"], "must be FIELD=VALUE"),
    (["swap_cores", "--config", "columns=x y"], "must be FIELD=VALUE"),
    (["swap_cores", "--seeds", "0"], "seeds must be how many"),
    (["swap_cores", "--chip", "v9"], "There is no chip 'v9'"),
    (["swap_cores", "--allow", "a.py:1"], "names no mutant of swap_cores"),
  ],
)
def test_what_cannot_be_mutated_says_why_and_exits_with_2(
  words, reason, capsys
):
  assert main.main(["mutate", *words]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert reason in err
