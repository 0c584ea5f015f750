"""Notes what each worker does, so that its times can be modelled afterwards.

The scheduler runs workers and DMAs in an order that a seed decides, which has
nothing to do with time. So nothing is timed while the kernel runs: each worker
has a log of what it did in its own order, and `replay` gives it times.
"""

import collections
from collections.abc import Sequence
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
  """A worker raises a semaphore. `busy_ps` is its work up to here."""

  busy_ps: int
  semaphore: Any
  amount: int
  site: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Take:
  """A worker has waited for a semaphore; `ends` is False if for ever."""

  busy_ps: int
  semaphore: Any
  amount: int
  site: Any
  decrement: bool = True
  ends: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
  """A worker starts a DMA."""

  busy_ps: int
  transfer: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Meet:
  """A worker arrives at a barrier of subcores."""

  busy_ps: int
  meeting: Any
  site: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Drain:
  """A worker waits for DMAs that raise no semaphore."""

  busy_ps: int
  transfers: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
  """A grid copies a block of an array in or out, one step ahead."""

  busy_ps: int
  window: Any
  src: Any
  dst: Any
  num_bytes: int
  site: Any


type Event = Signal | Take | Start | Meet | Drain | Block


class Recorder:
  """The logs of all workers of one run of a kernel.

  Attributes:
    logs: by worker.
    counts: what each semaphore held before the kernel.
  """

  def __init__(self):
    self.logs: dict[Any, list[Event]] = collections.defaultdict(list)
    self.counts: dict[Any, int] = {}

  def signal(self, worker: Any, semaphore: Any, amount: int, site: Any) -> None:
    """Before a semaphore is raised."""
    self._see(semaphore)
    self.logs[worker].append(Signal(worker.busy_ps, semaphore, amount, site))

  def take(
    self,
    worker: Any,
    semaphore: Any,
    amount: int,
    site: Any,
    decrement: bool = True,
  ) -> None:
    """When a semaphore has what is waited for, before it is lowered."""
    self._see(semaphore)
    self.logs[worker].append(
      Take(worker.busy_ps, semaphore, amount, site, bool(decrement))
    )

  def start(self, transfer: Any) -> None:
    """Before a DMA is under way."""
    worker = transfer.starter
    for semaphore in (transfer.src_sem, transfer.dst_sem):
      if semaphore is not None:
        self._see(semaphore)
    self.logs[worker].append(Start(worker.busy_ps, transfer))

  def meet(self, worker: Any, meeting: Any, site: Any) -> None:
    """When a worker arrives at a barrier of subcores."""
    self.logs[worker].append(Meet(worker.busy_ps, meeting, site))

  def drain(self, worker: Any, transfers: Sequence[Any]) -> None:
    """When a worker waits for its streams."""
    self.logs[worker].append(Drain(worker.busy_ps, tuple(transfers)))

  def block(
    self,
    worker: Any,
    window: Any,
    src: Any,
    dst: Any,
    num_bytes: int,
    site: Any,
  ) -> None:
    """When a grid copies a block."""
    self.logs[worker].append(
      Block(worker.busy_ps, window, src, dst, num_bytes, site)
    )

  def finish(self, workers: Sequence[Any]) -> None:
    """Notes who waits for ever. (A barrier's arrivals are noted already.)"""
    for worker in workers:
      semaphore = worker.blocked_on
      if hasattr(semaphore, "signals"):
        self._see(semaphore)
        self.logs[worker].append(
          Take(
            worker.busy_ps,
            semaphore,
            worker.need,
            worker.blocked_at,
            ends=False,
          )
        )

  def _see(self, semaphore: Any) -> None:
    # All that raises or lowers it comes by here first.
    self.counts.setdefault(semaphore, semaphore.count)
