"""Modules of coremesh import only those below them and to their left."""

import ast
from collections.abc import Iterator
import pathlib

import pytest

import coremesh

_FACTS = (
  *("errors", "_compat", "topology", "tiles"),
  *("generations", "chip_facts", "chips", "spec"),
)
_ROWS = (
  _FACTS,
  (  # device: runs in the traced program.
    *("partition", "scope", "mesh", "barriers", "remote", "exchanges"),
    *("pipelines", "shapes", "place", "collective", "arguments", "hbm"),
    *("launch", "kernels"),
  ),
  # host: never the device row.
  (
    "terminal",
    "perfetto",
    "simulate",
    "compiler",
    "profile",
    "explanation",
    "guard",
    "tune",
  ),
)
# What chooses where a kernel runs chooses how it is simulated; `python -m
# coremesh` is the command.
_EXCEPTIONS = {"place": {"simulate"}, "__main__": {"cli"}}
_TOP = ("cli", "__main__", "pytest_plugin")  # may import all below
_OUTSIDE = {"benchmarks", "configs", "examples", "tests", "tools"}

_PACKAGE = pathlib.Path(coremesh.__file__).parent


def _may_import(module: str) -> set[str]:
  if module in _TOP:
    below = {name for row in _ROWS for name in row} | {module}
    return below | _EXCEPTIONS.get(module, set())
  for row in _ROWS:
    if module in row:
      # A folder is one module: the files in it may import each other.
      left = set(row[: row.index(module) + 1])
      if row is _FACTS:
        return left
      return left | set(_FACTS) | _EXCEPTIONS.get(module, set())
  raise LookupError(module)


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
  """Line and full name of each import, lazy ones and attributes included.

  Args:
    tree: the parsed file.
    package: the package the file is in, such as "coremesh.compiler".
  """
  for node in ast.walk(tree):
    match node:
      case ast.Import(names=names):
        yield from ((node.lineno, alias.name) for alias in names)
      case ast.ImportFrom(module=module, names=names, level=level):
        up = package.split(".")[: len(package.split(".")) - level + 1]
        start = ".".join(
          [*(up if level else []), *([module] if module else [])]
        )
        yield from ((node.lineno, f"{start}.{alias.name}") for alias in names)
      case ast.Attribute(value=ast.Name(id="jax"), attr=attribute):
        yield node.lineno, f"jax.{attribute}"
      case ast.Call(
        func=ast.Name(id="import_module" | "__import__")
        | ast.Attribute(attr="import_module"),
        args=[ast.Constant(value=str(name)), *_],
      ):
        yield node.lineno, name


def _faults(root: pathlib.Path) -> list[str]:
  """What is wrong with the imports of the package at `root`."""
  faults = []
  for path in sorted([*root.rglob("*.py"), *root.rglob("*.pyi")]):
    parts = path.relative_to(root).with_suffix("").parts
    package = ".".join([root.name, *parts[:-1]])
    try:
      own = set() if parts == ("__init__",) else _may_import(parts[0])
    except LookupError:
      faults.append(f"{'/'.join(parts)} has no place in _ROWS")
      continue
    if path.suffix == ".pyi":
      own = {name for row in _ROWS for name in row}
    for line, name in _imports(ast.parse(path.read_text()), package):
      where = f"{path.relative_to(root)}:{line} "
      if name.startswith(("jax._src", "jax.__version__")):
        if parts[0] != "_compat":
          faults.append(f"{where}{name} is for _compat only")
      elif name.split(".")[0] in _OUTSIDE:
        faults.append(f"{where}{name} is outside the package")
      elif name.split(".")[0] == root.name:
        imported = (name.split(".") + ["the package itself"])[1]
        if imported not in own:
          faults.append(f"{where}must not import {imported}")
  return faults


def test_modules_import_only_downwards_and_leftwards():
  assert not _faults(_PACKAGE)


def _graph(root: pathlib.Path) -> dict[str, set[str]]:
  """The modules of a package that each of them imports."""
  paths = {
    ".".join([root.name, *p.relative_to(root).with_suffix("").parts]): p
    for p in root.rglob("*.py")
  }
  graph = {}
  for module, path in paths.items():
    package = module.rpartition(".")[0]
    names = {n for _, n in _imports(ast.parse(path.read_text()), package)}
    folders = {f"{n}.__init__" for n in names}
    # What is imported from a module is named after it.
    whole = {n.rpartition(".")[0] for n in names}
    graph[module] = (names | folders | whole) & set(paths) - {module}
  return graph


def _circle(graph: dict[str, set[str]]) -> list[str]:
  """Modules that import each other in turn, [] if none do."""
  done: set[str] = set()

  def visit(module: str, above: list[str]) -> list[str]:
    if module in above:
      return [*above[above.index(module) :], module]
    if module in done:
      return []
    for other in sorted(graph[module]):
      if found := visit(other, [*above, module]):
        return found
    done.add(module)
    return []

  return next(filter(None, (visit(m, []) for m in sorted(graph))), [])


