"""Instructions on memory: scopes, loads and stores, and who races with whom."""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import numpy as np

from coremesh.simulate import (
  clocks,
  memory,
  race_report,
  regions,
  state,
  unwritten,
  views,
)
from coremesh.simulate.worker import Site, Worker

# Polls before it matters to those that poll whether a write changes anything.
_FEW_POLLS = 1000


class Memories(state.State):
  """A machine that can touch memory."""

  # --- who has what ----------------------------------------------------------

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
    if member is None or isinstance(member, memory.Remains):
      remains = member
      if family.dtype is None:
        member = memory.Bank(family, place)
        self.banks.append(member)
      else:
        member = memory.Buffer(family, place)
        if not family.outlives_kernel:
          self.forget(member)
        if family.is_shared:
          self.share(member)
        if remains is not None:
          remains.restore(member)
      family.members[place] = member
    return member

  def get_global(self, worker: Worker, declaration: Any) -> Any:
    """A worker's memory that is there in every launch of the kernel."""
    family = self.families.get(declaration)
    if family is None:
      family = self.families[declaration] = declaration.family()
      family.outlives_kernel = True
    return self.member(worker.device, worker.coords, family)

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
    if place in family.members:
      return self.member(device, coords, family)
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

  def along(self, worker: Worker, axis: Any, index: Any, size: int) -> int:
    """A coordinate of a device, checked."""
    index = int(index)
    if not 0 <= index < size:
      return self.stop(
        "out of bounds",
        f"{worker}: device_id names place {index} along {axis!r}, an axis of"
        f" {size} devices.",
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

  # --- scopes, loads and stores ----------------------------------------------

  def share(self, buffer: memory.Buffer) -> None:
    """Records accesses to a buffer from now on."""
    if self.races:
      buffer.shadow = clocks.Shadow(buffer.data.shape, self.records)

  def forget(self, buffer: memory.Buffer) -> None:
    """Looks for reads of what nobody will have written from now on."""
    if self.uninitialised:
      unwritten.forget(buffer)

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

  def free(self, worker: Worker, member: Any, site: Site) -> None:
    """The worker leaves the scope of its own memory."""
    if isinstance(member, memory.Buffer) and member.owner is worker:
      self.leave(worker, member, site)
      remains = memory.Remains(member)
      self.records.watch(remains)
      member.family.members[member.place] = remains

  def load(
    self,
    worker: Worker,
    buffer: memory.Buffer,
    steps: Sequence[views.Step],
    site: Site,
    *,
    counts: bool = True,
  ) -> Any:
    """A value read by a worker's own instruction.

    It is checked that somebody has written it, unless it counts only where a
    select chooses it.
    """
    if counts and buffer.unwritten is not None:
      self.check_written(worker, buffer, steps, site)
    if buffer.shadow is not None:
      number = worker.read_numbers.get(site)
      if number is None:
        number = self._number(worker, site, "read")
        worker.read_numbers[site] = number
      self._note(buffer, steps, number, worker.clock)
    return views.read(buffer.data, steps)

  def store(
    self,
    worker: Worker,
    buffer: memory.Buffer,
    steps: Sequence[views.Step],
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
      self._note(buffer, steps, number, worker.clock, value)
    if buffer.unwritten is not None:
      unwritten.wrote(buffer, steps)
    write = functools.partial(views.write, buffer.data, steps, value)
    self.changes += self.changed_by(write, buffer, steps)

  def changed_by(
    self,
    write: Callable[[], None],
    buffer: memory.Buffer,
    steps: Sequence[views.Step],
  ) -> bool:
    """Writes a part of a buffer: whether what it holds is another.

    Which is taken for granted until workers have polled for a while.
    """
    if self.polls < _FEW_POLLS:
      write()
      return True
    old = np.array(views.read(buffer.data, steps))
    write()
    new = np.array(views.read(buffer.data, steps))
    return old.tobytes() != new.tobytes()

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
    part = (tuple(slice(i, i + 1) for i in key),)
    if buffer.unwritten is not None:
      self.check_written(worker, buffer, part, site)
    old = buffer.data[key]
    if buffer.shadow is not None:
      # It may meet other additions, and nothing else. Who comes later knows
      # what those before knew; that chance had it come later orders no more.
      number = self._number(worker, site, "add")
      self._note(buffer, part, number, worker.clock, value)
      if (buffer, key) in self._atomic_clocks:
        worker.acquire(self._atomic_clocks[buffer, key])
      self._atomic_clocks[buffer, key] = worker.release()
    buffer.data[key] = old + value
    self.polls += 1
    self.changes += bool(value)
    worker.polled_at = site
    return old

  def settle(self) -> None:
    """Forgets accesses with which nothing can race any more."""
    width = max(len(worker.clock) for worker in self.workers)
    known = [clocks.widened(w.clock, width)[:width] for w in self.workers]
    self.records.settle(np.minimum.reduce(known))
    for worker in self.workers:
      worker.read_numbers.clear()
      worker.write_numbers.clear()

  # --- memory that nobody wrote ----------------------------------------------

  def check_written(
    self,
    who: Any,
    buffer: memory.Buffer,
    steps: Sequence[views.Step],
    site: Site,
  ) -> None:
    """Notes a read of a part of which nobody has written any element."""
    key = (site, buffer.family)
    if key in self._unwritten_reads or not unwritten.is_unwritten(
      buffer, steps
    ):
      return
    self._unwritten_reads[key] = (
      site,
      f"{who}: {site} reads {buffer}, but nobody has written what it reads."
      " Write it first: set a sum to 0 before its first term, or start the copy"
      " that fills it, and wait for it.",
    )

  def report_unwritten(self) -> None:
    """Reports the reads of what nobody wrote, but for those that race.

    What such a read should have waited for is in the report of the race.
    """
    for site, text in self._unwritten_reads.values():
      if site not in self._raced:
        self.report("uninitialised", text)
    self._unwritten_reads.clear()

  # --- races -----------------------------------------------------------------

  def _number(self, worker: Worker, site: Site, kind: str) -> int:
    return self.records.number(
      worker.thread, int(worker.clock[worker.thread]), site, kind, worker
    )

  def _note(self, buffer, steps, number, clock, value=None) -> None:
    """Notes an access, a write if a value is given."""
    shadow = buffer.shadow
    part, key = views.part_of(shadow.state, steps, buffer.data)
    if key is None and part.size <= clocks.FEW:
      state = self.records.harmless.get((number, part.tobytes()))
      if state is not None:  # As before: nothing to compare.
        part[...] = state
        return
    view = part if key is None else part[key]
    if value is None:
      raced = shadow.read(view, number, clock)
    else:

      def changes() -> np.ndarray:
        changed = views.changed(buffer.data, steps, value)
        part, key = views.part_of(changed, steps, buffer.data)
        return part if key is None else part[key]

      raced = shadow.write(view, number, clock, changes)
    if key is not None:
      part[key] = view  # It was a copy.
    if raced:
      self._report_races(buffer, raced, number, steps)

  def _report_races(self, buffer, raced, number, steps=()) -> None:
    """Reports what races with an access, to a part of a buffer or to all."""
    now = self.records.accesses[number]
    for before in raced:
      self._raced |= {before.site, now.site}
      key = (buffer.family.name, *race_report.sites(before, now))
      is_known = any((kind, key) in self._told for kind in ("race", "scope"))
      box = None if is_known else regions.box_of_part(buffer.data, steps)
      kind, text = race_report.told(buffer, before, now, box)
      self.report(kind, text, key, by=race_report.worker_of(now))

  def _report_input(self, buffer, who, site) -> None:
    self.report(
      "input written",
      f"{who}: {site} writes to {buffer}, an input of the kernel, which its"
      " caller still holds. Write to an output, or let an output be that input"
      " with input_output_aliases.",
      (id(site), buffer.family.name),
    )
