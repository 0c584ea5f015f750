"""Two explanations side by side: kernels, chips or versions."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from coremesh.explanation import page, record, words

FORMAT = "coremesh comparison"
VERSION = 1
_TIMES = ("µs", "cycles")

type Record = Mapping[str, Any]
type Value = float | str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
  """One quantity in both.

  Attributes:
    kernel: whose; "" for the whole program.
    quantity: what, "time" for instance.
    unit: of the numbers, "µs" for instance; "" for words.
    before: a number, or words; None if it is not there.
    after: the same.
  """

  kernel: str
  quantity: str
  unit: str
  before: Value
  after: Value

  @property
  def ratio(self) -> float | None:
    """After by before; None if one is no number or before is 0."""
    before, after = self.before, self.after
    if not isinstance(before, int | float) or not isinstance(
      after, int | float
    ):
      return None
    return after / before if before else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """What differs between two explanations, and what does not.

  Kernels are matched by name, and by order among those of one name; if each
  program has one kernel these are matched whatever their names.

  Attributes:
    before: name, chip and versions of one.
    after: of the other.
    differences: of the programs, then of each kernel.
    of_model: the kernels whose machine code and arguments are the same, and
      whose times are not: coremesh's model changed, and not the kernel.
  """

  before: Mapping[str, Any]
  after: Mapping[str, Any]
  differences: tuple[Difference, ...]
  of_model: tuple[str, ...] = ()

  def as_dict(self) -> dict[str, Any]:
    """All of it as lists, dicts, numbers and strings, for JSON."""
    return {
      "format": FORMAT,
      "version": VERSION,
      "before": dict(self.before),
      "after": dict(self.after),
      "differences": [
        dataclasses.asdict(d) | {"ratio": d.ratio} for d in self.differences
      ],
      "of_model": list(self.of_model),
    }

  def __rich_console__(
    self, console: Console, options: ConsoleOptions
  ) -> RenderResult:
    yield from _parts(self)

  def __str__(self) -> str:
    return page.text(_parts(self))


def compare(before: Record, after: Record) -> Comparison:
  """Sets two records side by side.

  Args:
    before: what `Explanation.as_dict` returns, or what was read of it.
    after: the same.

  Raises:
    UnsupportedError: one is no such record.
  """
  before = record.checked(before, "before")
  after = record.checked(after, "after")
  rows = [*_program(before, after)]
  of_model = []
  is_same_call = _is_same_call(before, after)
  for name, one, other in _matched(_kernels(before), _kernels(after)):
    found = [*_kernel(name, one, other)]
    rows += found
    if is_same_call and _is_of_model(one, other, found):
      of_model.append(name)
  return Comparison(
    before={key: before[key] for key in ("name", "chip", "versions")},
    after={key: after[key] for key in ("name", "chip", "versions")},
    differences=tuple(rows),
    of_model=tuple(of_model),
  )


# --- what is compared -------------------------------------------------------


def _program(before: Record, after: Record) -> Iterator[Difference]:
  rows = (
    ("time, central", "µs", lambda r: _time(r, "central")),
    ("time, low", "µs", lambda r: _time(r, "low")),
    ("time, high", "µs", lambda r: _time(r, "high")),
    ("of it XLA's operations", "µs", _of_xla),
    ("HBM between operations", "bytes", lambda r: _memory(r, "temp")),
    ("machine code", "bytes", lambda r: _memory(r, "generated_code")),
  )
  for quantity, unit, of in rows:
    yield Difference(
      kernel="",
      quantity=quantity,
      unit=unit,
      before=of(before),
      after=of(after),
    )


def _time(found: Record, which: str) -> float | None:
  """Of all operations; None if one of them has none."""
  return None if found["unpredicted"] else found["microseconds"][which]


def _of_xla(found: Record) -> float:
  return sum(
    o["microseconds"]["central"] * o["times"]
    for o in found["operations"]
    if o["kernel"] is None
  )


def _memory(found: Record, what: str) -> int | None:
  return found["memory_bytes_per_device"].get(what)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
  """A kernel of a record: its ledger and its operation, where there are."""

  name: str
  ledger: Record | None
  operation: Record | None


def _kernels(found: Record) -> list[_Kernel]:
  operations = [o for o in found["operations"] if o["kernel"] is not None]
  ledgers = list(found["ledgers"])
  kernels = []
  for operation in operations:
    own = next((x for x in ledgers if x["kernel"] == operation["kernel"]), None)
    if own is not None:
      ledgers.remove(own)
    kernels.append(_Kernel(operation["kernel"], own, operation))
  return kernels + [_Kernel(x["kernel"], x, None) for x in ledgers]


def _matched(
  before: list[_Kernel], after: list[_Kernel]
) -> Iterator[tuple[str, _Kernel | None, _Kernel | None]]:
  if len(before) == len(after) == 1:
    names = dict.fromkeys([before[0].name, after[0].name])
    yield " / ".join(names), before[0], after[0]
    return
  rest = list(after)
  for one in before:
    other = next((k for k in rest if k.name == one.name), None)
    if other is not None:
      rest.remove(other)
    yield one.name, one, other
  for other in rest:
    yield other.name, None, other


def _kernel(
  name: str, before: _Kernel | None, after: _Kernel | None
) -> Iterator[Difference]:
  one, other = _quantities(before), _quantities(after)
  for quantity, unit in dict.fromkeys([*one, *other]):
    yield Difference(
      kernel=name,
      quantity=quantity,
      unit=unit,
      before=one.get((quantity, unit)),
      after=other.get((quantity, unit)),
    )


def _is_same_call(before: Record, after: Record) -> bool:
  """Whether equal code takes equal time; not known of older records."""
  keys = ("chip", "arguments_digest")
  return "arguments_digest" in before and all(
    before[key] == after.get(key) for key in keys
  )


def _is_of_model(
  before: _Kernel | None, after: _Kernel | None, found: Sequence[Difference]
) -> bool:
  """Whether equal machine code takes another time."""
  codes = [
    k and k.operation and k.operation.get("code_digest")
    for k in (before, after)
  ]
  is_same_code = codes[0] is not None and codes[0] == codes[1]
  times = [d for d in found if d.unit in _TIMES]
  return is_same_code and any(d.before != d.after for d in times)


def _quantities(kernel: _Kernel | None) -> dict[tuple[str, str], Value]:
  """Numbers and words of a kernel, by quantity and unit."""
  found: dict[tuple[str, str], Value] = {}
  if kernel is None:
    return found
  if (operation := kernel.operation) is not None:
    found |= _times(operation)
  if (ledger := kernel.ledger) is not None:
    vmem = ledger["memories"]["VMEM"]
    found["VMEM predicted, each core", "bytes"] = vmem["predicted_per_core"]
    found["VMEM used, each core", "bytes"] = vmem["used_per_core"]
    found["VMEM limit, each core", "bytes"] = vmem["limit_per_core"]
    spilled = ledger["spilled_bytes_per_core"]
    found["VMEM of spilled registers", "bytes"] = spilled
  return found


def _times(operation: Record) -> dict[tuple[str, str], Value]:
  found: dict[tuple[str, str], Value] = {
    ("time, central", "µs"): operation["microseconds"]["central"],
    ("time, low", "µs"): operation["microseconds"]["low"],
    ("time, high", "µs"): operation["microseconds"]["high"],
    ("cycles, central", "cycles"): operation["cycles"]["central"],
    ("limited by", ""): operation["limit"],
    ("machine code, digest", ""): operation.get("code_digest"),
  }
  if (roofline := operation["roofline"]) is not None:
    found["floor by its roof", "µs"] = roofline["floor_microseconds"]
    found["of its roof", "share"] = roofline["share_of_roof"]
    found["matmul work", "FLOP"] = roofline["matmul_flops"]
    found["vector work", "op"] = roofline["vector_ops"]
  if cores := operation["cores"]:
    slowest = max(cores, key=lambda core: core["cycles"]["central"])
    found["issued by the slowest core", "cycles"] = slowest["issued_cycles"]
    found["waiting of the slowest core", "cycles"] = slowest["waiting_cycles"]
    for key in ("read_bytes", "written_bytes"):
      what = key.removesuffix("_bytes")
      found[f"{what}, all cores", "bytes"] = sum(core[key] for core in cores)
    for unit, share in slowest["busy_shares"].items():
      busy = "" if unit in ("waiting", "idle") else " busy"
      found[f"{unit}{busy}, slowest core", "share"] = share
  return found


# --- as a page --------------------------------------------------------------


def _parts(found: Comparison) -> Iterator[RenderableType]:
  made = Text(no_wrap=False)
  for label, one in (("before", found.before), ("after", found.after)):
    versions = ", ".join(f"{n} {v}" for n, v in one["versions"].items())
    made.append(f"{label:7}", style="dim")
    made.append(f"{one['name']} on {one['chip']}", style="bold")
    made.append(f"  {versions}\n", style="dim")
  made.append("All times are predicted from compiled bundles, not measured.")
  yield made
  for kernel in dict.fromkeys(d.kernel for d in found.differences):
    title = f"kernel {kernel}" if kernel else "the whole program"
    is_of_model = kernel in found.of_model
    if is_of_model:
      title += " (same machine code: coremesh's model changed)"
    table = page.table(title, "", "before", "after", "difference")
    for one in found.differences:
      if one.kernel == kernel and (one.before or one.after):
        table.add_row(
          one.quantity,
          _text(one.before, one.unit),
          _text(one.after, one.unit),
          _change(one, is_of_model),
          style="dim" if one.before == one.after else "",
        )
    yield table


def _text(value: Value, unit: str) -> str:
  if value is None:
    return "-"
  if isinstance(value, str):
    return value
  match unit:
    case "bytes":
      return words.num_bytes(value)
    case "share":
      return f"{value:.1%}"
    case "FLOP" | "op":
      return words.rate(value, unit)
  return f"{words.short(value)} {unit}"


def _change(one: Difference, is_of_model: bool) -> Text:
  if one.before == one.after:
    return Text("same")
  if one.unit == "share" and None not in (one.before, one.after):
    points = 100 * (float(one.after or 0) - float(one.before or 0))
    return Text(f"{points:+.1f} points")
  ratio = one.ratio
  if ratio is None:
    return Text("differs")
  text = f"{ratio - 1:+.1%}" if 0.5 <= ratio <= 2 else f"x {ratio:.3g}"
  is_good_or_bad = one.unit in _TIMES and not is_of_model
  colour = "red" if ratio > 1 else "green"
  return Text(text, style=colour if is_good_or_bad else "")
