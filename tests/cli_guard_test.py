"""Tests of the command `coremesh guard`."""

import importlib.metadata
import json
import pathlib
import re

import pytest

from coremesh.cli import guard, main, targets
from coremesh.guard.figures import OTHERS

_ROOT = pathlib.Path(__file__).parents[1]

_KERNEL = """
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS = 2048


def double(chip):
  def double(x_ref, o_ref, scratch):
    {body}

  x = jax.ShapeDtypeStruct((ROWS, 1024), "float32")
  block = pl.BlockSpec(({rows}, 1024), lambda i: (i, 0))
  kernel = pl.pallas_call(
    double,
    out_shape=x,
    grid=(ROWS // {rows},),
    in_specs=[block],
    out_specs=block,
    scratch_shapes=[pltpu.VMEM(({rows}, 1024), "float32")],
  )
  return kernel, (x,)
"""
_BODY = "o_ref[...] = x_ref[...] * 2"


class _Project:
  """A folder with a kernel that can be written anew, and its goldens."""

  def __init__(self, capsys):
    self._capsys = capsys
    self.write()

  def write(self, rows=256, body=_BODY):
    pathlib.Path("kernels.py").write_text(_KERNEL.format(rows=rows, body=body))

  def guard(self, *words) -> tuple[int, str]:
    """The exit code, and what is printed."""
    code = main.main(["guard", *words])
    out, err = self._capsys.readouterr()
    return code, out + err

  def verdict(self, *words) -> tuple[int, str]:
    """The exit code of a check, and its only verdict."""
    code, printed = self.guard("check", *words)
    [row] = [r for r in printed.splitlines() if r.startswith("kernels.py")]
    return code, row.rstrip().split("  ")[-1].strip()


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("COLUMNS", "160")
  return _Project(capsys)


@pytest.fixture
def recorded(project):
  words = ("record", "kernels.py:double", "--chips", "v6e:2x2")
  assert project.guard(*words)[0] == 0
  return project


def _golden() -> pathlib.Path:
  [path] = pathlib.Path("guards").glob("*/*.json")
  return path


def test_what_did_not_change_is_the_same_and_recorded_the_same(recorded):
  before = _golden().read_bytes()
  assert recorded.verdict() == (0, "same")
  assert recorded.verdict("kernels.py:double") == (0, "same")
  assert recorded.guard("record")[0] == 0
  assert _golden().read_bytes() == before


@pytest.mark.parametrize(
  "changes",
  [
    dict(rows=64),  # Blocks cut smaller, so that their latency counts.
    # A copy that nobody needs.
    dict(body="pltpu.sync_copy(x_ref, scratch); o_ref[...] = scratch[...] * 2"),
  ],
)
def test_a_kernel_that_is_slowed_is_caught(changes, recorded):
  recorded.write(**changes)
  code, printed = recorded.guard("check")
  assert code == 1 and "slower" in printed
  assert "1 of 1 got worse" in printed
  before = json.loads(_golden().read_text())["figures"]["operations"][0]
  assert f"{before['cycles']:,} -> " in printed
  change = re.search(r"([\d,]+) -> ([\d,]+) \((\+\d+\.\d%)\)", printed)
  assert change is not None
  old, new = (int(n.replace(",", "")) for n in change.groups()[:2])
  assert change[3] == f"{new / old - 1:+.1%}"
  times = re.search(r" (\d+\.\d+) -> (\d+\.\d+) ", printed)
  assert times is not None  # The same clock, so in the same ratio.
  ratio = float(times[2]) / float(times[1])
  assert ratio == pytest.approx(new / old, rel=2e-3)  # four digits each


def test_a_kernel_that_is_faster_passes_though_not_if_it_takes_more_vmem(
  recorded,
):
  recorded.write(rows=64)
  recorded.guard("record")
  recorded.write(rows=256)
  assert recorded.verdict() == (1, "faster, more VMEM")
  recorded.write(rows=64, body="o_ref[:32] = x_ref[:32] * 2")
  assert recorded.verdict() == (0, "faster")


def test_a_compile_break_is_caught_and_says_why(recorded):
  recorded.write(body="o_ref[...] = x_ref[pl.ds(1, 256), :1000]")
  code, printed = recorded.guard("check")
  assert code == 1 and "compile break" in printed
  recorded.write(body="o_ref[...] = oh_ref[...]")
  code, printed = recorded.guard("check")
  assert code == 1 and "compile break" in printed
  assert "NameError: name 'oh_ref' is not defined" in printed


