"""Kernels traced once, to be simulated under many seeds."""

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from coremesh.simulate import (
  findings,
  launch,
  params,
  program,
  repeat,
  session,
)

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Capture(params.SimulatorParams):
  """Keeps the kernels it is given to compile."""

  programs: list[Any] = dataclasses.field(default_factory=list, compare=False)

  def compile_kernel(self, program: Any) -> Any:
    self.programs.append(program)
    return super().compile_kernel(program)


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
  """A kernel, as the simulator is handed it.

  Attributes:
    program: what JAX traced.
    num_devices: on which it runs.
    call: the function it was traced from, over all devices.
  """

  program: Any
  num_devices: int
  call: Callable[..., Any]

  def run(self, *args: Any, **options: Any) -> list[np.ndarray]:
    """The outputs, those of all devices one after another."""
    outs, error = self._simulate(args, options)
    if error is not None:
      raise error
    return [np.concatenate(parts) for parts in zip(*outs, strict=True)]

  def findings(self, *args: Any, **options: Any) -> list[findings.Finding]:
    """What the simulator finds wrong."""
    noted = session.Simulation()
    self._simulate(args, {"session": noted, **options})
    return list(noted.findings)

  def program_excess(self) -> tuple[str, ...]:
    """What does not fit into the chip's memories; nothing is run."""
    return program.compile_program(self.program).excess

  def _simulate(self, args: Any, options: Any) -> tuple[list[Any], Any]:
    run = launch.Launch(self.program, params.SimulatorParams(**options))
    shards = [np.split(np.asarray(a), self.num_devices) for a in args]
    with futures.ThreadPoolExecutor(self.num_devices) as pool:
      jobs = [
        pool.submit(run, d, *(shard[d] for shard in shards))
        for d in range(self.num_devices)
      ]
      try:
        return [list(job.result()) for job in jobs], None
      except findings.SimulationError as error:
        return [], error


def kernel(
  body: Any,
  *args: Any,
  out: Any,
  cores: Callable[[cm.Chip], Any] = lambda chip: chip.tensor_cores("core"),
  chip: str = "v5p:2x2x1",
  devices: int = 1,
  **options: Any,
) -> Kernel:
  """Traces a plain `pl.kernel`, one on each of some devices.

  Args:
    body: the kernel's body, or a list of one for each mesh.
    *args: arrays (or shapes) of all devices, split along their first axis.
    out: type of the outputs of one device.
    cores: the mesh of cores of a chip, or a list of several.
    chip: which.
    devices: how many.
    **options: those of `pl.kernel`.
  """
  found = cm.chip(chip)

  def call(*shards):
    return pl.kernel(body, out, mesh=cores(found), **options)(*shards)

  return traced(call, *args, chip=chip, devices=devices)


def traced(
  call: Callable[..., Any], *args: Any, chip: str, devices: int
) -> Kernel:
  """A function of one kernel, traced over some devices of a chip."""
  found = cm.chip(chip)
  mesh = found.device_mesh(
    "device",
    (devices,),
    on="simulator",
    devices=jax.devices()[:devices],
  )
  spec = P("device")
  whole = jax.shard_map(
    call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )
  capture = _Capture()
  with pltpu.force_tpu_interpret_mode(capture):
    jax.jit(whole).lower(*args)
  (program,) = capture.programs
  # JAX keeps what it traced for a function, whatever interprets it.
  fresh = lambda *arrays: jax.jit(lambda *a: whole(*a))(*arrays)
  return Kernel(program, math.prod(mesh.devices.shape), fresh)


def silent(
  made: Kernel, *args: Any, seeds: Sequence[int] = range(50), **options: Any
) -> list[np.ndarray]:
  """Runs a correct kernel under many seeds; its outputs, always the same."""
  first = None
  for seed in seeds:
    noted = session.Simulation()
    dma = ("late", "early", "random")[seed % 3]
    chosen = {"seed": seed, "dma": dma, "session": noted, **options}
    outs = made.run(*args, **chosen)
    assert not noted.findings, f"seed {seed}: {noted.findings}"  # Nor warnings.
    first = first or outs
    for a, b in zip(first, outs, strict=True):
      np.testing.assert_array_equal(a, b, err_msg=f"seed {seed}")
  assert first is not None
  return first


def silent_calls(
  fn: Callable[..., Any], *args: Any, seeds: Sequence[int] = range(50)
) -> list[np.ndarray]:
  """Calls a function of correct kernels under many seeds; its outputs.

  They must be the same bit for bit whether DMAs are late, early, or done at a
  random time, as under each of the seeds. A jitted function is compiled once.
  """
  chosen = repeat.RepeatedParams(
    on_finding="record", session=repeat.Repetition()
  )
  runner = repeat.Runner(fn, args, chosen)
  outcomes = [runner.run(0, "late"), runner.run(0, "early")]
  outcomes += [runner.run(seed, "random") for seed in seeds]
  expected = outcomes[0].outputs
  for outcome in outcomes:
    assert not outcome.findings, f"{outcome.how}: {outcome.findings}"
    assert outcome.outputs is not None and expected is not None
    differs = repeat.difference(expected, outcome.outputs)
    assert differs is None, f"{outcome.how}: {differs}"
  assert expected is not None
  return list(expected.values())


def caught(
  made: Kernel,
  kind: str,
  *args: Any,
  seeds: Sequence[int] = range(10),
  **options: Any,
) -> str:
  """The text of what is found under every seed; all of it of one kind."""
  found: Sequence[findings.Finding] = ()
  for seed in seeds:
    found = made.findings(*args, seed=seed, **options)
    assert found, f"seed {seed}: nothing is found"
    assert {f.kind for f in found} == {kind}, list(map(str, found))
  return "\n".join(map(str, found))
