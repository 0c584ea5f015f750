"""What a command is asked to run: an example, or a function of a module."""

import argparse
import ast
from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import importlib
import inspect
import pathlib
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp

from coremesh import chips, errors, spec
from coremesh.cli import calls, source_files
from coremesh.kernels import specs

type Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""

type Maker = Callable[[chips.Chip], Program]

type _Place = Literal["simulator", "compiler"]

_FORMS = (
  "TARGET is the name of an example, such as swap_cores; or MODULE:NAME or"
  " FILE.py:NAME, where NAME is a function without arguments that contains"
  " kernels, a function of a chip that returns such a function and its"
  " arguments, or a KernelSpec, with :CASE for one of its cases."
)
HELP = (
  "an example, such as swap_cores; MODULE:NAME or FILE.py:NAME, where NAME is a"
  " function without arguments, one of a chip that returns a function and its"
  " arguments, or a spec; FILE.py for its case"
)
_OF_CHIP = (
  "def case(chip): return fn, (x, y), where fn(x, y) runs kernels; or"
  " def case(): fn(x, y)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the arguments that say what to run."""
  parser.add_argument(
    "target",
    metavar="TARGET",
    help=f"{HELP}. Arguments without values are ones",
  )
  add_settings(parser, chip_help="what TARGET is simulated on")


def add_settings(parser: argparse.ArgumentParser, *, chip_help: str) -> None:
  """Declares --chip, with its help, and --config."""
  parser.add_argument("--chip", default="v5p:2x2x1", help=chip_help)
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


def loaded(arguments: argparse.Namespace) -> Program:
  """The function that a target names, and its arguments, to be simulated."""
  make = maker(arguments.target, arguments.config, on="simulator")
  fn, args = make(chips.chip(arguments.chip))
  return fn, jax.tree.map(_with_value, args)


def _with_value(leaf: Any) -> Any:
  is_type = isinstance(leaf, jax.ShapeDtypeStruct)
  return jnp.ones(leaf.shape, leaf.dtype) if is_type else leaf


def maker(
  target: str,
  config: Sequence[str] = (),
  args: Sequence[Any] = (),
  *,
  on: _Place = "compiler",
) -> Maker:
  """What makes the program that a target names, for chips not there.

  Args:
    target: an example; or MODULE:NAME or FILE.py:NAME, where NAME is a function
      without arguments, a function of a chip that returns a function and its
      arguments, or a `spec.KernelSpec`, followed by :CASE if it has several.
      A FILE.py alone means its `case`.
    config: changes to the settings of an example, "FIELD=VALUE".
    args: what to give the function NAME, which then may take any number.
    on: where the devices of an example's mesh are.

  Returns:
    A function of a chip. It returns what `cm.compile` takes, a function and a
    tuple of its arguments, and raises what the target raises for that chip.

  Raises:
    UnsupportedError: there is no such target, or it is none of these.
  """
  module, found, case_name = _named(target)
  if args:
    _num_arguments(found, target)
    calls.check_given(found, args, target)
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
    return lambda chip: (_without_result(found, target), ())
  if wanted == 1:
    return lambda chip: _of_chip(found, chip, target)
  if wanted > 2:
    raise errors.UnsupportedError(
      f"TARGET {target!r} takes {wanted} arguments, {calls.in_words(found)}."
      f" Write one that takes a chip or nothing: {_OF_CHIP}."
      f" {calls.advice(found)}"
    )
  with source_files.importable(module):
    settings = _config(module, found, target, config)

  def of_example(chip: chips.Chip) -> Program:
    with source_files.importable(module):
      build, args = _pair(found(chip, settings), target)
      return build(chip, chip.device_mesh("device", on=on)), args

  return of_example


def _named(target: str) -> tuple[Any, Any, str]:
  """What a target names: its module, the value, and what case of it."""
  place, _, name = target.partition(":")
  is_file = place.endswith(".py")
  if not name and not is_file:
    module = _module(f"examples.{target}", target)
    return module, _attribute(module, "case"), ""
  module = source_files.load(place) if is_file else _module(place, target)
  name, _, case_name = name.partition(":")
  return module, _attribute(module, name or "case"), case_name


def examples() -> list[str]:
  """The examples of the working folder, by name."""
  paths = sorted(pathlib.Path("examples").glob("*.py"))
  return [p.stem for p in paths if "\ndef case(" in p.read_text()]


def everything() -> list[str]:
  """The examples of the working folder, and a case of each coremesh kernel."""
  of_kernels = [
    f"{place}:{next(iter(found.cases))}"
    for place, found in specs.by_place().items()
  ]
  return [*examples(), *of_kernels]


def _num_arguments(function: Any, target: str) -> int:
  """How many arguments a function must be given."""
  if not callable(function):
    raise errors.UnsupportedError(
      f"TARGET {target!r} is a {type(function).__name__}. {_FORMS}"
    )
  return len(calls.required(function))


def _without_result(function: Any, target: str) -> Callable[[], Any]:
  """A function without arguments; one that returns a program is refused."""
  if hasattr(function, "trace"):  # JAX looks at the results of its own.
    return function

  @functools.wraps(function)
  def checked():
    found = function()
    if any(callable(leaf) for leaf in jax.tree.leaves(found)):
      raise errors.UnsupportedError(
        f"TARGET {target!r} takes no chip and returns a function. Only one of"
        f" a chip returns what is to run: {_OF_CHIP}."
      )
    return found

  return checked


def _of_chip(
  found: Callable[..., Any], chip: chips.Chip, target: str
) -> Program:
  """What a function of a chip returns, which must fit together."""
  try:
    made = found(chip)
  except errors.CoreMeshError:
    raise
  except Exception as error:
    if calls.wants_arrays(found, error):
      first, *_ = str(error).splitlines()
      raise errors.UnsupportedError(
        f"TARGET {target!r} takes {calls.in_words(found)} and was called with"
        f" the chip, which it cannot use. {calls.advice(found)} What takes a"
        f" chip names it so: {_OF_CHIP}. It failed with: {first}"
      ) from error
    error.add_note(
      f"TARGET {target!r} was called with the chip, {chip.name}. It must be"
      f" like {_OF_CHIP}."
    )
    raise
  fn, args = _pair(made, target)
  try:
    inspect.signature(fn).bind(*args)
  except ValueError:  # Nobody can say what it takes.
    return fn, args
  except TypeError as error:
    what = f"{getattr(fn, '__name__', 'a function')}{calls.in_words(fn)}"
    raise errors.UnsupportedError(
      f"TARGET {target!r} must return a function and a tuple of its arguments;"
      f" it returned {what} and {len(args)} arguments: {error}. Return what"
      f" takes the arguments, such as {_OF_CHIP}. A maker of a chip and a mesh"
      " is for examples, whose case takes a chip and a config."
    ) from error
  return fn, args


def _pair(found: Any, target: str) -> Program:
  is_pair = isinstance(found, tuple) and len(found) == 2
  if is_pair and callable(found[0]) and isinstance(found[1], tuple | list):
    return found[0], tuple(found[1])
  raise errors.UnsupportedError(
    f"TARGET {target!r} must return a function and a tuple of its arguments;"
    f" got {type(found).__name__}. Write {_OF_CHIP}."
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


def _config(
  module: Any, found: Any, target: str, changes: Sequence[str]
) -> Any:
  name = module.__name__.rpartition(".")[2]
  try:
    settings = importlib.import_module(f"configs.{name}")
  except ModuleNotFoundError as error:
    if not f"configs.{name}.".startswith(f"{error.name}."):
      raise
    raise errors.UnsupportedError(
      f"TARGET {target!r} takes two arguments, as the case of an example does,"
      f" a chip and the settings of configs/{name}.py; there is no module"
      f" {error.name!r} here. Write that file, or {_OF_CHIP}."
      f" {calls.advice(found)}"
    ) from error
  config = _attribute(settings, "get_config")()
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


def _attribute(module: Any, name: str) -> Any:
  if not hasattr(module, name):
    raise errors.UnsupportedError(
      f"TARGET: module {module.__name__!r} has no function {name!r}. {_FORMS}"
    )
  return getattr(module, name)
