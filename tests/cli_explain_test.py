"""Tests of the command `coremesh explain`."""

import json
import pathlib
import re
import shlex
import sys

import pytest

from coremesh.cli import explain, main, shapes
from coremesh.errors import UnsupportedError
from coremesh.explanation import files

_TARGET = '''
"""Functions of arrays, with a kernel and without."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

number = 3


def _double(x_vmem, o_vmem):
  o_vmem[...] = x_vmem[...] * 2


def double(x):
  return pl.pallas_call(_double, out_shape=x, name="double")(x)


def _large(x_vmem, o_vmem, large_vmem):
  large_vmem[:8, :128] = x_vmem[...]
  o_vmem[...] = large_vmem[pl.ds(0, 8), :128]


def large(x):
  scratch = [pltpu.VMEM((8192, 4096), x.dtype)]
  return pl.pallas_call(_large, out_shape=x, scratch_shapes=scratch)(x)


def add(x):
  return x + x


jitted = jax.jit(add)


def first(x):
  return double(x[0])


def of_another_chip(chip):
  return double, [chip.gone]


@jax.jit
def axpy(a, x, y):
  return a * x + y


def scaled(x, *, factor):
  return factor * x


def of_chip(chip):
  return double, [jax.ShapeDtypeStruct((chip.sublanes, 256), jnp.float32)]


def case():
  return double(jnp.ones((8, 128), jnp.float32))
'''


@pytest.fixture
def target(tmp_path, monkeypatch):
  """A file in the working folder."""
  (tmp_path / "mine.py").write_text(_TARGET)
  monkeypatch.chdir(tmp_path)
  yield "mine.py"
  sys.modules.pop("mine", None)


def _explained(capsys, *words):
  assert main.main(["explain", *words]) == 0
  return capsys.readouterr()


def test_an_example_is_explained_for_a_chip(capsys):
  printed = _explained(capsys, "add_one@v6e:2x2").out
  assert printed.startswith("add_one on v6e:2x2: ")
  said = " ".join(printed.split())
  assert "predicted from compiled bundles, not measured" in said
  assert "examples/add_one.py" in printed
  assert "32 MiB" in printed  # what a kernel may take of a v6e's VMEM


@pytest.mark.parametrize(
  ("words", "start"),
  [
    (["mine.py"], "case on v5p:2x2x1: "),
    (["mine:case", "--chip", "v6e:2x2"], "case on v6e:2x2: "),
    (["mine.py:of_chip@v6e:2x2"], "double on v6e:2x2: "),
    (["mine.py:double", "--arg", "f32[16,128]"], "double on v5p:2x2x1: "),
  ],
)
def test_a_function_is_named_by_module_or_file(target, capsys, words, start):
  path = list(sys.path)
  assert _explained(capsys, *words).out.startswith(start)
  assert sys.path == path


def test_data_are_alone_on_standard_output_and_can_be_compared_with(
  target, tmp_path, capsys
):
  kept = _explained(capsys, target, "--json")
  assert kept.err == ""
  record = json.loads(kept.out)
  assert record["chip"] == "v5p:2x2x1"
  (tmp_path / "earlier.json").write_text(kept.out)

  words = [target, "--diff", str(tmp_path / "earlier.json")]
  assert "same" in _explained(capsys, *words).out
  data = json.loads(_explained(capsys, *words, "--json").out)
  assert data["format"] == "coremesh comparison"
  assert all(
    d["before"] == d["after"] for d in data["differences"] if "µs" == d["unit"]
  )


def test_two_chips_and_two_kernels_can_be_compared(target, capsys):
  printed = _explained(capsys, target, "--diff", "@v6e:2x2").out
  assert printed.startswith("before case on v6e:2x2")
  assert "\nafter  case on v5p:2x2x1" in printed
  assert "VMEM limit" in printed
  printed = _explained(capsys, target, "--diff", "mine.py:of_chip").out
  assert printed.startswith("before double on v5p:2x2x1")


def test_files_are_written_to_a_new_folder(
  target, tmp_path, capsys, monkeypatch
):
  # Drawing takes long and is tested with cm.explain.
  monkeypatch.setattr(files, "draw", lambda found: {"ledger.png": b"png"})
  folder = tmp_path / "a" / "b"
  said = _explained(capsys, target, "--out", str(folder)).err
  assert f"Written to {folder}: report.html, " in said
  names = {path.name for path in folder.iterdir()}
  assert names == {
    *("report.html", "ledger.png"),
    *("explanation.json", "trace.json"),
  }


def test_a_kernel_that_is_refused_has_its_ledger_and_the_rule(target, capsys):
  words = ["explain", "mine.py:large", "--arg", "f32[8,128]"]
  assert main.main(words) == 2
  out, err = capsys.readouterr()
  assert re.search(r"large_vmem +float32\[8192x4096\] +134,217,728", out)
  assert "128.00M are needed without blocks, 64.00M are there" in err
  assert "mine.py:" in err
  assert main.main([*words, "--json"]) == 2
  assert capsys.readouterr().out == ""


