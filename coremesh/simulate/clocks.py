"""Vector clocks: which accesses to a memory are ordered, and which race.

A thread is a worker or a slot of DMAs of one worker. Each access is recorded
as (thread, clock); it happened before another thread's present if that thread's
vector clock has reached it (Lamport's happened-before, by the vector clocks of
Mattern and Fidge). Every element of a shared memory remembers its last write
and the reads since, as FastTrack does for variables (Flanagan and Freund, PLDI
2009), so that two accesses are compared exactly where they meet.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any
import weakref

import numpy as np

from coremesh.simulate import regions

type Clock = np.ndarray  # [threads] int64: the last event known of each


class Threads:
  """Numbers of the threads, and room for their clocks."""

  def __init__(self):
    self._count = 0

  def add(self) -> int:
    """The number of a new thread."""
    self._count += 1
    return self._count - 1

  def new_clock(self) -> Clock:
    """A clock that knows of no event."""
    return np.zeros(self._count, np.int64)


def joined(mine: Clock, other: Clock) -> Clock:
  """What is known by one who knows both."""
  if len(mine) < len(other):
    mine, other = other, mine
  if len(mine) == len(other):
    return np.maximum(mine, other)
  result = mine.copy()
  np.maximum(result[: len(other)], other, out=result[: len(other)])
  return result


def certain(sent: Sequence[tuple[int, Clock]], spare: int) -> Clock:
  """What one knows who has got some signals, and cannot tell which.

  Args:
    sent: signals that may be among them, each an amount and a clock.
    spare: the amount by which the signals that were or may be sent exceed what
      was got, so that signals of this amount in all may be missing.

  Returns:
    Of each thread the last event that signals of a larger amount know of: they
    cannot all be missing.
  """
  width = max((len(clock) for _, clock in sent), default=0)
  events = np.stack([widened(c, width)[:width] for _, c in sent])
  amounts = np.array([amount for amount, _ in sent])
  order = np.argsort(-events, axis=0, kind="stable")
  known_to = np.cumsum(amounts[order], axis=0)
  rows = np.argmax(known_to > spare, axis=0)
  events = np.take_along_axis(events, order, axis=0)
  chosen = np.take_along_axis(events, rows[None], axis=0)[0]
  return np.where(known_to[-1] > spare, chosen, 0)


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
  """One access: who, when, from which line, and what it did.

  Attributes:
    box: of one that races, the part of the memory that it touched and nobody
      has written since; None if that is not known.
  """

  thread: int
  event: int
  site: Any
  kind: str  # "read", "write", "add", "enter" or "leave"
  who: Any
  box: regions.Box | None = None


class Records:
  """Accesses by number, equal ones once; sets of them by number.

  Attributes:
    accesses: those that some state names, and those since they were counted.
    sets: as tuples of numbers; set 0 is the empty one.
    settled: of accesses that no state names any more, the events by thread,
      but for those that all workers know of.
  """

  def __init__(self):
    self.accesses: dict[int, Access] = {}
    self.sets: dict[int, tuple[int, ...]] = {0: ()}
    self.settled: dict[int, np.ndarray] = {}
    self._states: weakref.WeakSet[Any] = weakref.WeakSet()
    self._num_accesses, self._num_sets = 0, 1
    self._limit = _FEWEST
    self._numbers: dict[Any, int] = {}
    self._set_numbers: dict[tuple[int, ...], int] = {(): 0}
    # The states that accesses which race with nothing leave, by state before.
    self.harmless: dict[tuple[int, bytes | int], int] = {}
    # The writes that a read followed, by its number.
    self.seen: dict[int, set[int]] = collections.defaultdict(set)

  def number(
    self, thread: int, event: int, site: Any, kind: str, who: Any
  ) -> int:
    key = (thread, event, id(site), kind)
    number = self._numbers.get(key)
    if number is None:
      number = self.new_number(thread, event, site, kind, who)
      self._numbers[key] = number
    return number

  def new_number(
    self, thread: int, event: int, site: Any, kind: str, who: Any
  ) -> int:
    """The number of an access that is the only one of its event."""
    self._num_accesses += 1
    access = Access(thread, event, site, kind, who)
    self.accesses[self._num_accesses] = access
    return self._num_accesses

  def set_number(self, members: tuple[int, ...]) -> int:
    number = self._set_numbers.get(members)
    if number is None:
      number = self._set_numbers[members] = self._num_sets
      self.sets[number] = members
      self._num_sets += 1
    return number

  def watch(self, holder: Any) -> None:
    """Keeps what a `state` names, an array or one number, while it is there."""
    self._states.add(holder)

  @property
  def is_full(self) -> bool:
    """Whether it is time to `settle`: there is much that was not there then."""
    return len(self.accesses) + len(self.harmless) > self._limit

  def settle(self, known: Clock) -> None:
    """Forgets the accesses that no state names: nothing can race with them.

    Numbers that were given before count no more, but for those in states.

    Args:
      known: of each thread the last event that all workers know of.
    """
    named = np.zeros(self._num_sets, bool)
    for holder in self._states:
      state = np.asarray(holder.state)
      named[state & _LOWER] = True
      named[state >> 32] = True
    named[0] = True
    self.sets = {n: self.sets[n] for n in np.flatnonzero(named).tolist()}
    self._set_numbers = {members: n for n, members in self.sets.items()}
    live = {n for members in self.sets.values() for n in members}
    self._keep_events(live, known)
    self.accesses = {n: self.accesses[n] for n in sorted(live)}
    self.seen = collections.defaultdict(
      set, {n: self.seen[n] & live for n in live if n in self.seen}
    )
    self._numbers.clear()
    self.harmless.clear()
    self._limit = _FEWEST + 2 * len(live)

  def _keep_events(self, live: set[int], known: Clock) -> None:
    """Keeps the events of accesses that go, unless all know of them."""
    events = {thread: old.tolist() for thread, old in self.settled.items()}
    for number, access in self.accesses.items():
      if number not in live:
        events.setdefault(access.thread, []).append(access.event)
    self.settled = {}
    for thread, found in events.items():
      kept = np.unique(np.array(found))
      if thread < len(known):
        kept = kept[kept > known[thread]]
      if kept.size:
        self.settled[thread] = kept

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
  them, and may then come before the others. They may add to one place in any
  order as well, for a DMA adds each element in one piece; a read must follow
  all of these.

  Attributes:
    state: for each element both numbers in one: the reads in the upper half,
      the writes in the lower.
  """

  __slots__ = ("__weakref__", "_records", "_told", "state")

  def __init__(self, shape: tuple[int, ...], records: Records):
    self._records = records
    self._told: set[tuple[Any, Any]] = set()
    self.state = np.zeros(shape, np.int64)
    records.watch(self)

  def read(
    self, part: np.ndarray, number: int, clock: Clock
  ) -> Sequence[Access]:
    """Notes a read of a view of `state`.

    Returns:
      The writes it races with.
    """
    return self._note(part, number, clock, self._after_read)

  def write(
    self,
    part: np.ndarray,
    number: int,
    clock: Clock,
    changes: Callable[[], np.ndarray | bool] = lambda: True,
  ) -> Sequence[Access]:
    """Notes a write; returns the reads and writes it races with.

    Args:
      part: a view of the `state` of what it writes to.
      number: of the access.
      clock: of who writes.
      changes: where the write changes a value; asked if it races.
    """
    if self._records.accesses[number].kind == "add":
      return self._note(part, number, clock, self._after_add)
    return self._note(part, number, clock, self._after_write, changes)

  def _note(self, part, number, clock, after, changes=None) -> Sequence[Access]:
    """Brings `part` to the state after an access; returns what races with it.

    What an access that races with nothing does to a state is remembered: the
    same access can only know more when it comes again.
    """
    harmless, key = self._records.harmless, None
    if part.size <= FEW:
      key = number, part.tobytes()
      new = harmless.get(key)
      if new is not None:
        part[...] = new
        return ()
    if not part.size:
      return ()
    first = part.item(0)
    is_uniform = part.size == 1 or (part == first).all()
    if is_uniform:
      new = harmless.get((number, first))
      if new is not None:
        part[...] = new
        return ()
    olds = [first] if is_uniform else np.unique(part).tolist()
    news, races = zip(*(after(old, number, clock) for old in olds), strict=True)
    is_harmless = not any(races)
    if not is_harmless and changes is not None:
      changed = np.broadcast_to(changes(), part.shape)
      news, races = list(news), list(races)
      for i, old in enumerate(olds):
        if races[i] and not changed[part == old].any():
          news[i], races[i] = self._after_same(old, number, clock)
    numbers = dict.fromkeys(m for found in races for m in found)
    raced = [self._placed(m, number) for m in numbers]
    if is_uniform:
      part[...] = news[0]
      if is_harmless:
        harmless[number, first] = news[0]
        if key is not None:
          harmless[key] = news[0]
      return raced
    before = part.copy()
    for old, new in zip(olds, news, strict=True):
      part[before == old] = new
    return raced

  def _placed(self, number: int, now: int) -> Access:
    """An access that races, with its box for the first of a pair of lines."""
    accesses = self._records.accesses
    access = accesses[number]
    lines = access.site, accesses[now].site
    if lines in self._told:
      return access
    self._told.add(lines)
    sets = self._records.sets.items()
    named = [n for n, members in sets if number in members]
    mask = np.isin(self.state & _LOWER, named)
    mask |= np.isin(self.state >> 32, named)
    return dataclasses.replace(access, box=regions.box_of(mask))

  def _after_read(self, old, number, clock) -> tuple[int, list[int]]:
    records = self._records
    members = records.sets[old & _LOWER]
    missed = [m for m in members if not records.follows(m, clock)]
    all_needed = records.are_adds(members)
    is_race = missed and (all_needed or len(missed) == len(members))
    records.seen[number].update(m for m in members if m not in missed)
    reads = self._with(old >> 32, number, clock)
    new = reads << 32 | old & _LOWER
    return new, [missed[-1]] if is_race else []

  def _after_write(self, old, number, clock) -> tuple[int, list[int]]:
    records = self._records
    before = (*records.sets[old & _LOWER], *records.sets[old >> 32])
    raced = [m for m in before if not records.follows(m, clock)]
    return records.set_number((number,)), raced

  def _after_same(self, old, number, clock) -> tuple[int, list[int]]:
    """After a write, unordered with others, that changed nothing.

    It races with reads, but for those that followed another of the writes that
    are unordered with it: they may count on the value.
    """
    records = self._records
    writes, reads = records.sets[old & _LOWER], records.sets[old >> 32]
    others = {m for m in writes if not records.follows(m, clock)}
    raced = [
      m
      for m in reads
      if not records.follows(m, clock) and others.isdisjoint(records.seen[m])
    ]
    return old & ~_LOWER | records.set_number((*writes, number)), raced

  def _after_add(self, old, number, clock) -> tuple[int, list[int]]:
    """After an addition, which races with all but other additions.

    The write that it adds to and the reads since are kept: an addition that
    comes later may follow this one's author and not them.
    """
    records = self._records
    writes, reads = records.sets[old & _LOWER], records.sets[old >> 32]
    others = [m for m in writes if records.accesses[m].kind != "add"]
    kept = [m for m in writes if m in others or not records.follows(m, clock)]
    raced = [m for m in (*others, *reads) if not records.follows(m, clock)]
    return old & ~_LOWER | records.set_number((*kept, number)), raced

  def _with(self, old: int, number: int, clock: Clock) -> int:
    """The set of reads with one more, and without those it follows."""
    records = self._records
    members = records.sets[old]
    if members == (number,):
      return old
    kept = [m for m in members if m != number and not records.follows(m, clock)]
    return records.set_number((*kept, number))


_LOWER = (1 << 32) - 1
# So many accesses are kept at least: settling takes time.
_FEWEST = 10_000
# Of up to so many elements, those of a register, the state is looked up whole.
FEW = 64
