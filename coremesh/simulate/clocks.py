"""Vector clocks: which accesses to a memory are ordered, and which race.

A thread is a worker or a slot of DMAs of one worker. Each access is recorded
as (thread, clock); it happened before another thread's present if that thread's
vector clock has reached it (Lamport's happened-before, by the vector clocks of
Mattern and Fidge). Every element of a shared memory remembers its last write
and the reads since, as FastTrack does for variables (Flanagan and Freund, PLDI
2009), so that two accesses are compared exactly where they meet.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import numpy as np

type Clock = np.ndarray  # [threads] int64: the last event known of each


class Threads:
  """Numbers of the threads, and room for their clocks."""

  def __init__(self):
    self.names: list[Any] = []

  def add(self, name: Any) -> int:
    self.names.append(name)
    return len(self.names) - 1

  def new_clock(self) -> Clock:
    return np.zeros(len(self.names), np.int64)


def joined(mine: Clock, other: Clock) -> Clock:
  """What is known by one who knows both."""
  if len(mine) < len(other):
    mine, other = other, mine
  if len(mine) == len(other):
    return np.maximum(mine, other)
  result = mine.copy()
  np.maximum(result[: len(other)], other, out=result[: len(other)])
  return result


def widened(clock: Clock, threads: int) -> Clock:
  """A clock with room for that many threads, itself if it has it."""
  if len(clock) >= threads:
    return clock
  wide = np.zeros(max(threads, 2 * len(clock)), np.int64)
  wide[: len(clock)] = clock
  return wide


def reaches(clock: Clock, thread: int, event: int) -> bool:
  """Whether an event of a thread happened before what `clock` knows."""
  return thread < len(clock) and clock[thread] >= event


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
  """One access: who, when, from which line, and what it did."""

  thread: int
  event: int
  site: Any
  kind: str  # "read", "write", "add", "enter" or "leave"
  who: Any


class Records:
  """Accesses by number, equal ones once; sets of them by number."""

  def __init__(self):
    # Number 0 is no access at all, and the empty set.
    self.accesses: list[Any] = [None]
    self.sets: list[tuple[int, ...]] = [()]
    self._numbers: dict[Any, int] = {}
    self._set_numbers: dict[tuple[int, ...], int] = {(): 0}

  def number(
    self, thread: int, event: int, site: Any, kind: str, who: Any
  ) -> int:
    key = (thread, event, id(site), kind)
    number = self._numbers.get(key)
    if number is None:
      number = self._numbers[key] = len(self.accesses)
      self.accesses.append(Access(thread, event, site, kind, who))
    return number

  def set_number(self, members: tuple[int, ...]) -> int:
    number = self._set_numbers.get(members)
    if number is None:
      number = self._set_numbers[members] = len(self.sets)
      self.sets.append(members)
    return number

  def are_adds(self, members: tuple[int, ...]) -> bool:
    """Whether a set is one of additions (and what they add to)."""
    return bool(members) and self.accesses[members[-1]].kind == "add"

  def follows(self, number: int, clock: Clock) -> bool:
    """Whether an access happened before what `clock` knows."""
    access = self.accesses[number]
    return reaches(clock, access.thread, access.event)


class Shadow:
  """The last write, and the reads since, of each element of one memory.

  Both are numbers of sets of accesses. Workers may write the same values to
  one place in any order: such writes are one set, and a read must follow one of
  them. They may add to one place in any order as well, for a DMA adds each
  element in one piece; a read must follow all of these.
  """

  __slots__ = ("_records", "reads", "writes")

  def __init__(self, shape: tuple[int, ...], records: Records):
    self._records = records
    self.writes = np.zeros(shape, np.int32)
    self.reads = np.zeros(shape, np.int32)

  def read(
    self, writes: np.ndarray, reads: np.ndarray, number: int, clock: Clock
  ) -> list[Access]:
    """Notes a read of views of `self.writes` and `self.reads`.

    Returns:
      The writes it races with.
    """
    records, raced = self._records, []
    for old in _distinct(writes):
      members = records.sets[old]
      missed = [m for m in members if not records.follows(m, clock)]
      all_needed = records.are_adds(members)
      if missed and (all_needed or len(missed) == len(members)):
        raced.append(records.accesses[missed[-1]])
    first = reads.flat[0] if reads.size else 0
    if reads.size and (reads == first).all():
      reads[...] = self._with(int(first), number, clock)
    else:
      before = reads.copy()
      for old in np.unique(before):
        reads[before == old] = self._with(int(old), number, clock)
    return raced

  def write(
    self,
    writes: np.ndarray,
    reads: np.ndarray,
    number: int,
    clock: Clock,
    changes: Callable[[], bool] = lambda: True,
  ) -> list[Access]:
    """Notes a write; returns the reads and writes it races with.

    Args:
      writes, reads: views of what it writes to.
      number: of the access.
      clock: of who writes.
      changes: whether the write changes any value; asked if it races.
    """
    records = self._records
    old_writes = _distinct(writes)
    if records.are_adds((number,)):
      return self._add(writes, reads, number, clock)
    raced = [
      m
      for old in {*old_writes, *_distinct(reads)}
      for m in records.sets[old]
      if not records.follows(m, clock)
    ]
    if raced and not changes():
      before = writes.copy()
      for old in old_writes:
        joint = (*records.sets[old], number)
        writes[before == old] = records.set_number(joint)
      return []
    writes[...] = records.set_number((number,))
    reads[...] = 0
    return [records.accesses[m] for m in raced]

  def _add(self, writes, reads, number, clock) -> list[Access]:
    """Notes an addition, which races with all but other additions.

    The write that it adds to and the reads since are kept: an addition that
    comes later may follow this one's author and not them.
    """
    records, raced = self._records, []
    for old in _distinct(reads):
      raced += records.sets[old]
    before = writes.copy()
    for old in _distinct(before):
      members = records.sets[old]
      others = [m for m in members if records.accesses[m].kind != "add"]
      raced += others
      kept = [
        m for m in members if m in others or not records.follows(m, clock)
      ]
      writes[before == old] = records.set_number((*kept, number))
    return [records.accesses[m] for m in raced if not records.follows(m, clock)]

  def _with(self, old: int, number: int, clock: Clock) -> int:
    """The set of reads with one more, and without those it follows."""
    records = self._records
    members = records.sets[old]
    if members == (number,):
      return old
    kept = [m for m in members if m != number and not records.follows(m, clock)]
    return records.set_number((*kept, number))


def _distinct(numbers: np.ndarray) -> list[int]:
  if not numbers.size:
    return []
  first = numbers.flat[0]
  if (numbers == first).all():
    return [int(first)]
  return np.unique(numbers).tolist()
