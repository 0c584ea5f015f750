"""Breaks each synchronisation of a kernel and reports what nobody notices."""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from coremesh import errors
from coremesh.cli import targets
from coremesh.simulate import mutate


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  targets.add_arguments(parser)
  parser.add_argument(
    "--seeds", type=int, default=3, help="interleavings for each mutant"
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
  with targets.working_folder():
    fn, args = targets.loaded(arguments)
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
  table = Table(
    title=f"Mutants of kernel {kernel}",
    title_justify="left",
    caption="#2: the second operation that the line makes",
    caption_justify="left",
  )
  for name in ("line", "#", "operation", "change", "caught by"):
    table.add_column(name, no_wrap=name in ("line", "#", "change"))
  for mutant, may in zip(mutants, allowed, strict=True):
    if mutant.kernel != kernel:
      continue
    is_line = mutant.change == "delete line"
    table.add_row(
      mutant.place,
      "all" if is_line else f"#{mutant.ordinal}",
      "" if is_line else mutant.brief_operation,
      mutant.change,
      mutant.caught_by or _survival(mutant, may),
    )
  return table


def _survival(mutant: mutate.Mutant, may: bool) -> str:
  what = "SURVIVES" if mutant.is_reached else "SURVIVES: no worker comes there"
  return f"{what} (allowed)" if may else what
