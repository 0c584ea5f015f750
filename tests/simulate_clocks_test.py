"""Races of a shadow memory against those of a list of all accesses."""

import dataclasses

from hypothesis import example, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from coremesh.simulate import clocks

_THREADS, _ROWS, _COLUMNS = 4, 3, 4

_slices = st.tuples(st.integers(0, 3), st.integers(1, 4)).map(
  lambda t: slice(t[0], t[0] + t[1])
)
_regions = st.one_of(
  st.tuples(_slices, _slices),
  st.just((slice(None), slice(None))),
  st.tuples(st.just(slice(0, None, 2)), _slices),
)
_accesses = st.tuples(
  st.sampled_from(["read", "read", "write", "add"]),
  st.integers(0, _THREADS - 1),
  _regions,
)
_messages = st.tuples(
  st.just("tell"), st.integers(0, _THREADS - 1), st.integers(0, _THREADS - 1)
)
# The same operation may come again from the same line.
_programs = st.lists(
  st.tuples(st.one_of(_accesses, _messages), st.integers(1, 2)), max_size=24
)


@dataclasses.dataclass(frozen=True)
class _Happened:
  kind: str
  thread: int
  event: int

  def races_with(self, kind: str, clock: np.ndarray) -> bool:
    both = {self.kind, kind}
    if both in ({"read"}, {"add"}):
      return False
    return clock[self.thread] < self.event


class _Threads:
  """Clocks that messages join, as workers of the simulator keep them."""

  def __init__(self):
    self.clocks = [np.zeros(_THREADS, np.int64) for _ in range(_THREADS)]
    for thread, clock in enumerate(self.clocks):
      clock[thread] = 1

  def tell(self, sender: int, receiver: int) -> None:
    known = self.clocks[sender].copy()
    self.clocks[sender][sender] += 1
    self.clocks[receiver] = clocks.joined(self.clocks[receiver], known)


def _first_races(program, size, *, settles=False):
  """The step at which each of the two first finds a race, None for none."""
  records = clocks.Records()
  shadow = clocks.Shadow(size, records)
  history = np.empty(size, object)
  history[...] = [[[] for _ in range(size[1])] for _ in range(size[0])]
  threads = _Threads()
  ours, reference = None, None
  for step, ((kind, thread, rest), times) in enumerate(program):
    if settles:
      records.settle(np.minimum.reduce(threads.clocks))
    if kind == "tell":
      threads.tell(thread, rest)
      continue
    site = object()
    for _ in range(times):
      clock = threads.clocks[thread]
      event = int(clock[thread])
      number = records.number(thread, event, site, kind, thread)
      method = shadow.read if kind == "read" else shadow.write
      raced = method(shadow.state[rest], number, clock)
      if raced and ours is None:
        ours = step
      for cell in history[rest].reshape(-1):
        if reference is None and any(
          before.races_with(kind, clock)
          for before in cell
          if (before.kind, before.thread, before.event) != (kind, thread, event)
        ):
          reference = step
        cell.append(_Happened(kind, thread, event))
    if ours is not None or reference is not None:
      break  # What comes after a race means little.
  return ours, reference


@given(_programs)
@settings(max_examples=400)
@example(
  # The addition of a thread follows its own write, and hides it no more.
  [(("write", 0, (slice(0, 1),) * 2), 1), (("add", 0, (slice(0, 1),) * 2), 1)]
  + [(("add", 1, (slice(0, 1),) * 2), 1)]
)
@example(
  [(("read", 0, (slice(0, 1),) * 2), 1), (("add", 0, (slice(0, 1),) * 2), 1)]
  + [(("add", 1, (slice(0, 1),) * 2), 1)]
)
def test_a_shadow_finds_the_races_that_a_list_of_all_accesses_shows(program):
  ours, reference = _first_races(program, (_ROWS, _COLUMNS))
  assert ours == reference


@given(_programs)
@settings(max_examples=200)
def test_what_is_forgotten_races_with_nothing(program):
  ours, reference = _first_races(program, (_ROWS, _COLUMNS), settles=True)
  assert ours == reference


def test_accesses_that_no_state_names_are_forgotten():
  records = clocks.Records()
  shadow = clocks.Shadow((4,), records)
  clock = np.array([1, 0])
  for event in range(1, 1001):
    clock[0] = event
    number = records.number(0, event, object(), "write", 0)
    assert not shadow.write(shadow.state, number, clock)
  records.settle(np.array([900, 0]))
  assert list(records.accesses) == [number]
  np.testing.assert_array_equal(records.settled[0], range(901, 1000))


@given(_programs)
@settings(max_examples=100)
def test_a_large_shadow_finds_them_too(program):
  # Its parts are too large to be looked up as a whole.
  scaled = [
    (
      (kind, thread, rest)
      if kind == "tell"
      else (
        kind,
        thread,
        tuple(slice((s.start or 0) * 8, s.stop and s.stop * 8) for s in rest),
      ),
      times,
    )
    for (kind, thread, rest), times in program
  ]
  ours, reference = _first_races(scaled, (8 * _ROWS, 8 * _COLUMNS))
  assert ours == reference


