"""Compiles, predicts and keeps what came of it, entry by entry.

A record holds the cycles of the program for a grid of bandwidths and latencies
of HBM, so that other constants can be tried without compiling again.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import pathlib
import time
from typing import Any, Self

from benchmarks.published import entries
import coremesh as cm
from coremesh import chips
from coremesh.compiler.compiled import Compiled
from coremesh.profile import (
  dma,
  hlo,
  interconnect,
  overlap,
  predict,
  rates,
  sparse_cores,
)
from coremesh.profile.details import Details
from coremesh.profile.events import Trace
from coremesh.profile.prediction import OperationPrediction, Prediction

# Of the bandwidth of JAX's table, and seconds. What is fitted is in between.
BANDWIDTHS = (0.65, 0.8, 0.9, 1.0, 1.15)
LATENCIES_SECONDS = (200e-9, 400e-9, 600e-9, 1000e-9)
_MOST_TEXTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """An entry and what is predicted for it.

  Attributes:
    name: of the entry.
    chip: generation of the chip.
    family: which kernel.
    operands: types and shapes.
    config: of the kernel.
    measured_us: median of the published runs.
    spread: between the slowest and the fastest run, of the median.
    error: why there is no prediction; "" if there is one.
    low_us: predicted at the least, with the constants of the library.
    central_us: predicted.
    high_us: predicted at the most.
    grid_cycles: of all operations, by bandwidth and latency; see `BANDWIDTHS`
      and `LATENCIES_SECONDS`, which are taken at `grid_hz`.
    grid_hz: cycles a second for which the grid was made.
    table_bytes_per_second: of HBM, in JAX's table.
    kernel_us: of the kernels alone.
    copies_us: of the operations whose limit is HBM, other than kernels.
    operations: how many run one after the other.
    left_out: how many are not predicted.
    offloads: of them, those that a SparseCore runs.
    num_bytes: to and from HBM.
    cores: TensorCores on which the kernels work.
    limit: of the longest operation.
    assumed: what was assumed, at most a few.
    peak_ratio: memory of our program over that of the published one.
    trace_seconds: this process, to trace, lower and fetch the program.
    predict_seconds: this process, after compilation.
  """

  name: str
  chip: str
  family: str
  operands: str
  config: str
  measured_us: float
  spread: float
  error: str = ""
  low_us: float = 0.0
  central_us: float = 0.0
  high_us: float = 0.0
  grid_cycles: tuple[tuple[float, ...], ...] = ()
  grid_hz: float = 0.0
  table_bytes_per_second: float = 0.0
  kernel_us: float = 0.0
  copies_us: float = 0.0
  operations: int = 0
  left_out: int = 0
  offloads: int = 0
  num_bytes: int = 0
  cores: int = 0
  limit: str = ""
  assumed: tuple[str, ...] = ()
  peak_ratio: float = 0.0
  trace_seconds: float = 0.0
  predict_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Records:
  """A file with a record on each line, added to as they are made."""

  path: pathlib.Path

  def read(self) -> dict[str, Record]:
    """What is there, by the name of the entry; the last of each counts."""
    found = {}
    for fields in self._lines():
      fields["grid_cycles"] = tuple(tuple(r) for r in fields["grid_cycles"])
      fields["assumed"] = tuple(fields["assumed"])
      found[fields["name"]] = Record(**fields)
    return found

  def _lines(self) -> Iterator[dict[str, Any]]:
    if not self.path.is_file():
      return
    names = {f.name for f in dataclasses.fields(Record)}
    for line in self.path.read_text().splitlines():
      try:
        fields = json.loads(line)
      except json.JSONDecodeError:
        continue  # A run that was interrupted while it wrote.
      if set(fields) == names:
        yield fields

  def add(self, record: Record) -> None:
    """Adds one."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with self.path.open("a") as file:
      file.write(json.dumps(dataclasses.asdict(record)) + "\n")


def made(entry: entries.Entry, timeout_seconds: float) -> Record:
  """Compiles and predicts an entry; a failure is part of the record."""
  times = entry.times_ms
  record = Record(
    name=entry.name,
    chip=entry.chip,
    family=entry.family,
    operands=entry.operands,
    config=entry.config,
    measured_us=entry.measured_us,
    spread=(max(times) - min(times)) * 1e3 / entry.measured_us,
  )
  slice_name = entries.CHIPS[entry.chip][0]
  start = time.process_time()
  try:
    fn, args = entries.program(entry)
    compiled = cm.compile(
      fn, *args, chip=slice_name, timeout_seconds=timeout_seconds
    )
    traced = time.process_time()
    details = Details()
    found = predict.of_compiled(compiled, args, details)
    done = time.process_time()
    if details.refused:
      raise cm.UnsupportedError(" ".join(details.refused.values()))
  except Exception as error:  # It is counted and shown.
    first = str(error).strip().partition("\n")[0]
    return dataclasses.replace(record, error=f"{type(error).__name__}: {first}")
  peak = compiled.memory["peak_memory_in_bytes"]
  return dataclasses.replace(
    record,
    **_figures(found),
    **_grid(found, _Runs.of(compiled, found, details)),
    peak_ratio=peak / entry.peak_bytes if entry.peak_bytes else 0.0,
    trace_seconds=traced - start,
    predict_seconds=done - traced,
  )


