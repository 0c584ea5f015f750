"""Tests for the command coremesh."""

import pathlib
import runpy
import sys

import pytest

import coremesh as cm
from coremesh.cli import main

_MODULE = pathlib.Path(cm.__path__[0]) / "__main__.py"


def test_chips_prints_one_column_for_each_chip(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "200")
  assert main.main(["chips", "v5p:2x2x1", "tpu7x"]) == 0
  printed = capsys.readouterr().out
  assert "v5p:2x2x1" in printed
  assert "tpu7x:2x2x1" in printed
  [row] = [r for r in printed.splitlines() if "lanes a vector subcore" in r]
  assert row.replace("│", "").split()[-2:] == ["8", "16"]


def test_the_module_is_the_command(capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["coremesh", "plan", "10", "4"])
  with pytest.raises(SystemExit) as caught:
    runpy.run_path(str(_MODULE), run_name="__main__")
  assert caught.value.code == 0
  assert "imbalance 1.200" in capsys.readouterr().out


def test_plan_prints_every_share_and_the_imbalance(capsys):
  assert main.main(["plan", "10", "4"]) == 0
  printed = capsys.readouterr().out
  assert "imbalance 1.200" in printed
  assert len(printed.splitlines()) == 2 + 4 + 1


@pytest.mark.parametrize(
  ("argv", "reason"),
  [
    (["plan", "10", "4", "--even"], "must be a multiple"),
    (["plan", "10", "0"], "workers"),
    (["chips", "v9"], "There is no chip 'v9'"),
  ],
)
def test_a_request_that_cannot_be_met_says_why_and_exits_with_2(
  argv, reason, capsys
):
  assert main.main(argv) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert reason in err


@pytest.mark.parametrize("command", [None, *main.COMMANDS])
def test_every_command_says_how_it_is_used(command, capsys):
  with pytest.raises(SystemExit, match="0"):
    main.main([*([command] if command else []), "--help"])
  printed = capsys.readouterr().out
  assert printed.startswith(f"usage: coremesh {command or '[-h]'}")
  assert "options:" in printed


def test_an_unknown_command_is_refused(capsys):
  with pytest.raises(SystemExit, match="2"):
    main.main(["fly"])
  assert "invalid choice: 'fly'" in capsys.readouterr().err
