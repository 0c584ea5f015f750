"""How long cores wait for their copies, by a model of HBM.

All cores of a device share its HBM, which serves copies in the order in which
they are started: a copy of B bytes holds it for B / bandwidth, and is done a
latency after that. Strides, banks and refresh are not modelled; the range of
bandwidth and latency stands for them.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
import dataclasses
import heapq

from coremesh import errors
from coremesh.profile.scalar import GRANULE_BYTES, Event, Trace


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hbm:
  """The HBM of one device, as its cores see it.

  Attributes:
    bytes_per_cycle: reads and writes of all cores together.
    latency_cycles: from the end of a transfer to when its semaphore says so.
  """

  bytes_per_cycle: float
  latency_cycles: float

  def __post_init__(self):
    if self.bytes_per_cycle <= 0 or self.latency_cycles < 0:
      raise ValueError(
        "bytes_per_cycle must be positive and latency_cycles not negative; got"
        f" {self}."
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CoreTiming:
  """When a core is through.

  Attributes:
    cycles: from the start to its last bundle, waiting included.
    waiting_cycles: of them, waiting for copies.
    waiting_by_bundle: where.
    read_bytes: from HBM.
    written_bytes: to HBM.
    local_bytes: copied inside the core.
    left_over: what semaphores hold, or will, when the program clears them or
      ends; {} if each wait takes what a copy has given.
  """

  cycles: float
  waiting_cycles: float
  waiting_by_bundle: Mapping[int, float]
  read_bytes: int
  written_bytes: int
  local_bytes: int
  left_over: Mapping[int, int]


def timings(traces: Sequence[Trace], hbm: Hbm) -> tuple[CoreTiming, ...]:
  """Runs the cores of a device against their HBM.

  Args:
    traces: what each core issues; the cores start together.
    hbm: what they share.

  Raises:
    UnsupportedError: a core waits for a copy that nobody starts.
  """
  server = _Server(hbm)
  cores = [_Core(trace, server) for trace in traces]
  queue = [(core.to_next_copy(), i) for i, core in enumerate(cores)]
  heapq.heapify(queue)
  while queue:
    time, i = heapq.heappop(queue)
    if time == float("inf"):
      break
    cores[i].start_copy()
    heapq.heappush(queue, (cores[i].to_next_copy(), i))
  return tuple(core.timing() for core in cores)


class _Server:
  """HBM that serves one copy after the other."""

  def __init__(self, hbm: Hbm):
    self._hbm = hbm
    self._free = 0.0

  def finish(self, start: float, num_bytes: int) -> float:
    """When a copy that is started at a time is done."""
    begin = max(start, self._free)
    self._free = begin + num_bytes / self._hbm.bytes_per_cycle
    return self._free + self._hbm.latency_cycles

  def local(self, start: float, num_bytes: int) -> float:
    """When a copy inside a core is done: no slower than one over HBM."""
    return start + num_bytes / self._hbm.bytes_per_cycle


class _Core:
  """A core on its way through its events."""

  def __init__(self, trace: Trace, server: _Server):
    self._trace = trace
    self._events = trace.events
    self._server = server
    self._next = 0
    self._waited = 0.0
    self._by_bundle: Counter[int] = Counter()  # of floats
    self._flags: dict[int, int] = {}
    self._coming: dict[int, deque[tuple[float, int]]] = {}
    self._bytes = Counter[str]()
    self._left_over: dict[int, int] = {}

  def to_next_copy(self) -> float:
    """Goes on to the next copy; when it is started, infinity if at the end."""
    events, count = self._events, len(self._events)
    while self._next < count:
      event = events[self._next]
      kind = event.kind
      if kind in ("read", "write", "local"):
        return event.cycle + self._waited
      self._next += 1
      if event.flag < 0:
        continue
      if kind == "wait":
        self._wait(event)
      elif kind == "add":
        self._settle(event.flag, event.cycle + self._waited)
        self._flags[event.flag] = self._flags.get(event.flag, 0) + event.amount
      elif kind == "set":
        self._clear(event.flag)
      else:
        self._waited += event.amount
    return float("inf")

  def start_copy(self) -> None:
    """Starts the copy at hand."""
    event = self._events[self._next]
    self._next += 1
    num_bytes = event.amount * GRANULE_BYTES
    self._bytes[event.kind] += num_bytes
    start = event.cycle + self._waited
    is_local = event.kind == "local"
    serve = self._server.local if is_local else self._server.finish
    done = serve(start, num_bytes)
    coming = self._coming.setdefault(event.flag, deque())
    coming.append((done, event.amount))

  def _settle(self, flag: int, now: float) -> None:
    """Counts the copies that are done by now."""
    coming = self._coming.get(flag)
    while coming and coming[0][0] <= now:
      self._flags[flag] = self._flags.get(flag, 0) + coming.popleft()[1]

  def _wait(self, event: Event) -> None:
    start = now = event.cycle + self._waited
    self._settle(event.flag, now)
    coming = self._coming.get(event.flag)
    while self._flags.get(event.flag, 0) < event.amount:
      if not coming:
        raise errors.UnsupportedError(
          f"Core {self._trace.core} waits at bundle {event.bundle:#x} for"
          f" {event.amount} granules, of which"
          f" {self._flags.get(event.flag, 0)} are to come: another core or"
          " device must send the rest, which is not modelled."
        )
      done, granules = coming.popleft()
      now = max(now, done)
      self._flags[event.flag] = self._flags.get(event.flag, 0) + granules
    if now > start:
      self._waited += now - start
      self._by_bundle[event.bundle] += now - start  # pyright: ignore

  def _clear(self, flag: int) -> None:
    coming = self._coming.pop(flag, ())
    held = self._flags.pop(flag, 0) + sum(amount for _, amount in coming)
    if held:
      self._left_over[flag] = held

  def timing(self) -> CoreTiming:
    """What came of it."""
    for flag in {*self._flags, *self._coming}:
      self._clear(flag)
    return CoreTiming(
      cycles=self._trace.cycles + self._waited,
      waiting_cycles=self._waited,
      waiting_by_bundle=dict(self._by_bundle),
      read_bytes=self._bytes["read"],
      written_bytes=self._bytes["write"],
      local_bytes=self._bytes["local"],
      left_over=self._left_over,
    )
