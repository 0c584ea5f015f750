"""Prints what a kernel author asks of a TPU, one column for each chip."""

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from coremesh import chips as known_chips
from coremesh import generations

_ROWS: dict[str, Callable[[known_chips.Chip], Any]] = {
  "devices": lambda c: c.num_devices,
  "TensorCores a device": lambda c: c.tensor_cores_per_device,
  "SparseCores a device": lambda c: c.sparse_cores_per_device,
  "vector subcores a SparseCore": lambda c: c.vector_subcores_per_sparse_core,
  "lanes a TensorCore": lambda c: c.lanes,
  "lanes a vector subcore": lambda c: c.sparse_core_lanes,
  "MXUs a TensorCore": lambda c: c.mxus_per_tensor_core,
  "MXU columns": lambda c: c.mxu_columns,
  "HBM a device, GB": lambda c: c.hbm_bytes_per_device / 1e9,
  "VMEM a TensorCore, MiB": lambda c: c.vmem_bytes_per_tensor_core / 2**20,
  "SMEM a TensorCore, MiB": lambda c: c.smem_bytes_per_tensor_core / 2**20,
  "VMEM a vector subcore, KiB": lambda c: (
    c.vmem_bytes_per_vector_subcore / 2**10
  ),
  "HBM a device, TB/s": lambda c: c.hbm_bytes_per_second_per_device / 1e12,
  "bf16 a TensorCore, TFLOP/s": lambda c: _tera(
    c.bf16_flops_per_second_per_tensor_core
  ),
  "fp8 a TensorCore, TFLOP/s": lambda c: _tera(
    c.fp8_flops_per_second_per_tensor_core
  ),
  "int8 a TensorCore, TOP/s": lambda c: _tera(
    c.int8_ops_per_second_per_tensor_core
  ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument(
    "names",
    nargs="*",
    metavar="NAME",
    help="slices such as v5p:2x2x1; default one host of every generation",
  )


def run(arguments: argparse.Namespace) -> int:
  """Prints the table."""
  names = arguments.names or generations.names()
  chips = [known_chips.chip(name) for name in names]
  table = Table("", *(chip.name for chip in chips))
  for label, value in _ROWS.items():
    table.add_row(label, *(_text(value(chip)) for chip in chips))
  console = Console()
  console.print(table)
  console.print("Source: jax.experimental.pallas.tpu.get_tpu_info_for_chip.")
  return 0


def _tera(rate: int | None) -> float | None:
  return None if rate is None else rate / 1e12


def _text(value: Any) -> str:
  """A number in four digits; a dash for what the chip does not have."""
  return f"{value:.4g}" if value else "-"
