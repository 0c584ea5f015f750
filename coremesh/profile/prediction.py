"""What a prediction says, as values, as a table and as plain data."""

from collections.abc import Mapping
import dataclasses
import io
from typing import Any

from rich import box, console, table

from coremesh.profile.rates import Spread

_WIDTH = 100
_MOST_CORES = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
  """A number that the model of the DMAs leaves open.

  Attributes:
    low: with the fastest HBM and clock that fit published times.
    central: the best guess.
    high: with the slowest.
  """

  low: float
  central: float
  high: float

  def __post_init__(self):
    if not 0 <= self.low <= self.central <= self.high:
      raise ValueError(
        f"low, central and high must be in order; got {self.low},"
        f" {self.central}, {self.high}."
      )

  def __str__(self) -> str:
    return f"{_short(self.central)} ({_short(self.low)}..{_short(self.high)})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CorePrediction:
  """One TensorCore, or vector subcore of a SparseCore.

  Attributes:
    core: its number in the device; of a subcore, among all of them.
    cycles: from its start to its end.
    issued_cycles: bundles issued; the rest is waiting.
    waiting_cycles: for copies and other cores, central value.
    shares: of its cycles, central value, for which each unit is busy.
    read_bytes: from HBM.
    written_bytes: to HBM.
    sent_bytes: to other devices.
  """

  core: int
  cycles: Estimate
  issued_cycles: int
  waiting_cycles: float
  shares: Mapping[str, float]
  read_bytes: int
  written_bytes: int
  sent_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HotRange:
  """Bundles that take much of the time.

  Attributes:
    start: the first.
    end: the bundle after the last.
    executions: how often they are issued.
    cycles: central value, waiting in them included.
    share: of the cycles of the core.
    limit: what they are busy with.
    sources: lines of the program, "file:line"; () if the compiler wrote none.
  """

  start: int
  end: int
  executions: int
  cycles: float
  share: float
  limit: str
  sources: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperationPrediction:
  """A kernel, or an operation of XLA's beside it.

  Attributes:
    name: the HLO instruction.
    kernel: the kernel it runs; None for an operation of XLA's.
    cycles: of the core that takes longest, with what starts SparseCores.
    microseconds: the same as time.
    floor_microseconds: what its bytes take at the bandwidth of JAX's table.
    limit: what bounds the slowest core: a unit, "DMA", a way out as in
      `shares`, "waiting" for copies that are not enough to fill HBM or links,
      "scalar" or "idle", instructions that wait for each other.
    shares: busy shares of the slowest core, with "DMA read" and "DMA write"
      of the device, and if it sends "ICI", "die to die" and "core to core": of
      the way to the receiver that gets most.
    cores: each core.
    hottest: where the slowest core spends its time, at most ten.
    assumed: what was taken for granted; () if the machine code decides all.
    times: how often loops of XLA's run it; all else is of one run.
  """

  name: str
  kernel: str | None
  cycles: Estimate
  microseconds: Estimate
  floor_microseconds: float
  limit: str
  shares: Mapping[str, float]
  cores: tuple[CorePrediction, ...]
  hottest: tuple[HotRange, ...]
  assumed: tuple[str, ...]
  times: int = 1

  @property
  def label(self) -> str:
    """What to call it, see `label`."""
    return label(self.name, self.kernel)

  @property
  def is_assumed(self) -> bool:
    """Whether the result rests on something that is not known."""
    return bool(self.assumed)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
  """The time of a compiled program on a device, from its machine code.

  Attributes:
    chip: what for.
    operations: kernels and operations of XLA's, in the order of their code.
    left_out: what of the program is not in it, in words.
    overlap_microseconds: for how long SparseCores work beside TensorCores,
      which the sum of all operations counts twice.
    predict_seconds: how long the prediction took, on this machine.
  """

  chip: str
  operations: tuple[OperationPrediction, ...]
  left_out: tuple[str, ...]
  predict_seconds: float
  overlap_microseconds: Spread = Spread(fast=0.0, central=0.0, slow=0.0)

  @property
  def kernels(self) -> tuple[OperationPrediction, ...]:
    """The operations that are Pallas kernels."""
    return tuple(o for o in self.operations if o.kernel is not None)

  @property
  def microseconds(self) -> Estimate:
    """All operations, without what is left out.

    They run one after the other, but for `overlap_microseconds`.
    """
    parts = [(o.times, o.microseconds) for o in self.operations]
    twice = self.overlap_microseconds
    return Estimate(
      low=sum(n * t.low for n, t in parts) - twice.fast,
      central=sum(n * t.central for n, t in parts) - twice.central,
      high=sum(n * t.high for n, t in parts) - twice.slow,
    )

  @property
  def assumed(self) -> tuple[str, ...]:
    """What was taken for granted, each with its operation."""
    return tuple(f"{o.label}: {a}" for o in self.operations for a in o.assumed)

  def as_dict(self) -> dict[str, Any]:
    """All of it as lists, dicts, numbers and strings, for JSON."""
    return dataclasses.asdict(self) | {
      "microseconds": dataclasses.asdict(self.microseconds),
      "assumed": self.assumed,
      "source": "predicted from compiled bundles, not measured",
    }

  def __str__(self) -> str:
    return render(self)


