"""What each core does when, while an operation is predicted to run.

Kept as it was worked out: rounds that repeat are held once and written out when
they are asked for.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools

import numpy as np

from coremesh.profile import dma, units
from coremesh.profile.events import EventKind, Rounds, Trace
from coremesh.profile.log import Again, Log, Span

# Written out, no more copies or waits of a core than this: see `Spans.is_whole`
_MOST_SPANS = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
  """Copies or waits of one core, in the order of their start.

  Attributes:
    start_cycles: [n] float64, from the start of the operation.
    end_cycles: [n] float64.
    num_bytes: [n] int64, 0 of waits.
    bundles: [n] int64, where in the machine code.
    is_whole: whether these are all; else the first ones.
  """

  start_cycles: np.ndarray
  end_cycles: np.ndarray
  num_bytes: np.ndarray
  bundles: np.ndarray
  is_whole: bool

  def __len__(self) -> int:
    return len(self.start_cycles)

  def union(self) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of the times in which there is at least one."""
    if not len(self):
      return self.start_cycles, self.end_cycles
    so_far = np.maximum.accumulate(self.end_cycles)
    is_new = np.r_[True, self.start_cycles[1:] > so_far[:-1]]
    first = np.flatnonzero(is_new)
    return self.start_cycles[first], so_far[np.r_[first[1:] - 1, len(self) - 1]]

  def share(self, edges: np.ndarray) -> np.ndarray:
    """Part of each stretch between edges in which there is at least one."""
    starts, ends = self.union()
    done = np.r_[0.0, np.cumsum(ends - starts)]
    index = np.searchsorted(starts, edges, side="right")
    before = done[index]
    last = np.maximum(index - 1, 0)
    if len(starts):
      over = np.maximum(0.0, ends[last] - edges)
      before = before - np.where(index > 0, over, 0.0)
    return np.diff(before) / np.diff(edges)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreActivity:
  """One core of an operation.

  Attributes:
    core: its number in the device.
    cycles: from the start of the operation to the core's own end.
    trace: what it issued.
    log: its copies and waits.
    busy: what each bundle keeps busy.
  """

  core: int
  cycles: float
  trace: Trace = dataclasses.field(repr=False)
  log: Log = dataclasses.field(repr=False)
  busy: units.Busy = dataclasses.field(repr=False)

  def spans(self, *kinds: EventKind) -> Spans:
    """Its copies and waits of some kinds.

    Args:
      *kinds: "read", "write", "local", "send", "wait" or "delay".
    """
    parts = [
      part
      for item in self.log.items
      if len(part := self._written_out(item, kinds))
    ]
    found = np.concatenate(parts) if parts else np.zeros((0, 4), np.int64)
    found = found[np.argsort(found[:, 0], kind="stable")]
    kept = found[:_MOST_SPANS]
    return Spans(
      start_cycles=kept[:, 0] / dma.TICKS,
      end_cycles=kept[:, 1] / dma.TICKS,
      num_bytes=kept[:, 2],
      bundles=kept[:, 3],
      is_whole=len(kept) == self._count(kinds),
    )

  def _own(self, item: Span | Again, kinds: Iterable[EventKind]) -> list[Span]:
    spans = item.spans if isinstance(item, Again) else (item,)
    return [s for s in spans if s.core == self.core and s.kind in kinds]

  def _count(self, kinds: Iterable[EventKind]) -> int:
    return sum(
      len(self._own(item, kinds))
      * (item.times if isinstance(item, Again) else 1)
      for item in self.log.items
    )

  def _written_out(
    self, item: Span | Again, kinds: Iterable[EventKind]
  ) -> np.ndarray:
    """Rows of start and end in ticks, bytes and bundle."""
    own = self._own(item, kinds)
    rows = [(s.start, s.end, s.num_bytes, s.bundle) for s in own]
    once = np.array(rows, np.int64).reshape(-1, 4)
    if not isinstance(item, Again) or not own:
      return once
    times = min(item.times, -(-_MOST_SPANS // len(own)))
    shift = np.arange(times, dtype=np.int64)[:, None, None] * item.period
    moved = once[None] + shift * np.array([1, 1, 0, 0])
    return moved.reshape(-1, 4)

  def shares(self, edges: np.ndarray) -> Mapping[str, np.ndarray]:
    """The busy share of each unit, and of waiting, between edges.

    Args:
      edges: [n + 1] float64, cycles, rising.

    Returns:
      [n] float64 for each of `units.UNITS` and "waiting". After the end of the
      core all are 0.
    """
    waits = self.spans("wait", "delay")
    waiting = waits.share(edges)
    waited = np.r_[0.0, np.cumsum(waiting * np.diff(edges))]
    waited += _before(waits, edges[0])
    issued = np.clip(edges - waited, 0, self.trace.cycles)
    done = np.stack([self._issued.until(cycle) for cycle in issued])
    rates = np.diff(done, axis=0) / np.diff(edges)[:, None]
    return {
      **{u: rates[:, i] for i, u in enumerate(self.busy.by_unit)},
      "waiting": waiting,
    }

  @functools.cached_property
  def _issued(self) -> "_Issued":
    return _Issued(self.trace, self.busy)


def _before(spans: Spans, edge: float) -> float:
  starts, ends = spans.union()
  return float(np.clip(np.minimum(ends, edge) - starts, 0, None).sum())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
  """Runs of bundles one after the other, so many times.

  Attributes:
    first: bundles issued before it.
    period: bundles of one time.
    offsets: where in it each run begins.
    starts: the first bundle of each run.
    busy: [runs + 1, units] cycles before each run, and after the last.
    before: [units] cycles before the stretch.
  """

  first: int
  period: int
  times: int
  offsets: np.ndarray
  starts: np.ndarray
  busy: np.ndarray
  before: np.ndarray


class _Issued:
  """Cycles for which units are busy until some number of bundles is issued."""

  def __init__(self, trace: Trace, busy: units.Busy):
    by_bundle = np.stack([*busy.by_unit.values()], axis=1)
    zero = np.zeros((1, by_bundle.shape[1]))
    self._until_bundle = np.concatenate([zero, np.cumsum(by_bundle, axis=0)])
    self._lengths = {run.start: run.end - run.start for run in trace.runs}
    self._stretches: list[_Stretch] = []
    self._first, self._before = 0, zero[0]
    single: list[int] = []
    for item in trace.path:
      if isinstance(item, Rounds):
        self._add(single, 1)
        self._add(item.starts, item.times)
        single = []
      else:
        single.append(item)
    self._add(single, 1)
    self._firsts = np.array([s.first for s in self._stretches])

  def _add(self, starts: Sequence[int], times: int) -> None:
    if not starts:
      return
    first = np.array(starts)
    lengths = np.array([self._lengths[s] for s in starts])
    each = self._until_bundle[first + lengths] - self._until_bundle[first]
    busy = np.concatenate([np.zeros((1, each.shape[1])), np.cumsum(each, 0)])
    period = int(lengths.sum())
    self._stretches.append(
      _Stretch(
        first=self._first,
        period=period,
        times=times,
        offsets=np.cumsum(lengths) - lengths,
        starts=first,
        busy=busy,
        before=self._before,
      )
    )
    self._first += times * period
    self._before = self._before + times * busy[-1]

  def until(self, cycle: float) -> np.ndarray:
    """[units] cycles, after so many bundles; may be a fraction."""
    if not self._stretches:
      return self._before
    which = int(np.searchsorted(self._firsts, cycle, side="right")) - 1
    found = self._stretches[max(0, which)]
    times, rest = divmod(cycle - found.first, found.period)
    if times >= found.times:
      return found.before + found.times * found.busy[-1]
    run = int(np.searchsorted(found.offsets, rest, side="right")) - 1
    bundles, part = divmod(rest - found.offsets[run], 1)
    start = int(found.starts[run])
    here = start + int(bundles)
    held = self._until_bundle[here] - self._until_bundle[start]
    held = held + part * (
      self._until_bundle[here + 1] - self._until_bundle[here]
    )
    return found.before + times * found.busy[-1] + found.busy[run] + held


def of_operation(
  traces: Sequence[Trace],
  timings: Sequence[dma.CoreTiming],
  *,
  log: Log,
  busy: units.Busy,
) -> tuple[CoreActivity, ...]:
  """What the cores of an operation do.

  Args:
    traces: of each core.
    timings: of each core.
    log: what `dma.timings` noted.
    busy: what each bundle keeps busy.
  """
  logs = log.by_core()
  return tuple(
    CoreActivity(
      core=trace.core,
      cycles=timing.cycles,
      trace=trace,
      log=logs.get(trace.core, Log()),
      busy=busy,
    )
    for trace, timing in zip(traces, timings, strict=True)
  )
