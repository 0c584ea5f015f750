"""A kernel launched on all devices: from arrays to arrays."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
import threading
import time
from typing import Any

import numpy as np

from coremesh import errors
from coremesh._compat import kernel_ir
from coremesh.simulate import (
  findings,
  machine,
  memory,
  program,
  schedule,
  session,
)

_ENTRY = machine.Site("its start", "the kernel's start")
_EXIT = machine.Site("its end", "the kernel's end")


class Launch:
  """A kernel prepared to run; called once for each device each time it runs.

  A kernel that reaches other devices waits until all of them have called, and
  the last runs all; one that does not runs each by itself.

  Args:
    kernel: the kernel as JAX traced it.
    params: a `SimulatorParams`.
  """

  def __init__(self, kernel: kernel_ir.KernelProgram, params: Any):
    self._kernel = kernel
    self._params = params
    self._program = program.compile_program(kernel)
    self._num_devices = math.prod(kernel.device_axes.values())
    self._meets = self._program.crosses_devices and self._num_devices > 1
    self._gate = threading.Condition()
    self._waiting: dict[int, list[np.ndarray]] = {}
    self._round = _Round()

  def __call__(self, device: Any, *args: Any) -> Sequence[np.ndarray]:
    index = int(device)
    arrays = [np.asarray(arg) for arg in args]
    if not self._meets:
      return self._run({index: arrays})[index]
    with self._gate:
      here = self._round
      self._waiting[index] = arrays
      if len(self._waiting) == self._num_devices:
        arrays_by_device = dict(sorted(self._waiting.items()))
        self._waiting, self._round = {}, _Round()
        try:
          here.results = self._run(arrays_by_device)
        except BaseException as error:  # Raised again on every device.
          here.error = error
        here.is_done = True
        self._gate.notify_all()
      while not here.is_done:
        if not self._gate.wait(timeout=_PATIENCE_SECONDS):
          raise self._gave_up()
    if here.error is not None:
      raise here.error
    return here.results[index]

  def _gave_up(self) -> Exception:
    return findings.DeadlockError(
      [
        findings.Finding(
          kind="deadlock",
          kernel=self._kernel.name,
          text=(
            f"only devices {sorted(self._waiting)} of {self._num_devices} have"
            f" launched it after {_PATIENCE_SECONDS} s, and it reaches the"
            " others. Launch it on every device: not under a lax.cond or in a"
            " loop that differs between devices."
          ),
        )
      ]
    )

  def _run(
    self, arrays: Mapping[int, Sequence[np.ndarray]]
  ) -> Mapping[int, Sequence[np.ndarray]]:
    start = time.perf_counter()
    params = self._params
    mach = machine.Machine(
      self._kernel.name,
      seed=params.seed,
      dma=params.dma,
      races=params.detect_races,
      device_sizes=tuple(self._kernel.device_axes.values()),
    )
    run = _Run(mach, self._kernel, self._program, arrays)
    try:
      with np.errstate(all="ignore"):
        run.execute()
    except findings.SimulationError:
      pass  # All it holds is among the machine's findings.
    if params.session is not None:
      params.session.add(
        session.KernelRun(
          kernel=self._kernel.name,
          devices=tuple(arrays),
          num_workers=len(mach.workers),
          seed=params.seed,
          findings=tuple(mach.findings),
          bytes_moved=mach.bytes_moved,
          seconds=time.perf_counter() - start,
        )
      )
    stopped = not run.has_ended
    if mach.findings and (stopped or params.on_finding == "raise"):
      raise findings.error_of(mach.findings)
    return run.results()


_PATIENCE_SECONDS = 120.0


class _Round:
  """One time that all devices run a kernel together."""

  def __init__(self):
    self.results: Any = None
    self.error: BaseException | None = None
    self.is_done = False


class _Run:
  """The state of a kernel while it runs."""

  def __init__(
    self,
    mach: machine.Machine,
    kernel: kernel_ir.KernelProgram,
    compiled: "program.Program",
    arrays: Mapping[int, Sequence[np.ndarray]],
  ):
    self._mach = mach
    self._kernel = kernel
    self._program = compiled
    self._arrays = arrays
    self.has_ended = False
    self._families = [d.family() for d in compiled.operands]
    self._fill()
    self._make_workers()

  def _fill(self) -> None:
    """The arrays of each device, in its HBM (or host) memory."""
    num_in = len(self._kernel.in_types)
    for i, family in enumerate(self._families[: self._program.num_arrays]):
      if family.axes or family.dtype is None:
        continue
      source = self._program.aliases.get(i - num_in, None)
      for device, arrays in self._arrays.items():
        if i >= num_in and source is not None:
          family.members[(device,)] = self._families[source].members[(device,)]
          continue
        buffer = memory.Buffer(family, (device,))
        if i < num_in:
          buffer.fill(arrays[i])
        self._mach.share(buffer)
        family.members[(device,)] = buffer

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
          worker.device_coords = device_coords
          worker.coords = dict(zip(part.core_axes, coords, strict=True))
          mach.workers.append(worker)
    for worker in mach.workers:
      worker.clock = mach.threads.new_clock()
      worker.clock[worker.thread] = 1
    self._enter()
    for worker in mach.workers:
      worker.program = self._program.parts[worker.mesh_index].start(
        mach, worker, self._refs(worker)
      )
      mach.ready.append(worker)

  def _enter(self) -> None:
    """Every worker enters the kernel: its scratch is now there."""
    for worker in self._mach.workers:
      for family in self._families:
        self._mach.own(worker, family, _ENTRY)
    # All subcores of a SparseCore are started by one program, so each knows
    # that the others have entered. TensorCores start on their own.
    for worker in self._mach.workers:
      worker.clock[worker.thread] += 1
      if not self._program.parts[worker.mesh_index].is_sparse:
        continue
      for other in self._mach.workers:
        if other.device == worker.device:
          worker.clock[other.thread] = max(worker.clock[other.thread], 1)

  def _refs(self, worker: machine.Worker) -> list[Any]:
    return [self._mach.own(worker, family, _ENTRY) for family in self._families]

  def execute(self) -> None:
    """Runs to the end, and looks at what is left."""
    mach = self._mach
    schedule.run(mach, signallers=self._program.signallers)
    self.has_ended = True
    self._check_left()

  def _check_left(self) -> None:
    mach = self._mach
    left = False
    for bank in mach.banks:
      for semaphore in bank.semaphores:
        if semaphore.count:
          left = True
          self._report_left(semaphore)
    if not mach.races or left:
      return  # A DMA that nobody waited for says so once.
    for worker in mach.workers:
      for family in self._families:
        member = mach.own(worker, family, _EXIT)
        mach.free(worker, member, _EXIT)

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
        f"{semaphore} ends with {semaphore.count} bytes of copies that nobody"
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

  def results(self) -> Mapping[int, Sequence[np.ndarray]]:
    """The outputs of each device."""
    num_in = len(self._kernel.in_types)
    outs = self._families[num_in : num_in + len(self._kernel.out_types)]
    return {
      device: list(self._outputs(device, outs)) for device in self._arrays
    }

  def _outputs(self, device: int, outs: Any) -> Iterator[np.ndarray]:
    for family, type_ in zip(outs, self._kernel.out_types, strict=True):
      member = family.members.get((device,))
      if not isinstance(member, memory.Buffer):
        raise errors.UnsupportedError(
          f"Kernel {self._kernel.name!r} returns {family}, which the simulator"
          " keeps for no later kernel: only arrays in HBM outlive a kernel."
        )
      yield np.ascontiguousarray(member.values()).reshape(type_.shape)
