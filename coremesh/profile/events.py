"""What a core issues: which bundles, how often, and the copies and waits."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Literal, NamedTuple

import numpy as np

from coremesh.profile.values import Word

GRANULE_BYTES = 32  # of DMA sizes, on all chips: bundles of known copies

type EventKind = Literal[
  "read",
  "write",
  "local",
  "code",
  "send",
  "signal",
  "wait",
  "add",
  "set",
  "delay",
  "meet",
  "fence",
]

type Way = Literal["core", "die", "link"]


class Target(NamedTuple):
  """Whom a copy or signal is for.

  Attributes:
    device: its number in the program.
    core: of that device.
    flag: the semaphore there that counts it.
    way: whether it is a core of the same device, on the same chip ("die"), or
      over links of ICI.
    hops: links of ICI on the way.
    route: tells apart the receivers of a device that stands for all, which are
      all that device.
    source: the memory a copy comes from, "hbm" or "vmem"; "" for a signal.
    place: the memory it goes to.
  """

  device: int
  core: int
  flag: int
  way: Way = "core"
  hops: int = 0
  route: int = 0
  source: str = ""
  place: str = ""


class Event(NamedTuple):
  """Something that takes time or makes another wait.

  Attributes:
    cycle: bundles issued before it.
    kind: "read" and "write" are DMAs from and to HBM, "code" is one of machine
      code, which no count of bytes includes. "local" is one that stays in the
      core, "send" one to another core. "signal" adds to the semaphore of
      another core. At "meet" a core waits for all of its group, at
      "fence" for all its writes.
    bundle: where.
    flag: the semaphore of its own core; -1 if it is not known, or none. Of a
      "meet" the barrier.
    amount: units of a DMA, what to wait for, add or set; cycles of a delay.
    to: the receiver of a "send" or "signal".
    unit_bytes: what the amount of a copy counts.
  """

  cycle: int
  kind: EventKind
  bundle: int
  flag: int
  amount: int
  to: Target | None = None
  unit_bytes: int = GRANULE_BYTES


class Result(NamedTuple):
  """A copy from SMEM to an operand in HBM.

  Attributes:
    bundle: where.
    operand: its number.
    first: the word of the operand it begins with.
    words: what is copied.
  """

  bundle: int
  operand: int
  first: int
  words: tuple[Word, ...]


class Repeat(NamedTuple):
  """Events that come again and again; their cycles count from each time.

  Attributes:
    cycle: bundles issued before the first time.
    events: of one time.
    times: how often.
    period: bundles from one time to the next.
  """

  cycle: int
  events: tuple[Event, ...]
  times: int
  period: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
  """Bundles that were issued one after the other, and how often."""

  start: int
  end: int
  count: int


class Rounds(NamedTuple):
  """Stretches of bundles that are issued again and again.

  Attributes:
    starts: the first bundle of each stretch.
    times: how often.
  """

  starts: tuple[int, ...]
  times: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
  """What one core issues.

  Attributes:
    core: its number.
    cycles: bundles issued.
    runs: which, how often.
    events: in order.
    assumed: what was taken for granted, in words.
    skipped: cycles that were not run one by one, because the rounds of a loop
      were proven to take the same way; see `affine`.
    path: the first bundle of each of the runs, in the order of their issue.
    device: the number of its device in the program.
    group: cores of one device and group meet at barriers.
    lines: the lines of the program that wait, "file:line", by bundle.
    sends: whether any event may have a receiver.
    results: what it copied from SMEM to operands in HBM.
  """

  core: int
  cycles: int
  runs: tuple[Run, ...]
  events: tuple[Event | Repeat, ...]
  assumed: tuple[str, ...]
  skipped: int
  path: tuple[int | Rounds, ...] = ()
  device: int = 0
  group: int = 0
  lines: Mapping[int, str] = dataclasses.field(default_factory=dict)
  sends: bool = True
  results: tuple[Result, ...] = ()

  def each_event(self) -> Iterator[Event]:
    """The events one by one, repetitions written out."""
    for found in self.events:
      if isinstance(found, Event):
        yield found
        continue
      for i in range(found.times):
        start = found.cycle + i * found.period
        for event in found.events:
          yield event._replace(cycle=start + event.cycle)

  def with_targets(self, find: Callable[[Target], Target]) -> "Trace":
    """The same with each receiver replaced."""
    if not self.sends:
      return self

    def replaced(event: Event) -> Event:
      return event if event.to is None else event._replace(to=find(event.to))

    events = tuple(
      found._replace(events=tuple(map(replaced, found.events)))
      if isinstance(found, Repeat)
      else replaced(found)
      for found in self.events
    )
    return dataclasses.replace(self, events=events)

  def targets(self) -> Iterator[Target]:
    """The receivers in order, those of a repetition once."""
    for found in self.events if self.sends else ():
      inner = found.events if isinstance(found, Repeat) else (found,)
      yield from (e.to for e in inner if e.to is not None)

  def executions(self, num_bundles: int) -> np.ndarray:
    """How often each bundle was issued."""
    change = np.zeros(num_bundles + 1, np.int64)
    for run in self.runs:
      change[run.start] += run.count
      change[run.end] -= run.count
    return np.cumsum(change)[:-1]
