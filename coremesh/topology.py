"""Where a chip's devices come from: attached, simulated or compile-only."""

from collections.abc import Iterator
import contextlib
import functools
import math
import os

import jax
from jax.experimental import mesh_utils, topologies
import numpy as np

from coremesh import _compat, errors

# libtpu reads these once, when it is loaded. Without them it looks for a
# metadata server, complains on stderr and refuses to share the machine with a
# second process.
OFFLINE_LIBTPU = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
}

# While the cores of a simulation wait for one another, each holds a CPU thread,
# and so does each device that has several. XLA makes threads for as many
# processors as the machine has; it is told of more, and this is how many.
PROCESSORS_PER_DEVICE = 4
_PROCESSORS_TOLD: list[int] = []


def tpu_is_attached() -> bool:
  """Whether this process computes on TPUs.

  Before JAX has started, looks at the PCI bus and at `JAX_PLATFORMS` so that
  asking does not start JAX.
  """
  if _compat.backends_started():
    return jax.default_backend() == "tpu"
  platforms = _compat.requested_platforms()
  if platforms is not None and "tpu" not in platforms.split(","):
    return False
  return _compat.num_attached_tpu_chips() > 0


def simulated_devices(num_devices: int) -> list[jax.Device]:
  """The CPU devices that stand in for `num_devices` TPU devices.

  Asks JAX for that many if JAX has not started yet. On a machine without a
  TPU it then also keeps JAX on the CPU, so that libtpu is not started in vain.

  Args:
    num_devices: how many devices, over all processes.

  Returns:
    The first `num_devices` CPU devices of the program.

  Raises:
    ChipError: JAX has already started with fewer devices.
  """
  processors = PROCESSORS_PER_DEVICE * _local_share(num_devices)
  if not _compat.backends_started():
    _request_cpu_devices(num_devices)
    _start_with_processors(processors)
  devices = jax.devices("cpu")
  if len(devices) < num_devices:
    raise errors.ChipError(
      f"Simulating {num_devices} devices needs {num_devices} CPU devices, but"
      f" JAX has already started with {len(devices)}. Call"
      " chip.device_mesh(...) before anything else that uses JAX, or put"
      f' jax.config.update("jax_num_cpu_devices", {processors}) at the top of'
      " the program (so many, because each brings threads)."
    )
  return devices[:num_devices]


def keep_jax_on_cpu() -> None:
  """Spares JAX the search for a TPU that is not there, and its complaints."""
  if _compat.backends_started() or tpu_is_attached():
    return
  if _compat.requested_platforms() is None:
    jax.config.update("jax_platforms", "cpu")


def _request_cpu_devices(num_devices: int) -> None:
  keep_jax_on_cpu()
  local = _local_share(num_devices)
  flags = os.environ.get("XLA_FLAGS", "")
  if "xla_force_host_platform_device_count" in flags:
    return  # The user has chosen a number; JAX refuses both at once.
  if _compat.requested_cpu_devices() < local:
    jax.config.update("jax_num_cpu_devices", local)


def _start_with_processors(count: int) -> None:
  """Starts JAX, and lets XLA take the machine for at least of this size."""
  before = os.environ.get("NPROC")
  _PROCESSORS_TOLD.append(max(_num_processors(), count))
  os.environ["NPROC"] = str(_PROCESSORS_TOLD[-1])
  try:
    jax.devices("cpu")
  finally:
    if before is None:
      del os.environ["NPROC"]
    else:
      os.environ["NPROC"] = before


def _num_processors() -> int:
  """Processors XLA sees: those this process may use, or what NPROC says."""
  told = os.environ.get("NPROC", "")
  return int(told) if told.isdecimal() else len(os.sched_getaffinity(0))


def num_simulation_threads() -> int:
  """CPU threads in which this process's simulated cores can wait.

  XLA runs computations in one pool and calls back to Python in another; each
  has a thread for each processor, and for each CPU device if those are more.
  """
  processors = max(_PROCESSORS_TOLD, default=_num_processors())
  return 2 * max(processors, jax.local_device_count("cpu"))


def _local_share(num_devices: int) -> int:
  return math.ceil(num_devices / _compat.num_processes())


def compile_only_devices(name: str, *, megacore: bool) -> list[jax.Device]:
  """Devices of a TPU slice that is not there, for the compiler only.

  Args:
    name: the slice in libtpu's words, such as "v5p:2x2x1".
    megacore: whether two TensorCores form one device (v4, v5p).

  Returns:
    One device for each device of the slice. They hold no data and run nothing;
    a program lowered for them can be compiled.

  Raises:
    ChipError: libtpu has no such slice, or is missing.
  """
  keep_jax_on_cpu()
  return list(_topology(name, megacore).devices)


@functools.lru_cache(maxsize=64)
def _topology(name: str, megacore: bool):
  options = {"chip_config_name": "megacore"} if megacore else {}
  # A host holds 2x2x1 chips; a slice that does not divide by that is one
  # whose hosts hold a single chip. (Three numbers, also where chips form a
  # plane.)
  single_chip_hosts = {"chips_per_host_bounds": (1, 1, 1)}
  try:
    with offline_libtpu():
      try:
        return _describe(name, options)
      except jax.errors.JaxRuntimeError as error:
        if "not divisible" not in str(error):
          raise
        return _describe(name, options | single_chip_hosts)
  except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as e:
    raise errors.ChipError(
      f"libtpu, the TPU compiler, cannot describe {name!r}: {e} Install it"
      " with the package jax[tpu], and use a slice that exists, such as"
      " v5p:2x2x1, v5e:2x2, v6e:2x2 or tpu7x:2x2x1."
    ) from e


def _describe(name, options):
  return topologies.get_topology_desc(
    platform="tpu", topology_name=name, **options
  )


@contextlib.contextmanager
def offline_libtpu() -> Iterator[None]:
  """Lets libtpu load as a compiler on a machine without a TPU.

  The environment is restored on exit and nothing is changed where a TPU is
  attached: there the runtime owns libtpu.
  """
  if tpu_is_attached():
    yield
    return
  missing = {k: v for k, v in OFFLINE_LIBTPU.items() if k not in os.environ}
  os.environ.update(missing)
  try:
    yield
  finally:
    for key in missing:
      os.environ.pop(key, None)


def arrange(
  devices: list[jax.Device],
  shape: tuple[int, ...],
  axis_names: tuple[str, ...],
  axis_types: tuple[jax.sharding.AxisType, ...] | None,
) -> jax.sharding.Mesh:
  """A mesh over TPU or compile-only devices, neighbours next to each other."""
  types = axis_types or (jax.sharding.AxisType.Auto,) * len(shape)
  try:
    return jax.make_mesh(shape, axis_names, devices=devices, axis_types=types)
  except NotImplementedError:  # No axis is a product of axes of the slice.
    grid = mesh_utils.create_device_mesh(
      shape, devices, allow_split_physical_axes=True
    )
    return jax.sharding.Mesh(grid, axis_names, types)


def arrange_simulated(
  devices: list[jax.Device],
  shape: tuple[int, ...],
  axis_names: tuple[str, ...],
  *,
  device_kind: str,
  num_cores: int,
) -> jax.sharding.Mesh:
  """A mesh of CPU devices that is traced for a TPU device kind."""
  simulated = _compat.SimulatedDevice(
    device_kind=device_kind,
    num_cores=num_cores,
    platform="cpu",
    num_processes=len({d.process_index for d in devices}),
  )
  return _compat.SimulatedMesh(
    np.array(devices).reshape(shape), axis_names, simulated
  )
