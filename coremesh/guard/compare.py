"""Verdicts: what differs between a golden and what there is now."""

from collections.abc import Iterator, Mapping
import dataclasses
import enum

from coremesh.guard.figures import OTHERS, Figures, OperationFigures
from coremesh.guard.golden import Golden

# Another compiler schedules everything anew. What it gains or loses below the
# median error of predictions against published times, 1.6 % for kernels alone,
# says nothing; the public slow-downs that a guard is for are of 8 % and more.
DEFAULT_TOLERANCE = 0.02
# What is said of code that grew though its cycles did not: above what another
# order of the same instructions adds.
_NOTABLE_GROWTH = 0.1


class Verdict(enum.StrEnum):
  """What is to be said of an operation or a program.

  Attributes:
    COMPILE_BREAK: it compiled, and is refused.
    SLOWER: more cycles are predicted.
    MORE_VMEM: a core holds more.
    MORE_BUNDLES: the code is longer, and no prediction tells what that costs.
    LONGER_CODE: the code is longer by 10 % and more, and the cycles are no more
      than is tolerated.
    LESS_OVERLAP: fewer operations of XLA's run beside a SparseCore kernel.
    NOT_PREDICTED: it was predicted, and is no more.
    MISSING: it is recorded, and is no more.
    SAME: as recorded, or no worse than is tolerated.
    FASTER: fewer cycles are predicted.
    OTHER_CODE: not longer, and no prediction tells what that costs.
    OTHER_MODEL: the same code and arguments are predicted otherwise, so that
      coremesh has changed, and not the kernel.
    REFUSED: it did not compile when recorded, and does not.
    COMPILES_NOW: it did not compile when recorded, and does.
    NEW: it is not recorded.
  """

  COMPILE_BREAK = "compile break"
  SLOWER = "slower"
  MORE_VMEM = "more VMEM"
  MORE_BUNDLES = "more bundles"
  LONGER_CODE = "longer code"
  LESS_OVERLAP = "less overlap"
  NOT_PREDICTED = "not predicted"
  MISSING = "missing"
  SAME = "same"
  FASTER = "faster"
  OTHER_CODE = "other code"
  OTHER_MODEL = "other model"
  REFUSED = "refused as before"
  COMPILES_NOW = "compiles now"
  NEW = "new"

  @property
  def is_worse(self) -> bool:
    """Whether a check fails for it."""
    return self in _WORSE


