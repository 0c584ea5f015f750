"""Tests of what the commands take as TARGET."""

import argparse
import sys

import pytest

import coremesh as cm
from coremesh import errors
from coremesh.cli import main, targets

_PROGRAM = '''
"""A kernel of a file, in the forms in which a command takes it."""

import jax
import jax.numpy as jnp

import coremesh as cm
from {package}neighbour import FACTOR


def build(chip, mesh=None):
  @cm.kernel(mesh=chip.tensor_cores("core"), out=cm.like(0))
  def copies(x_hbm, o_hbm):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], o_hbm.at[rows])

  return copies


X = jax.ShapeDtypeStruct((8 * FACTOR, 128), jnp.float32)


def case(chip):
  return build(chip), (X,)


def values(chip):
  return build(chip), (jnp.zeros(X.shape),)


def maker_of_chip(chip):
  return build, (X, X, X)


def a_number(chip):
  return 3


def fails(chip):
  return chip.nothing


def maker():
  return build, (X,)


def example(chip, config):
  return build, (X,)


def of_three(x, y, z):
  return x + y + z
'''


def _write(folder, package=""):
  (folder / "mine.py").write_text(_PROGRAM.format(package=package))
  (folder / "neighbour.py").write_text("FACTOR = 4\n")
  return str(folder / "mine.py")


@pytest.fixture
def file(tmp_path):
  """The path of a program in a folder that is not the working one."""
  yield _write(tmp_path)
  sys.modules.pop("neighbour", None)


@pytest.mark.parametrize("name", ["", ":case", ":values"])
def test_a_file_is_simulated_and_mutated(file, name, capsys):
  path = list(sys.path)
  assert main.main(["simulate", file + name]) == 0
  assert "copies" in capsys.readouterr().out
  assert main.main(["mutate", file + name, "--seeds", "1"]) == 0
  assert "Mutants of kernel copies" in capsys.readouterr().out
  assert sys.path == path


def test_types_without_values_are_simulated_as_ones(file):
  arguments = lambda name: argparse.Namespace(
    target=f"{file}:{name}", config=[], chip="v5p:2x2x1"
  )
  _, (ones,) = targets.loaded(arguments("case"))
  _, (zeros,) = targets.loaded(arguments("values"))
  assert ones.shape == (32, 128) and (ones == 1).all() and (zeros == 0).all()


def test_a_file_of_a_package_finds_its_project_from_elsewhere(
  tmp_path, monkeypatch
):
  package = tmp_path / "project" / "kernels_of_mine"
  package.mkdir(parents=True)
  (package / "__init__.py").touch()
  path = _write(package, package="kernels_of_mine.")
  before = list(sys.path)
  fn, _ = targets.maker(path)(cm.chip("v5p:2x2x1"))
  assert callable(fn)
  assert sys.path == before
  for name in [n for n in sys.modules if n.startswith("kernels_of_mine")]:
    del sys.modules[name]


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("maker_of_chip", r"returned build\(chip\) and 3 arguments: too many"),
    ("a_number", "got int. Write def case"),
    ("maker", "takes no chip and returns a function. Only one of a chip"),
    (
      "example",
      r"and the settings of configs/mine.py; there is no module",
    ),
    (
      "of_three",
      r"takes 3 arguments, \(x, y, z\). Write one that takes a",
    ),
  ],
)
@pytest.mark.parametrize("on", ["simulator", "compiler"])
def test_what_is_of_another_form_is_told_of_it(file, name, reason, on):
  with pytest.raises(errors.UnsupportedError, match=reason):
    fn, args = targets.maker(f"{file}:{name}", on=on)(cm.chip("v5p:2x2x1"))
    fn(*args)


def test_what_fails_with_a_chip_says_that_it_had_one(file):
  with pytest.raises(AttributeError) as caught:
    main.main(["simulate", f"{file}:fails"])
  [note] = caught.value.__notes__
  assert "was called with the chip, v5p:2x2x1" in note
  assert "def case(chip): return fn, (x, y)" in note