def test_a_tolerance_can_be_given(recorded):
  recorded.write(rows=128)
  assert recorded.verdict() == (1, "slower")
  assert recorded.verdict("--tolerance", "50") == (0, "same")


def test_golden_of_other_versions_are_said_to_be(recorded):
  text = _golden().read_text()
  libtpu = importlib.metadata.version("libtpu")
  _golden().write_text(text.replace(libtpu, "0.0.1"))
  code, printed = recorded.guard("check")
  assert code == 0 and "same" in printed
  assert f"versions differ: libtpu 0.0.1 -> {libtpu}" in printed


def test_a_program_that_is_gone_and_one_that_is_new_are_said_to_be(recorded):
  assert recorded.verdict("--chips", "v5p:2x2x1") == (0, "new")
  pathlib.Path("kernels.py").write_text("")
  code, printed = recorded.guard("check")
  assert code == 1 and "missing" in printed
  assert "has no function 'double'" in printed


def test_a_corrupt_golden_names_itself_and_exits_with_2(recorded):
  _golden().write_text("{")
  code, printed = recorded.guard("check")
  assert code == 2
  assert f"{_golden()} is no golden that this version" in printed


@pytest.mark.parametrize(
  ("words", "reason"),
  [
    (["check"], "There is no golden in guards, so TARGET must say what to"),
    (["record"], "so TARGET must say what to record"),
    (["record", "nothing"], "there is no module 'examples.nothing' here"),
    (["record", "nothing.py"], "there is no file 'nothing.py'"),
    (["record", "kernels.py:triple"], "has no function 'triple'"),
    (["record", "kernels.py:ROWS"], "TARGET 'kernels.py:ROWS' is a int"),
    (["record", "kernels.py:double", "--chips", "v9"], "There is no chip 'v9'"),
    (["check", "kernels.py:double", "--tolerance", "-1"], "0 or more; got -1"),
    (["check", "kernels.py:double", "--config", "a=1"], "is none"),
    (["record", "kernels.py:double", "--config", "a=1"], "--config is for"),
  ],
)
def test_a_request_that_cannot_be_met_says_why_and_exits_with_2(
  words, reason, project
):
  code, printed = project.guard(*words)
  assert code == 2 and reason in printed
  assert not pathlib.Path("guards").exists()


def test_without_a_compiler_nothing_is_recorded(project, monkeypatch):
  monkeypatch.setattr(
    guard.outcomes.aot.jax_aot, "versions", lambda: {"libtpu": "none"}
  )
  monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
  code, printed = project.guard("record", "kernels.py:double")
  assert code == 2 and "libtpu, the TPU compiler, is not installed" in printed
  assert not pathlib.Path("guards").exists()


# --- our own kernels -------------------------------------------------------


@pytest.mark.parametrize("chip", guard.DEFAULT_CHIPS.split(","))
def test_no_example_or_kernel_got_worse(chip, monkeypatch, capsys):
  """If one did for a good reason: coremesh guard record."""
  monkeypatch.chdir(_ROOT)
  monkeypatch.setenv("COLUMNS", "160")
  folder = pathlib.Path("guards", chip.replace(":", "-"))
  recorded = [path.stem for path in folder.glob("*.json")]
  for target in targets.everything():
    name = target.rpartition(":")[0].replace(":", "-") or target
    assert any(stem.startswith(name) for stem in recorded), target
  code = main.main(["guard", "check", "--chips", chip])
  assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", ["swap_cores", "sc_add_one"])
def test_both_routes_give_one_kernel(name, monkeypatch):
  """What docs/guard.md says of the public slow-down of pl.kernel."""
  monkeypatch.chdir(_ROOT)
  with targets.working_folder():
    one, other = (
      guard.current(name, "v5p:2x2x1", [f"route={route}"])
      for route in ("kernel", "core_map")
    )
  assert one.figures and other.figures
  kernels = [g.figures.operation(name) for g in (one, other)]
  for figure in ("bundles", "cycles", "vmem_bytes_per_core"):
    assert len({getattr(k, figure) for k in kernels}) == 1
  around = [g.figures.operation(OTHERS) for g in (one, other)]
  # The buffer that core_map writes to is allocated by an operation of its own.
  assert around[1].bundles - around[0].bundles == 1
