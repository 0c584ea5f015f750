"""The public names of coremesh, and what importing it costs."""

import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
import typing

import pytest

import coremesh as cm

_STUB = pathlib.Path(cm.__file__).with_suffix(".pyi").read_text()
_LINES = _STUB.splitlines()
_NAMES = [line.split()[-1] for line in _LINES]


def test_the_stub_re_exports_one_name_a_line_sorted():
  pattern = re.compile(r"from \.[\w.]+ import (\w+) as \1")
  assert [line for line in _LINES if not pattern.fullmatch(line)] == []
  assert sorted(_LINES) == _LINES
  assert len(set(_NAMES)) == len(_NAMES)


def test_the_package_offers_the_names_of_the_stub():
  assert sorted(cm.__all__) == sorted(_NAMES)
  assert set(_NAMES) <= set(dir(cm))
  assert not [name for name in _NAMES if name.startswith("_")]
  with pytest.raises(AttributeError, match="nothing"):
    cm.nothing  # noqa: B018


@pytest.mark.parametrize("line", _LINES, ids=_NAMES)
def test_a_public_name_is_what_its_module_defines(line):
  _, module, _, name, *_ = line.split()
  home = importlib.import_module(f"coremesh{module}")
  found = getattr(cm, name)
  assert found is getattr(home, name)
  assert found.__module__ == home.__name__


@pytest.mark.parametrize("name", _NAMES)
def test_a_public_name_says_what_it_is(name):
  found = getattr(cm, name)
  if isinstance(found, typing.TypeAliasType):
    return  # Python has no place for its docstring.
  doc = inspect.cleandoc(found.__dict__.get("__doc__") or found.__doc__)
  summary, *rest = doc.split("\n", 2)
  # Not the signature that a dataclass without a docstring gets.
  assert not summary.startswith(f"{name}(")
  # One line, a sentence; then a blank line.
  assert re.fullmatch(r"[A-Z`].*[.:]", summary)
  assert not rest or not rest[0]


def _public_parts(name):
  """The methods and properties that coremesh gives a class."""
  return [
    f"{name}.{part}"
    for owner in inspect.getmro(getattr(cm, name))
    if owner.__module__.startswith("coremesh")
    for part, value in vars(owner).items()
    if not part.startswith("_")
    and (inspect.isfunction(value) or isinstance(value, property))
  ]


_CLASSES = [
  n for n in _NAMES if inspect.isclass(getattr(cm, n)) and n[0].isupper()
]
_PARTS = [
  part
  for name in _CLASSES
  if not issubclass(getattr(cm, name), Exception)
  for part in _public_parts(name)
]


@pytest.mark.parametrize("part", _PARTS)
def test_a_public_method_says_what_it_does(part):
  owner, _, name = part.partition(".")
  found = inspect.getattr_static(getattr(cm, owner), name)
  assert found.__doc__ and found.__doc__.strip()


def _parameters(name):
  found = getattr(cm, name)
  if not inspect.isfunction(found):
    return []
  return list(inspect.signature(found).parameters.values())


@pytest.mark.parametrize("name", _NAMES)
def test_flags_of_a_public_function_are_passed_by_name(name):
  flags = [p for p in _parameters(name) if isinstance(p.default, bool)]
  assert all(p.kind is p.KEYWORD_ONLY for p in flags)


def test_no_public_name_is_the_name_of_a_module():
  # `import coremesh.barriers` makes the module an attribute of the package; a
  # function of that name would be lost.
  modules = {module.name for module in pkgutil.iter_modules(cm.__path__)}
  assert len(modules) > 10
  assert not modules & set(_NAMES)


def test_a_module_that_is_imported_hides_no_public_name():
  before = {name: getattr(cm, name) for name in _NAMES}
  for module in pkgutil.walk_packages(cm.__path__, "coremesh."):
    if not module.name.startswith("coremesh.cli"):
      importlib.import_module(module.name)
  assert {name: getattr(cm, name) for name in _NAMES} == before


def test_every_error_is_public_and_a_core_mesh_error():
  modules = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(cm.__path__, "coremesh.")
    if not module.name.startswith("coremesh.cli")
  ]
  defined = {
    name
    for module in modules
    for name, value in vars(module).items()
    if inspect.isclass(value)
    and issubclass(value, Exception)
    and not issubclass(value, Warning)
    and value.__module__ == module.__name__
    and not name.startswith("_")
  }
  assert defined == {n for n in _NAMES if n.endswith("Error")}
  for name in defined:
    assert issubclass(getattr(cm, name), cm.CoreMeshError)
  # What a caller may already catch: his mistake, or what is not there.
  assert issubclass(cm.ShapeError, ValueError)
  assert issubclass(cm.DTypeError, TypeError)
  assert issubclass(cm.UnsupportedError, NotImplementedError)
  assert issubclass(cm.DeadlockError, cm.SimulationError)
  assert issubclass(cm.SimulationError, RuntimeError)


def _python(program: str) -> str:
  return subprocess.run(
    [sys.executable, "-W", "error", "-c", program],
    capture_output=True,
    check=True,
    text=True,
    timeout=60,
  ).stdout


def test_importing_coremesh_loads_nothing_heavy():
  program = "import sys, coremesh; print(*sys.modules)"
  loaded = set(_python(program).split())
  assert "coremesh" in loaded
  assert not {n for n in loaded if n.split(".")[0] in ("jax", "numpy")}
  assert {n for n in loaded if n.startswith("coremesh")} == {"coremesh"}


def test_a_public_name_loads_what_it_needs_and_no_more():
  program = "import sys; from coremesh import split; print(*sys.modules)"
  loaded = set(_python(program).split())
  assert "coremesh.partition" in loaded
  assert "coremesh.launch" not in loaded
