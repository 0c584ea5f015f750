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


_LINKS = dma.Links(
  bytes_per_cycle=16.0, die_bytes_per_cycle=48.0, hop_cycles=40, core_cycles=7
)


def _event(cycle: int, kind: str, flag: int, amount: int, to=None):
  return profile_events.Event(cycle, kind, cycle, flag, amount, to)


def _exchange(core: int, *, gap: int, granules: int, times: int):
  """Each round: a signal to the other core, its own, a copy and its own."""
  other = profile_events.Target(
    device=1 - core, core=0, flag=1, way="link", hops=1, source="vmem"
  )
  copy = other._replace(flag=2)
  events = (
    _event(0, "signal", -1, 1, other),
    _event(gap, "wait", 1, 1),
    _event(gap, "add", 1, -1),
    _event(gap + 1, "send", 3, granules, copy),
    _event(gap + 2, "wait", 3, granules),
    _event(gap + 2, "add", 3, -granules),
    _event(gap + 3, "wait", 2, granules),
    _event(gap + 3, "add", 2, -granules),
  )
  block = profile_events.Repeat(0, events, times, gap + 5)
  return dataclasses.replace(
    _trace(cycles=times * (gap + 5)), events=(block,), device=core
  )


@given(
  gap=st.integers(1, 200),
  other_gap=st.integers(1, 200),
  granules=st.integers(1, 300),
  times=st.integers(2, 40),
)
def test_skipping_rounds_of_an_exchange_changes_nothing(
  gap, other_gap, granules, times
):
  traces = [
    _exchange(0, gap=gap, granules=granules, times=times),
    _exchange(1, gap=other_gap, granules=granules, times=times),
  ]
  found = dma.timings(traces, _HBM, links=_LINKS)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(samples, "_MOST_SAMPLES", 0)
    assert found == dma.timings(traces, _HBM, links=_LINKS)
  assert all(not core.left_over for core in found)
  # No round is shorter than a signal and a copy, one after the other.
  least = times * (2 * 40 + granules * 32 / 16 + 100)
  assert min(core.cycles for core in found) >= least


def test_a_million_exchanges_are_not_run_one_by_one():
  traces = [
    _exchange(core, gap=gap, granules=9, times=10**6)
    for core, gap in ((0, 5), (1, 60))
  ]
  found = dma.timings(traces, _HBM, links=_LINKS)
  assert [core.sent_bytes for core in found] == [10**6 * 9 * 32] * 2


def test_a_signal_is_waited_for_as_long_as_it_is_on_its_way():
  to = profile_events.Target(device=0, core=1, flag=4, way="core")
  sender = _trace((100, "signal", 0, -1, 2, to))
  waiter = _trace((3, "wait", 9, 4, 2), (3, "add", 9, 4, -2), core=1)
  _, core = dma.timings([sender, waiter], _HBM, links=_LINKS)
  assert core.waiting_by_bundle == {9: 100 + 7 - 3}
  assert not core.left_over


def test_one_of_two_signals_is_not_enough():
  to = profile_events.Target(device=0, core=1, flag=4, way="core")
  sender = _trace((100, "signal", 0, -1, 1, to))
  waiter = _trace((3, "wait", 9, 4, 2), core=1)
  with pytest.raises(UnsupportedError, match="hold 2, where all.* makes 1"):
    dma.timings([sender, waiter], _HBM, links=_LINKS)


def test_each_way_has_its_own_rate():
  def arrives(way, hops=0):
    to = profile_events.Target(
      device=1, core=0, flag=4, way=way, hops=hops, source="vmem"
    )
    sender = _trace((0, "send", 0, -1, 96, to))
    waiter = dataclasses.replace(_trace((0, "wait", 9, 4, 96)), device=1)
    _, core = dma.timings([sender, waiter], _HBM, links=_LINKS)
    return core.waiting_cycles - 100

  assert arrives("link", 3) == 96 * 32 / 16 + 3 * 40
  assert arrives("die") == 96 * 32 / 48 + 7


def test_cores_of_a_group_meet_when_the_last_is_there():
  traces = [
    dataclasses.replace(_trace((cycle, "meet", 5, 0, 0), core=core), group=g)
    for core, (cycle, g) in enumerate([(10, 0), (45, 0), (30, 1)])
  ]
  found = dma.timings(traces, _HBM)
  assert [core.waiting_cycles for core in found] == [35, 0, 0]


def test_a_core_that_does_not_come_to_a_barrier_is_a_deadlock():
  traces = [_trace((10, "meet", 5, 0, 0)), _trace(core=1)]
  with pytest.raises(UnsupportedError, match="for all other subcores"):
    dma.timings(traces, _HBM)


def test_a_fence_waits_for_what_was_written():
  write = (0, "write", 0, 1, 8)
  read = (0, "read", 0, 2, 8)
  [core] = dma.timings([_trace(write, (9, "fence", 9, 0, 0))], _HBM)
  assert core.waiting_cycles == 8 * 32 / 64 + 100 - 9
  [core] = dma.timings([_trace(read, (9, "fence", 9, 0, 0))], _HBM)
  assert core.waiting_cycles == 0


def test_what_one_core_can_copy_is_less_than_all_can():
  hbm = dataclasses.replace(_HBM, core_bytes_per_cycle=8.0)
  [core] = dma.timings([_trace(*_copy(0, 80))], hbm)
  assert core.waiting_cycles == 80 * 32 / 8 + 100 - 3