def _noted(steps, *, size=4):
  """Accesses of threads that know nothing of one another but what is told."""
  records, threads = clocks.Records(), _Threads()
  shadow = clocks.Shadow((size,), records)
  raced = []
  for kind, thread, *rest in steps:
    if kind == "tell":
      threads.tell(thread, rest[0])
      continue
    clock = threads.clocks[thread]
    kind, same = ("write", True) if kind == "same" else (kind, False)
    number = records.number(thread, int(clock[thread]), object(), kind, thread)
    if kind == "read":
      found = shadow.read(shadow.state, number, clock)
    else:
      changes = (lambda: False) if same else (lambda: True)
      found = shadow.write(shadow.state, number, clock, changes)
    raced.append(sorted(access.thread for access in found))
  return raced


@pytest.mark.parametrize(
  ("steps", "raced"),
  [
    # Who writes what is there already races with nobody,
    ([("write", 0), ("same", 1)], [[], []]),
    # and a reader needs to follow one of the writers,
    ([("write", 0), ("same", 1), ("tell", 1, 2), ("read", 2)], [[], [], []]),
    ([("write", 0), ("same", 1), ("tell", 0, 2), ("read", 2)], [[], [], []]),
    ([("write", 0), ("same", 1), ("read", 2)], [[], [], [1]]),
    # who writes another value all of them.
    (
      [("write", 0), ("same", 1), ("tell", 1, 2), ("write", 2)],
      [[], [], [0]],
    ),
    (
      [("write", 0), ("same", 1), ("tell", 0, 2), ("tell", 1, 2), ("write", 2)],
      [[], [], []],
    ),
    # A write of the same value does not hide a read.
    (
      [("write", 0), ("tell", 0, 1), ("read", 1), ("same", 0), ("write", 0)],
      [[], [], [1], [1]],
    ),
    ([("read", 0), ("same", 1)], [[], [0]]),
    # But who follows one of several such writes may count on the value.
    ([("write", 0), ("read", 0), ("same", 1)], [[], [], []]),
    ([("write", 0), ("tell", 0, 2), ("read", 2), ("same", 1)], [[], [], []]),
    (
      [("write", 0), ("tell", 0, 1), ("read", 0), ("same", 1)],
      [[], [], [0]],
    ),
    # A reader of sums needs all of them.
    ([("add", 0), ("add", 1), ("tell", 0, 2), ("read", 2)], [[], [], [1]]),
    (
      [("add", 0), ("add", 1), ("tell", 0, 2), ("tell", 1, 2), ("read", 2)],
      [[], [], []],
    ),
    ([("write", 0), ("add", 1)], [[], [0]]),
    ([("read", 0), ("add", 1)], [[], [0]]),
    ([("read", 0), ("read", 1), ("write", 2)], [[], [], [0, 1]]),
  ],
)
def test_who_races_with_whom(steps, raced):
  assert _noted(steps) == raced


def test_nothing_of_a_memory_races_with_nothing():
  records = clocks.Records()
  shadow = clocks.Shadow((4,), records)
  number = records.number(0, 1, object(), "write", 0)
  assert not shadow.write(shadow.state[4:], number, np.ones(1, np.int64))
  assert not shadow.read(shadow.state[:0], number, np.ones(1, np.int64))


_known = st.dictionaries(st.integers(0, 6), st.integers(1, 9), max_size=5)


def _clock(known, size):
  clock = np.zeros(max([size, *(t + 1 for t in known)]), np.int64)
  for thread, event in known.items():
    clock[thread] = event
  return clock


@given(_known, _known, st.integers(0, 8), st.integers(0, 8))
def test_who_joins_two_clocks_knows_what_either_knew(a, b, size_a, size_b):
  mine, other = _clock(a, size_a), _clock(b, size_b)
  kept = mine.copy(), other.copy()
  both = clocks.joined(mine, other)
  for thread in range(10):
    for event in range(1, 11):
      known = max(a.get(thread, 0), b.get(thread, 0)) >= event
      assert clocks.reaches(both, thread, event) == known
  np.testing.assert_array_equal(mine, kept[0])
  np.testing.assert_array_equal(other, kept[1])


@given(_known, st.integers(0, 20))
def test_a_wider_clock_knows_the_same(known, threads):
  clock = _clock(known, 0)
  wide = clocks.widened(clock, threads)
  assert len(wide) >= threads
  np.testing.assert_array_equal(wide[: len(clock)], clock)
  assert not wide[len(clock) :].any()


@pytest.mark.parametrize(
  ("spare", "expected"),
  [(0, [5, 9, 3]), (1, [5, 4, 0]), (2, [2, 0, 0]), (3, [0, 0, 0])],
)
def test_what_a_wait_must_have_been_told_whichever_signals_it_got(
  spare, expected
):
  sent = [
    (1, np.array([5, 9, 0])),
    (1, np.array([5, 4, 3])),
    (1, np.array([2])),
  ]
  np.testing.assert_array_equal(clocks.certain(sent, spare), expected)
