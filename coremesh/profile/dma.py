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
import math
from typing import Any

from coremesh import errors
from coremesh.profile.events import GRANULE_BYTES, Event, Repeat, Trace
from coremesh.profile.log import Log, Span

# Times are whole numbers of these, so that no rounding builds up.
TICKS = 1024  # a cycle
_COPIES = ("read", "write", "local")
_MOST_SAMPLES = 500


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


def timings(
  traces: Sequence[Trace], hbm: Hbm, log: Log | None = None
) -> tuple[CoreTiming, ...]:
  """Runs the cores of a device against their HBM.

  Args:
    traces: what each core issues; the cores start together.
    hbm: what they share.
    log: where to note each copy and wait.

  Raises:
    UnsupportedError: a core waits for a copy that nobody starts.
  """
  server = _Server(hbm)
  log = Log() if log is None else log
  cores = [_Core(trace, server, log) for trace in traces]
  samples = _Samples(cores, server, log)
  queue = _queue(cores)
  while queue:
    now, i = heapq.heappop(queue)
    if samples.skip(now, i):
      queue = _queue(cores)
      continue
    cores[i].start_copy(now)
    if (then := cores[i].to_next_copy()) is not None:
      heapq.heappush(queue, (then, i))
  return tuple(core.timing() for core in cores)


def _queue(cores: Sequence["_Core"]) -> list[tuple[int, int]]:
  """When each core starts its next copy, those that have one."""
  times = [(core.to_next_copy(), i) for i, core in enumerate(cores)]
  queue = [(time, i) for time, i in times if time is not None]
  heapq.heapify(queue)
  return queue


class _Server:
  """HBM that serves one copy after the other. Times are ticks."""

  def __init__(self, hbm: Hbm):
    self._ticks_per_byte = TICKS / hbm.bytes_per_cycle
    self._latency = round(hbm.latency_cycles * TICKS)
    self.free = 0

  def _transfer(self, num_bytes: int) -> int:
    return math.ceil(num_bytes * self._ticks_per_byte)

  def finish(self, start: int, num_bytes: int) -> int:
    """When a copy that is started at a time is done."""
    self.free = max(start, self.free) + self._transfer(num_bytes)
    return self.free + self._latency

  def local(self, start: int, num_bytes: int) -> int:
    """When a copy inside a core is done: no slower than one over HBM."""
    return start + self._transfer(num_bytes)


