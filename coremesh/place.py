"""Where a kernel that is being traced will run, and with what interpreter."""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import threading
from typing import Any, Literal

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from coremesh import _compat, chips, errors, generations, topology
from coremesh.simulate import repeat
from coremesh.simulate.params import SimulatorParams
from coremesh.simulate.session import Simulation

_SPARSE_CORE_IN_JAX = (
  "Kernel {name!r} runs on SparseCore subcores, which JAX's TPU interpret"
  " mode simulates wrongly: every subcore believes it is subcore 0. Leave"
  " `interpret` out, or pass cm.SimulatorParams(): coremesh's simulator runs"
  " it."
)

# XLA's CPU client keeps at most 32 computations of a device in flight, and the
# interpreter runs all cores of chips with several on the first device. A few
# are taken by the rest of the program.
_MAX_WAITING_CORES = 28


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
  """Where a kernel will run.

  Attributes:
    chip: what it is traced for.
    is_simulated: on CPU devices.
    params: how, None if it is not simulated: coremesh's `SimulatorParams`, or
      the `pltpu.InterpretParams` of JAX's own interpreter.
    knows_chip: whether JAX's tracer knows the chip without being told.
    is_plain_mesh: in a mesh of plain CPU devices, not `chip.device_mesh`'s;
      JAX cannot be told of a chip there.
    num_processes: processes the device mesh spans, 1 on a TPU.
  """

  chip: chips.Chip
  is_simulated: bool
  knows_chip: bool
  params: pltpu.InterpretParams | None = None
  is_plain_mesh: bool = False
  num_processes: int = 1

  @property
  def uses_jax_interpreter(self) -> bool:
    """Whether JAX's own interpreter runs the kernel, not coremesh's."""
    return self.is_simulated and not isinstance(self.params, SimulatorParams)

  def tracing_context(self) -> Any:
    """A context in which Pallas sees the chip."""
    if self.knows_chip or self.is_plain_mesh:
      return contextlib.nullcontext()
    device = self.chip.abstract_device(platform="cpu")
    return _compat.empty_device_context(device)


