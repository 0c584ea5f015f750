"""The simulated machine: its workers, and what their instructions do."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import random
from typing import Any, Literal

import numpy as np

from coremesh.simulate import clocks, findings, memory

type Dma = Literal["late", "early", "random"]


@dataclasses.dataclass(eq=False, slots=True)
class Site:
  """A place in a kernel: what is done there, and the user's line.

  Attributes:
    what: the operation, in words: "load of 'acc'".
    line: "kernel.py:12 (body)".
  """

  what: str
  line: str

  def __str__(self) -> str:
    return f"{self.what} at {self.line}"


class Worker:
  """One core (or subcore) of one device, running its program.

  Attributes:
    device: its index in the device mesh.
    device_coords: that index by axis.
    coords: the core's place on its mesh, by axis.
    thread: its number among the threads whose events clocks count.
    clock: what it knows of all threads.
    streams: its DMAs that raise no semaphore when they are done, and that it
      has not waited for.
    blocked_on: the semaphore or meeting it waits for, None if it can run.
    busy_ps: picoseconds of its own work so far, if a timeline is asked for.
  """

  __slots__ = (
    "blocked_at",
    "blocked_on",
    "busy_ps",
    "clock",
    "coords",
    "device",
    "device_coords",
    "machine",
    "mesh",
    "mesh_index",
    "mxu",
    "need",
    "prng",
    "program",
    "read_numbers",
    "slots",
    "streams",
    "thread",
    "write_numbers",
  )

  def __init__(self, machine: "Machine", device: int, mesh_index: int):
    self.machine = machine
    self.device = device
    self.mesh_index = mesh_index
    self.mesh: Any = None
    self.device_coords: Mapping[Any, int] = {}
    self.coords: Mapping[Any, int] = {}
    self.thread = machine.threads.add(self)
    self.clock: clocks.Clock = np.zeros(0, np.int64)
    self.slots: list[list[int]] = []
    self.streams: list[Transfer] = []
    self.program: Iterator[None] = iter(())
    self.blocked_on: Any = None
    self.blocked_at: Any = None
    self.need = 0
    self.busy_ps = 0
    self.prng: Any = None
    self.mxu: Any = None
    # Of the accesses of this event, by their sites.
    self.read_numbers: dict[Site, int] = {}
    self.write_numbers: dict[Site, int] = {}

  def __str__(self) -> str:
    return memory.describe(
      (self.device, *self.coords.values()), tuple(self.coords)
    )

  @property
  def event(self) -> int:
    return int(self.clock[self.thread])

  def known(self, other: "Worker", event: int) -> bool:
    """Whether this worker knows that `other` has passed an event."""
    return clocks.reaches(self.clock, other.thread, event)

  def release(self) -> clocks.Clock:
    """What it knows now, to be handed on; what it does next is after that."""
    given = self.clock
    self.clock = given.copy()
    self.advance()
    return given

  def advance(self) -> None:
    """Begins a new event."""
    self.clock[self.thread] += 1
    self.read_numbers.clear()
    self.write_numbers.clear()

  def acquire(self, clock: clocks.Clock) -> None:
    self.clock = clocks.joined(self.clock, clock)

  def slot(self) -> list[int]:
    """A thread for a DMA: [number, last event], free of older DMAs."""
    for slot in self.slots:
      if clocks.reaches(self.clock, slot[0], slot[1]):
        return slot
    slot = [self.machine.threads.add(self), 0]
    self.slots.append(slot)
    return slot


@dataclasses.dataclass(eq=False, slots=True)
class Transfer:
  """A DMA: it reads, is on its way, and writes.

  Attributes:
    starter: the worker that started it.
    src, dst: buffers, with the steps to the parts copied.
    src_sem, dst_sem: raised when the read (of a remote copy) and the write are
      done; None for none.
    data: what was read, None before.
    is_done: whether it has written.
  """

  starter: Worker
  src: memory.Buffer
  src_steps: Sequence[memory.Step]
  dst: memory.Buffer
  dst_steps: Sequence[memory.Step]
  src_sem: Any
  dst_sem: Any
  add: bool
  site: Site
  num_bytes: int
  thread: int = 0
  event: int = 0
  clock: clocks.Clock = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int64)
  )
  data: Any = None
  is_done: bool = False

  def __str__(self) -> str:
    return f"a DMA of {self.starter}"


class Meeting:
  """A barrier of the subcores of one SparseCore."""

  def __init__(self, size: int, where: str):
    self.size = size
    self.where = where
    self.arrived: list[Worker] = []

  def __str__(self) -> str:
    there = f"{len(self.arrived)} of {self.size}"
    return f"subcore_barrier of {self.where} ({there} are there)"


class Machine:
  """All devices that run one kernel together.

  Args:
    kernel: the kernel's name.
    seed: decides every interleaving.
    dma: when a DMA moves its bytes: as late as the waits allow, at once, or at
      random.
    races: whether to look for data races.

  Attributes:
    meets: the signals of barrier semaphores, which outlive the kernel: who,
      which, what was known, and where.
    timeline: the `Recorder` of what workers do, None if nobody asked for it.
  """

  def __init__(
    self,
    kernel: str,
    *,
    seed: int,
    dma: Dma,
    races: bool,
    device_sizes: Sequence[int] = (),
  ):
    self.kernel = kernel
    self.num_devices = int(np.prod(device_sizes, dtype=np.int64))
    self.dma = dma
    self.races = races
    self.rng = random.Random(seed)
    self.threads = clocks.Threads()
    self.records = clocks.Records()
    self.workers: list[Worker] = []
    self.ready: list[Worker] = []
    self.due: list[memory.Semaphore] = []
    self.pending: dict[Transfer, None] = {}
    self.meetings: dict[Any, Meeting] = {}
    self.banks: list[memory.Bank] = []
    self.families: dict[Any, memory.Family] = {}
    self._entries: Counter[Any] = Counter()
    self._atomic_clocks: dict[memory.Family, clocks.Clock] = {}
    self.findings: list[findings.Finding] = []
    self.bytes_moved: Counter[tuple[Any, ...]] = Counter()
    self.meets: list[tuple[Worker, memory.Semaphore, clocks.Clock, Site]] = []
    self._seen: set[Any] = set()
    self._credit = 0
    self.turns = 0
    self.polls = 0
    self.max_turns: int | None = None
    self.timeline: Any = None

  # --- places ----------------------------------------------------------------

  def barrier(self, worker: Worker, declaration: Any, tag: Any) -> Any:
    """A worker's barrier semaphore, which outlives kernels."""
    key = ("barrier", worker.mesh_index, tag)
    family = self.families.get(key)
    if family is None:
      family = self.families[key] = declaration.family()
      for other in self.workers:
        if other.mesh_index == worker.mesh_index:
          self.member(other.device, other.coords, family)
    return family.at(worker.device, worker.coords)

  def meeting(self, worker: Worker) -> Meeting:
    """The barrier of the subcores of the worker's SparseCore."""
    axis, subcore_axis = tuple(worker.coords)
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
      del subcore_axis
      meeting = self.meetings[key] = Meeting(len(others), where)
    return meeting

  def along(self, index: Any, size: int) -> int:
    """A coordinate of a device, checked."""
    index = int(index)
    if not 0 <= index < size:
      return self.stop(
        "out of bounds",
        f"device_id names place {index} along an axis of {size} devices.",
      )
    return index

  def device(self, worker: Worker, index: int) -> int:
    """A device by its number in the mesh, checked."""
    if not 0 <= index < self.num_devices:
      return self.stop(
        "out of bounds",
        f"{worker}: device_id {index} is none of {self.num_devices} devices.",
      )
    return index

  def shuffled(self, order: Sequence[int]) -> list[int]:
    """Iterations in an order that the seed decides."""
    order = list(order)
    self.rng.shuffle(order)
    return order

  def print(
    self, worker: Worker, params: Mapping[str, Any], values: Sequence[Any]
  ) -> None:
    """`debug_print` of a worker."""
    fmt = params.get("fmt", "")
    try:
      text = str(fmt).format(*values)
    except (IndexError, KeyError, ValueError):
      text = f"{fmt} {list(values)}"
    print(f"[{worker}] {text}", flush=True)

  # --- findings --------------------------------------------------------------

  def report(
    self,
    kind: findings.Kind,
    text: str,
    key: Any = None,
    *,
    is_warning: bool = False,
  ) -> None:
    """Notes a fault, once for each `key`."""
    key = (kind, text if key is None else key)
    if key not in self._seen:
      self._seen.add(key)
      self.findings.append(
        findings.Finding(
          kind=kind, kernel=self.kernel, text=text, is_warning=is_warning
        )
      )

  def stop(self, kind: findings.Kind, text: str) -> Any:
    """Ends the simulation with a fault."""
    self.report(kind, text)
    raise findings.SimulationError(self.findings)

  # --- memory ----------------------------------------------------------------

  def share(self, buffer: memory.Buffer) -> None:
    """Records accesses to a buffer from now on."""
    if self.races:
      buffer.shadow = clocks.Shadow(buffer.data.shape, self.records)

  def enter(self, worker: Worker, member: Any, site: Site) -> None:
    """The owner of a memory enters its scope: before, nobody may touch it."""
    member.owner = worker
    member.entered = worker.event
    if isinstance(member, memory.Buffer) and member.shadow is not None:
      number = self._number(worker, site, "enter")
      member.shadow.state[...] = self.records.set_number((number,))

  def leave(self, worker: Worker, buffer: memory.Buffer, site: Site) -> None:
    """The owner leaves the scope: after, nobody may touch the buffer."""
    if buffer.shadow is not None:
      number = self._number(worker, site, "leave")
      raced = buffer.shadow.write(buffer.shadow.state, number, worker.clock)
      self._report_races(buffer, raced, number)

  def load(
    self,
    worker: Worker,
    buffer: memory.Buffer,
    steps: Sequence[memory.Step],
    site: Site,
  ) -> Any:
    """A value read by a worker's own instruction."""
    if buffer.shadow is not None:
      number = worker.read_numbers.get(site)
      if number is None:
        number = self._number(worker, site, "read")
        worker.read_numbers[site] = number
      self._note(buffer, steps, number, worker.clock)
    return memory.read(buffer.data, steps)

  def store(
    self,
    worker: Worker,
    buffer: memory.Buffer,
    steps: Sequence[memory.Step],
    value: Any,
    site: Site,
  ) -> None:
    """A value written by a worker's own instruction."""
    if buffer.is_input:
      self._report_input(buffer, worker, site)
    if buffer.shadow is not None:
      number = worker.write_numbers.get(site)
      if number is None:
        number = self._number(worker, site, "write")
        worker.write_numbers[site] = number
      changes = lambda: memory.changes(buffer.data, steps, value)
      self._note(buffer, steps, number, worker.clock, changes)
    memory.write(buffer.data, steps, value)

  def _number(self, worker: Worker, site: Site, kind: str) -> int:
    return self.records.number(
      worker.thread, int(worker.clock[worker.thread]), site, kind, worker
    )

  def _note(self, buffer, steps, number, clock, changes=None) -> None:
    """Notes an access, a write if `changes` tells what it would change."""
    shadow = buffer.shadow
    part, key = shadow.state, None
    for i, step in enumerate(steps):
      if type(step) is tuple:
        outer, part = part, part[step]
        if part.__class__ is not np.ndarray:  # One element: keep it a view.
          part = outer[tuple(slice(i, i + 1) for i in step)]
      elif type(step) is memory.Rows and i == len(steps) - 1:
        key = memory.kept_key(step)
      else:
        part = shadow.state.reshape(-1)
        key = (_flat_index(buffer.data, steps),)
        break
    view = part if key is None else part[key]
    if changes is None:
      raced = shadow.read(view, number, clock)
    else:
      raced = shadow.write(view, number, clock, changes)
    if key is not None:
      part[key] = view  # It was a copy.
    if raced:
      self._report_races(buffer, raced, number)

  def _report_races(self, buffer, raced, number) -> None:
    now = self.records.accesses[number]
    for before in raced:
      self._report_race(buffer, before, now)

  def _report_race(self, buffer, before, now) -> None:
    key = (id(before.site), id(now.site), buffer.family.name)
    if before.kind == "enter":
      text = (
        f"{now.who}: {now.site} touches {buffer} without knowing that"
        f" {before.who} has entered the scope of that memory. Meet in a barrier"
        " first."
      )
      self.report("scope", text, key)
    elif before.kind == "leave":
      text = (
        f"{now.who}: {now.site} ({now.kind}) touches {buffer} when"
        f" {before.who} may have left the scope of that memory ({before.site})."
        " Let the owner wait for it first."
      )
      self.report("scope", text, key)
    elif now.kind == "leave":
      text = (
        f"{now.who} leaves the scope of {buffer} while {before.who}:"
        f" {before.site} ({before.kind}) may still be under way. Wait for it"
        " first."
      )
      self.report("scope", text, key)
    else:
      text = (
        f"{now.kind} of {buffer} by {now.who} ({now.site}) and"
        f" {before.kind} by {before.who} ({before.site}) are not ordered. Order"
        " them: wait for the DMA, or signal from one and wait in the other."
      )
      self.report("race", text, key)

  def _report_input(self, buffer, who, site) -> None:
    self.report(
      "input written",
      f"{who}: {site} writes to {buffer}, an input of the kernel, which its"
      " caller still holds. Write to an output, or let an output be that input"
      " with input_output_aliases.",
      (id(site), buffer.family.name),
    )

  def allocate(self, worker: Worker, declaration: Any, site: Site) -> Any:
    """A worker's own memory or semaphores of a scope it enters."""
    count = self._entries[(declaration, worker)]
    self._entries[(declaration, worker)] += 1
    # Cores that run one program enter a scope equally often, so equal counts
    # name the same memory to a core that reaches for another's.
    family = self.families.get((declaration, count))
    if family is None:
      family = self.families[(declaration, count)] = declaration.family()
    return self.own(worker, family, site)

  def own(self, worker: Worker, family: memory.Family, site: Site) -> Any:
    """A worker's member of a family, made at need; a family if it has none."""
    if any(axis not in worker.coords for axis in family.axes):
      return family
    member = self.member(worker.device, worker.coords, family)
    is_private = family.space not in ("hbm", "host", "vmem_shared")
    if (
      is_private
      and member.owner is None
      and worker.mesh == family.mesh
      and not family.outlives_kernel
    ):
      self.enter(worker, member, site)
    return member

  def member(
    self, device: int, coords: Mapping[Any, int], family: memory.Family
  ) -> Any:
    """The member of a family on a core, made at need."""
    place = (device, *(coords[axis] for axis in family.axes))
    member = family.members.get(place)
    if member is None:
      if family.dtype is None:
        member = memory.Bank(family, place)
        self.banks.append(member)
      else:
        member = memory.Buffer(family, place)
        if family.is_shared:
          self.share(member)
      family.members[place] = member
    return member

  def get_global(self, worker: Worker, declaration: Any) -> Any:
    """A worker's memory that is there in every launch of the kernel."""
    family = self.families.get(declaration)
    if family is None:
      family = self.families[declaration] = declaration.family()
      family.outlives_kernel = True
    return self.member(worker.device, worker.coords, family)

  def fail_check(self, worker: Worker, message: str, site: Site) -> None:
    """Ends the simulation: a `debug_check` of the kernel has failed."""
    self.stop("check", f"{worker}: {site} failed: {message}")

  def free(self, worker: Worker, member: Any, site: Site) -> None:
    """The worker leaves the scope of its own memory."""
    if isinstance(member, memory.Buffer) and member.owner is worker:
      self.leave(worker, member, site)

  def peer(self, worker: Worker, ref: Any, target: Any, site: Site) -> Any:
    """What a ref stands for on another core."""
    device, coords = target
    family = ref if isinstance(ref, memory.Family) else ref.family
    if any(axis not in coords for axis in family.axes):
      missing = [axis for axis in family.axes if axis not in coords]
      return self.stop(
        "scope", f"{worker}: {site} must say which {missing} in device_id."
      )
    place = (device, *(coords[axis] for axis in family.axes))
    member = family.members.get(place)
    if member is not None:
      return member
    for axis in family.axes:
      size = family.mesh.shape[axis]
      if not 0 <= coords[axis] < size:
        return self.stop(
          "out of bounds",
          f"{worker}: {site} reaches {axis} {coords[axis]}, but a device has"
          f" {size} of them.",
        )
    if not family.outlives_kernel:
      self.report(
        "scope",
        f"{worker}: {site} reaches {family} of"
        f" {memory.describe(place, family.axes)}, which has not entered its"
        " scope yet. Meet in a barrier after both have.",
        (id(site), "early"),
        is_warning=family.dtype is None,  # See `signal`.
      )
    return self.member(device, coords, family)

  def fetch_and_add(
    self,
    worker: Worker,
    buffer: memory.Buffer,
    key: tuple[int, ...],
    value: Any,
    site: Site,
  ) -> Any:
    """Adds to an element of another subcore's memory, all at once."""
    if buffer.is_input:
      self._report_input(buffer, worker, site)
    old = buffer.data[key]
    if buffer.shadow is not None:
      # It may meet other additions, and nothing else. Who comes later knows
      # what those before knew; that chance had it come later orders no more.
      part = (tuple(slice(i, i + 1) for i in key),)
      number = self._number(worker, site, "add")
      self._note(buffer, part, number, worker.clock, lambda: True)
      if buffer.family in self._atomic_clocks:
        worker.acquire(self._atomic_clocks[buffer.family])
      self._atomic_clocks[buffer.family] = worker.release()
    buffer.data[key] = old + value
    return old

  # --- semaphores ------------------------------------------------------------

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
        if not worker.known(owner, semaphore.bank.entered):
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
        self.meets.append((worker, semaphore, clock, site))
      self._raise(semaphore, amount, clock, (worker, site))
    else:
      self._raise(semaphore, amount, None, (worker, site))
    return self.switches()

  def switches(self) -> bool:
    """Whether the worker should let another run, as the seed has it."""
    self._credit -= 1
    if self._credit >= 0:
      return False
    self._credit = self.rng.randrange(12)
    return True

  def _raise(self, semaphore, amount, clock, by) -> None:
    semaphore.count += amount
    if amount > 0:
      semaphore.signals.append([amount, clock, by])
    worker = semaphore.waiter
    if worker is not None and semaphore.count >= worker.need:
      semaphore.waiter = None
      worker.blocked_on = None
      self.ready.append(worker)

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
    if decrement:
      semaphore.count -= amount
    if semaphore.signals:
      self._take_signals(worker, semaphore, amount, decrement)
    return True

  def _take_signals(self, worker, semaphore, amount, decrement) -> None:
    """Learns what the senders of the oldest signals knew."""
    signals = semaphore.signals
    if not decrement:
      signals = [list(signal) for signal in signals]
    while amount > 0 and signals:
      first = signals[0]
      if self.races and first[1] is not None:
        worker.acquire(first[1])
      if first[0] > amount:
        first[0] -= amount
        break
      amount -= first[0]
      signals.pop(0)

  def observe(self, worker: Worker, semaphore: memory.Semaphore) -> np.int32:
    """The count, read without waiting; it tells of every signal so far."""
    self.polls += 1
    if self.timeline is not None and semaphore.count > 0:
      self.timeline.take(
        worker, semaphore, semaphore.count, "semaphore_read", decrement=False
      )
    if self.races:
      for _, clock, _ in semaphore.signals:
        if clock is not None:
          worker.acquire(clock)
    return np.int32(semaphore.count)

  def block(self, worker: Worker, on: Any, need: int, site: Site) -> None:
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

  def meet(self, worker: Worker, meeting: Meeting, site: Site) -> bool:
    """Arrives at a barrier: whether all are there, else it blocks."""
    if self.timeline is not None:
      self.timeline.meet(worker, meeting, site)
    meeting.arrived.append(worker)
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

  # --- DMAs ------------------------------------------------------------------

  def start(self, transfer: Transfer) -> bool:
    """Starts a DMA; returns whether another worker should run next."""
    worker = transfer.starter
    if self.timeline is not None:
      self.timeline.start(transfer)
    if self.races:
      slot = worker.slot()
      transfer.thread, transfer.event = slot[0], slot[1] + 1
      slot[1] += 2  # One event for the read, one for the write.
      transfer.clock = clocks.widened(worker.release(), slot[0] + 1).copy()
      transfer.clock[transfer.thread] = transfer.event
    if transfer.dst_sem is None:
      worker.streams.append(transfer)
    if self.dma == "early":
      self.deliver(transfer)
    else:
      self.pending[transfer] = None
      for semaphore in (transfer.src_sem, transfer.dst_sem):
        if semaphore is not None:
          semaphore.arrivals.append(transfer)
          if semaphore.waiter is not None:
            self.due.append(semaphore)
    return self.switches()

  def drain(self, worker: Worker) -> None:
    """Waits for all streams of a vector subcore: they share one fence."""
    if self.timeline is not None:
      self.timeline.drain(worker, worker.streams)
    for transfer in worker.streams:
      if not transfer.is_done:
        self.deliver(transfer)
      if self.races:
        worker.acquire(transfer.clock)
    worker.streams.clear()

  def fetch(self, transfer: Transfer) -> None:
    """The first half of a DMA: it reads, and its read semaphore is raised."""
    transfer.data = memory.read(transfer.src.data, transfer.src_steps)
    if transfer.src.shadow is not None:
      self._note_transfer(transfer, transfer.src, transfer.src_steps, None)
    if transfer.src_sem is not None:
      self._arrive(transfer, transfer.src_sem)

  def deliver(self, transfer: Transfer) -> None:
    """The second half: it writes, and its write semaphore is raised."""
    if transfer.data is None:
      self.fetch(transfer)
    if transfer.dst.is_input:
      self._report_input(transfer.dst, transfer, transfer.site)
    self.pending.pop(transfer, None)
    transfer.is_done = True
    if self.races:
      transfer.event += 1
      transfer.clock = transfer.clock.copy()
      transfer.clock[transfer.thread] = transfer.event
    if transfer.dst.shadow is not None:
      self._note_transfer(
        transfer,
        transfer.dst,
        transfer.dst_steps,
        lambda: (
          transfer.add
          or memory.changes(
            transfer.dst.data, transfer.dst_steps, transfer.data
          )
        ),
      )
    _place(transfer)
    self._count(transfer.src, transfer.dst, transfer.num_bytes)
    if transfer.dst_sem is not None:
      self._arrive(transfer, transfer.dst_sem)
    transfer.data = True  # The elements are not needed any more.

  def copied_block(
    self, worker: Worker, window: Any, *, out: bool, num_bytes: int, site: Site
  ) -> None:
    """Notes that the grid of a `pallas_call` has copied a block in, or out."""
    src, dst = window.array, window.block
    if out:
      src, dst = dst, src
    self._count(src, dst, num_bytes)
    if self.timeline is not None:
      self.timeline.block(worker, window, src, dst, num_bytes, site)

  def _count(self, src, dst, num_bytes) -> None:
    link = (src.family.space, src.place[0], dst.family.space, dst.place[0])
    self.bytes_moved[link] += num_bytes

  def _arrive(self, transfer, semaphore) -> None:
    if transfer in semaphore.arrivals:
      semaphore.arrivals.remove(transfer)
    clock = transfer.clock if self.races else None
    by = (transfer, transfer.site)
    self._raise(semaphore, transfer.num_bytes, clock, by)

  def _note_transfer(self, transfer, buffer, steps, changes) -> None:
    kind = "read" if changes is None else "add" if transfer.add else "write"
    number = self.records.new_number(
      transfer.thread, transfer.event, transfer.site, kind, transfer
    )
    self._note(buffer, steps, number, transfer.clock, changes)


