"""Records what kernels compile to and take, and checks that none got worse."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
import pathlib

from rich.console import Console
from rich.table import Table

from coremesh import chips, errors
from coremesh._compat import aot
from coremesh.cli import progress, targets
from coremesh.guard import compare, counting, golden, outcomes
from coremesh.guard.compare import Row
from coremesh.profile import rates

DEFAULT_CHIPS = "v5p:2x2x1,v6e:2x2,tpu7x:2x2x1"
_WIDTH = 112  # where no terminal says
_FOLDER = pathlib.Path("guards")
_EPILOGUE = """\
record writes a golden file for each target and chip; commit them. check
compares. Without targets, record and check take all that is recorded.

check fails (1) for: a compile break, more cycles, more VMEM, more bundles where
no prediction tells, fewer operations of XLA's beside a SparseCore kernel, a
prediction or a kernel that is gone. With the versions of jax, jaxlib and libtpu
of the golden any increase counts, else one of more than 2 %; see --tolerance.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.epilog = _EPILOGUE
  parser.add_argument("action", choices=("record", "check"))
  parser.add_argument(
    "targets",
    nargs="*",
    metavar="TARGET",
    help="an example, such as swap_cores, or MODULE:NAME or FILE.py:NAME: a"
    " function without arguments, a function of a chip that returns a function"
    " and its arguments, or a KernelSpec, with :CASE",
  )
  parser.add_argument(
    "--chips",
    metavar="NAME,...",
    help=f"default those recorded of a target, else {DEFAULT_CHIPS}",
  )
  parser.add_argument(
    "--dir",
    type=pathlib.Path,
    default=_FOLDER,
    help="where the golden files are; default guards",
  )
  parser.add_argument(
    "--tolerance",
    type=float,
    metavar="PERCENT",
    help="how much more is not worse yet; default 0 with the versions of the"
    f" golden, else {compare.DEFAULT_TOLERANCE * 100:g}",
  )
  parser.add_argument(
    "--config",
    action="append",
    default=[],
    metavar="FIELD=VALUE",
    help="a setting of an example, to check it against the golden without."
    " May be repeated",
  )


def run(arguments: argparse.Namespace) -> int:
  """Prints a row for each kernel and chip; 1 if a check finds one worse."""
  folder, percent = arguments.dir, arguments.tolerance
  if percent is not None and percent < 0:
    raise errors.UnsupportedError(
      f"--tolerance must be a percentage of 0 or more; got {percent}."
    )
  if arguments.action == "record" and arguments.config:
    raise errors.UnsupportedError(
      "--config is for check: a golden is of the example as it stands."
    )
  with targets.working_folder():
    asked = _asked(arguments)
    if arguments.action == "record":
      return _record(folder, asked)
    tolerance = None if percent is None else percent / 100
    rows = list(_check(folder, asked, arguments.config, tolerance))
  print_rows(rows)
  worse = sum(row.is_worse for row in rows)
  what = f"{worse} of {len(rows)} got worse" if worse else "nothing got worse"
  Console(soft_wrap=True, highlight=False).print(
    f"{len(asked)} programs checked; {what}."
  )
  return 1 if worse else 0


def current(
  target: str, chip: str, config: Sequence[str] = ()
) -> golden.Golden:
  """The golden that a target would have now.

  Raises:
    UnsupportedError: there is no such target.
  """
  found = outcomes.outcome(targets.maker(target, config), chips.chip(chip))
  return golden.Golden(
    target=target,
    chip=chip,
    versions=aot.versions(),
    figures=counting.figures_of(found),
    refusal=found.refusal,
  )


def print_rows(rows: Iterable[Row]) -> None:
  """Prints verdicts as a table."""
  table = Table(box=None, pad_edge=False)
  table.add_column("program", overflow="fold")
  table.add_column("chip", no_wrap=True)
  table.add_column("operation", overflow="fold")
  for name in ("cycles", "µs", "bundles", "VMEM a core"):
    table.add_column(name, justify="right")
  table.add_column("verdict")
  for row in rows:
    table.add_row(
      row.target,
      row.chip,
      row.operation,
      *_changes(row),
      ", ".join(row.verdicts),
      style="bold" if row.is_worse else "",
    )
  console = Console(highlight=False)
  if not console.is_terminal:
    console.width = max(console.width, _WIDTH)
  console.print(table)
  for note, named in _notes(rows).items():
    console.print(f"{', '.join(named)}: {note}", markup=False, soft_wrap=True)


