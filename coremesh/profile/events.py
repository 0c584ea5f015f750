"""What a core issues: which bundles, how often, and the copies and waits."""

from collections.abc import Iterator
import dataclasses
from typing import Literal, NamedTuple

import numpy as np

GRANULE_BYTES = 32  # of DMA sizes, on all chips: bundles of known copies

type EventKind = Literal[
  "read", "write", "local", "wait", "add", "set", "delay"
]


class Event(NamedTuple):
  """Something that takes time or makes another wait.

  Attributes:
    cycle: bundles issued before it.
    kind: "read" and "write" are DMAs from and to HBM, "local" is one that
      stays in the core.
    bundle: where.
    flag: the semaphore; -1 if it is not known.
    amount: granules of a DMA, what to wait for, add or set; cycles of a delay.
  """

  cycle: int
  kind: EventKind
  bundle: int
  flag: int
  amount: int


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
  """

  core: int
  cycles: int
  runs: tuple[Run, ...]
  events: tuple[Event | Repeat, ...]
  assumed: tuple[str, ...]
  skipped: int
  path: tuple[int | Rounds, ...] = ()

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

  def executions(self, num_bundles: int) -> np.ndarray:
    """How often each bundle was issued."""
    change = np.zeros(num_bundles + 1, np.int64)
    for run in self.runs:
      change[run.start] += run.count
      change[run.end] -= run.count
    return np.cumsum(change)[:-1]
