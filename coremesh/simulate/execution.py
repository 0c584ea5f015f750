"""One run of a kernel: arrays in, workers to their end, arrays out."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
from typing import Any

import numpy as np

from coremesh._compat import kernel_ir
from coremesh.simulate import (
  kept_arrays,
  kept_semaphores,
  machine,
  memory,
  program,
  reuse,
  schedule,
)

_ENTRY = machine.Site("its start", "the kernel's start")
_EXIT = machine.Site("its end", "the kernel's end")


class Execution:
  """The state of a kernel while it runs.

  Attributes:
    devices: those that run it.
    has_ended: whether all workers have reached their end.
  """

  def __init__(
    self,
    mach: machine.Machine,
    kernel: kernel_ir.KernelProgram,
    compiled: program.Program,
    arrays: Mapping[int, Sequence[np.ndarray]],
  ):
    self._mach = mach
    self._kernel = kernel
    self._program = compiled
    self._arrays = arrays
    self.devices = tuple(arrays)
    self.has_ended = False
    self._families = [
      None if d is None else d.family() for d in compiled.operands
    ]
    self._fill()
    self._make_workers()

  # --- before ----------------------------------------------------------------

  def _fill(self) -> None:
    """Gives each device its arrays, and the semaphores that it kept."""
    num_in = len(self._kernel.in_types)
    changed = set(self._program.aliases.values())
    for i, family in enumerate(self._families[: self._program.num_arrays]):
      if family is None:
        continue
      source = self._program.aliases.get(i - num_in)
      if i >= num_in and source is not None:
        # The same family, so that what is said of the one holds for the other.
        self._families[i] = self._families[source]
        continue
      family.outlives_kernel = True
      for device, arrays in self._arrays.items():
        given = arrays[i] if i < num_in else None
        if family.dtype is None:
          family.members.update(kept_semaphores.take(given, family, device))
        else:
          is_input = i < num_in and i not in changed
          self._fill_buffers(family, device, given, is_input=is_input)

  def _fill_buffers(self, family, device, given, *, is_input) -> None:
    """The memories of a device that hold an array: one, or one a core."""
    kept = None if given is None else kept_arrays.find(given)
    sizes = dict(family.mesh.shape) if family.axes else {}
    for coords in itertools.product(*(range(sizes[a]) for a in family.axes)):
      buffer = memory.Buffer(family, (device, *coords))
      if kept is not None and coords in kept:
        buffer.fill(kept[coords])
      elif given is not None:
        buffer.fill(given)
      else:
        self._mach.forget(buffer)
      buffer.is_input = is_input
      self._mach.share(buffer)
      family.members[(device, *coords)] = buffer

  def _make_workers(self) -> None:
    mach, axes = self._mach, self._kernel.device_axes
    sizes = list(axes.values())
    for device in self._arrays:
      place = np.unravel_index(device, sizes) if sizes else ()
      device_coords = dict(zip(axes, map(int, place), strict=True))
      for mesh_index, part in enumerate(self._program.parts):
        ranges = [range(n) for n in part.core_axes.values()]
        for coords in itertools.product(*ranges):
          worker = machine.Worker(mach, device, mesh_index)
          worker.mesh = part.mesh
          worker.device_coords = device_coords
          worker.coords = dict(zip(part.core_axes, coords, strict=True))
          mach.workers.append(worker)
    for worker in mach.workers:
      worker.clock = mach.threads.new_clock()
      worker.clock[worker.thread] = 1
    self._enter()
    for worker in mach.workers:
      worker.program = self._program.parts[worker.mesh_index].start(
        mach, worker, self._operands(worker)
      )
      mach.ready.append(worker)

  def _enter(self) -> None:
    """Every worker enters the kernel: its scratch is now there."""
    for worker in self._mach.workers:
      self._operands(worker)
    # All subcores of the SparseCores of a device are started by one program, so
    # each knows that the others have entered. TensorCores start on their own.
    for device in self._arrays:
      sparse = [
        w
        for w in self._mach.workers
        if w.device == device and self._program.parts[w.mesh_index].is_sparse
      ]
      threads = [w.thread for w in sparse]
      for worker in sparse:
        worker.clock[threads] = 1
    for worker in self._mach.workers:
      worker.clock[worker.thread] = 2

  def _operands(self, worker: machine.Worker) -> list[Any]:
    return [
      self._arrays[worker.device][i][()]
      if family is None
      else self._mach.own(worker, family, _ENTRY)
      for i, family in enumerate(self._families)
    ]

  # --- the run ---------------------------------------------------------------

  def execute(self) -> None:
    """Runs to the end, and looks at what is left."""
    for text in self._program.excess:
      self._mach.report("memory", text)
    try:
      schedule.run(self._mach, changers=self._program.changers)
    finally:
      self._mach.report_unwritten()
    self.has_ended = True
    self._report_matrix_units()
    if not self._has_leftovers() and self._mach.races:
      # A DMA that nobody waited for has been reported once already.
      self._leave()
      reuse.check(self._mach)

  def _report_matrix_units(self) -> None:
    for worker in self._mach.workers:
      if worker.mxu is not None:
        for what in worker.mxu.leftovers():
          self._mach.report(
            "leftover",
            f"{worker} ends with {what}. A kernel must leave the matrix units"
            " empty: load each operand that is pushed with load_staged_rhs, and"
            " take all rows with matmul_pop_fifo.",
          )

  def _has_leftovers(self) -> bool:
    left = [
      semaphore
      for bank in self._mach.banks
      if not bank.family.outlives_kernel
      for semaphore in bank.semaphores
      if semaphore.count
    ]
    for semaphore in left:
      self._report_left(semaphore)
    return bool(left)

  def _report_left(self, semaphore: memory.Semaphore) -> None:
    senders = [by for _, _, by in semaphore.signals]
    kinds = {isinstance(sender, machine.Transfer) for sender, _ in senders}
    last = f" (the last by {senders[-1][1]})" if senders else ""
    name = semaphore.bank.family.name
    if semaphore.count < 0:
      self._mach.report(
        "negative count",
        f"{semaphore} ends at {semaphore.count}: it was signalled a negative"
        " amount. Signal as much as is waited for.",
        name,
      )
    elif kinds == {True}:
      self._mach.report(
        "unwaited",
        f"{semaphore} ends with {semaphore.count}"
        f"{' bytes of' * semaphore.bank.family.counts_bytes} copies that nobody"
        f" waited for{last}. Wait for each copy that is started.",
        name,
      )
    else:
      self._mach.report(
        "leftover",
        f"{semaphore} ends at {semaphore.count}, not 0{last}: the next kernel"
        " would find it so. Wait for as much as is signalled.",
        name,
      )

  def _leave(self) -> None:
    """Every worker leaves; what of others still touches its memory races."""
    mach = self._mach
    for worker in mach.workers:
      for family in filter(None, self._families):
        mach.free(worker, mach.own(worker, family, _EXIT), _EXIT)

  # --- after -----------------------------------------------------------------

  def results(self) -> Mapping[int, Sequence[np.ndarray]]:
    """The outputs of each device."""
    return {device: list(self._outputs(device)) for device in self._arrays}

  def unwritten_outputs(self) -> Iterator[str]:
    """Outputs of which elements hold what nobody has written, in words."""
    for family in self._out_families():
      if family.dtype is None or family.space != "hbm":
        continue
      for buffer in family.members.values():
        if buffer.unwritten is not None:
          marks = buffer.unwritten.marks
          first = np.unravel_index(int(marks.argmax()), marks.shape)
          yield (
            f"{buffer}: {buffer.unwritten.count} of {math.prod(buffer.shape)}"
            f" elements, the first at {list(map(int, first))}"
          )

  def _out_families(self) -> list[Any]:
    num_in = len(self._kernel.in_types)
    return self._families[num_in : num_in + len(self._kernel.out_types)]

  def close(self) -> None:
    """Breaks the cycles of what the run made, so that its memory is free.

    No garbage is collected while kernels run.
    """
    for family in (*self._families, *self._mach.families.values()):
      if family is not None:
        for member in family.members.values():
          if isinstance(member, memory.Bank):
            member.semaphores.clear()
        family.members.clear()
    for worker in self._mach.workers:
      worker.machine = worker.blocked_on = None
      worker.program = iter(())
      worker.streams.clear()
    self._mach.records.accesses.clear()

  def _outputs(self, device: int) -> Iterator[np.ndarray]:
    outs = zip(self._out_families(), self._kernel.out_types, strict=True)
    for family, type_ in outs:
      if family.dtype is None:
        yield np.full(
          type_.shape, kept_semaphores.keep(family, device), np.int32
        )
      else:
        values = {
          place[1:]: np.ascontiguousarray(member.values())
          for place, member in family.members.items()
          if place[0] == device
        }
        yield kept_arrays.kept(values).reshape(type_.shape)
