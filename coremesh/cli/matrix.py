"""Compiles programs for every chip; prints what they take, or why they do not.

Every cell is the compiler's word or predicted from its code; nothing is
measured.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coremesh import chips, errors, generations
from coremesh._compat import aot
from coremesh.cli import progress, targets
from coremesh.compiler.ledger import Ledger
from coremesh.guard import outcomes
from coremesh.profile.prediction import Estimate

_WIDTH = 110  # where no terminal says
_MARKDOWN = """\
# What compiles where, what it takes and how long

Written by `coremesh matrix --markdown docs/matrix.md`, with
{versions}.
Memories and code are the compiler's word; the time is predicted from the
machine code, central value and range, as [prediction.md](prediction.md) says.
Nothing is measured. Examples have their default settings.

* VMEM is what a core holds at once, of the kernel of a program that holds most;
  on a vector subcore it is the TileSpmem.
* The ledger is what was predicted of that before compiling: exact; or different
  for reasons that it gives after compiling, "explained"; or off by a share of
  what is used for reasons it does not know. Of several kernels it is the one
  that is off most. Kernels are counted as compiled: XLA makes equal calls one.

"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelVmem:
  """What a kernel of a program holds on a core.

  Attributes:
    kernel: its name; several may have the same.
    used_bytes: what the compiler says; None if it does not.
    predicted_bytes: before compiling.
    expected_bytes: the same, with what compiling explains.
  """

  kernel: str
  used_bytes: int | None
  predicted_bytes: int
  expected_bytes: int

  @property
  def unexplained_share(self) -> float | None:
    """How far the prediction is off, of what is used; None if unknown."""
    if self.used_bytes is None:
      return None
    return (self.expected_bytes - self.used_bytes) / max(self.used_bytes, 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
  """What became of a program on a chip.

  Attributes:
    target: the program.
    chip: the slice.
    vmem_bytes_per_core: the most of its kernels; None if nobody says.
    vmem_predicted_bytes_per_core: of that kernel, before compiling.
    vmem_expected_bytes_per_core: the same, with what compiling explains.
    vmem_limit_bytes_per_core: what that kernel may take.
    kernels: each of them, in order.
    smem_bytes_per_core: the most of its kernels; None if nobody says.
    semaphores_per_core: likewise.
    code_bytes: of the whole program.
    microseconds: of the whole program; None if it is not predicted.
    limit: what bounds the operation that takes longest.
    reason: why it is not compiled, or not predicted; None if it is both.
  """

  target: str
  chip: str
  vmem_bytes_per_core: int | None = None
  vmem_predicted_bytes_per_core: int | None = None
  vmem_expected_bytes_per_core: int | None = None
  vmem_limit_bytes_per_core: int | None = None
  kernels: tuple[KernelVmem, ...] = ()
  smem_bytes_per_core: int | None = None
  semaphores_per_core: int | None = None
  code_bytes: int | None = None
  microseconds: Estimate | None = None
  limit: str | None = None
  reason: str | None = None

  @property
  def compiles(self) -> bool:
    """Whether the compiler takes it."""
    return self.code_bytes is not None


_COLUMNS: dict[str, Callable[[Cell], str]] = {
  "program": lambda c: c.target,
  "chip": lambda c: c.chip,
  "kernels": lambda c: str(len(c.kernels)) if c.compiles else "-",
  "VMEM a core": lambda c: _bytes(c.vmem_bytes_per_core),
  "of": lambda c: _bytes(c.vmem_limit_bytes_per_core),
  "ledger": lambda c: _ledger(c),
  "SMEM": lambda c: _bytes(c.smem_bytes_per_core),
  "semaphores": lambda c: _number(c.semaphores_per_core),
  "code": lambda c: _bytes(c.code_bytes),
  "µs": lambda c: _time(c.microseconds),
  "limit": lambda c: c.limit or "-",
}
_NOTE = "note"
_TEXT = ("program", "chip", "limit", _NOTE)
# What a page has room for and a terminal has not.
_ON_PAGES_ONLY = ("kernels", "of", "SMEM", "semaphores")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument(
    "targets",
    nargs="*",
    metavar="TARGET",
    help="as for coremesh guard; default all examples, and a case of each"
    " kernel of coremesh",
  )
  parser.add_argument(
    "--chips",
    metavar="NAME,...",
    help="default one host of every generation",
  )
  parser.add_argument(
    "--markdown",
    type=pathlib.Path,
    metavar="FILE",
    help="write the table as a page, such as docs/matrix.md",
  )
  parser.add_argument(
    "--json", type=pathlib.Path, metavar="FILE", help="write it as data"
  )


def run(arguments: argparse.Namespace) -> int:
  """Prints a row for each program and chip."""
  names = arguments.chips.split(",") if arguments.chips else generations.names()
  asked = [chips.chip(name.strip()) for name in names]
  with targets.working_folder():
    wanted = arguments.targets or targets.everything()
    if not wanted:
      raise errors.UnsupportedError(
        "There is no folder examples here, so TARGET must say what to compile,"
        " such as MODULE:FUNCTION."
      )
    makers = {target: targets.maker(target) for target in wanted}
    pairs = [(target, chip) for target in makers for chip in asked]
    cells = [
      cell(target, makers[target], chip)
      for target, chip in progress.shown(pairs, "compiling")
    ]
  _print(cells)
  if arguments.markdown is not None:
    arguments.markdown.write_text(markdown(cells), encoding="utf-8")
  if arguments.json is not None:
    data = [dataclasses.asdict(c) for c in cells]
    arguments.json.write_text(json.dumps(data, indent=2) + "\n")
  return 0


def cell(target: str, make: targets.Maker, chip: chips.Chip) -> Cell:
  """Compiles and predicts a program for a chip."""
  found = outcomes.outcome(make, chip)
  if found.compiled is None:
    return Cell(target=target, chip=chip.name, reason=found.refusal)
  prediction = found.prediction
  return Cell(
    target=target,
    chip=chip.name,
    code_bytes=found.compiled.code_bytes,
    microseconds=prediction and prediction.microseconds,
    limit=prediction
    and max(prediction.operations, key=lambda o: o.microseconds.central).limit,
    reason=found.unpredicted,
    **_of_ledgers(found.compiled.ledgers),
  )


def markdown(cells: Sequence[Cell]) -> str:
  """The cells as a page."""
  versions = ", ".join(f"{n} {v}" for n, v in aot.versions().items())
  reasons = _reasons(cells)
  names = [*_COLUMNS, _NOTE]
  rows = [
    names,
    ["---" if name in _TEXT else "---:" for name in names],
    *([*_texts(c, _COLUMNS), _note(c, reasons)] for c in cells),
  ]
  lines = [f"| {' | '.join(row)} |" for row in rows]
  lines.append("")
  lines += [f"{n}. {reason}" for n, reason in enumerate(reasons, start=1)]
  return _MARKDOWN.format(versions=versions) + "\n".join(lines) + "\n"


def _print(cells: Sequence[Cell]) -> None:
  names = [n for n in _COLUMNS if n not in _ON_PAGES_ONLY]
  table = Table(box=None, pad_edge=False)
  for name in (*names, _NOTE):
    is_text = name in _TEXT
    table.add_column(
      name,
      justify="left" if is_text else "right",
      no_wrap=name != "program",
      overflow="fold",
    )
  reasons = _reasons(cells)
  for found in cells:
    table.add_row(*_texts(found, names), escape(_note(found, reasons)))
  console = Console(highlight=False)
  if not console.is_terminal:
    console.width = max(console.width, _WIDTH)
  console.print(table)
  for number, reason in enumerate(reasons, start=1):
    console.print(f"[{number}] {reason}", markup=False, soft_wrap=True)


def _reasons(cells: Sequence[Cell]) -> list[str]:
  return list(dict.fromkeys(c.reason for c in cells if c.reason is not None))


def _note(found: Cell, reasons: Sequence[str]) -> str:
  if found.reason is None:
    return ""
  what = "not predicted" if found.compiles else "refused"
  return f"{what} [{1 + reasons.index(found.reason)}]"


def _texts(found: Cell, names: Iterable[str]) -> list[str]:
  return [_COLUMNS[name](found) for name in names]


def _of_ledgers(ledgers: Sequence[Ledger]) -> dict[str, Any]:
  """The figures of the kernel that holds most, and the most of the rest."""
  if not ledgers:
    return {}
  most = max(ledgers, key=lambda one: one.used_vmem_bytes or 0)
  return {
    "vmem_bytes_per_core": most.used_vmem_bytes,
    "vmem_predicted_bytes_per_core": most.predicted("VMEM"),
    "vmem_expected_bytes_per_core": most.expected_vmem_bytes,
    "vmem_limit_bytes_per_core": most.limit("VMEM"),
    "kernels": tuple(
      KernelVmem(
        kernel=one.kernel,
        used_bytes=one.used_vmem_bytes,
        predicted_bytes=one.predicted("VMEM"),
        expected_bytes=one.expected_vmem_bytes,
      )
      for one in ledgers
    ),
    "smem_bytes_per_core": _most(ledgers, "SMEM"),
    "semaphores_per_core": _most(ledgers, "semaphores"),
  }


def _most(ledgers: Sequence[Ledger], memory: str) -> int | None:
  used = [one.used(memory) for one in ledgers]
  return max((u for u in used if u is not None), default=None)


def _ledger(found: Cell) -> str:
  """How far the prediction is off, with what compiling explains."""
  shares = [one.unexplained_share for one in found.kernels]
  known = [share for share in shares if share is not None]
  if not known or len(known) < len(shares):
    return "-"
  worst = max(known, key=abs)
  if worst:
    return f"{worst:+.1%}"
  is_exact = all(k.predicted_bytes == k.used_bytes for k in found.kernels)
  return "exact" if is_exact else "explained"


def _bytes(amount: int | None) -> str:
  if amount is None:
    return "-"
  for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
    if amount >= size:
      return f"{amount / size:.4g} {unit}"
  return f"{amount} B"


def _time(found: Estimate | None) -> str:
  if found is None:
    return "-"
  central, low, high = (
    f"{n:,.0f}" if n >= 1000 else f"{n:.3g}"
    for n in (found.central, found.low, found.high)
  )
  return f"{central} ({low}..{high})"


def _number(amount: int | None) -> str:
  return "-" if amount is None else str(amount)
