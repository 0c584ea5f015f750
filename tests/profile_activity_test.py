"""Tests for coremesh.profile.activity: what is kept once is written out."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from coremesh.profile import activity, dma, units
from coremesh.profile.events import Event, Repeat, Rounds, Run, Trace
from coremesh.profile.log import Again, Log, Span

# Three runs of bundles, and how many bundles each has.
_LENGTHS = {0: 3, 3: 1, 4: 5}
_NUM_BUNDLES = sum(_LENGTHS.values())


def _trace(path, events=()) -> Trace:
  starts = list(_written_out(path))
  return Trace(
    core=0,
    cycles=sum(_LENGTHS[s] for s in starts),
    runs=tuple(
      Run(start=s, end=s + n, count=starts.count(s))
      for s, n in _LENGTHS.items()
    ),
    events=events,
    assumed=(),
    skipped=0,
    path=tuple(path),
  )


def _written_out(path):
  for item in path:
    if isinstance(item, Rounds):
      yield from item.starts * item.times
    else:
      yield item


def _activity(trace, log=None, waited=0.0) -> activity.CoreActivity:
  rng = np.random.default_rng(0)
  by_unit = {u: rng.random(_NUM_BUNDLES) for u in units.UNITS}
  return activity.CoreActivity(
    core=0,
    cycles=trace.cycles + waited,
    trace=trace,
    log=log or Log(),
    busy=units.Busy(by_unit=by_unit),
  )


_STARTS = st.sampled_from(list(_LENGTHS))
_PATHS = st.lists(
  st.one_of(
    _STARTS,
    st.builds(
      lambda starts, times: Rounds(tuple(starts), times),
      st.lists(_STARTS, min_size=1, max_size=4),
      st.integers(1, 5),
    ),
  ),
  min_size=1,
  max_size=6,
)


@given(path=_PATHS, cuts=st.lists(st.floats(0, 1), max_size=6))
def test_shares_are_those_of_the_bundles_one_by_one(path, cuts):
  found = _activity(_trace(path))
  bundles = [
    bundle
    for start in _written_out(path)
    for bundle in range(start, start + _LENGTHS[start])
  ]
  edges = np.unique([0.0, *(round(c * len(bundles)) for c in cuts)])
  edges = np.unique([*edges, len(bundles)])
  shares = found.shares(edges)
  for unit, by_bundle in found.busy.by_unit.items():
    for i, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
      held = by_bundle[bundles[int(first) : int(last)]].sum()
      assert shares[unit][i] * (last - first) == pytest.approx(held)
  assert not shares["waiting"].any()


def _span(kind, start, end, num_bytes=0, core=0) -> Span:
  ticks = (start * dma.TICKS, end * dma.TICKS)
  return Span(core, kind, *ticks, bundle=7, num_bytes=num_bytes)


def test_units_stand_still_while_a_core_waits():
  # Bundles 0 to 2, a wait of 10 cycles in the third, and one bundle more.
  log = Log(items=[_span("wait", 2, 12)])
  found = _activity(_trace([0, 3]), log, waited=10)
  shares = found.shares(np.array([0.0, 2, 12, 14]))
  by_bundle = found.busy.by_unit["MXU"]
  assert shares["waiting"] == pytest.approx([0, 1, 0])
  assert shares["MXU"][0] * 2 == pytest.approx(by_bundle[:2].sum())
  assert shares["MXU"][1] == pytest.approx(0)
  assert shares["MXU"][2] * 2 == pytest.approx(by_bundle[2:4].sum())


def test_a_repetition_is_written_out_each_time():
  once = (
    _span("read", 1, 4, 64),
    _span("wait", 2, 4),
    _span("read", 1, 9, 1, 1),
  )
  log = Log(items=[_span("read", 0, 1, 32), *once])
  log.repeat(1, count=2, period=10 * dma.TICKS)
  assert log.items[1] == Again(once, 3, 10 * dma.TICKS)
  found = _activity(_trace([0]), log)
  reads = found.spans("read")
  assert reads.start_cycles.tolist() == [0, 1, 11, 21]
  assert reads.end_cycles.tolist() == [1, 4, 14, 24]
  assert reads.num_bytes.tolist() == [32, 64, 64, 64]
  assert reads.bundles.tolist() == [7] * 4
  assert reads.is_whole
  assert found.spans("wait").start_cycles.tolist() == [2, 12, 22]
  assert len(found.spans("write")) == 0
  other = dataclasses.replace(found, core=1)
  assert other.spans("read").num_bytes.tolist() == [1, 1, 1]


def test_what_is_too_long_to_be_written_out_says_so(monkeypatch):
  log = Log(items=[Again((_span("read", 0, 1, 8),), 1000, dma.TICKS * 2)])
  found = _activity(_trace([0]), log)
  assert found.spans("read").is_whole
  monkeypatch.setattr(activity, "_MOST_SPANS", 10)
  reads = found.spans("read")
  assert not reads.is_whole
  assert reads.start_cycles.tolist() == list(range(0, 20, 2))


@given(
  starts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
  lengths=st.lists(st.integers(1, 9), min_size=8, max_size=8),
)
def test_a_share_is_the_part_of_the_cycles_with_a_span(starts, lengths):
  spans = [
    _span("read", s, s + n)
    for s, n in zip(sorted(starts), lengths, strict=False)
  ]
  found = _activity(_trace([0]), Log(items=list(spans))).spans("read")
  busy = np.zeros(60)
  for span in spans:
    busy[span.start // dma.TICKS : span.end // dma.TICKS] = 1
  edges = np.array([0.0, 7, 8, 30, 60])
  cells = [slice(0, 7), slice(7, 8), slice(8, 30), slice(30, 60)]
  wanted = [busy[cell].mean() for cell in cells]
  assert found.share(edges) == pytest.approx(wanted)


def test_a_timing_that_skips_rounds_notes_them_all(monkeypatch):
  # A copy of 320 bytes and the wait for it, 200 times.
  events = (Event(0, "read", 0, 1, 10), Event(1, "wait", 1, 1, 10))
  events += (Event(1, "add", 1, 1, -10),)
  trace = _trace([0] * 200, (Repeat(0, events, 200, 3),))
  hbm = dma.Hbm(bytes_per_cycle=10, latency_cycles=5)
  log = Log()
  [timing] = dma.timings([trace], hbm, log)
  found = _activity(trace, log, timing.waiting_cycles)
  assert any(isinstance(item, Again) for item in log.items)
  reads, waits = found.spans("read"), found.spans("wait")
  assert len(reads) == len(waits) == 200
  # 32 cycles of transfer and 5 of latency, of which 1 is not waited.
  assert reads.end_cycles - reads.start_cycles == pytest.approx(37)
  assert np.diff(reads.start_cycles) == pytest.approx(3 + 36)
  total = (waits.end_cycles - waits.start_cycles).sum()
  assert total == pytest.approx(timing.waiting_cycles)
  assert waits.end_cycles.max() <= timing.cycles
