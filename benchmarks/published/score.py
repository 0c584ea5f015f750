"""Splits records, fits constants on one part and scores them on the other."""

from collections.abc import Iterable, Sequence
import dataclasses
import itertools

import numpy as np

from benchmarks.published import record
from benchmarks.published.record import Record

WITHIN = 0.04
_MOST_ERROR = 0.1
# Of the range of a constant, how far to look around the best so far.
_STEPS = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015)
_POINTS = 13
# Programs whose cycles change less than this over all of the grid tell the
# clock, if there are enough of them.
_STEADY = 0.005
_FEWEST_STEADY = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
  """What the time of a program is worked out with.

  Attributes:
    bytes_per_second: of HBM, for all cores of a device.
    latency_seconds: of a copy.
    clock_hz: cycles a second.
  """

  bytes_per_second: float
  latency_seconds: float
  clock_hz: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """How near predictions are.

  Attributes:
    entries: how many are predicted.
    median: of the absolute relative errors.
    within: the share of them that is no more than `WITHIN`.
    largest: of them.
    bias: median of predicted over measured, less one.
    spearman: how alike predicted and measured times are in their order; nan
      for fewer than three.
  """

  entries: int
  median: float
  within: float
  largest: float
  bias: float
  spearman: float


def halves(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
  """Alternate records of each family, sorted by time: to fit and to score.

  Entries of one shape, whose times are nearly the same, are not torn apart.
  """
  fit, test = [], []
  families: dict[str, list[Record]] = {}
  for one in records:
    families.setdefault(one.family, []).append(one)
  for family in families.values():
    shapes: dict[str, list[Record]] = {}
    for one in sorted(family, key=lambda r: (r.measured_us, r.name)):
      shapes.setdefault(shape(one.operands), []).append(one)
    for i, alike in enumerate(shapes.values()):
      (test if i % 2 else fit).extend(alike)
  return fit, test


def shape(operands: str) -> str:
  """The operands without how a loss is summed, which takes no time."""
  words = operands.split(" ")
  return " ".join(w for w in words if w not in ("mean", "sum", "none"))


def predicted_us(one: Record, constants: Constants) -> float:
  """The time of a record with other constants than it was made with."""
  cycles = float((np.array(one.grid_cycles) * _weights(one, constants)).sum())
  return cycles / constants.clock_hz * 1e6


def _weights(one: Record, constants: Constants) -> np.ndarray:
  """How much each point of the grid counts: linear in the time of a byte."""
  # The grid is of cycles: at another clock HBM moves other bytes in each.
  faster = constants.clock_hz / one.grid_hz
  bandwidth = constants.bytes_per_second / one.table_bytes_per_second / faster
  byte_times = [1 / b for b in record.BANDWIDTHS]
  latency = constants.latency_seconds * faster
  return np.outer(
    _between(byte_times, 1 / bandwidth),
    _between(record.LATENCIES_SECONDS, latency),
  )


def _between(points: Sequence[float], value: float) -> np.ndarray:
  """The weights of the two points a value is between, or nearest to."""
  rising = np.sort(np.array(points))
  at = int(np.clip(np.searchsorted(rising, value), 1, len(points) - 1))
  share = (value - rising[at - 1]) / (rising[at] - rising[at - 1])
  weights = np.zeros(len(points))
  weights[at - 1], weights[at] = 1 - share, share
  return weights if points[0] < points[-1] else weights[::-1]


def fitted(records: Sequence[Record], start: Constants) -> Constants:
  """Constants that fit records.

  The clock is the median of those that programs give which hardly wait for
  HBM. Bandwidth and latency are those with the least mean of absolute relative
  errors, looked for on ever finer grids; an error counts for at most
  `_MOST_ERROR`, so that an entry for which another program was timed does not
  pull at the constants of the rest.

  Args:
    records: those to fit, of one chip.
    start: where to begin; its clock is kept if too few records tell it.
  """
  table = records[0].table_bytes_per_second
  grids = np.array([r.grid_cycles for r in records])
  measured = np.array([r.measured_us for r in records])
  ends = {
    "bytes_per_second": (
      record.BANDWIDTHS[0] * table,
      record.BANDWIDTHS[-1] * table,
    ),
    "latency_seconds": (
      record.LATENCIES_SECONDS[0],
      record.LATENCIES_SECONDS[-1],
    ),
  }

  def loss(tried: Constants) -> float:
    cycles = (grids * _weights(records[0], tried)).sum((1, 2))
    off = np.abs(cycles / tried.clock_hz * 1e6 / measured - 1)
    return float(np.minimum(off, _MOST_ERROR).mean())

  best = dataclasses.replace(
    start, clock_hz=_clock_hz(grids, measured, start.clock_hz)
  )
  least = loss(best)
  for step in _STEPS:
    # They stand in for each other, so that both move at once.
    points = [_around(getattr(best, n), ends[n], step) for n in ends]
    for values in itertools.product(*points):
      changes = dict(zip(ends, map(float, values), strict=True))
      tried = dataclasses.replace(best, **changes)
      if (off := loss(tried)) < least:
        best, least = tried, off
  return best


def _clock_hz(
  grids: np.ndarray, measured_us: np.ndarray, otherwise: float
) -> float:
  """The clock that programs give whose cycles HBM hardly changes."""
  low, high = grids.min((1, 2)), grids.max((1, 2))
  is_steady = high < (1 + _STEADY) * low
  if is_steady.sum() < _FEWEST_STEADY:
    return otherwise
  found = (low + high)[is_steady] / 2 / measured_us[is_steady] * 1e6
  return float(np.median(found))


def _around(
  value: float, ends: tuple[float, float], width: float
) -> np.ndarray:
  """Points around a value, within a share of what is allowed."""
  half = width * (ends[1] - ends[0])
  return np.clip(np.linspace(value - half, value + half, _POINTS), *ends)


def score(measured: Sequence[float], predicted: Sequence[float]) -> Score:
  """How near predictions are to what was measured."""
  ratios = np.array(predicted) / np.array(measured)
  off = np.abs(ratios - 1)
  if not len(off):
    nan = float("nan")
    return Score(
      entries=0, median=nan, within=nan, largest=nan, bias=nan, spearman=nan
    )
  return Score(
    entries=len(off),
    median=float(np.median(off)),
    within=float(np.mean(off <= WITHIN)),
    largest=float(off.max()),
    bias=float(np.median(ratios) - 1),
    spearman=_spearman(measured, predicted),
  )


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
  if len(a) < 3:
    return float("nan")
  return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
  """Ranks; equal values share the mean of theirs."""
  _, inverse, counts = np.unique(
    np.array(values), return_inverse=True, return_counts=True
  )
  last = np.cumsum(counts)
  return (last - (counts - 1) / 2)[inverse]
