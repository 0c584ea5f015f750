"""What a command is asked to run: an example, or a function of a module."""

import argparse
import ast
from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import sys
from typing import Any

from coremesh import chips, errors, kernels, spec

type Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""

type Maker = Callable[[chips.Chip], Program]

_FORMS = (
  "TARGET is the name of an example, such as swap_cores, or MODULE:FUNCTION, a"
  " function without arguments that contains kernels."
)

_COMPILED_FORMS = (
  "TARGET is the name of an example, such as swap_cores; or MODULE:NAME or"
  " FILE.py:NAME, where NAME is a function without arguments that contains"
  " kernels, a function of a chip that returns such a function and its"
  " arguments, or a KernelSpec, with :CASE for one of its cases."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the arguments that say what to run."""
  parser.add_argument(
    "target",
    metavar="TARGET",
    help="an example, such as swap_cores, or MODULE:FUNCTION",
  )
  parser.add_argument(
    "--chip", default="v5p:2x2x1", help="what an example is simulated on"
  )
  parser.add_argument(
    "--config",
    action="append",
    default=[],
    metavar="FIELD=VALUE",
    help="a setting of an example, such as rows=5. May be repeated",
  )


@contextlib.contextmanager
def working_folder() -> Iterator[None]:
  """Modules of the working folder can be imported, as with `python -m`."""
  sys.path.insert(0, "")
  try:
    yield
  finally:
    sys.path.remove("")


def loaded(
  arguments: argparse.Namespace,
) -> tuple[Callable[..., Any], Any]:
  """The function that a target names, and its arguments."""
  target = arguments.target
  if ":" in target:
    module, _, name = target.partition(":")
    return _attribute(_module(module, target), name), ()
  module = _module(f"examples.{target}", target)
  case = _attribute(module, "case")
  config = _config(module, target, arguments.config)
  chip = chips.chip(arguments.chip)
  build, args = case(chip, config)
  return build(chip, chip.device_mesh("device", on="simulator")), args


def maker(
  target: str, config: Sequence[str] = (), args: Sequence[Any] = ()
) -> Maker:
  """What makes the program that a target names, for chips not there.

  Args:
    target: an example; or MODULE:NAME or FILE.py:NAME, where NAME is a function
      without arguments, a function of a chip that returns a function and its
      arguments, or a `spec.KernelSpec`, followed by :CASE if it has several.
      A FILE.py alone means its `case`.
    config: changes to the settings of an example, "FIELD=VALUE".
    args: what to give the function NAME, which then may take any number.

  Returns:
    A function of a chip. It returns what `cm.compile` takes, a function and a
    tuple of its arguments, and raises what the target raises for that chip.

  Raises:
    UnsupportedError: there is no such target, or it is none of these.
  """
  place, _, name = target.partition(":")
  is_file = place.endswith(".py")
  if name or is_file:
    module = _file(place) if is_file else _module(place, target)
    name, _, case_name = name.partition(":")
    found = _attribute(module, name or "case", _COMPILED_FORMS)
  else:
    module = _module(f"examples.{target}", target)
    case_name, found = "", _attribute(module, "case")
  if args:
    _num_arguments(found, target)
    return lambda chip: (found, tuple(args))
  if isinstance(found, spec.KernelSpec):
    program = _case_of_spec(found, case_name, target)
    return lambda chip: program
  wanted = _num_arguments(found, target)
  if config and wanted != 2:
    raise errors.UnsupportedError(
      f"--config changes the settings of an example, and TARGET {target!r} is"
      " none."
    )
  if wanted == 0:
    return lambda chip: (found, ())
  if wanted == 1:
    return lambda chip: _function_and_arguments(found(chip), target)
  settings = _config(module, target, config)

  def of_example(chip: chips.Chip) -> Program:
    build, args = found(chip, settings)
    return build(chip, chip.device_mesh("device", on="compiler")), args

  return of_example


def examples() -> list[str]:
  """The examples of the working folder, by name."""
  paths = sorted(pathlib.Path("examples").glob("*.py"))
  return [p.stem for p in paths if "\ndef case(" in p.read_text()]


def everything() -> list[str]:
  """The examples of the working folder, and a case of each coremesh kernel."""
  found: dict[str, str] = {}
  for module in pkgutil.iter_modules(kernels.__path__):
    place = f"{kernels.__name__}.{module.name}"
    for name, value in vars(importlib.import_module(place)).items():
      if isinstance(value, spec.KernelSpec):
        found.setdefault(
          value.name, f"{place}:{name}:{next(iter(value.cases))}"
        )
  return [*examples(), *found.values()]


def _num_arguments(function: Any, target: str) -> int:
  """How many arguments a function must be given."""
  if not callable(function):
    raise errors.UnsupportedError(
      f"TARGET {target!r} is a {type(function).__name__}. {_COMPILED_FORMS}"
    )
  return sum(
    p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    for p in inspect.signature(function).parameters.values()
  )


def _function_and_arguments(found: Any, target: str) -> Program:
  is_pair = isinstance(found, tuple) and len(found) == 2
  if is_pair and callable(found[0]) and isinstance(found[1], tuple | list):
    return found[0], tuple(found[1])
  raise errors.UnsupportedError(
    f"TARGET {target!r} must return a function and a tuple of its arguments;"
    f" got {type(found).__name__}."
  )


def _case_of_spec(found: spec.KernelSpec, name: str, target: str) -> Program:
  if not name and len(found.cases) == 1:
    [name] = found.cases
  if name not in found.cases:
    raise errors.UnsupportedError(
      f"TARGET {target!r} must end in one of the cases of {found.name}:"
      f" {', '.join(f':{n}' for n in found.cases)}."
    )
  case = found.cases[name]
  return functools.partial(found.function, **case.options), case.args


def _config(module: Any, target: str, changes: Sequence[str]) -> Any:
  name = module.__name__.rpartition(".")[2]
  config = _attribute(_module(f"configs.{name}", target), "get_config")()
  for change in changes:
    _set(config, change)
  return config


def _set(config: Any, change: str) -> None:
  name, _, value = change.partition("=")
  try:
    is_text = isinstance(config[name], str)  # A new field would be made.
    config[name] = value if is_text else ast.literal_eval(value)
  except (KeyError, SyntaxError, TypeError, ValueError) as error:
    raise errors.UnsupportedError(
      f"--config {change!r} must be FIELD=VALUE, a field of {sorted(config)}"
      f" and a value of its type: {error}"
    ) from error


def _module(name: str, target: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if not f"{name}.".startswith(f"{error.name}."):
      raise
    raise errors.UnsupportedError(
      f"TARGET {target!r}: there is no module {error.name!r} here. {_FORMS}"
    ) from error


def _file(path: str) -> Any:
  """The module in a file, which may import its neighbours."""
  file = pathlib.Path(path)
  if not file.is_file():
    raise errors.UnsupportedError(f"TARGET: there is no file {path!r}.")
  found = importlib.util.spec_from_file_location(file.stem, file)
  assert found is not None and found.loader is not None  # It ends in .py.
  module = importlib.util.module_from_spec(found)
  sys.path.insert(0, str(file.parent))
  try:
    found.loader.exec_module(module)
  finally:
    sys.path.remove(str(file.parent))
  return module


def _attribute(module: Any, name: str, forms: str = _FORMS) -> Any:
  if not hasattr(module, name):
    raise errors.UnsupportedError(
      f"TARGET: module {module.__name__!r} has no function {name!r}. {forms}"
    )
  return getattr(module, name)
