"""Tests for coremesh.profile.dma: HBM that cores share."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
import pytest

from coremesh.errors import UnsupportedError
from coremesh.profile import dma, samples
from coremesh.profile import events as profile_events

_HBM = dma.Hbm(bytes_per_cycle=64.0, latency_cycles=100.0)


def _trace(*events, cycles=50, core=0) -> profile_events.Trace:
  return profile_events.Trace(
    core=core,
    cycles=cycles,
    runs=(),
    events=tuple(profile_events.Event(*e) for e in events),
    assumed=(),
    skipped=0,
  )


def _copy(start: int, granules: int, flag: int = 1, kind="read"):
  """A copy, and the wait for it three cycles later."""
  return (
    (start, kind, 0, flag, granules),
    (start + 3, "wait", 3, flag, granules),
    (start + 3, "add", 3, flag, -granules),
  )


def test_a_copy_takes_its_bytes_and_a_latency():
  [core] = dma.timings([_trace(*_copy(10, 8))], _HBM)
  done = 10 + 8 * 32 / 64 + 100
  assert core.cycles == pytest.approx(done + 50 - 13)
  assert core.waiting_by_bundle == {3: pytest.approx(done - 13)}
  assert (core.read_bytes, core.written_bytes) == (256, 0)
  assert not core.left_over


def test_a_copy_that_is_done_is_not_waited_for():
  events = ((0, "read", 0, 1, 8), (900, "wait", 9, 1, 8))
  [core] = dma.timings([_trace(*events, cycles=1000)], _HBM)
  assert core.cycles == 1000


def test_cores_share_the_bandwidth():
  alone = dma.timings([_trace(*_copy(0, 4000))], _HBM)[0].cycles
  both = dma.timings(
    [_trace(*_copy(0, 4000)), _trace(*_copy(0, 4000), core=1)], _HBM
  )
  transfer = 4000 * 32 / 64
  assert both[1].cycles == pytest.approx(alone + transfer)


def test_a_copy_inside_a_core_does_not_take_hbm():
  other = _trace((0, "local", 0, 1, 10**6), core=1)
  alone = dma.timings([_trace(*_copy(0, 8))], _HBM)[0].cycles
  assert dma.timings([_trace(*_copy(0, 8)), other], _HBM)[0].cycles == alone


def test_a_wait_for_what_nobody_sends_is_an_error():
  events = ((0, "read", 0, 1, 8), (5, "wait", 9, 1, 9))
  with pytest.raises(
    UnsupportedError, match="waits at bundle 0x9 for.* hold 9.* makes 8"
  ):
    dma.timings([_trace(*events)], _HBM)


def test_what_is_left_in_a_semaphore_is_found():
  [core] = dma.timings([_trace((0, "read", 0, 1, 8))], _HBM)
  assert core.left_over == {1: 8}
  events = ((0, "add", 0, 2, 3), (1, "set", 1, 2, 0))
  [core] = dma.timings([_trace(*events)], _HBM)
  assert core.left_over == {2: 3}


def test_a_delay_is_time():
  [core] = dma.timings([_trace((5, "delay", 0, 0, 70))], _HBM)
  assert core.cycles == 120


@given(
  st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5000)), max_size=8),
  st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5000)), max_size=8),
)
def test_no_order_of_copies_beats_the_bandwidth(one, two):
  traces = []
  for core, copies in enumerate((one, two)):
    events, cycle = [], 0
    for gap, granules in copies:
      cycle += gap
      events += _copy(cycle, granules)
      cycle += 3
    traces.append(_trace(*events, cycles=cycle, core=core))
  total = 32 * sum(granules for _, granules in one + two)
  ends = dma.timings(traces, _HBM)
  assert max(core.cycles for core in ends) >= total / 64 - 1e-6
  assert ends == dma.timings(traces, _HBM)
  faster = dma.Hbm(bytes_per_cycle=128.0, latency_cycles=100.0)
  if not two:
    assert dma.timings(traces, faster)[0].cycles <= ends[0].cycles


def test_an_hbm_without_bandwidth_is_an_error():
  with pytest.raises(ValueError, match="bytes_per_cycle must be positive"):
    dma.Hbm(bytes_per_cycle=0, latency_cycles=1)


def _repeated(core: int, *, gap: int, granules: int, times: int):
  """Copies into two buffers in turn, each waited for a round later."""
  events = tuple(
    profile_events.Event(*e)
    for e in (
      (0, "read", 0, 1, granules),
      (gap, "wait", 1, 2, granules),
      (gap, "add", 1, 2, -granules),
      (gap, "read", 1, 2, granules),
      (2 * gap, "wait", 2, 1, granules),
      (2 * gap, "add", 2, 1, -granules),
    )
  )
  first = profile_events.Event(0, "read", 0, 2, granules)
  last = profile_events.Event(5 + times * 2 * gap, "wait", 3, 2, granules)
  block = profile_events.Repeat(5, events, times, 2 * gap)
  cycles = 10 + times * 2 * gap
  return dataclasses.replace(
    _trace(cycles=cycles, core=core), events=(first, block, last)
  )


@given(
  gap=st.integers(1, 300),
  granules=st.integers(1, 900),
  other_gap=st.integers(1, 300),
  times=st.integers(2, 60),
)
def test_skipping_repetitions_changes_nothing(gap, granules, other_gap, times):
  traces = [
    _repeated(0, gap=gap, granules=granules, times=times),
    _repeated(1, gap=other_gap, granules=granules + 3, times=2 * times),
  ]
  found = dma.timings(traces, _HBM)
  alone = dma.timings(traces[:1], _HBM)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(samples, "_MOST_SAMPLES", 0)
    assert found == dma.timings(traces, _HBM)
    assert alone == dma.timings(traces[:1], _HBM)


def test_a_million_repetitions_are_not_run_one_by_one():
  traces = [
    _repeated(core, gap=100, granules=300, times=10**6) for core in (0, 1)
  ]
  both = dma.timings(traces, _HBM)
  num_bytes = sum(c.read_bytes for c in both)
  assert num_bytes == 2 * (2 * 10**6 + 1) * 300 * 32
  assert max(c.cycles for c in both) >= num_bytes / 64