_WORSE = frozenset(
  [
    Verdict.COMPILE_BREAK,
    Verdict.SLOWER,
    Verdict.MORE_VMEM,
    Verdict.MORE_BUNDLES,
    Verdict.LESS_OVERLAP,
    Verdict.NOT_PREDICTED,
    Verdict.MISSING,
  ]
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
  """The verdicts on one operation of a program, or on all of it.

  Attributes:
    target: the program.
    chip: what for.
    operation: a kernel or `OTHERS`; "" for the program.
    verdicts: at least one.
    before: its recorded figures; None if there are none.
    now: its figures; None if there are none.
    note: what else to say: why it does not compile, which versions differ.
  """

  target: str
  chip: str
  operation: str
  verdicts: tuple[Verdict, ...]
  before: OperationFigures | None = None
  now: OperationFigures | None = None
  note: str = ""

  @property
  def is_worse(self) -> bool:
    """Whether a check fails for it."""
    return any(v.is_worse for v in self.verdicts)


def compare(
  before: Golden, now: Golden, *, tolerance: float | None = None
) -> tuple[Row, ...]:
  """The verdicts on a program.

  Args:
    before: as recorded.
    now: the same target and chip.
    tolerance: what share more cycles, VMEM or bundles are not worse yet.
      Default: none with the versions of the golden, as the figures are counts
      that only change for a cause, else `DEFAULT_TOLERANCE`.

  Returns:
    A row for each operation, or one for the program if it does not compile.
  """
  changed = version_changes(before.versions, now.versions)
  note = f"versions differ: {changed}" if changed else ""
  if tolerance is None:
    tolerance = DEFAULT_TOLERANCE if changed else 0.0

  def of_program(verdict: Verdict, why: str) -> tuple[Row, ...]:
    text = "; ".join(t for t in (why, note) if t)
    row = Row(
      target=now.target,
      chip=now.chip,
      operation="",
      verdicts=(verdict,),
      note=text,
    )
    return (row,)

  if now.figures is None:
    why = now.refusal or ""
    is_new = before.figures is not None
    verdict = Verdict.COMPILE_BREAK if is_new else Verdict.REFUSED
    return of_program(verdict, why)
  if before.figures is None:
    return of_program(Verdict.COMPILES_NOW, f"before: {before.refusal}")
  return tuple(_of_operations(before, now, tolerance=tolerance, note=note))


def new(now: Golden) -> Row:
  """The row of a program without a golden."""
  return Row(
    target=now.target,
    chip=now.chip,
    operation="",
    verdicts=(Verdict.NEW,),
    note=now.refusal or "",
  )


def missing(before: Golden, why: str) -> Row:
  """The row of a golden whose program is no more."""
  return Row(
    target=before.target,
    chip=before.chip,
    operation="",
    verdicts=(Verdict.MISSING,),
    note=why,
  )


def version_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
  """The versions that differ, such as "libtpu 0.0.50 -> 0.0.51"; "" if none."""
  names = sorted({*before, *now})
  return ", ".join(
    f"{n} {before.get(n, 'none')} -> {now.get(n, 'none')}"
    for n in names
    if before.get(n) != now.get(n)
  )


def _of_operations(
  before: Golden, now: Golden, *, tolerance: float, note: str
) -> Iterator[Row]:
  old, new_ = before.figures, now.figures
  assert old is not None and new_ is not None  # The caller looked.
  names = [o.name for o in old.operations]
  names += [o.name for o in new_.operations if o.name not in names]
  names.sort(key=lambda n: n == OTHERS)  # The kernels first.
  for name in names:
    verdicts = _verdicts(old, new_, name=name, tolerance=tolerance)
    notes = [note]
    one, other = old.operation(name), new_.operation(name)
    if one and other and one.cycles is None and other.cycles is None:
      notes.append(f"not predicted: {new_.unpredicted}")
    if new_.num_assumed:
      what = "assumption" if new_.num_assumed == 1 else "assumptions"
      notes.append(f"the prediction rests on {new_.num_assumed} {what}")
    yield Row(
      target=now.target,
      chip=now.chip,
      operation=name,
      verdicts=verdicts,
      before=one,
      now=other,
      note="; ".join(n for n in notes if n),
    )


def _verdicts(
  old: Figures, new_: Figures, *, name: str, tolerance: float
) -> tuple[Verdict, ...]:
  before, now = old.operation(name), new_.operation(name)
  # XLA's operations around the kernels may come and go: none take no time.
  if name == OTHERS:
    before = before or _none(known=old.unpredicted is None)
    now = now or _none(known=new_.unpredicted is None)
  if before is None or now is None:
    return (Verdict.NEW if before is None else Verdict.MISSING,)
  is_same_call = (before.code, old.arguments) == (now.code, new_.arguments)
  found = []
  if time := _of_time(before, now, tolerance, is_same_call):
    found.append(time)
  is_passed = time is None and before.cycles is not None and name != OTHERS
  if is_passed and now.bundles > before.bundles * (1 + _NOTABLE_GROWTH):
    found.append(Verdict.LONGER_CODE)
  vmem = (before.vmem_bytes_per_core or 0, now.vmem_bytes_per_core or 0)
  if vmem[1] > vmem[0] * (1 + tolerance):
    found.append(Verdict.MORE_VMEM)
  if (before.operations_beside or 0) > (now.operations_beside or 0):
    found.append(Verdict.LESS_OVERLAP)
  return tuple(found) or (Verdict.SAME,)


def _of_time(
  before: OperationFigures,
  now: OperationFigures,
  tolerance: float,
  is_same_call: bool,
) -> Verdict | None:
  if before.cycles is not None and now.cycles is None:
    return Verdict.NOT_PREDICTED
  if is_same_call:
    return None if before.cycles == now.cycles else Verdict.OTHER_MODEL
  if before.cycles is not None and now.cycles is not None:
    if now.cycles > before.cycles * (1 + tolerance):
      return Verdict.SLOWER
    is_faster = now.cycles < before.cycles / (1 + tolerance)
    return Verdict.FASTER if is_faster else None
  if now.bundles > before.bundles * (1 + tolerance):
    return Verdict.MORE_BUNDLES
  return None if before.code == now.code else Verdict.OTHER_CODE


def _none(*, known: bool) -> OperationFigures:
  return OperationFigures(
    name=OTHERS, bundles=0, code="", cycles=0 if known else None
  )