def find(interpret: Any) -> Place:
  """The place of a kernel traced now.

  Args:
    interpret: what the user asked for: None to choose, False for a TPU or the
      compiler, anything else for interpret mode.

  Raises:
    ChipError: the devices are TPUs coremesh does not know.
    UnsupportedError: the devices are neither TPUs nor CPUs.
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = _device_of(mesh)
  chip = chips.chip_of_device_kind(device.device_kind)
  forced = _compat.forced_interpret_params()
  if interpret is None:
    is_simulated = bool(forced) or device.platform != "tpu"
  else:
    is_simulated = bool(interpret)
  if device.platform == "tpu":
    if chip is None:
      raise errors.ChipError(
        f"coremesh does not know the device kind {device.device_kind!r}; it"
        f" knows {', '.join(generations.names())}."
      )
  elif device.platform != "cpu":
    raise errors.UnsupportedError(
      f"coremesh kernels run on TPUs and, simulated, on CPUs; these devices"
      f" are {device.platform!r}. Use chip.device_mesh(on='simulator')."
    )
  return Place(
    chip=chip or chips.chip(),
    is_simulated=is_simulated,
    params=_params(interpret) if is_simulated else None,
    knows_chip=chip is not None,
    is_plain_mesh=chip is None and not mesh.empty,
    num_processes=_num_processes(mesh),
  )


def current_chip() -> chips.Chip:
  """The chip that what is traced now is for.

  That of the device mesh in scope, else that of the default device, of a CPU
  `cm.chip()`.

  Raises:
    ChipError: the devices are TPUs coremesh does not know.
    UnsupportedError: the mesh does not say: it is of plain CPU devices, or of
      neither TPUs nor CPUs.
  """
  here = find(None)
  if here.is_plain_mesh:
    raise errors.UnsupportedError(
      "A kernel of coremesh.kernels asks which chip it is for, and a mesh of"
      " plain CPU devices does not say. Make the mesh with"
      " chip.device_mesh(...)."
    )
  return here.chip


def _params(interpret: Any) -> pltpu.InterpretParams:
  if isinstance(interpret, pltpu.InterpretParams):
    return interpret
  return _compat.forced_interpret_params() or SimulatorParams()


def _device_of(mesh: jax.sharding.AbstractMesh) -> jax.sharding.AbstractDevice:
  """What is traced for: a device of the mesh in scope, else the default one."""
  told = mesh.abstract_device
  if told is None:
    return _default_device()
  if mesh.empty and told.platform == "cpu":  # `cm.simulation` tells it.
    _start_jax()
  return told


def _start_jax() -> None:
  if not _compat.backends_started() and not topology.tpu_is_attached():
    topology.simulated_devices(1)


def _default_device() -> jax.sharding.AbstractDevice:
  _start_jax()
  device = jax.local_devices()[0]
  return _compat.AbstractDevice(
    device_kind=device.device_kind,
    num_cores=getattr(device, "num_cores", None),
    platform=device.platform,
  )


def _num_processes(mesh: jax.sharding.AbstractMesh) -> int:
  device = mesh.abstract_device
  if device is None or device.platform == "tpu":
    return 1
  if isinstance(device, _compat.SimulatedDevice):
    return device.num_processes
  spans = mesh.size > jax.local_device_count()
  return _compat.num_processes() if spans else 1


def check(name: str, meshes: Sequence[Any], place: Place) -> None:
  """Checks that the meshes exist at the place.

  Raises:
    ChipError: more cores than the chip has, or a mesh without a core count.
    UnsupportedError: several processes on a CPU, or SparseCores in JAX's
      interpreter.
  """
  for mesh in meshes:
    _check_mesh(name, mesh, place.chip)
  if not place.is_simulated:
    return
  is_sparse = any(not isinstance(m, pltpu.TensorCoreMesh) for m in meshes)
  if is_sparse and place.uses_jax_interpreter:
    raise errors.UnsupportedError(_SPARSE_CORE_IN_JAX.format(name=name))
  if place.num_processes > 1:
    raise errors.UnsupportedError(
      f"Kernel {name!r} runs over a device mesh of {place.num_processes}"
      " processes. On CPUs a kernel runs within one process: build the mesh"
      " from this process's devices, chip.device_mesh(...,"
      " devices=jax.local_devices()). Only a TPU runs it across processes,"
      ' and a compile checks it: chip.device_mesh(..., on="compiler").'
    )


def _check_mesh(name: str, mesh: Any, chip: chips.Chip) -> None:
  match mesh:
    case pltpu.TensorCoreMesh():
      have, what = chip.tensor_cores_per_device, "TensorCores"
    case plsc.VectorSubcoreMesh() | plsc.ScalarSubcoreMesh():
      have, what = chip.sparse_cores_per_device, "SparseCores"
    case _:
      raise errors.ChipError(
        f"mesh of kernel {name!r} must be a TensorCoreMesh,"
        f" VectorSubcoreMesh or ScalarSubcoreMesh; got {mesh!r}. Make one"
        " with chip.tensor_cores() and its like."
      )
  if mesh.num_cores is None:
    raise errors.ChipError(
      f"mesh of kernel {name!r} has no number of cores: on a CPU"
      " pltpu.TensorCoreMesh() does not know it. Use chip.tensor_cores()."
    )
  subcores = getattr(mesh, "num_subcores", 0)
  if mesh.num_cores > have or subcores > chip.vector_subcores_per_sparse_core:
    raise errors.ChipError(
      f"Kernel {name!r} is launched on {mesh}, but a device of"
      f" {chip.generation} has {have} {what}"
      + (
        f" of {chip.vector_subcores_per_sparse_core} vector subcores."
        if have and what == "SparseCores"
        else "."
      )
    )


def check_waiting(name: str, num_cores: int, place: Place) -> None:
  """Checks that cores in JAX's interpreter can wait for one another.

  Raises:
    UnsupportedError: JAX's CPU runtime has too few threads, so that a barrier
      would never end.
  """
  if num_cores == 1 or not place.uses_jax_interpreter:
    return  # The devices' own threads do.
  devices = max(1, jax.sharding.get_abstract_mesh().size)
  have = topology.num_simulation_threads()
  if devices * (num_cores + 1) >= have:
    raise errors.UnsupportedError(
      f"Kernel {name!r} makes {devices * num_cores} simulated cores wait for"
      f" one another, but JAX has started with too few CPU threads ({have}),"
      " so that they would wait for ever. Call chip.device_mesh(...) before"
      " anything else that uses JAX, or set the environment variable"
      f" NPROC={topology.PROCESSORS_PER_DEVICE * devices} before JAX starts."
    )
  if devices * num_cores > _MAX_WAITING_CORES:
    raise errors.UnsupportedError(
      f"Kernel {name!r} makes {devices * num_cores} simulated cores wait for"
      f" one another; JAX's CPU runtime runs {_MAX_WAITING_CORES} at once, so"
      " that they would wait for ever. Simulate fewer devices, or compile for"
      ' all of them: chip.device_mesh(..., on="compiler").'
    )


def interpret_params(*, num_cores: int, place: Place) -> pltpu.InterpretParams:
  """How a kernel of `num_cores` cores a device should be interpreted there."""
  assert place.params is not None
  if not place.uses_jax_interpreter:
    return place.params
  base = place.params
  if place.is_plain_mesh:  # Padding needs the size of the chip's tiles.
    base = dataclasses.replace(base, buffer_bounds="logical")
  return dataclasses.replace(base, num_cores_or_threads=num_cores)


@contextlib.contextmanager
def simulation(
  *,
  seed: int = 0,
  races: bool = True,
  uninitialised: bool = True,
  dma: Literal["late", "early", "random"] = "late",
  on_finding: Literal["raise", "record"] = "raise",
  timeline: bool = False,
  chip: chips.Chip | None = None,
) -> Iterator[Simulation]:
  """Runs the kernels called inside in coremesh's simulator, and notes them.

  coremesh's kernels, and those of plain `pl.kernel`, `pl.core_map` and
  `pl.pallas_call` that are made inside the `with`, run on simulated devices.
  Inside, Pallas knows a chip: `plsc.VectorSubcoreMesh(...)` can be made.

  Args:
    seed: decides every interleaving of cores and DMAs; the same seed gives the
      same run.
    races: look for data races and for memory touched outside its scope.
    uninitialised: look for reads of memory that nobody wrote.
    dma: when a DMA moves its bytes: as late as the waits allow, at once, or at
      random.
    on_finding: "raise" raises `SimulationError` when a kernel ends that did
      what it must not; "record" only notes it in the findings of the run. A
      deadlock or an index out of bounds raises all the same.
    timeline: model when each worker computes, waits and copies, for
      `run.timeline` and the report.
    chip: what devices outside a device mesh are taken for; default `cm.chip()`.
      A mesh of `chip.device_mesh` says itself what it is of.

  Yields:
    A `Simulation`: what was run and found; `print(run.report)`.

  Raises:
    SimulationError, DeadlockError: at the latest on exit.
    ChipError, UnsupportedError: another value of an argument.

  Example:
    with cm.simulation(seed=3) as run:
      y = swap(x)
    print(run.findings)
  """
  session = Simulation()
  params = SimulatorParams(
    seed=seed,
    dma=dma,
    detect_races=races,
    detect_uninitialised=uninitialised,
    on_finding=on_finding,
    session=session,
    timeline=timeline,
  )
  with repeat.simulating(params, chip=chip):
    yield session


_INTERPRETER_IDS: dict[int, int] = {}
_INTERPRETER_IDS_LOCK = threading.Lock()


def interpreter_collective_id(collective_id: int) -> int:
  """A small number for a collective id: JAX's interpreter holds 16 bits."""
  with _INTERPRETER_IDS_LOCK:
    return _INTERPRETER_IDS.setdefault(collective_id, len(_INTERPRETER_IDS))
