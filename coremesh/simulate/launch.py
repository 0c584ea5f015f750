"""A kernel launched on all devices: from arrays to arrays."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import gc
import math
import threading
import time
from typing import Any

import numpy as np

from coremesh._compat import kernel_ir
from coremesh.simulate import (
  execution,
  findings,
  kernel_run,
  kernel_timeline,
  machine,
  program,
  rates,
  recorder,
  synchronisation,
)


class Launch:
  """A kernel prepared to run; called once for each device each time it runs.

  A kernel that reaches other devices waits until all of them have called, and
  the last runs all; one that does not runs each by itself.

  Args:
    kernel: the kernel as JAX traced it.
    params: a `SimulatorParams`.
  """

  def __init__(self, kernel: kernel_ir.KernelProgram, params: Any):
    kernel_ir.keep_quiet_about(findings.SimulationError)
    self._kernel = kernel
    self._params = params
    self._rates: rates.Rates | None = None
    if params.timeline:
      self._rates = rates.Rates(program.chip_of(kernel))
    self._program = self._compile()
    self._num_devices = math.prod(kernel.device_axes.values())
    self._meets = self._program.crosses_devices and self._num_devices > 1
    self._gate = threading.Condition()
    self._waiting: dict[int, list[np.ndarray]] = {}
    self._round = _Round()

  def __call__(self, device: Any, *args: Any) -> Sequence[np.ndarray]:
    index = int(device)
    arrays = [kernel_ir.stored(arg) for arg in args]
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
        came = self._gate.wait(timeout=_PATIENCE_SECONDS)
        if not came and not here.is_done:
          raise self._gave_up()
    if here.error is not None:
      raise here.error
    return here.results[index]

  def _compile(
    self, operations: synchronisation.Operations | None = None
  ) -> program.Program:
    return program.compile_program(
      self._kernel,
      num_cores=program.chip_of(self._kernel).tensor_cores_per_device,
      operations=operations,
      timed_on=self._rates,
    )

  def _compiled(self) -> program.Program:
    """What runs now."""
    return self._program

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
    params = self._params.now()
    compiled = self._compiled()
    mach = machine.Machine(
      self._kernel.name,
      seed=params.seed,
      dma=params.dma,
      races=params.detect_races,
      uninitialised=params.detect_uninitialised,
      device_sizes=tuple(self._kernel.device_axes.values()),
    )
    mach.max_turns = params.max_turns
    if self._rates is not None:
      mach.timeline = recorder.Recorder()
    run = execution.Execution(mach, self._kernel, compiled, arrays)
    try:
      return self._executed(run, mach, params, start)
    finally:
      run.close()

  def _executed(
    self,
    run: execution.Execution,
    mach: machine.Machine,
    params: Any,
    start: float,
  ) -> Mapping[int, Sequence[np.ndarray]]:
    """The outputs of a run; notes it in the session."""
    try:
      with np.errstate(all="ignore"), _undisturbed():
        run.execute()
    except findings.SimulationError:
      pass  # All it holds is among the machine's findings.
    if params.session is not None:
      params.session.add(
        kernel_run.KernelRun(
          kernel=self._kernel.name,
          devices=run.devices,
          num_workers=len(mach.workers),
          seed=params.seed,
          dma=params.dma,
          findings=tuple(mach.findings),
          bytes_moved=mach.bytes_moved,
          seconds=time.perf_counter() - start,
          turns=mach.turns,
          unwritten_outputs=tuple(run.unwritten_outputs()),
          timeline=self._timeline(mach),
        )
      )
    is_wrong = any(not f.is_warning for f in mach.findings)
    if is_wrong and (not run.has_ended or params.on_finding == "raise"):
      raise findings.error_of(mach.findings)
    return run.results()

  def _timeline(self, mach: machine.Machine) -> Any:
    """The run in model time, None if nobody asked for it."""
    if self._rates is None:
      return None
    return kernel_timeline.model(
      self._kernel.name, mach.timeline, mach.workers, self._rates
    )


_PATIENCE_SECONDS = 120.0


_UNDISTURBED = threading.Lock()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
  """One simulation at a time, without garbage collections.

  Devices that run on their own would only take Python's lock from each other.
  What a run allocates makes Python look through all that JAX holds, for
  nothing: a run drops next to no cycles.
  """
  with _UNDISTURBED:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
      yield
    finally:
      if was_enabled:
        gc.enable()


class _Round:
  """One time that all devices run a kernel together."""

  def __init__(self):
    self.results: Any = None
    self.error: BaseException | None = None
    self.is_done = False
