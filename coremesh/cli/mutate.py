"""Breaks each synchronisation of a kernel and reports what nobody notices."""

import argparse
import ast
from collections.abc import Callable, Iterator, Sequence
import contextlib
import importlib
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from coremesh import chips, errors
from coremesh.simulate import mutate

_FORMS = (
  "TARGET is the name of an example, such as swap_cores, or MODULE:FUNCTION, a"
  " function without arguments that contains kernels."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument(
    "target",
    metavar="TARGET",
    help="an example, such as swap_cores, or MODULE:FUNCTION",
  )
  parser.add_argument(
    "--seeds", type=int, default=3, help="interleavings for each mutant"
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
  parser.add_argument(
    "--allow",
    action="append",
    default=[],
    metavar="NAME",
    help='a mutant that may survive, such as "swap_cores.py:37 #2 delete"; the'
    " number and the change may be left out. May be repeated",
  )


def run(arguments: argparse.Namespace) -> int:
  """Prints a row for each mutant; 1 if one survives that may not."""
  with _working_folder():
    fn, args = _loaded(arguments)
    report = mutate.mutate(fn, *args, seeds=arguments.seeds)
  for words in arguments.allow:
    if not any(m.is_named_by(words) for m in report.mutants):
      raise errors.UnsupportedError(
        f"--allow {words!r} names no mutant of {arguments.target}: give a line"
        ' of the table, such as "swap_cores.py:37 #2 delete".'
      )
  allowed = [
    any(m.is_named_by(words) for words in arguments.allow)
    for m in report.mutants
  ]
  wrong = sum(
    m.caught_by is None and not may
    for m, may in zip(report.mutants, allowed, strict=True)
  )
  console = Console()
  for kernel in dict.fromkeys(m.kernel for m in report.mutants):
    console.print(_table(kernel, report.mutants, allowed))
  console.print(
    f"{len(report.mutants) - len(report.survivors)} of"
    f" {len(report.mutants)} mutants caught under {report.num_runs} seeds;"
    f" {wrong} survive that may not."
  )
  return 1 if wrong else 0


def _table(
  kernel: str, mutants: Sequence[mutate.Mutant], allowed: Sequence[bool]
) -> Table:
  table = Table(title=f"Mutants of kernel {kernel}", title_justify="left")
  for name in ("line", "#", "operation", "change", "caught by"):
    table.add_column(name, no_wrap=name in ("line", "#", "change"))
  for mutant, may in zip(mutants, allowed, strict=True):
    if mutant.kernel != kernel:
      continue
    is_line = mutant.change == "delete line"
    table.add_row(
      mutant.place,
      "all" if is_line else f"#{mutant.ordinal}",
      "" if is_line else mutant.operation,
      mutant.change,
      mutant.caught_by or _survival(mutant, may),
    )
  return table


def _survival(mutant: mutate.Mutant, may: bool) -> str:
  what = "SURVIVES" if mutant.is_reached else "SURVIVES: no worker comes there"
  return f"{what} (allowed)" if may else what


@contextlib.contextmanager
def _working_folder() -> Iterator[None]:
  """Modules of the working folder can be imported, as with `python -m`."""
  sys.path.insert(0, "")
  try:
    yield
  finally:
    sys.path.remove("")


def _loaded(
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