def _figures(found: Prediction) -> dict[str, Any]:
  longest = max(found.operations, key=lambda o: o.times * o.cycles.central)
  time_of = lambda o: o.times * o.microseconds.central
  copies = [o for o in found.operations if not o.kernel and o.limit == "DMA"]
  return {
    "low_us": found.microseconds.low,
    "central_us": found.microseconds.central,
    "high_us": found.microseconds.high,
    "kernel_us": sum(time_of(o) for o in found.kernels),
    "copies_us": sum(time_of(o) for o in copies),
    "operations": sum(o.times for o in found.operations),
    "left_out": len(found.left_out),
    "offloads": sum("SparseCore" in text for text in found.left_out),
    "num_bytes": sum(o.times * overlap.bytes_of(o) for o in found.operations),
    "cores": max((_busy_cores(o) for o in found.kernels), default=0),
    "limit": longest.limit,
    "assumed": (*found.assumed, *found.left_out)[:_MOST_TEXTS],
  }


def _busy_cores(operation: OperationPrediction) -> int:
  """Cores that do at least a tenth of what the busiest does."""
  issued = [c.issued_cycles for c in operation.cores]
  return sum(10 * i >= max(issued) for i in issued)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Runs:
  """What the cores of a program issue.

  Attributes:
    chip: what for.
    traces: of each operation that has code, by its name.
    sparse: the operations of SparseCores.
    groups: what runs at the same time.
  """

  chip: chips.Chip
  traces: Mapping[str, tuple[Trace, ...]]
  sparse: frozenset[str]
  groups: Sequence[overlap.Beside]

  @classmethod
  def of(cls, compiled: Compiled, found: Prediction, details: Details) -> Self:
    names = [o.name for o in found.operations]
    program = hlo.parse(compiled.text("hlo"))
    codes = compiled.operations
    return cls(
      chip=predict.chip_of(compiled),
      traces={
        name: tuple(a.trace for a in activities)
        for name, activities in details.activities.items()
        if activities
      },
      sparse=frozenset(o.name for o in codes if "bundles" not in o.texts),
      groups=predict.side_by_side(compiled, names, program),
    )


def _grid(found: Prediction, runs: _Runs) -> dict[str, Any]:
  """Cycles of all operations for each bandwidth and latency."""
  clock_hz = rates.rates(runs.chip).clock_hz.central
  table = runs.chip.hbm_bytes_per_second_per_device
  cycles = tuple(
    tuple(
      _cycles(
        found,
        runs,
        dma.Hbm(
          bytes_per_cycle=share * table / clock_hz,
          latency_cycles=latency * clock_hz,
        ),
      )
      for latency in LATENCIES_SECONDS
    )
    for share in BANDWIDTHS
  )
  return {
    "grid_cycles": cycles,
    "grid_hz": clock_hz,
    "table_bytes_per_second": table,
  }


def _cycles(found: Prediction, runs: _Runs, hbm: dma.Hbm) -> float:
  """Cycles of all operations."""
  of_code: dict[int, float] = {}
  for operation in found.operations:
    if traces := runs.traces.get(operation.name):
      is_sparse = operation.name in runs.sparse
      through = _through(traces, is_sparse, runs.chip, hbm)
      floor = overlap.bytes_of(operation) / hbm.bytes_per_cycle
      of_code[id(operation.cores)] = max(through, floor)
  cycles = {
    # What shares the code of another shares its cores too.
    o.name: of_code.get(id(o.cores)) or _copied(o, runs.chip, hbm)
    for o in found.operations
  }
  num_bytes = {o.name: overlap.bytes_of(o) for o in found.operations}
  rate = hbm.bytes_per_cycle
  twice = sum(
    overlap.hidden(g, cycles, num_bytes=num_bytes, bytes_per_time=rate)
    for g in runs.groups
  )
  return sum(o.times * cycles[o.name] for o in found.operations) - twice


def _copied(
  operation: OperationPrediction, chip: chips.Chip, hbm: dma.Hbm
) -> float:
  """A copy, whose bytes are known from what they take at the least."""
  table = chip.hbm_bytes_per_second_per_device
  num_bytes = operation.floor_microseconds * 1e-6 * table
  return num_bytes / hbm.bytes_per_cycle + hbm.latency_cycles


def _through(
  traces: Sequence[Trace], is_sparse: bool, chip: chips.Chip, hbm: dma.Hbm
) -> float:
  """When the last core of an operation has ended."""
  if not is_sparse:
    return max(t.cycles for t in dma.timings(traces, hbm))
  seen = sparse_cores.hbm(chip, hbm)
  links = interconnect.links(chip, rates.rates(chip), "central")
  return max(t.cycles for t in dma.timings(traces, seen, links=links))
