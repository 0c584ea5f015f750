"""Model times for what the workers of a kernel did.

Workers go through their logs again, this time in the order of model time. A
signal arrives some time after it is sent; a wait ends when what it takes has
arrived; a copy occupies the memories and the link it goes through. The order
in which the simulation ran has no part in it, so that every seed and DMA mode
gives the same times, unless the kernel itself does other things.
"""

from collections.abc import Iterator
import dataclasses
import heapq
from typing import Any

from coremesh.simulate import rates, recorder, traffic
from coremesh.simulate.intervals import Cause, Interval

_ARRIVAL, _WORKER = 0, 1


@dataclasses.dataclass(slots=True)
class _Semaphore:
  count: int
  arrived: list[list[Any]] = dataclasses.field(default_factory=list)
  waiting: list[tuple[int, recorder.Take, int]] = dataclasses.field(
    default_factory=list
  )


class Replay:
  """Goes through the logs of a run.

  Args:
    recorded: the logs.
    workers: all workers of the run; they are known by their index in it.
    chip_rates: how long things take.

  Attributes:
    intervals: by worker, one after another.
    copies: in the order in which they start.
    end_ps: when all is done.
  """

  def __init__(
    self,
    recorded: recorder.Recorder,
    workers: list[Any],
    chip_rates: rates.Rates,
  ):
    self._workers = workers
    self._logs = [recorded.logs.get(w, []) for w in workers]
    self._semaphores = {
      s: _Semaphore(count) for s, count in recorded.counts.items()
    }
    self._meetings: dict[Any, list[tuple[int, recorder.Meet, int]]] = {}
    self._traffic = traffic.Traffic(chip_rates)
    self._copies_of: dict[Any, Cause] = {}
    self._windows: dict[Any, tuple[int, int]] = {}
    self._queue: list[tuple[Any, ...]] = []
    self._order = 0
    self._issue_ps = chip_rates.issue_ps()
    self._next = [0] * len(workers)
    self._now = [0] * len(workers)
    self._busy = [0] * len(workers)
    self.intervals: list[list[Interval]] = [[] for _ in workers]
    self.copies = self._traffic.copies
    self.end_ps = 0
    self._run()

  # --- the loop --------------------------------------------------------------

  def _run(self) -> None:
    for index in range(len(self._workers)):
      self._go_on(index)
    while self._queue or self._release_one():
      time, kind, _, what = heapq.heappop(self._queue)
      self.end_ps = max(self.end_ps, time)
      if kind == _ARRIVAL:
        self._arrive(time, *what)
      else:
        self._do(time, what)
    self.end_ps = max([self.end_ps, *(c.end_ps for c in self.copies)])
    self._wait_for_ever()

  def _push(self, time: int, kind: int, order: int, what: Any) -> None:
    heapq.heappush(self._queue, (time, kind, order, what))

  def _go_on(self, index: int) -> None:
    """Computes up to the worker's next event."""
    log, position = self._logs[index], self._next[index]
    if position < len(log):
      busy = log[position].busy_ps
    else:
      busy = self._workers[index].busy_ps
    start = self._now[index]
    end = start + busy - self._busy[index]
    self._busy[index] = busy
    self._add(index, Interval("compute", start, end))
    self.end_ps = max(self.end_ps, end)
    if position < len(log):
      self._next[index] += 1
      self._push(end, _WORKER, index, index)

  def _add(self, index: int, interval: Interval) -> None:
    """Notes what a worker did, and that it has come to the end of it."""
    self._now[index] = interval.end_ps
    if interval.end_ps > interval.start_ps or interval.kind == "wait":
      self.intervals[index].append(interval)

  def _issue(self, index: int, what: str) -> int:
    """The worker issues an instruction; when it began."""
    start = self._now[index]
    self._add(index, Interval("issue", start, start + self._issue_ps, what))
    return start

  def _do(self, time: int, index: int) -> None:
    event = self._logs[index][self._next[index] - 1]
    match event:
      case recorder.Signal():
        self._signal(index, event)
      case recorder.Start(transfer=transfer):
        self._start(index, transfer)
      case recorder.Take():
        self._take(time, index, event)
        return
      case recorder.Meet():
        self._meet(time, index, event)
        return
      case recorder.Drain():
        causes = [
          self._copies_of[t] for t in event.transfers if t in self._copies_of
        ]
        self._wait_until(index, time, "wait for its copies", causes)
      case recorder.Block():
        self._block(time, index, event)
    self._go_on(index)

  # --- semaphores ------------------------------------------------------------

  def _signal(self, index: int, event: recorder.Signal) -> None:
    sent = self._issue(index, str(event.site))
    worker, bank = self._workers[index], event.semaphore.bank
    delay = rates.OWN_SIGNAL_PS
    if bank.place[0] != worker.device:
      delay = rates.CORE_SIGNAL_PS + rates.LINK_LATENCY_PS
    elif bank.place[1:] != tuple(worker.coords[a] for a in bank.family.axes):
      delay = rates.CORE_SIGNAL_PS
    arrives = sent + delay
    cause = Cause("signal", index, str(event.site), sent, arrives)
    self._send(arrives, event.semaphore, event.amount, cause)

  def _send(self, time: int, semaphore: Any, amount: int, cause: Cause) -> None:
    self._order += 1
    self._push(time, _ARRIVAL, self._order, (semaphore, amount, cause))

  def _arrive(
    self, time: int, semaphore: Any, amount: int, cause: Cause
  ) -> None:
    state = self._semaphores[semaphore]
    state.count += amount
    if amount > 0:
      state.arrived.append([amount, cause])
    for waiter in list(state.waiting):
      index, event, since = waiter
      if event.ends and state.count >= event.amount:
        state.waiting.remove(waiter)
        self._taken(state, index, event, since, time)
        self._go_on(index)

  def _take(self, time: int, index: int, event: recorder.Take) -> None:
    state = self._semaphores[event.semaphore]
    if not event.ends or state.count < event.amount:
      state.waiting.append((index, event, time))
      return
    self._taken(state, index, event, time, time)
    self._go_on(index)

  def _taken(self, state, index, event, since: int, time: int) -> None:
    """The oldest arrivals that make up the amount end the wait."""
    if event.decrement:
      state.count -= event.amount
    causes, missing, used = [], event.amount, 0
    for entry in state.arrived:
      if missing <= 0:
        break
      causes.append(entry[1])
      part = min(entry[0], missing)
      missing -= part
      if event.decrement:
        entry[0] -= part
        used += not entry[0]
    del state.arrived[:used]
    what, on = str(event.site), str(event.semaphore)
    self._add(index, Interval("wait", since, time, what, on, tuple(causes)))
    self._issue(index, what)

  def _wait_until(
    self, index: int, time: int, what: str, causes: list[Cause]
  ) -> None:
    end = max([time, *(c.arrives_ps for c in causes)])
    self._add(
      index, Interval("wait", time, end, what, "its copies", tuple(causes))
    )
    self._issue(index, what)

  def _meet(self, time: int, index: int, event: recorder.Meet) -> None:
    here = self._meetings.setdefault(event.meeting, [])
    here.append((index, event, time))
    if len(here) < event.meeting.size:
      return
    self._meetings[event.meeting] = []
    end = time + rates.MEETING_PS
    cause = Cause("arrival", index, str(event.site), time, end)
    for other, met, since in here:
      on = f"subcore_barrier of {met.meeting.where}"
      what = str(met.site)
      self._add(other, Interval("wait", since, end, what, on, (cause,)))
      self._issue(other, what)
    for other, _, _ in here:
      self._go_on(other)

  # --- copies ----------------------------------------------------------------

  def _start(self, index: int, transfer: Any) -> None:
    what = str(transfer.site)
    sent = self._issue(index, what)
    read, end = self._traffic.copy(
      index,
      sent,
      src=transfer.src,
      dst=transfer.dst,
      num_bytes=transfer.num_bytes,
      what=what,
    )
    self._copies_of[transfer] = Cause("copy", index, what, sent, end)
    for semaphore, time in ((transfer.src_sem, read), (transfer.dst_sem, end)):
      if semaphore is not None:
        cause = Cause("copy", index, what, sent, time)
        self._send(time, semaphore, semaphore.raised_by(transfer), cause)

  def _block(self, time: int, index: int, event: recorder.Block) -> None:
    """A block of a grid, which a TPU copies while it computes on another.

    A block comes in from when the grid came to the last one, and goes out after
    its step; the one before must be out by then.
    """
    key = (event.window, event.src is event.window.block)
    last_time, last_end = self._windows.get(key, (0, 0))
    goes_out = key[1]
    _, end = self._traffic.copy(
      index,
      time if goes_out else last_time,
      src=event.src,
      dst=event.dst,
      num_bytes=event.num_bytes,
      what=str(event.site),
    )
    self._windows[key] = (time, end)
    arrives = last_end if goes_out else end
    cause = Cause("copy", index, str(event.site), time, max(time, arrives))
    causes = [cause] if arrives > time else []
    self._wait_until(index, time, str(event.site), causes)

  # --- what does not end -----------------------------------------------------

  def _release_one(self) -> bool:
    """Lets a worker go that this order has left without its signals.

    Only a kernel in which two workers take from one semaphore, or one that
    polls, can have done in the simulation what it cannot do in this order.
    """
    for state in self._semaphores.values():
      for waiter in state.waiting:
        index, event, since = waiter
        if event.ends:
          state.waiting.remove(waiter)
          self._taken(state, index, event, since, max(since, self.end_ps))
          self._go_on(index)
          return True
    return False

  def _wait_for_ever(self) -> None:
    for index, what, on, since in self._stuck():
      self.intervals[index].append(
        Interval("wait", since, self.end_ps, what, on, ends=False)
      )

  def _stuck(self) -> Iterator[tuple[int, str, str, int]]:
    for semaphore, state in self._semaphores.items():
      for index, event, since in state.waiting:
        yield index, str(event.site), str(semaphore), since
    for meeting, here in self._meetings.items():
      for index, event, since in here:
        on = f"subcore_barrier of {meeting.where}"
        yield index, str(event.site), on, since
