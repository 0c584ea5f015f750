"""Every example gives the right answer, and compiles where the cores exist."""

import importlib
import pathlib
import re

from absl.testing import flagsaver
import pytest

import coremesh as cm
from coremesh.cli import targets
from examples import common
from tests import support

_ROOT = pathlib.Path(__file__).parents[1]
_NAMES = (
  "add_one",
  "flash_attention",
  "fused_mlp",
  "indexed_add_one",
  "matmul_study",
  "ring_shift",
  "sc_add_one",
  "softmax_rows",
  "sum_blocks",
  "swap_cores",
)
# Several kernels, each to be compared with the one before.
_LONG = ("matmul_study",)
# One size that suits the hardware and one that does not.
_SIZES = {
  "add_one": [{}, dict(rows_per_device=13, columns=200)],
  "flash_attention": [{}, dict(heads=2, kv_heads=2, length=9, head_dim=8)],
  "fused_mlp": [dict(rows_per_row=3), dict(features=32, hidden_per_column=7)],
  "indexed_add_one": [{}, dict(rows_per_device=20, columns=768, first_block=2)],
  "matmul_study": [{}],
  "ring_shift": [{}, dict(steps=11, rows=5, columns=100)],
  "sc_add_one": [{}, dict(rows_per_device=100, columns=200)],
  "softmax_rows": [{}, dict(rows_per_device=3, columns=1000)],
  "sum_blocks": [{}, dict(terms=3, rows_per_device=13, columns=200)],
  "swap_cores": [{}, dict(rows_per_device=5, columns=200)],
}


def _run(name: str, changes: dict, **flags) -> None:
  config = importlib.import_module(f"configs.{name}").get_config()
  config.update(changes)
  with flagsaver.flagsaver(chip=flags.pop("chip", "v5p:2x2x1"), **flags):
    importlib.import_module(f"examples.{name}").main(config)


@pytest.fixture(autouse=True)
def _parsed_flags():
  importlib.import_module("examples.sum_blocks")  # Declares --wrong.
  common.flags.FLAGS(["examples"])


def test_every_example_is_tested_and_short():
  files = {p.stem: p for p in (_ROOT / "examples").glob("*.py")}
  assert set(files) - {"__init__", "common", "demo"} == set(_NAMES)
  for name in _NAMES:
    most = 200 if name in _LONG else 100
    assert len(files[name].read_text().splitlines()) <= most, name


@pytest.mark.parametrize(
  ("name", "changes"), [(n, c) for n in _NAMES for c in _SIZES[n]]
)
def test_an_example_checks_its_own_answer(name, changes, capsys):
  _run(name, changes)
  printed = capsys.readouterr().out
  assert "simulated on v5p:2x2x1" in printed
  assert "bit for bit" in printed or "relative Frobenius error" in printed


def test_the_sparse_core_example_runs_on_every_subcore(capsys):
  with cm.simulation() as run:
    _run("sc_add_one", {})
  printed = capsys.readouterr().out
  assert "4 devices x 4 SparseCores x 16 subcores" in printed
  assert sum(r.num_workers for r in run.runs) == 4 * 4 * 16
  assert not run.findings
  _run("sc_add_one", dict(rows_per_device=64), compile=True)
  assert "compiled for v5p:2x2x1" in capsys.readouterr().out


def test_a_wrong_answer_fails(monkeypatch):
  swap_cores = importlib.import_module("examples.swap_cores")
  monkeypatch.setattr(swap_cores, "expected", lambda x: x)
  with pytest.raises(AssertionError, match="Arrays are not equal"):
    _run("swap_cores", {})
  sc_add_one = importlib.import_module("examples.sc_add_one")
  build = sc_add_one.build
  monkeypatch.setattr(
    sc_add_one, "build", lambda *args: lambda x: build(*args)(-x)
  )
  with pytest.raises(AssertionError, match="Arrays are not equal"):
    _run("sc_add_one", {})


@pytest.mark.parametrize(
  ("name", "changes", "shape"),
  [
    ("softmax_rows", dict(predicted_rows=64), "float32[64, 8192]"),
    (
      "flash_attention",
      dict(predicted_batch=1, predicted_heads=1, predicted_length=256),
      "bfloat16[1, 1, 256, 128]",
    ),
    (
      "fused_mlp",
      dict(predicted_rows=64, predicted_hidden=256, predicted_features=128),
      "bfloat16[64, 128], bfloat16[128, 256]",
    ),
  ],
)
def test_a_kernel_is_timed_beside_xla_when_it_is_compiled(
  name, changes, shape, capsys
):
  _run(name, changes, compile=True)
  printed = capsys.readouterr().out
  for who in ("coremesh", "XLA"):
    assert re.search(rf"{who}, {re.escape(shape)}.*: predicted ", printed)


def test_the_study_of_a_product_makes_a_table_and_a_plot(tmp_path, capsys):
  sizes = dict(predicted_sizes=(256,), searched_blocks=((256,) * 3, (128,) * 3))
  plot = tmp_path / "new" / "study.png"
  _run("matmul_study", dict(**sizes, plot=str(plot)), compile=True)
  printed = capsys.readouterr().out
  assert "Of 2 the best blocks are (256, 256, 256)." in printed
  rates = dict(re.findall(r"^(\S.*\S) +(\d+\.\d)$", printed, re.MULTILINE))
  assert float(rates["naive, one core"]) < float(rates["kernels.matmul"])
  assert "XLA, bfloat16" in rates
  assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  ("wrong", "reason"),
  [("outer", "is left and revisited"), ("garbage", "would overwrite")],
)
def test_each_wrong_sum_shows_its_error(wrong, reason, capsys):
  _run("sum_blocks", {}, wrong=wrong)
  assert reason in capsys.readouterr().out


def test_a_mistyped_setting_is_refused():
  with pytest.raises((AttributeError, KeyError), match="rowz"):
    importlib.import_module("configs.add_one").get_config().rowz  # noqa: B018


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@pytest.mark.parametrize("name", _NAMES)
def test_an_example_compiles_for_every_chip_with_its_cores(name, chip):
  found = cm.chip(chip)
  fn, args = targets.maker(name)(found)
  if name == "swap_cores" and found.tensor_cores_per_device == 1:
    with pytest.raises(cm.CollectiveError, match="there is one worker"):
      cm.compile(fn, *args)
    return
  assert cm.compile(fn, *args, chip=chip).code_bytes > 0


def test_the_ring_compiles_for_512_chips():
  fn, args = targets.maker("ring_shift")(cm.chip("v5p:8x8x8"))
  assert cm.compile(fn, *args).num_devices == 512


@pytest.mark.tpu
@pytest.mark.parametrize("name", _NAMES)
def test_an_example_is_right_on_the_attached_tpu(name, request, capsys):
  _run(name, {}, chip=request.config.getoption("--chip"))
  assert capsys.readouterr().out.startswith(("TPU on", "route kernel: TPU on"))


def _documented_commands():
  files = sorted((_ROOT / "examples").glob("*.py"))
  files += sorted((_ROOT / "benchmarks").glob("*.py"))
  for path in files:
    text = path.read_text().replace("\\\n", " ")
    for line in re.findall(r"^  (python -m \S+.*)$", text, re.MULTILINE):
      yield path.stem, line


def test_every_command_in_a_docstring_names_fields_that_exist():
  commands = list(_documented_commands())
  assert {name for name, _ in commands} >= set(_NAMES)
  for name, command in commands:
    fields = re.findall(r"--config\.(\w+)=", command)
    if fields:
      config = importlib.import_module(f"configs.{name}").get_config()
      assert set(fields) <= set(config), command
