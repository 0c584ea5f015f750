"""One multi-core kernel, on every device and for every chip, in one report.

Runs the kernel of examples/swap_cores.py on the TensorCores of a chip, and that
of examples/sc_add_one.py on its SparseCores (simulated where there is no TPU),
checks the results, compiles the first for each kind of chip with libtpu, and
says what ran where and what it uses.

To run:
  make demo
"""

from collections.abc import Callable
import inspect
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

import coremesh as cm
from examples import common, sc_add_one, swap_cores

_COMPILED_CHIPS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
_ROWS_PER_DEVICE, _COLUMNS = 8, 256


def main() -> None:
  chip = common.chip()
  mesh = chip.device_mesh("device")
  x = common.random_floats(
    (_ROWS_PER_DEVICE * chip.num_devices, _COLUMNS), seed=0
  )
  console = Console(width=100)
  console.rule("the kernel")
  console.print(Syntax(_kernel_source(), "python"))
  console.rule("run")
  console.print(_run(chip, mesh, x))
  console.rule("compiled by libtpu, the TPU compiler, for chips not here")
  _compile_everywhere(console)


def _run(chip: cm.Chip, mesh: jax.sharding.Mesh, x: np.ndarray) -> Table:
  """Runs both kernels, the swap by both routes; what came out, as a table."""
  table = Table("where", "route", "checked", "trace and run")
  where = f"{common.ran_on(mesh)} {chip.name}: {chip.num_devices} devices x"
  cores = f"{where} {chip.tensor_cores_per_device} TensorCores"
  for route in ("kernel", "core_map"):
    fn = swap_cores.build(chip, mesh, route)
    table.add_row(cores, route, *_checked(fn, x, swap_cores.expected(x)))
  if chip.sparse_cores_per_device:
    subcores = (
      f"{where} {chip.sparse_cores_per_device} SparseCores x"
      f" {chip.vector_subcores_per_sparse_core} subcores"
    )
    fn, words = sc_add_one.build(chip, mesh), _words(chip)
    table.add_row(subcores, "kernel", *_checked(fn, words, words + 1))
  return table


def _words(chip: cm.Chip) -> np.ndarray:
  """A block of words for every vector subcore of every device."""
  cores = chip.num_devices * chip.sparse_cores_per_device
  rows = _ROWS_PER_DEVICE * cores * chip.vector_subcores_per_sparse_core
  return np.arange(rows * 128, dtype=np.int32).reshape(rows, 128)


def _checked(
  fn: Callable[..., Any], x: np.ndarray, expected: np.ndarray
) -> tuple[str, str]:
  """Runs a function of one kernel: what was checked, and how long it took."""
  checked = f"{x.shape} {x.dtype} equal to NumPy, bit for bit"
  start = time.perf_counter()
  y = fn(x)  # A simulated kernel with a data race would raise.
  np.testing.assert_array_equal(y, expected)
  seconds = time.perf_counter() - start
  if y.devices().pop().platform == "cpu":
    checked += "; no data race found"
  return checked, f"{seconds:.2f} s"


def _compile_everywhere(console: Console) -> None:
  """Compiles the swap for one host of each chip and prints what came out."""
  table = Table(
    "chip", "TensorCores", "VMEM a core", "semaphores a core", "code", "result"
  )
  reasons: list[str] = []
  for name in _COMPILED_CHIPS:
    chip = cm.chip(name)
    cores = f"{chip.num_devices} x {chip.tensor_cores_per_device}"
    with console.status(f"compiling for {name}"):
      try:
        kernel, cells = _compile(chip)
      except cm.CoreMeshError as error:
        if str(error) not in reasons:
          reasons.append(str(error))
        number = reasons.index(str(error)) + 1
        table.add_row(name, cores, "", "", "", f"refused [{number}]")
        continue
    vmem = _size(kernel.usage.vmem_bytes_per_core)
    table.add_row(
      name,
      cores,
      f"{vmem} of {_size(chip.vmem_bytes_per_tensor_core)}",
      str(kernel.usage.semaphores_per_core),
      *cells,
    )
  console.print(table)
  for number, reason in enumerate(reasons, start=1):
    console.print(f"[{number}] {reason}", markup=False, highlight=False)


def _compile(chip: cm.Chip) -> tuple[cm.KernelUsage, tuple[str, str]]:
  """The compiled kernel's use, its code size and how long it took."""
  mesh = chip.device_mesh("device", on="compiler")
  shape = (_ROWS_PER_DEVICE * chip.num_devices, _COLUMNS)
  array = jax.ShapeDtypeStruct(shape, np.float32)
  compiled = cm.compile(swap_cores.build(chip, mesh), array)
  [kernel] = compiled.kernels
  took = f"compiles, {compiled.compile_seconds:.2f} s"
  return kernel, (_size(compiled.code_bytes), took)


def _size(num_bytes: int) -> str:
  """A number of bytes in the largest unit that keeps it whole."""
  unit = 0
  while num_bytes % 1024 == 0 and num_bytes >= 1024 and unit < 2:
    num_bytes, unit = num_bytes // 1024, unit + 1
  return f"{num_bytes} {('B', 'KiB', 'MiB')[unit]}"


def _kernel_source() -> str:
  """The kernel as the user writes it."""
  source = inspect.getsource(swap_cores.build)
  start = source.index("  @cm.kernel")
  return inspect.cleandoc(source[start : source.index("\n  return")])


if __name__ == "__main__":
  common.run(main)
