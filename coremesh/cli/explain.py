"""Explains a compiled kernel: memory, predicted time, what limits it, where."""

import argparse
from collections.abc import Callable, Sequence
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

from rich.console import Console

from coremesh import chips, errors
from coremesh.cli import shapes, targets
from coremesh.compiler import aot
from coremesh.compiler.ledger import Ledger
from coremesh.explanation import compare, page, record, stages
from coremesh.explanation.explain import explain
from coremesh.explanation.explanation import Explanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument("target", metavar="TARGET[@CHIP]", help=targets.HELP)
  targets.add_settings(parser, chip_help="what a target without @CHIP is for")
  parser.add_argument(
    "--arg",
    action="append",
    default=[],
    metavar="TYPE",
    help="an argument of the function NAME, such as f32[128,256]. May be"
    " repeated",
  )
  parser.add_argument(
    "--out",
    metavar="DIR",
    help="write report.html, pictures, explanation.json and trace.json",
  )
  parser.add_argument(
    "--diff",
    metavar="OTHER",
    help="compare with another TARGET[@CHIP], with the same on @CHIP, or with"
    " the explanation.json of an earlier time",
  )
  parser.add_argument(
    "--json", action="store_true", help="print data instead of a page"
  )


def run(arguments: argparse.Namespace) -> int:
  """Prints a page or data, and writes files; 0."""
  shown = False if arguments.json else None
  folder = _folder(arguments.out) if arguments.out is not None else None
  kept = _kept(arguments.diff)
  found = _explained(arguments.target, arguments, shown)
  answer: Any = found
  if arguments.diff is not None:
    before = kept or _explained(_other(arguments), arguments, shown).as_dict()
    answer = compare.compare(before, found.as_dict())
  if arguments.json:
    print(json.dumps(answer.as_dict(), indent=1))
  else:
    _console().print(answer)
  if folder is not None:
    with stages.on_terminal(shown) as stage:
      stage("Drawing")
      paths = found.save(folder)
    names = ", ".join(path.name for path in paths)
    print(f"Written to {folder}: {names}", file=sys.stderr)
  return 0


def _console() -> Console:
  console = Console(highlight=False)
  if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = page.WIDTH
  return console


def _kept(other: str | None) -> dict[str, Any] | None:
  """What an earlier run wrote, if that is what to compare with."""
  if other is None or not other.endswith(".json"):
    return None
  return record.load(pathlib.Path(other))


def _other(arguments: argparse.Namespace) -> str:
  other = arguments.diff
  is_chip = other.startswith("@")
  return _split(arguments.target)[0] + other if is_chip else other


def _split(target: str) -> tuple[str, str | None]:
  """A target and its chip."""
  name, at, chip = target.rpartition("@")
  # An "@" may also be part of the path of a file.
  if not at or "/" in chip or ".py" in chip:
    return target, None
  return name, chip


def _explained(
  target: str, arguments: argparse.Namespace, shown: bool | None
) -> Explanation:
  name, asked = _split(target)
  chip = chips.chip(asked or arguments.chip)
  given = [shapes.parse(text) for text in arguments.arg]
  with targets.working_folder():
    make = targets.maker(name, arguments.config, given)
    fn, args = _made(make, chip)
    try:
      return explain(fn, *args, chip=chip, progress=shown)
    except (errors.CompileError, errors.UnsupportedError) as error:
      if not arguments.json:
        is_refused = isinstance(error, errors.CompileError)
        ledgers = aot.ledgers if is_refused else _compiled_ledgers
        _print_ledgers(ledgers, fn, args, chip, said=str(error))
      raise


def _compiled_ledgers(
  fn: Any, *args: Any, chip: chips.Chip
) -> Sequence[Ledger]:
  """What the kernels hold that no time is known of."""
  return aot.compile(fn, *args, chip=chip).ledgers


def _made(make: targets.Maker, chip: chips.Chip) -> targets.Program:
  try:
    return make(chip)
  except errors.CoreMeshError:
    raise
  except Exception as error:
    error.add_note(
      "If it is a function of arrays say of which, with --arg f32[128,256]."
    )
    raise


def _print_ledgers(
  ledgers: Callable[..., Sequence[Ledger]],
  fn: Any,
  args: Any,
  chip: chips.Chip,
  *,
  said: str,
) -> None:
  """What a program holds, or would have held, where that can be said."""
  try:
    found = ledgers(fn, *args, chip=chip)
  except Exception:  # What is wrong with it is about to be said.
    return
  for ledger in found:
    if str(ledger) not in said:
      print(ledger)


def _folder(name: str) -> pathlib.Path:
  """The folder, made, before anything is compiled for it.

  Raises:
    UnsupportedError: it cannot be written to.
  """
  folder = pathlib.Path(name)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise errors.UnsupportedError(
      f"--out {name!r} must be a folder that can be written to: {error}"
    ) from error
  return folder