class _Core:
  """A core on its way through its events. Times are ticks."""

  def __init__(self, trace: Trace, server: _Server, log: Log):
    self._trace = trace
    self._log = log
    self._blocks = _blocks(trace.events)
    self._server = server
    # Where it is: in a block, how many times through it, at which event.
    self._block = self.times = self._index = 0
    self._waited = 0
    self._flags: dict[int, int] = {}
    self._coming: dict[int, deque[tuple[int, int]]] = {}
    self._left_over: dict[int, int] = {}
    # Bytes by kind of copy, and ticks waited by bundle.
    self.tally = Counter[str | int]()

  def _here(self) -> Repeat | None:
    is_on = self._block < len(self._blocks)
    return self._blocks[self._block] if is_on else None

  def to_next_copy(self) -> int | None:
    """Goes on to the next copy; when it is started, None at the end."""
    while (block := self._here()) is not None:
      start = (block.cycle + self.times * block.period) * TICKS
      for index in range(self._index, len(block.events)):
        event = block.events[index]
        now = start + event.cycle * TICKS + self._waited
        if event.kind in _COPIES:
          self._index = index
          return now
        if event.flag >= 0:
          self._apply(event, now)
      self._index = 0
      self.times += 1
      if self.times == block.times:
        self._block += 1
        self.times = 0
    return None

  def start_copy(self, now: int) -> None:
    """Starts the copy at hand."""
    block = self._here()
    assert block is not None
    event = block.events[self._index]
    self._index += 1
    num_bytes = event.amount * GRANULE_BYTES
    self.tally[event.kind] += num_bytes
    is_local = event.kind == "local"
    serve = self._server.local if is_local else self._server.finish
    coming = self._coming.setdefault(event.flag, deque())
    done = serve(now, num_bytes)
    coming.append((done, event.amount))
    self._note(event, now, done, num_bytes)

  def _note(self, event: Event, start: int, end: int, num_bytes: int) -> None:
    span = (event.kind, start, end, event.bundle, num_bytes)
    self._log.items.append(Span(self._trace.core, *span))

  def _apply(self, event: Event, now: int) -> None:
    """What an event other than a copy does."""
    match event.kind:
      case "wait":
        self._wait(event, now)
      case "add":
        self._settle(event.flag, now)
        self._flags[event.flag] = self._flags.get(event.flag, 0) + event.amount
      case "set":
        self._clear(event.flag)
      case "delay":
        self._waited += event.amount * TICKS
        self._note(event, now, now + event.amount * TICKS, 0)

  def _settle(self, flag: int, now: int) -> None:
    """Counts the copies that are done by now."""
    coming = self._coming.get(flag)
    while coming and coming[0][0] <= now:
      self._flags[flag] = self._flags.get(flag, 0) + coming.popleft()[1]

  def _wait(self, event: Event, start: int) -> None:
    now = start
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
      self._note(event, start, now, 0)
      self.tally[event.bundle] += now - start

  def _clear(self, flag: int) -> None:
    coming = self._coming.pop(flag, ())
    held = self._flags.pop(flag, 0) + sum(amount for _, amount in coming)
    if held:
      self._left_over[flag] = held

  def timing(self) -> CoreTiming:
    """What came of it."""
    for flag in {*self._flags, *self._coming}:
      self._clear(flag)
    by_bundle = {
      bundle: ticks / TICKS
      for bundle, ticks in self.tally.items()
      if isinstance(bundle, int)
    }
    return CoreTiming(
      cycles=self._trace.cycles + self._waited / TICKS,
      waiting_cycles=self._waited / TICKS,
      waiting_by_bundle=by_bundle,
      read_bytes=self.tally["read"],
      written_bytes=self.tally["write"],
      local_bytes=self.tally["local"],
      left_over=self._left_over,
    )

  # --- repetitions ---

  @property
  def is_at_repetition(self) -> bool:
    """Whether it is at the first copy of events that come again."""
    block = self._here()
    return (
      block is not None
      and block.times > 1
      and all(e.kind not in _COPIES for e in block.events[: self._index])
    )

  def state(self, now: int) -> tuple[Any, ...]:
    """All that decides what it does from now on, but for how often."""
    flags = frozenset((f, n) for f, n in self._flags.items() if n)
    coming = frozenset(
      (flag, *((max(0, done - now), amount) for done, amount in queue))
      for flag, queue in self._coming.items()
      if queue
    )
    then = self.to_next_copy()
    next_copy = None if then is None else then - now
    return self._block, self._index, next_copy, flags, coming

  def most_skips(self, times: int) -> int:
    """How often it could go so many times further through its block."""
    block = self._here()
    if block is None:
      return 1 << 62
    return (block.times - 1 - self.times) // times if times else 0

  def skip(self, count: int, times: int, ticks: int, tally: Counter) -> None:
    """Goes on as if it had done `count` times what took `times` and `ticks`."""
    block = self._here()
    if block is not None:
      self.times += count * times
      self._waited += count * (ticks - times * block.period * TICKS)
      for key, amount in tally.items():
        self.tally[key] += count * amount
    for queue in self._coming.values():
      for i, (done, amount) in enumerate(queue):
        queue[i] = (done + count * ticks, amount)


class _Samples:
  """Finds cores that together come back to a state they were in.

  What follows a state does not depend on how it came about, so that all goes
  round in the same way until a core has no more repetitions. Times are whole
  numbers of ticks, so that equal states are equal.
  """

  def __init__(self, cores: Sequence[_Core], server: _Server, log: Log):
    self._cores = cores
    self._server = server
    self._log = log
    self._seen: dict[Any, tuple[int, int, list[int], list[Counter]]] = {}
    self._tries = 0

  def skip(self, now: int, which: int) -> bool:
    """Skips what is to come round again, if a core is about to start a copy."""
    if self._tries >= _MOST_SAMPLES or not self._cores[which].is_at_repetition:
      return False
    self._tries += 1
    states = tuple(core.state(now) for core in self._cores)
    key = (which, max(0, self._server.free - now), states)
    times = [core.times for core in self._cores]
    seen = self._seen.get(key)
    if seen is None:
      tallies = [core.tally.copy() for core in self._cores]
      self._seen[key] = (now, len(self._log.items), times, tallies)
      return False
    then, logged, before, tallies = seen
    moved = [a - b for a, b in zip(times, before, strict=True)]
    count = min(
      c.most_skips(m) for c, m in zip(self._cores, moved, strict=True)
    )
    if count < 1:
      return False
    for core, m, tally in zip(self._cores, moved, tallies, strict=True):
      core.skip(count, m, now - then, core.tally - tally)
    self._server.free += count * (now - then)
    self._log.repeat(logged, count, now - then)
    self._seen.clear()
    self._tries = 0
    return True


def _blocks(events: Sequence[Event | Repeat]) -> list[Repeat]:
  """The events as blocks of which some come again."""
  blocks: list[Repeat] = []
  single: list[Event] = []
  for found in events:
    if isinstance(found, Event):
      single.append(found)
      continue
    if single:
      blocks.append(Repeat(0, tuple(single), 1, 0))
      single = []
    blocks.append(found)
  if single:
    blocks.append(Repeat(0, tuple(single), 1, 0))
  return blocks
