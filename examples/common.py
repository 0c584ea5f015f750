"""Flags and reports that the examples share."""

from collections.abc import Callable, Mapping, Sequence
import functools
import sys
from typing import Any

from absl import app, flags
import jax
from ml_collections import config_flags
import numpy as np

import coremesh as cm

_CHIP = flags.DEFINE_string(
  "chip",
  None,
  "TPU slice, such as v5p:2x2x1. Default: the attached TPU, else"
  " $COREMESH_CHIP, else v5p:2x2x1, simulated.",
)
_COMPILE = flags.DEFINE_bool(
  "compile", False, "Also compile for the chip with libtpu; needs no TPU."
)

type Build = Callable[[cm.Chip, jax.sharding.Mesh], Callable[..., Any]]


def chip() -> cm.Chip:
  """The chip the flags ask for."""
  return cm.chip(_CHIP.value)


def run(main: Callable[..., None], *, config: str | None = None) -> None:
  """Parses the flags and calls `main`, with its config if it has one.

  The flag --config is made here, not where an example is imported, so that
  several can be imported by one program.
  """
  flag = None
  shown = [_CHIP, _COMPILE]
  if config is not None:
    flag = config_flags.DEFINE_config_file(
      "config", config, f"Settings: those of {config}, --config.FIELD=VALUE."
    )
    shown.append(flag)
  for holder in shown:  # --help shows the flags of the program, not of modules.
    flags.FLAGS.register_key_flag_for_module(
      sys.argv[0], flags.FLAGS[holder.name]
    )

  def checked(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
    main() if flag is None else main(flag.value)

  app.run(checked)


def random_floats(shape: Sequence[int], seed: int) -> np.ndarray:
  """float32 numbers of a normal distribution."""
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ran_on(mesh: jax.sharding.Mesh) -> str:
  """Where a program over `mesh` ran, in words."""
  kind = mesh.devices.flat[0].platform
  return "TPU" if kind == "tpu" else "simulated"


def grid(
  chip: cm.Chip, mesh: jax.sharding.Mesh, axis_names: tuple[str, str]
) -> jax.sharding.Mesh:
  """The devices of a mesh in rows of `grid_shape`."""
  shape = grid_shape(mesh.devices.size)
  return _arranged(chip, axis_names, shape, mesh.devices)


def grid_shape(num_devices: int) -> tuple[int, int]:
  """Rows of two devices, or of one if their number is odd."""
  in_a_row = 2 - num_devices % 2
  return num_devices // in_a_row, in_a_row


def first_device(chip: cm.Chip, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
  """A mesh of the first device of another."""
  return _arranged(chip, ("device",), (1,), mesh.devices.ravel()[:1])


def check_on_grid(
  chip: cm.Chip,
  build: Build,
  arrays: Sequence[np.ndarray],
  want: np.ndarray,
  *,
  most: float,
) -> None:
  """Runs an example on all devices and on one, and prints how it differs.

  Args:
    chip: whose devices.
    build: makes the example's function for them.
    arrays: its arguments.
    want: the right result, in float64.
    most: relative Frobenius error, and difference to one device.
  """
  mesh = chip.device_mesh("device")
  meshes = mesh, first_device(chip, mesh)
  y, alone = (np.asarray(build(chip, m)(*arrays)) for m in meshes)
  norm = np.linalg.norm(want)
  error, difference = (np.linalg.norm(y - a) / norm for a in (want, alone))
  assert max(error, difference) < most, (error, difference)
  print(
    f"{ran_on(mesh)} on {chip.name}: relative Frobenius error {error:.1e};"
    f" {difference:.1e} from one device."
  )


def _arranged(chip, axis_names, shape, devices) -> jax.sharding.Mesh:
  place = "tpu" if devices.flat[0].platform == "tpu" else "simulator"
  return chip.device_mesh(axis_names, shape, on=place, devices=devices)


def is_compiling() -> bool:
  """Whether --compile asks for what needs the compiler."""
  return bool(_COMPILE.value)


def compile_if_asked(build: Build, *args: Any) -> None:
  """With --compile: compiles the example for its chip and prints the result.

  Args:
    build: makes the example's function for a chip and a device mesh of it.
    *args: arguments of that function, arrays or their shapes.
  """
  if is_compiling():
    print(compiled(chip(), build, *args))


def print_times(
  chip: cm.Chip,
  fns: Mapping[str, Callable[..., Any]],
  *args: jax.ShapeDtypeStruct,
  **options: Any,
) -> None:
  """Prints how long functions would take on one device of a chip."""
  shapes = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in args)
  for name, fn in fns.items():
    call = jax.jit(functools.partial(fn, **options))
    time = cm.predict(call, *args, chip=chip).microseconds
    print(f"{name}, {shapes}: predicted {time} us on a device")


def compiled(chip: cm.Chip, build: Build, *args: Any) -> str:
  """Compiles the example for a chip; one line that says what came out."""
  mesh = chip.device_mesh("device", on="compiler")
  result = cm.compile(build(chip, mesh), *args)
  uses = ", ".join(
    f"{k.name}: VMEM {k.usage.vmem_bytes_per_core} bytes,"
    f" {k.usage.semaphores_per_core} semaphores a core"
    for k in result.kernels
  )
  return f"compiled for {chip.name}: {result.code_bytes} bytes of code; {uses}"