def _asked(arguments: argparse.Namespace) -> list[tuple[str, str]]:
  """The targets and chips that a command is about.

  Raises:
    UnsupportedError: nothing is recorded, and no target is given.
  """
  named = arguments.chips and [
    chips.chip(n.strip()).name for n in arguments.chips.split(",")
  ]
  recorded = [(g.target, g.chip) for g in golden.read_all(arguments.dir)]
  wanted = arguments.targets or list(dict.fromkeys(t for t, _ in recorded))
  if not wanted:
    raise errors.UnsupportedError(
      f"There is no golden in {arguments.dir}, so TARGET must say what to"
      f" {arguments.action}, such as swap_cores or MODULE:FUNCTION."
    )
  defaults = DEFAULT_CHIPS.split(",")
  return [
    (target, chip)
    for target in wanted
    for chip in named or [c for t, c in recorded if t == target] or defaults
  ]


def _record(folder: pathlib.Path, asked: Sequence[tuple[str, str]]) -> int:
  for target, _ in asked:
    targets.maker(target)  # Nothing is written if one is mistyped.
  console = Console(soft_wrap=True, highlight=False)
  for target, chip in progress.shown(asked, "compiling"):
    now = current(target, chip)
    path = golden.write(folder, now)
    console.print(f"{path}: {_in_words(now)}", markup=False)
  return 0


def _check(
  folder: pathlib.Path,
  asked: Sequence[tuple[str, str]],
  config: Sequence[str],
  tolerance: float | None,
) -> Iterator[Row]:
  for target, chip in progress.shown(asked, "compiling"):
    before = golden.read(folder, target, chip)
    try:
      targets.maker(target, config)
    except errors.UnsupportedError as error:
      if before is None or config:
        raise
      yield compare.missing(before, str(error))
      continue
    now = current(target, chip, config)
    if before is None:
      yield compare.new(now)
    else:
      yield from compare.compare(before, now, tolerance=tolerance)


def _in_words(found: golden.Golden) -> str:
  if found.figures is None:
    return f"refused, {found.refusal}"
  return ", ".join(
    f"{o.name} {'?' if o.cycles is None else f'{o.cycles:,}'} cycles"
    for o in found.figures.operations
  )


def _changes(row: Row) -> Iterator[str]:
  """Cycles, µs, bundles and VMEM, before and now where they differ."""
  both = (row.before, row.now)
  cycles = [f and f.cycles for f in both]
  yield _change(row, cycles)
  yield _change(row, [_microseconds(n, row.chip) for n in cycles], share=False)
  for name in ("bundles", "vmem_bytes_per_core"):
    yield _change(row, [f and getattr(f, name) for f in both])


def _change(
  row: Row, values: Sequence[float | None], *, share: bool = True
) -> str:
  """A number, or two with what share the second is more."""
  before, now = values
  texts = ["-" if v is None else f"{v:,}" for v in values]
  if row.before is None or row.now is None or before == now:
    return texts[1] if row.before is None else texts[0]
  text = " -> ".join(texts)
  return (
    f"{text} ({now / before - 1:+.1%})" if share and before and now else text
  )


def _microseconds(cycles: int | None, chip: str) -> float | None:
  """At the clock that a central prediction takes."""
  if not cycles:
    return cycles
  clock_hz = rates.rates(chips.chip(chip)).clock_hz.central
  return float(f"{cycles / clock_hz * 1e6:.4g}")


def _notes(rows: Iterable[Row]) -> dict[str, list[str]]:
  """What else is to be said, with the programs it is about."""
  found: dict[str, list[str]] = {}
  for row in rows:
    if row.note:
      named = f"{row.target} on {row.chip}"
      about = found.setdefault(row.note, [])
      if named not in about:
        about.append(named)
  return found