def test_no_modules_import_each_other_in_a_circle():
  assert not _circle(_graph(_PACKAGE))


@pytest.mark.parametrize(
  "back",
  [
    "from coremesh.tune import search",
    "import coremesh.tune.search",
    "def f():\n  importlib.import_module('coremesh.tune.search')",
  ],
)
def test_a_circle_is_found(back, tmp_path):
  files = {
    "tune/search.py": "from coremesh.tune import cost",
    "tune/cost.py": "from coremesh.tune.model import Model",
    "tune/model.py": back,
  }
  found = _circle(_graph(_write(tmp_path, files)))
  assert set(found) == {
    f"coremesh.tune.{n}" for n in ("search", "cost", "model")
  }


def test_every_module_of_the_package_is_looked_at():
  seen = {p.name for p in _PACKAGE.rglob("*.py")}
  assert {"launch.py", "kernel_ir.py", "aot.py", "__init__.py"} <= seen


def _write(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
  package = root / "coremesh"
  for name, text in {"__init__.py": "", **files}.items():
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return package


_GOOD = {
  "__init__.pyi": "from .launch import kernel as kernel",
  "errors.py": "import numpy as np",
  "_compat.py": "from jax._src import core\nfrom coremesh import errors",
  "chips.py": "from coremesh import _compat, errors, topology",
  "mesh.py": "from coremesh import chips, scope\nimport coremesh.partition",
  "launch.py": "import coremesh.mesh\nfrom coremesh import place as places",
  "kernels/add.py": "from coremesh.launch import kernel",
  "kernels/__init__.py": "from coremesh.kernels import add",
  "compiler/aot.py": "from coremesh.compiler import usage",
  "tune/search.py": "from coremesh import chips, compiler, profile",
  "cli/main.py": "from coremesh import kernels, launch, tune",
  "cli/other.py": "from coremesh.cli import main",
  "__main__.py": "from coremesh.cli import main",
}


def test_a_good_tree_passes(tmp_path):
  assert not _faults(_write(tmp_path, _GOOD))


@pytest.mark.parametrize(
  ("name", "text", "fault"),
  [
    ("errors.py", "from coremesh import _compat", "must not import _compat"),
    ("_compat.py", "import coremesh.chips", "must not import chips"),
    ("chips.py", "from coremesh import mesh", "must not import mesh"),
    ("mesh.py", "from coremesh import launch", "must not import launch"),
    ("mesh.py", "from .barriers import barrier", "must not import barriers"),
    ("mesh.py", "from . import launch", "must not import launch"),
    ("launch.py", "from coremesh.compiler import aot", "not import compiler"),
    ("launch.py", "import coremesh as cm", "must not import the package"),
    ("launch.py", "from coremesh import kernel", "must not import kernel"),
    ("launch.py", "from coremesh import cli", "must not import cli"),
    ("cli/main.py", "from coremesh import pytest_plugin", "pytest_plugin"),
    ("__main__.py", "from coremesh import pytest_plugin", "pytest_plugin"),
    ("compiler/aot.py", "from coremesh import mesh", "must not import mesh"),
    ("compiler/aot.py", "from .. import launch", "must not import launch"),
    ("tune/search.py", "import coremesh.kernels", "must not import kernels"),
    ("compiler/aot.py", "import coremesh.tune.cost", "must not import tune"),
    ("__init__.py", "from coremesh import chips", "must not import chips"),
    ("__init__.pyi", "from .cli import main", "must not import cli"),
    # Lazy imports count.
    (
      "mesh.py",
      "def f():\n  from coremesh import launch",
      "mesh.py:2 must not",
    ),
    ("mesh.py", "if TYPE_CHECKING:\n  import coremesh.launch", "must not"),
    (
      "mesh.py",
      "importlib.import_module('coremesh.launch')",
      "must not import launch",
    ),
    ("chips.py", "from jax._src import core", "jax._src.core is for _compat"),
    ("chips.py", "import jax._src.core as c", "jax._src.core is for _compat"),
    ("chips.py", "from jax import _src", "jax._src is for _compat"),
    ("chips.py", "import jax\njax._src.core", "chips.py:2 jax._src is for"),
    ("chips.py", "jax.__version__", "jax.__version__ is for _compat"),
    ("kernels/add.py", "import tests.support", "outside the package"),
    ("kernels/add.py", "from examples import demo", "outside the package"),
    ("news.py", "", "news has no place in _ROWS"),
    ("compile/aot.py", "", "compile/aot has no place in _ROWS"),
  ],
)
def test_a_bad_tree_fails(name, text, fault, tmp_path):
  [found] = _faults(_write(tmp_path, _GOOD | {name: text}))
  assert fault in found


def test_only_folders_may_hold_what_import_each_other(tmp_path):
  files = {"compiler/dump.py": "from coremesh.profile import bundles"}
  [found] = _faults(_write(tmp_path, _GOOD | files))
  assert found == "compiler/dump.py:1 must not import profile"