def label(name: str, kernel: str | None) -> str:
  """What to call an operation: "matmul.1", or "copy (tpu_custom_call.1)".

  Args:
    name: the HLO instruction, which tells apart calls of one kernel.
    kernel: the kernel it runs, named first if the instruction hides it; None
      for an operation of XLA's.
  """
  is_told = kernel is None or name.startswith(kernel)
  return name if is_told else f"{kernel} ({name})"


def render(prediction: Prediction) -> str:
  """The prediction as tables for a terminal."""
  out = console.Console(file=io.StringIO(), width=_WIDTH, color_system=None)
  out.print(
    f"Predicted from compiled bundles for {prediction.chip}, not measured:"
    f" {prediction.microseconds} µs",
    highlight=False,
  )
  out.print(_operations(prediction))
  if beside := prediction.overlap_microseconds.central:
    out.print(
      f"SparseCores work beside TensorCores for {_short(beside)} µs of it.",
      highlight=False,
    )
  for operation in prediction.operations:
    if operation.cores:
      out.print(_shares(operation))
      out.print(_hottest(operation))
  for title, texts in (
    ("Assumed:", prediction.assumed),
    ("Left out:", prediction.left_out),
  ):
    if texts:
      out.print(title, *(f"* {t}" for t in texts), sep="\n", highlight=False)
  text = out.file.getvalue()  # pyright: ignore
  return "\n".join(line.rstrip() for line in text.splitlines())


def _table(title: str, *columns: str) -> table.Table:
  made = table.Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
  for i, column in enumerate(columns):
    made.add_column(column, justify="left" if i == 0 else "right")
  return made


def _operations(prediction: Prediction) -> table.Table:
  made = _table("", "operation", "µs", "cycles", "byte floor µs", "limit")
  for o in prediction.operations:
    name = f"{o.label}, kernel" if o.kernel else o.name
    name += f" x {o.times}" if o.times != 1 else ""
    made.add_row(
      f"{name}{', assumed' if o.is_assumed else ''}",
      str(o.microseconds),
      f"{o.cycles.central:,.0f}",
      _short(o.floor_microseconds),
      o.limit,
    )
  return made


def _shares(operation: OperationPrediction) -> table.Table:
  names = list(operation.cores[0].shares)
  title = f"{operation.label}: busy share of cycles"
  if len(operation.cores) > _MOST_CORES:
    title += f", {_MOST_CORES} slowest of {len(operation.cores)} cores"
  made = _table(title, "core", *names)
  shown = sorted(operation.cores, key=lambda core: -core.cycles.central)
  shown = sorted(shown[:_MOST_CORES], key=lambda core: core.core)
  for core in shown:
    cells = [f"{core.shares[n]:.0%}" for n in names]
    made.add_row(str(core.core), *cells)
  return made


def _hottest(operation: OperationPrediction) -> table.Table:
  made = _table(
    f"{operation.label}: hottest bundles",
    *("bundles", "times", "cycles", "share", "limit", "lines"),
  )
  for hot in operation.hottest:
    made.add_row(
      f"{hot.start:#x}..{hot.end - 1:#x}",
      f"{hot.executions:,}",
      f"{hot.cycles:,.0f}",
      f"{hot.share:.1%}",
      hot.limit,
      "\n".join(hot.sources),
    )
  return made


def _short(number: float) -> str:
  return f"{number:,.0f}" if number >= 10000 else f"{number:.4g}"
