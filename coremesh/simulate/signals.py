"""Instructions on semaphores, and the barrier of subcores."""

from typing import Any

import numpy as np

from coremesh.simulate import clocks, memories, memory
from coremesh.simulate.worker import Meeting, Site, Worker


class Signals(memories.Memories):
  """A machine whose workers can wait for one another."""

  def signal(
    self, worker: Worker, semaphore: memory.Semaphore, amount: Any, site: Site
  ) -> bool:
    """Raises a semaphore; returns whether another worker should run next."""
    amount = int(amount)
    if self.timeline is not None:
      self.timeline.signal(worker, semaphore, amount, site)
    if self.races:
      owner = semaphore.bank.owner
      if owner is not None and owner is not worker:
        if not worker.knows(owner, semaphore.bank.entered):
          self.report(
            "scope",
            f"{worker}: {site} signals {semaphore} without knowing that its"
            " owner has entered the kernel. Meet in a barrier first, or signal"
            " the barrier semaphore, which outlives kernels.",
            (id(site), "signal"),
            is_warning=True,  # Its counter is there, and 0 if none ran before.
          )
      clock = worker.release()
      if owner is None:
        senders = self.meets.setdefault(semaphore, {})
        senders.pop(worker, None)  # In the order of the last signals.
        senders[worker] = clock, site
      self._raise(semaphore, amount, clock, (worker, site))
    else:
      self._raise(semaphore, amount, None, (worker, site))
    return self.switches()

  def _raise(self, semaphore, amount, clock, by) -> None:
    semaphore.count += amount
    self._changed(semaphore)
    if amount > 0:
      semaphore.signals.append((amount, clock, by))
    worker = semaphore.waiter
    if worker is not None and semaphore.count >= worker.need:
      semaphore.waiter = None
      worker.blocked_on = None
      self.ready.append(worker)

  def _changed(self, semaphore: memory.Semaphore) -> None:
    """Counts a change of a count; of a copy's, what it writes is the change."""
    self.changes += not semaphore.bank.family.counts_bytes

  def take(
    self,
    worker: Worker,
    semaphore: memory.Semaphore,
    amount: Any,
    site: Site,
    *,
    decrement: bool = True,
  ) -> bool:
    """Waits for a semaphore: whether it had the count, else it blocks."""
    amount = int(amount)
    if semaphore.count < amount:
      self.block(worker, semaphore, amount, site)
      return False
    if self.timeline is not None:
      self.timeline.take(worker, semaphore, amount, site, decrement)
    if semaphore.signals:
      self._learn(worker, semaphore, amount)
    if decrement:
      semaphore.count -= amount
      self._changed(semaphore)
      if semaphore.count == 0 and not semaphore.arrivals:
        semaphore.signals = []
      elif len(semaphore.signals) > _MAX_SIGNALS:
        self._forget_signals(worker, semaphore)
    return True

  def _forget_signals(self, worker, semaphore) -> None:
    """Forgets signals that can tell the owner of a semaphore nothing new.

    Those it knows of cannot be what the largest amounts of others tell more
    than. The last one stays, to be named if the semaphore is left raised.
    """
    *earlier, last = semaphore.signals
    semaphore.signals = [
      *(s for s in earlier if s[1] is not None and not _is_known(worker, s)),
      last,
    ]

  def _learn(self, worker, semaphore, amount) -> None:
    """Learns what the senders knew, whichever signals the wait has taken.

    A copy under way might have come first, so that it counts as a signal too.
    """
    if not self.races:
      return
    under_way = sum(map(semaphore.raised_by, semaphore.arrivals))
    spare = semaphore.count + under_way - amount
    sent = [
      (n, clock) for n, clock, _ in semaphore.signals if clock is not None
    ]
    if spare == 0:
      for _, clock in sent:
        worker.acquire(clock)
      return
    sent += [(semaphore.raised_by(t), t.clock) for t in semaphore.arrivals]
    worker.acquire(clocks.certain(sent, spare))

  def observe(
    self, worker: Worker, semaphore: memory.Semaphore, site: Site
  ) -> np.int32:
    """The count, read without waiting; it tells of every signal so far."""
    self.polls += 1
    worker.polled_at = site
    if self.timeline is not None and semaphore.count > 0:
      self.timeline.take(
        worker, semaphore, semaphore.count, site, decrement=False
      )
    if self.races:
      for _, clock, _ in semaphore.signals:
        if clock is not None:
          worker.acquire(clock)
    return np.int32(semaphore.count)

  def block(self, worker: Worker, on: Any, need: int, site: Site) -> None:
    if not isinstance(on, memory.Semaphore):
      self.changes += 1
    worker.blocked_on, worker.need, worker.blocked_at = on, need, site
    if isinstance(on, memory.Semaphore):
      if on.waiter is not None:
        self.stop(
          "deadlock",
          f"{worker}: {site} waits for {on}, for which {on.waiter} waits"
          f" already ({on.waiter.blocked_at}). Give each worker its own.",
        )
      on.waiter = worker
      if on.arrivals:
        self.due.append(on)

  def meeting(self, worker: Worker) -> Meeting:
    """The barrier of the subcores of the worker's SparseCore."""
    axis, _ = worker.coords
    key = (worker.device, worker.mesh_index, worker.coords[axis])
    meeting = self.meetings.get(key)
    if meeting is None:
      others = [
        w
        for w in self.workers
        if w.device == worker.device
        and w.mesh_index == worker.mesh_index
        and w.coords[axis] == worker.coords[axis]
      ]
      where = f"device {worker.device}, {axis} {worker.coords[axis]}"
      meeting = self.meetings[key] = Meeting(len(others), where)
    return meeting

  def meet(self, worker: Worker, meeting: Meeting, site: Site) -> bool:
    """Arrives at a barrier: whether all are there, else it blocks."""
    if self.timeline is not None:
      self.timeline.meet(worker, meeting, site)
    meeting.arrived.append(worker)
    self.changes += 1
    if len(meeting.arrived) < meeting.size:
      self.block(worker, meeting, 0, site)
      return False
    arrived, meeting.arrived = meeting.arrived, []
    if self.races:
      clock = arrived[0].clock
      for other in arrived[1:]:
        clock = clocks.joined(clock, other.clock)
      for other in arrived:
        other.clock = clocks.widened(clock, other.thread + 1).copy()
        other.advance()
    for other in arrived:
      if other is not worker:
        other.blocked_on = None
        self.ready.append(other)
    return True


def _is_known(worker: Worker, signal: tuple[int, clocks.Clock, Any]) -> bool:
  """Whether a worker knows all that a signal tells."""
  _, clock, (sender, _) = signal
  event = int(clock[sender.thread])
  return clocks.reaches(worker.clock, sender.thread, event)


# A wait looks through so many signals at most, and those it learns from.
_MAX_SIGNALS = 32
