"""How long cores wait for their copies and for each other.

Cores are advanced in the order of time, each as far as nobody else can hold it
up: to its next copy or signal, or to a wait for what another core sends.
"""

from collections.abc import Sequence
import heapq

from coremesh import errors
from coremesh.profile.core import Core, CoreTiming
from coremesh.profile.events import Event, Target, Trace
from coremesh.profile.log import Log
from coremesh.profile.samples import Samples
from coremesh.profile.servers import TICKS, Hbm, Links, Servers

__all__ = ["TICKS", "CoreTiming", "Hbm", "Links", "timings"]

_MOST_NAMED = 4


def timings(
  traces: Sequence[Trace],
  hbm: Hbm,
  log: Log | None = None,
  *,
  links: Links | None = None,
) -> tuple[CoreTiming, ...]:
  """Runs cores against the HBM of their devices and against each other.

  Args:
    traces: what each core issues; the cores start together.
    hbm: what the cores of a device share.
    log: where to note each copy and wait of the cores of the first device.
    links: what lies between cores; None if they send each other nothing.

  Raises:
    UnsupportedError: cores wait for what nobody sends; it names the waits.
  """
  run = _Run(traces, hbm, log, links)
  run.to_the_end()
  return tuple(core.timing() for core in run.cores)


class _Run:
  """Cores on their way. Times are ticks."""

  def __init__(
    self,
    traces: Sequence[Trace],
    hbm: Hbm,
    log: Log | None,
    links: Links | None,
  ):
    targets = [(t.device, to) for t in traces for to in t.targets()]
    places = [(t.device, t.core) for t in traces]
    servers = Servers(hbm, links, places, targets)
    shared: dict[tuple[int, int], set[int]] = {}
    for _, to in targets:
      shared.setdefault((to.device, to.core), set()).add(to.flag)
    first = places[0][0] if places else 0
    self.cores = [
      Core(
        trace,
        servers,
        log=log if trace.device == first else None,
        shared=frozenset(shared.get((trace.device, trace.core), ())),
        deliver=self._deliver if targets else None,
      )
      for trace in traces
    ]
    self._samples = Samples(self.cores, servers, log or Log())
    self._index = {place: i for i, place in enumerate(places)}
    self._meetings: dict[tuple[int, int, int], list[int]] = {}
    self._queue: list[tuple[int, int]] = []

  def to_the_end(self) -> None:
    """Runs all cores to their end."""
    for core in self.cores:
      core.go_on()
    self._fill()
    while self._queue:
      now, i = heapq.heappop(self._queue)
      core = self.cores[i]
      if core.next != now:
        continue  # Something came that lets it go on at another time.
      if self._samples.skip(now, i):
        self._fill()
        continue
      core.act(now)
      self._push(i)
      event = core.waits_at
      if event is not None and event.kind == "meet":
        self._meet(core, event, now)
    waiting = [core for core in self.cores if not core.is_over]
    if waiting:
      raise _deadlock(waiting, self.cores)

  def _fill(self) -> None:
    self._queue = [
      (core.next, i)
      for i, core in enumerate(self.cores)
      if core.next is not None
    ]
    heapq.heapify(self._queue)

  def _push(self, i: int) -> None:
    if (then := self.cores[i].next) is not None:
      heapq.heappush(self._queue, (then, i))

  def _deliver(self, to: Target, done: int, amount: int) -> None:
    i = self._index.get((to.device, to.core))
    if i is None:
      raise errors.UnsupportedError(
        f"The receiver of a copy or signal must be a core that runs the kernel;"
        f" got core {to.core} of device {to.device}."
      )
    self.cores[i].receive(to.flag, done, amount)
    self._push(i)

  def _meet(self, core: Core, event: Event, now: int) -> None:
    """Lets all of a group go on from a barrier when the last is there."""
    trace = core.trace
    place = (trace.device, trace.group, event.flag)
    there = self._meetings.setdefault(place, [])
    there.append(self._index[trace.device, trace.core])
    group = [c for c in self.cores if _group(c.trace) == _group(trace)]
    if len(there) < len(group):
      return
    del self._meetings[place]
    for i in there:
      self.cores[i].pass_wait(now)
      self._push(i)


def _group(trace: Trace) -> tuple[int, int]:
  return trace.device, trace.group


def _deadlock(
  waiting: Sequence[Core], cores: Sequence[Core]
) -> errors.UnsupportedError:
  """The error of cores that wait for what nobody sends."""
  named = []
  for core in waiting[:_MOST_NAMED]:
    trace, event = core.trace, core.waits_at
    assert event is not None
    where = f"bundle {event.bundle:#x}{trace.lines.get(event.bundle, '')}"
    who = f"core {trace.core} of device {trace.device} waits at {where}"
    if event.kind == "meet":
      named.append(f"{who} for all other subcores")
      continue
    named.append(
      f"{who} for semaphore {event.flag} to hold {event.amount}, where all that"
      f" is sent to it makes {core.held(event.flag)}"
    )
  more = len(waiting) - len(named)
  rest = f"; and {more} more" if more > 0 else ""
  assumed = dict.fromkeys(a for core in cores for a in core.trace.assumed)
  because = f" Assumed: {'; '.join(assumed)}." if assumed else ""
  return errors.UnsupportedError(
    f"The kernel does not end, or waits for what is not modelled:"
    f" {'; '.join(named)}{rest}.{because}"
  )