def _flat_index(data: np.ndarray, steps: Sequence[memory.Step]) -> np.ndarray:
  """Which elements of a memory steps lead to, counted in one row."""
  flat = np.arange(data.size).reshape(*data.shape, 1)
  for step in steps:
    if type(step) is tuple:
      flat = flat[step]
    elif type(step) is memory.Rows:
      flat = flat[memory.kept_key(step)]
    else:
      flat = step.forward_records(flat)
  return np.unique(flat)


def _place(transfer: Transfer) -> None:
  """Writes what a DMA has read."""
  steps, data = list(transfer.dst_steps), transfer.data
  kept = next(
    (s for s in transfer.src_steps if isinstance(s, memory.Rows)), None
  )
  if kept is not None and kept.kept is not None:
    # Rows that the source's indices ignore are left as they were.
    old = memory.read(transfer.dst.data, steps)
    shape = [1] * np.ndim(data)
    shape[kept.axis] = -1
    data = np.where(np.reshape(kept.kept, shape), data, old)
  if not transfer.add:
    memory.write(transfer.dst.data, steps, data)
  elif any(isinstance(s, memory.Rows) for s in steps):
    _add_rows(transfer.dst.data, steps, data)
  else:
    old = memory.read(transfer.dst.data, steps)
    memory.write(transfer.dst.data, steps, (old + data).astype(old.dtype))


def _add_rows(base: np.ndarray, steps: list[Any], data: Any) -> None:
  *outer, last = steps
  for step in outer:
    base = base[step] if type(step) is tuple else step.forward(base)
  key, data = memory.kept_rows(last, data)
  np.add.at(base, key, data)  # An index may be there twice.
