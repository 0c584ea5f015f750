"""What a command is asked to run: an example, or a function of a module."""

import argparse
import ast
from collections.abc import Callable, Iterator
import contextlib
import importlib
import sys
from typing import Any

from coremesh import chips, errors

_FORMS = (
  "TARGET is the name of an example, such as swap_cores, or MODULE:FUNCTION, a"
  " function without arguments that contains kernels."
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
  case = _attribute(_module(f"examples.{target}", target), "case")
  config = _attribute(_module(f"configs.{target}", target), "get_config")()
  for change in arguments.config:
    _set(config, change)
  chip = chips.chip(arguments.chip)
  build, args = case(chip, config)
  return build(chip, chip.device_mesh("device", on="simulator")), args


def _set(config: Any, change: str) -> None:
  name, _, value = change.partition("=")
  try:
    config[name]  # A field that is not there would be made.
    config[name] = ast.literal_eval(value)
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