def test_a_chip_without_rates_has_its_ledger_and_the_reason(target, capsys):
  words = ["explain", f"{target}@v4:2x2x1"]
  assert main.main(words) == 2
  out, err = capsys.readouterr()
  assert out.startswith("double on v4:2x2x1, each core:")
  assert "VMEM       8,192 predicted, 8,192 used" in out
  assert "whose rates are known; got v4:2x2x1" in err
  assert main.main([*words, "--json"]) == 2
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
  ("words", "reason"),
  [
    (["nothing"], "there is no module 'examples.nothing' here"),
    (["nothing.py"], "there is no file 'nothing.py'"),
    (["mine.py:none"], "has no function 'none'"),
    (["mine.py:number"], "is a int"),
    (["mine.py:number", "--arg", "f32[8]"], "is a int"),
    (["mine.py:add", "--arg", "f32[8,128]"], "add holds no Pallas kernel"),
    (["mine.py:add", "--arg", "f33[8]"], "must be a type such as f32"),
    (
      ["mine.py:axpy", "--arg", "f32[8,128]"],
      "'mine.py:axpy' takes (a, x, y) and is given 1 --arg: it lacks x, y."
      " Give one --arg for each, in their order, such as --arg f32[128,256].",
    ),
    (["mine.py:axpy"], "with one --arg such as --arg f32[128,256] for each of"),
    (["mine.py:scaled", "--arg", "f32[8]"], "factor must be named, which"),
    (["mine.py:add", *2 * ["--arg", "f32[8]"]], "it takes no more than 1."),
    (["mine.py", "--config", "rows=5"], "--config changes the settings of"),
    (["mine.py", "--chip", "v9"], "There is no chip 'v9'"),
    (["mine.py@v9"], "There is no chip 'v9'"),
    (["mine.py", "--diff", "@v9"], "There is no chip 'v9'"),
    (["mine.py", "--diff", "gone.json"], "must be a file that `coremesh"),
    (["mine.py", "--diff", "nothing.py"], "there is no file 'nothing.py'"),
    (["mine.py", "--out", "mine.py"], "must be a folder that can be written"),
    (["mine.py", "--out", "mine.py/a"], "must be a folder that can be written"),
  ],
)
def test_what_cannot_be_explained_says_why_and_exits_with_2(
  target, words, reason, capsys
):
  assert main.main(["explain", *words]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.startswith("coremesh explain: ")
  assert reason in err


def test_a_missing_compiler_is_said(target, capsys, monkeypatch):
  none = lambda: {"jax": "0.12", "jaxlib": "0.12", "libtpu": "none"}
  monkeypatch.setattr("coremesh._compat.aot.versions", none)
  assert main.main(["explain", target]) == 2
  assert "libtpu, the TPU compiler, is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["double", "add", "jitted", "first"])
def test_a_function_of_arrays_without_any_is_told_of_arg(target, capsys, name):
  assert main.main(["explain", f"mine.py:{name}"]) == 2
  said = capsys.readouterr().err
  assert f"'mine.py:{name}' takes (x) and was called with the chip" in said
  assert "with one --arg such as --arg f32[128,256] for each of (x)." in said


def test_a_fault_of_what_takes_a_chip_keeps_its_traceback(target):
  with pytest.raises(AttributeError, match="has no attribute 'gone'") as caught:
    main.main(["explain", "mine.py:of_another_chip"])
  note = " ".join(caught.value.__notes__)
  assert "was called with the chip" in note
  assert "--arg f32[128,256]" in note


_DOCS = pathlib.Path(__file__).parents[1] / "docs" / "explain.md"


def test_every_command_of_the_docs_is_one(monkeypatch):
  lines = re.findall(
    r"^coremesh (explain [^#>\n]*)", _DOCS.read_text(), re.MULTILINE
  )
  assert len(lines) >= 8
  asked = []
  monkeypatch.setattr(explain, "run", lambda found: asked.append(found) or 0)
  for line in lines:
    assert main.main(shlex.split(line)) == 0
  assert {"report"} == {found.out for found in asked if found.out}
  assert ["f32[4096,512]"] in [found.arg for found in asked]


@pytest.mark.parametrize(
  ("text", "shape", "dtype"),
  [
    ("f32[128,256]", (128, 256), "float32"),
    ("bf16[8]", (8,), "bfloat16"),
    ("s32[]", (), "int32"),
    ("u8[4, 4]", (4, 4), "uint8"),
    ("float8_e4m3fn[16]", (16,), "float8_e4m3fn"),
    ("pred[8]", (8,), "bool"),
  ],
)
def test_an_argument_is_a_dtype_and_sizes(text, shape, dtype):
  found = shapes.parse(text)
  assert (found.shape, found.dtype.name) == (shape, dtype)


@pytest.mark.parametrize("text", ["f32", "f32[a]", "[8]", "f32[8]x", "f32[-1]"])
def test_what_is_no_argument_is_refused(text):
  with pytest.raises(UnsupportedError, match="must be a type such as"):
    shapes.parse(text)
