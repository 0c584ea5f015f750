"""A core on its way through its events, as far as others let it."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from coremesh.profile.events import Event, Repeat, Target, Trace
from coremesh.profile.log import Log, Span
from coremesh.profile.servers import TICKS, Servers

COPIES = ("read", "write", "local", "code")
# What other cores may notice, so that it must come in the order of time.
_OUTWARD = (*COPIES, "send", "signal", "meet")

type Deliver = Callable[[Target, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CoreTiming:
  """When a core is through.

  Attributes:
    cycles: from the start to its last bundle, waiting included.
    waiting_cycles: of them, waiting for copies and other cores.
    waiting_by_bundle: where.
    read_bytes: from HBM.
    written_bytes: to HBM.
    local_bytes: copied inside the core, and to others of its device.
    sent_bytes: to other devices.
    left_over: what semaphores hold, or will, when the program clears them or
      ends; {} if each wait takes what a copy has given.
  """

  cycles: float
  waiting_cycles: float
  waiting_by_bundle: Mapping[int, float]
  read_bytes: int
  written_bytes: int
  local_bytes: int
  sent_bytes: int
  left_over: Mapping[int, int]


class Core:
  """A core. Times are ticks.

  Attributes:
    trace: what it issues.
    times: how often it went through the events that come again where it is.
    next: when it goes on; None if it is through, or another core must act.
    tally: bytes by kind of copy, and ticks waited by bundle.
    is_over: whether it is through.
  """

  def __init__(
    self,
    trace: Trace,
    servers: Servers,
    *,
    log: Log | None = None,
    shared: frozenset[int] = frozenset(),
    deliver: Deliver | None = None,
  ):
    """Puts a core at its start.

    Args:
      trace: what it issues.
      servers: what its copies go through.
      log: where to note its copies and waits.
      shared: semaphores that other cores add to.
      deliver: called with the receiver of a signal, its time and its amount.
    """
    self.trace = trace
    self.times = 0
    self.next: int | None = None
    self.tally = Counter[str | int]()
    self.is_over = False
    self._log = log
    self._blocks = _blocks(trace.events)
    self._servers = servers
    self._shared = shared
    self._deliver = deliver
    # Where it is: in a block, how many times through it, at which event.
    self._block = self._index = 0
    self._waited = 0
    self._flags: dict[int, int] = {}
    self._coming: dict[int, deque[tuple[int, int]]] = {}
    self._left_over: dict[int, int] = {}
    # Since when it waits where it is; None if it does not.
    self._since: int | None = None
    # When all it has written so far is in HBM.
    self._written = 0

  def _here(self) -> Repeat | None:
    is_on = self._block < len(self._blocks)
    return self._blocks[self._block] if is_on else None

  @property
  def waits_at(self) -> Event | None:
    """The event it waits at, if it does."""
    block = self._here()
    if block is None or self._since is None:
      return None
    return block.events[self._index]

  def go_on(self) -> None:
    """Goes on to what others may notice or must do first."""
    while (block := self._here()) is not None:
      start = (block.cycle + self.times * block.period) * TICKS
      for index in range(self._index, len(block.events)):
        event = block.events[index]
        now = start + event.cycle * TICKS + self._waited
        if event.kind in _OUTWARD:
          self._index, self.next = index, now
          return
        if event.flag >= 0 and not self._apply(event, now):
          self._index, self._since = index, now
          self.next = self._ready(event, now)
          return
      self._index = 0
      self.times += 1
      if self.times == block.times:
        self._block += 1
        self.times = 0
    self.next, self.is_over = None, True

  def act(self, now: int) -> None:
    """Does what it has come to, whose time it is, and goes on."""
    if self._since is not None:
      self.pass_wait(now)
      return
    block = self._here()
    assert block is not None
    event = block.events[self._index]
    if event.kind == "meet":
      self._since, self.next = now, None
      return
    self._index += 1
    if event.kind in COPIES:
      self._start_copy(event, now)
    elif event.to is not None and self._deliver is not None:
      self._reach(event, event.to, now)
    self.go_on()

  def pass_wait(self, now: int) -> None:
    """Leaves the wait it is at."""
    block = self._here()
    assert block is not None and self._since is not None
    event = block.events[self._index]
    if event.kind == "wait":
      self._settle(event.flag, now)
    self._note_wait(event, self._since, now)
    self._since = None
    self._index += 1
    self.go_on()

  def receive(self, flag: int, done: int, amount: int) -> None:
    """Takes what another core sends, which will be there at a time."""
    coming = self._coming.setdefault(flag, deque())
    place = len(coming)
    while place and coming[place - 1][0] > done:
      place -= 1
    coming.insert(place, (done, amount))
    event = self.waits_at
    if event is not None and event.kind == "wait" and event.flag == flag:
      assert self._since is not None
      self.next = self._ready(event, self._since)

  def _start_copy(self, event: Event, now: int) -> None:
    num_bytes = event.amount * event.unit_bytes
    self.tally[event.kind] += num_bytes
    is_local = event.kind == "local"
    serve = self._servers.local if is_local else self._servers.copy
    done = serve(self.trace.device, self.trace.core, now, num_bytes)
    if event.kind == "write":
      self._written = max(self._written, done)
    if event.flag >= 0:
      self._come(event.flag, done, event.amount)
    self._note(event, now, done, num_bytes)

  def _come(self, flag: int, done: int, amount: int) -> None:
    if flag in self._shared:
      self.receive(flag, done, amount)
    else:
      self._coming.setdefault(flag, deque()).append((done, amount))

  def _reach(self, event: Event, to: Target, now: int) -> None:
    """Sends a copy or signal to another core."""
    assert self._deliver is not None
    if event.kind == "signal":
      self._deliver(to, now + self._servers.way(to), event.amount)
      return
    num_bytes = event.amount * event.unit_bytes
    self.tally["local" if to.way == "core" else "send"] += num_bytes
    if to.source == "hbm":
      self.tally["read"] += num_bytes
    left, arrived = self._servers.send(self.trace.device, to, now, num_bytes)
    if event.flag >= 0:
      self._come(event.flag, left, event.amount)
    self._deliver(to, arrived, event.amount)
    self._note(event, now, arrived, num_bytes)

  def _note(self, event: Event, start: int, end: int, num_bytes: int) -> None:
    if self._log is not None:
      span = (event.kind, start, end, event.bundle, num_bytes)
      self._log.items.append(Span(self.trace.core, *span))

  def _note_wait(self, event: Event, start: int, end: int) -> None:
    if end > start:
      self._waited += end - start
      self._note(event._replace(kind="wait"), start, end, 0)
      self.tally[event.bundle] += end - start

  def _apply(self, event: Event, now: int) -> bool:
    """Does what concerns this core alone; False if it has to wait first."""
    match event.kind:
      case "wait":
        return self._wait(event, now)
      case "add":
        self._settle(event.flag, now)
        self._flags[event.flag] = self._flags.get(event.flag, 0) + event.amount
      case "set":
        self._clear(event.flag)
      case "fence":
        self._note_wait(event, now, max(now, self._written))
      case "delay":
        self._waited += event.amount * TICKS
        self._note(event, now, now + event.amount * TICKS, 0)
    return True

  def _settle(self, flag: int, now: int) -> None:
    """Counts the copies that are done by now."""
    coming = self._coming.get(flag)
    while coming and coming[0][0] <= now:
      self._flags[flag] = self._flags.get(flag, 0) + coming.popleft()[1]

  def _wait(self, event: Event, start: int) -> bool:
    """Waits for copies of its own; False if they are not enough.

    Where others add to the semaphore too, it waits for the time to come.
    """
    now = start
    self._settle(event.flag, now)
    if event.flag in self._shared:
      return self._flags.get(event.flag, 0) >= event.amount
    coming = self._coming.get(event.flag)
    while self._flags.get(event.flag, 0) < event.amount:
      if not coming:
        return False
      done, granules = coming.popleft()
      now = max(now, done)
      self._flags[event.flag] = self._flags.get(event.flag, 0) + granules
    self._note_wait(event, start, now)
    return True

  def _ready(self, event: Event, start: int) -> int | None:
    """When a wait is over by what is known to come."""
    held = self._flags.get(event.flag, 0)
    for done, amount in self._coming.get(event.flag, ()):
      held += amount
      if held >= event.amount:
        return max(start, done)
    return None

  def _clear(self, flag: int) -> None:
    coming = self._coming.pop(flag, ())
    held = self._flags.pop(flag, 0) + sum(amount for _, amount in coming)
    if held:
      self._left_over[flag] = held

  def held(self, flag: int) -> int:
    """What a semaphore holds, with all that is known to come."""
    coming = self._coming.get(flag, ())
    return self._flags.get(flag, 0) + sum(amount for _, amount in coming)

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
      cycles=self.trace.cycles + self._waited / TICKS,
      waiting_cycles=self._waited / TICKS,
      waiting_by_bundle=by_bundle,
      read_bytes=self.tally["read"],
      written_bytes=self.tally["write"],
      local_bytes=self.tally["local"],
      sent_bytes=self.tally["send"],
      left_over=self._left_over,
    )

  # --- repetitions ---

  @property
  def is_at_repetition(self) -> bool:
    """Whether it is at the first outward event of some that come again."""
    block = self._here()
    return (
      block is not None
      and block.times > 1
      and self._since is None
      and all(e.kind not in _OUTWARD for e in block.events[: self._index])
    )

  def state(self, now: int) -> tuple[Any, ...]:
    """All that decides what it does from now on, but for how often."""
    flags = frozenset((f, n) for f, n in self._flags.items() if n)
    coming = frozenset(
      (flag, *((max(0, done - now), amount) for done, amount in queue))
      for flag, queue in self._coming.items()
      if queue
    )
    then = None if self.next is None else self.next - now
    block = self._here()
    since: int | bool | None = self._since
    if self._since is not None:
      # Since when decides how long it has waited, where that comes round too.
      comes_again = block is not None and block.times > 1
      since = self._since - now if comes_again else True
    written = max(0, self._written - now)
    return self._block, self._index, since, then, written, flags, coming

  def most_skips(self, times: int) -> int:
    """How often it could go so many times further through its block."""
    block = self._here()
    if block is None or (not times and self._since is not None):
      return 1 << 62
    return (block.times - 1 - self.times) // times if times else 0

  def skip(self, count: int, times: int, ticks: int, tally: Counter) -> None:
    """Goes on as if it had done `count` times what took `times` and `ticks`."""
    block = self._here()
    if self.next is not None:
      self.next += count * ticks
    if block is not None and times:
      self.times += count * times
      self._waited += count * (ticks - times * block.period * TICKS)
      if self._since is not None:
        self._since += count * ticks
      for key, amount in tally.items():
        self.tally[key] += count * amount
    self._written += count * ticks
    for queue in self._coming.values():
      for i, (done, amount) in enumerate(queue):
        queue[i] = (done + count * ticks, amount)


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
