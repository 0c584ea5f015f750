"""An explanation as one page for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
import io

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from coremesh.compiler.ledger import Entry, Ledger
from coremesh.explanation import alike, life, memory, words
from coremesh.explanation.findings import Findings
from coremesh.explanation.hot_lines import HotLine
from coremesh.explanation.roofline import Roofline
from coremesh.profile.activity import CoreActivity
from coremesh.profile.prediction import OperationPrediction
from coremesh.profile.sending import Sending

# Of a page that is not on a terminal.
WIDTH = 110
_NUM_STRETCHES = 48
_LEAST = 0.005
_ALONE = 0.98  # of the time of its cores; more is not told
_MOST_LINES = 6
_MOST_RANGES = 2
_MOST_GROUPS = 8
_MOST_COLUMNS = 3


def text(parts: Iterable[RenderableType]) -> str:
  """A page without colours."""
  out = io.StringIO()
  console = Console(file=out, width=WIDTH, color_system=None)
  for part in parts:
    console.print(part)
  return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def parts(found: Findings) -> Iterator[RenderableType]:
  """The page of an explanation, from top to bottom."""
  yield head(found)
  for ledger in found.ledgers:
    yield _ledger(ledger)
  yield _operations(found)
  for operation in found.prediction.kernels:
    yield from _kernel(operation, found)
  if found.unpredicted:
    yield Text("Without a time:", style="bold yellow")
    for name, reason in found.unpredicted.items():
      yield Text(f"* {found.labels[name]}: {reason}")
  left_out = [
    t
    for t in found.prediction.left_out
    if t.split(":")[0] not in found.unpredicted
  ]
  for title, texts in (
    ("Assumed, because data decide it:", found.prediction.assumed),
    ("Left out of the time:", left_out),
    (f"{words.DROPPED}:", found.dropped),
  ):
    if texts:
      yield Text(title, style="bold")
      for line in texts:
        yield Text(f"* {line}")


def head(found: Findings) -> Text:
  """What was compiled, for what, with what, and the time in all."""
  versions = ", ".join(f"{n} {v}" for n, v in found.versions.items())
  cached = ", from the cache" if found.is_from_cache else ""
  memory = found.memory_bytes_per_device
  held = ", ".join(
    f"{words.num_bytes(memory[name])} {what}"
    for name, what in (
      ("argument", "arguments"),
      ("output", "results"),
      ("temp", "between"),
      ("generated_code", "code"),
    )
    if name in memory
  )
  made = Text()
  made.append(f"{found.name} on {found.chip}", style="bold")
  time = words.estimate(found.prediction.microseconds)
  if found.unpredicted:
    which = ", ".join(found.labels[name] for name in found.unpredicted)
    made.append(f": no time for {which}", style="bold yellow")
    made.append(
      f", {time} µs for the rest" if found.prediction.operations else ""
    )
  else:
    made.append(f": {time} µs", style="bold green")
  made.append(", predicted from compiled bundles, not measured")
  if beside := found.prediction.overlap_microseconds.central:
    made.append(
      "\nSparseCores work beside TensorCores for"
      f" {words.short(beside)} µs of it"
    )
  made.append(
    f"\n{versions}; compiled in {found.compile_seconds:.2g} s{cached},"
    f" predicted in {found.prediction.predict_seconds:.2g} s"
    f"\nHBM of a device: {held}",
    style="dim",
  )
  return made


def table(title: str, *columns: str, left: int = 1) -> Table:
  """A table whose first columns are words and whose others are numbers."""
  made = Table(
    title=title,
    title_justify="left",
    title_style="bold",
    box=box.SIMPLE_HEAD,
    pad_edge=False,
  )
  for i, column in enumerate(columns):
    is_word = i < left
    made.add_column(
      column, justify="left" if is_word else "right", no_wrap=not is_word
    )
  return made


# --- memory -----------------------------------------------------------------


def _ledger(ledger: Ledger) -> Table:
  kind = "vector subcore" if ledger.is_sparse else "TensorCore"
  made = table(
    f"Memory of {ledger.kernel}, each {kind}",
    *("", "buffer", "type", "predicted", "used", "limit", ""),
    left=3,
  )
  for entry in ledger.entries:
    made.add_row(*_buffer(entry, ledger), style="dim")
  for name, note, num_bytes in memory.added(ledger):
    size = words.num_bytes(num_bytes)
    made.add_row("VMEM", name, note, "-", size, style="dim")
  for name in memory.MEMORIES:
    limit, held = ledger.limit(name), memory.held(ledger, name)
    made.add_row(
      name,
      "in all",
      "",
      _amount(ledger.predicted(name), name),
      _amount(ledger.used(name), name),
      _amount(limit, name),
      f"{held / limit:.1%}" if limit else "",
      style="red" if limit and held > limit else "",
    )
  return made


def _buffer(entry: Entry, ledger: Ledger) -> tuple[str, ...]:
  kind = f"{entry.dtype}[{','.join(map(str, entry.shape))}]"
  copies = f" x{entry.copies}" if entry.copies > 1 else ""
  return (
    entry.memory,
    words.buffer_name(entry.name),
    f"{kind if entry.dtype else ''}{copies}",
    _amount(entry.amount_per_core, entry.memory),
    memory.fate(entry, ledger),
  )


def _amount(amount: int | None, name: str) -> str:
  if amount is None:
    return "-"
  return f"{amount:,}" if name == "semaphores" else words.num_bytes(amount)


# --- time -------------------------------------------------------------------


def _operations(found: Findings) -> Table:
  made = table(
    "Time of each operation",
    *("operation", "µs", "cycles", "of its roof", "limited by"),
  )
  for o in found.prediction.operations:
    roofline = found.rooflines.get(o.name)
    made.add_row(
      f"{o.label}, {'kernel' if o.kernel else 'XLA'}"
      f"{f' x {o.times}' if o.times != 1 else ''}"
      f"{', assumed' if o.is_assumed else ''}",
      words.estimate(o.microseconds),
      f"{o.cycles.central:,.0f}",
      f"{words.share(roofline.share_of_roof)} {roofline.roof}"
      if roofline
      else "",
      o.limit,
      style="" if o.kernel else "dim",
    )
  for name in found.unpredicted:
    called = f"{found.labels[name]}, kernel"
    made.add_row(called, "no time", style="yellow")
  return made


def _kernel(
  operation: OperationPrediction, found: Findings
) -> Iterator[RenderableType]:
  yield _cores(operation)
  if activities := found.activities.get(operation.name):
    yield _life(operation, activities)
  if (roofline := found.rooflines.get(operation.name)) is not None:
    yield _roofline(roofline)
  if lines := found.hot_lines.get(operation.name):
    yield _lines(operation, lines)


def _cores(operation: OperationPrediction) -> Table:
  made = table(
    f"{operation.label}: each core",
    *("core", "cycles", "µs", "waiting", "read", "written"),
  )
  for group in alike.predictions(operation.cores)[:_MOST_GROUPS]:
    core = group[0]
    central = core.cycles.central
    made.add_row(
      alike.name(group),
      words.estimate(core.cycles),
      words.short(central * cycle_us(operation)),
      f"{core.waiting_cycles / max(1.0, central):.0%}",
      words.num_bytes(core.read_bytes),
      words.num_bytes(core.written_bytes),
    )
  return made


def _life(
  operation: OperationPrediction, activities: Sequence[CoreActivity]
) -> Table:
  """Each unit of the slowest core over time, and the mean of others too."""
  edges = life.edges(activities, _NUM_STRETCHES)
  groups = alike.shown(alike.groups(activities), _MOST_COLUMNS)
  shares = [life.shares(group[0], edges) for group in groups]
  slowest = max(range(len(groups)), key=lambda i: groups[i][0].cycles)
  end_us = edges[-1] * cycle_us(operation)
  made = table(
    f"{operation.label}: what is busy when",
    *("", f"core {alike.name(groups[slowest])}, 0 to {words.short(end_us)} µs"),
    *(f"core {alike.name(group)}" for group in groups),
    left=2,
  )
  for name in life.NAMES:
    if max(found[name].max() for found in shares) > _LEAST:
      made.add_row(
        name,
        words.blocks(list(shares[slowest][name])),
        *(f"{found[name].mean():.1%}" for found in shares),
      )
  return made


def time(operation: OperationPrediction, end_cycles: float) -> str:
  """The time of an operation and, if it is less, of its cores alone.

  Args:
    operation: a kernel.
    end_cycles: of its slowest core; what starts SparseCores comes before.
  """
  text = f"{words.estimate(operation.microseconds)} µs"
  if end_cycles > _ALONE * operation.cycles.central:
    return text
  alone = words.short(end_cycles * cycle_us(operation))
  return f"{text}, {alone} µs of it on these cores"


def cycle_us(operation: OperationPrediction) -> float:
  """Microseconds of a cycle, central value."""
  return operation.microseconds.central / max(1.0, operation.cycles.central)


def _roofline(found: Roofline) -> Table:
  made = table(
    f"{found.operation}: no less than {words.short(found.floor_microseconds)}"
    f" µs by {_roof(found)}",
    *("", "work", "predicted", "peak of the device", "of it"),
  )
  ways = (
    (
      f"{one.way}, assumed",
      _sent(one),
      found.per_second(one.busiest_bytes),
      one.assumed_bytes_per_second,
      "B/s",
    )
    for one in found.sendings
  )
  for what, amount, rate, peak, unit in (
    (
      "matmul",
      words.rate(found.matmul_flops, "FLOP"),
      found.matmul_flops_per_second,
      found.peak_matmul_flops_per_second,
      "FLOP/s",
    ),
    (
      "vector",
      words.rate(found.vector_ops, "op"),
      found.vector_ops_per_second,
      found.peak_vector_ops_per_second,
      "op/s",
    ),
    (
      "HBM",
      words.num_bytes(found.hbm_bytes),
      found.hbm_bytes_per_second,
      found.peak_hbm_bytes_per_second,
      "B/s",
    ),
    *ways,
  ):
    made.add_row(
      what,
      amount,
      words.rate(rate, unit),
      words.rate(peak, unit),
      f"{rate / peak:.1%}",
    )
  return made


def _roof(found: Roofline) -> str:
  if found.is_roof_assumed:
    return f"the assumed rate of {found.roof}"
  return f"the peak of its {found.roof}"


def _sent(one: Sending) -> str:
  """What counts against the way, and what it is a part of."""
  busiest = words.num_bytes(one.busiest_bytes)
  if one.busiest_bytes == one.sent_bytes:
    return busiest
  return f"{busiest} of {words.num_bytes(one.sent_bytes)}"


def _lines(operation: OperationPrediction, lines: Sequence[HotLine]) -> Table:
  made = table(
    f"{operation.label}: hottest lines, on its slowest core",
    *("line", "bundles", "share", "waiting", "busy with"),
    left=2,
  )
  for line in lines[:_MOST_LINES]:
    code = f"\n  {line.code}" if line.code else ""
    made.add_row(
      Text(f"{where(line.source)}{code}", no_wrap=True, overflow="ellipsis"),
      "\n".join(span(*r) for r in line.ranges[:_MOST_RANGES]),
      f"{line.share:.1%}",
      f"{line.waiting_cycles / max(1.0, line.cycles):.0%}",
      line.limit,
    )
  return made


def where(source: str) -> str:
  """A line of the program as short as it is told apart by."""
  if not source:
    return "no line: waits of pipelines, empty bundles, SparseCores"
  file, _, line = source.rpartition(":")
  return f"{'/'.join(file.split('/')[-2:])}:{line}"


def span(first: int, last: int) -> str:
  """Bundles from first to last."""
  return f"{first:#x}" if first == last else f"{first:#x}..{last:#x}"
