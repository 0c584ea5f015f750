"""The simulated machine: what a kernel's instructions do.

It is made in layers, each a class on the one below: what it holds (`state`),
memory (`memories`), semaphores (`signals`), and here DMAs.
"""

import functools
from typing import Any

from jax.experimental.pallas import tpu_sc as plsc
import numpy as np

from coremesh.simulate import clocks, regions, signals, unwritten, views
from coremesh.simulate.transfer import Transfer as Transfer
from coremesh.simulate.transfer import write
from coremesh.simulate.worker import Meeting as Meeting
from coremesh.simulate.worker import Site as Site
from coremesh.simulate.worker import Worker as Worker

# A word of HBM as streams of vector subcores count it, and the size of the
# elements for which this has been looked up in what libtpu 0.0.50.1 compiles
# for v5p, v6e and tpu7x: `sint`, an interrupt, before a start that is none.
_HBM_WORD = 32
_CHECKED_BYTES = 4


class Machine(signals.Signals):
  """All devices that run one kernel together."""

  def start(self, transfer: Transfer) -> bool:
    """Starts a DMA; returns whether another worker should run next."""
    worker = transfer.starter
    if isinstance(worker.mesh, plsc.VectorSubcoreMesh):
      self._check_start(transfer, transfer.src, transfer.src_steps)
      self._check_start(transfer, transfer.dst, transfer.dst_steps)
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

  def _check_start(self, transfer: Transfer, buffer: Any, steps: Any) -> None:
    """Reports a copy of a vector subcore that starts amid a word of HBM."""
    is_plain = all(isinstance(step, tuple) for step in steps)
    if buffer.family.space != "hbm" or not is_plain:
      return
    data = buffer.data
    part = data
    for step in steps:
      part = part[(*step, ...)]
    start = _address(part) - _address(data)
    if part.size and data.itemsize == _CHECKED_BYTES and start % _HBM_WORD:
      index = regions.index(regions.box_of_part(data, steps), buffer.shape)
      self.report(
        "check",
        f"{transfer.starter}: {transfer.site} starts at {buffer.part(index)},"
        f" {start} bytes into it: a vector subcore copies from and to multiples"
        f" of {_HBM_WORD} bytes of HBM, {_HBM_WORD // data.itemsize} elements."
        " The TPU compiler makes a trap of another. Copy from the multiple"
        " before it, and use a part of what came.",
        (id(transfer.site), buffer.family.name),
        by=transfer.starter,
      )

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
    transfer.data = views.read(transfer.src.data, transfer.src_steps)
    if transfer.src.unwritten is not None:
      transfer.unwritten = unwritten.of_part(transfer.src, transfer.src_steps)
    self._note_lists(transfer, transfer.src_steps)
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
    self._note_lists(transfer, transfer.dst_steps)
    if transfer.dst.shadow is not None:
      self._note_transfer(
        transfer, transfer.dst, transfer.dst_steps, transfer.data
      )
    self._note_written(transfer)
    self.changes += self.changed_by(
      functools.partial(write, transfer), transfer.dst, transfer.dst_steps
    )
    self._count(transfer.src, transfer.dst, transfer.num_bytes)
    if transfer.dst_sem is not None:
      self._arrive(transfer, transfer.dst_sem)
    if self.timeline is None:
      transfer.release()
    else:
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
    self._raise(semaphore, semaphore.raised_by(transfer), clock, by)

  def _note_written(self, transfer: Transfer) -> None:
    """Notes that a DMA writes; what nobody has written counts as such there."""
    dst, steps = transfer.dst, transfer.dst_steps
    if dst.unwritten is None and transfer.unwritten is None:
      return
    if not transfer.add:
      unwritten.copied(transfer.unwritten, dst, steps)
    elif dst.unwritten is not None:
      self.check_written(transfer, dst, steps, transfer.site)

  def _note_lists(self, transfer, steps) -> None:
    """A DMA reads the lists of its indices while it runs."""
    for step in steps:
      if isinstance(step, views.Rows):
        for buffer, part in step.listed:
          if buffer.shadow is not None:
            self._note_transfer(transfer, buffer, part, None)

  def _note_transfer(self, transfer, buffer, steps, value) -> None:
    kind = "read" if value is None else "add" if transfer.add else "write"
    number = self.records.new_number(
      transfer.thread, transfer.event, transfer.site, kind, transfer
    )
    self._note(buffer, steps, number, transfer.clock, value)


def _address(array: np.ndarray) -> int:
  return array.__array_interface__["data"][0]
