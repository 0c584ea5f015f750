"""Sizes of the blocks of a matrix product: given, or chosen by a model."""

from collections.abc import Iterator
import dataclasses
import itertools
import math
from typing import Literal

from coremesh import chips, errors

# Copies start to arrive after this long: the DMA latency of a v5p that
# `profile/rates.py` takes from published times.
_LATENCY_SECONDS = 0.4e-6
# Cycles between two steps in which no product starts: the compiled loop of the
# pipeline, and filling and draining the matrix units.
_STEP_CYCLES = 350
# The rest of VMEM is for what the compiler spills.
_VMEM_SHARE = 0.8
_SIZES = (128, 256, 384, 512, 768, 1024, 1536, 2048)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
  """How a product is cut into blocks.

  Attributes:
    rows: of the output, a multiple of 8, or all.
    columns: of the output, a multiple of 128, or all.
    inner: of the axis that is summed, a multiple of 128, or all.
    split: whether the cores share the blocks of rows or those of columns.
  """

  rows: int
  columns: int
  inner: int
  split: Literal["rows", "columns"] = "rows"

  def __post_init__(self):
    for name, tile in (("rows", 8), ("columns", 128), ("inner", 128)):
      size = getattr(self, name)
      if not isinstance(size, int) or size < 1 or size % tile:
        raise errors.ShapeError(
          f"{name} of Blocks must be a positive multiple of {tile}; got"
          f" {size!r}."
        )
    if self.split not in ("rows", "columns"):
      raise errors.ShapeError(
        f"split of Blocks must be 'rows' or 'columns'; got {self.split!r}."
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
  """What blocks are chosen for.

  Attributes:
    batch, rows, columns, inner: sizes of the product.
    num_weights: products that share x.
    in_bytes: of an element of x and w.
    out_bytes: of an element of the output.
    full_bytes: of an element of all operands of the epilogue that are as large
      as the output.
    row_tile: what a partial block of rows must be a multiple of.
  """

  batch: int
  rows: int
  columns: int
  inner: int
  num_weights: int = 1
  in_bytes: int = 2
  out_bytes: int = 2
  full_bytes: int = 0
  row_tile: int = 8


def vmem_bytes(product: Product, blocks: Blocks) -> int:
  """VMEM a core needs: two blocks of each array, and the sums."""
  p, b = product, blocks
  inputs = b.rows * b.inner + p.num_weights * b.inner * b.columns
  outputs = p.out_bytes + p.full_bytes
  block = b.rows * b.columns
  sums = p.num_weights * 4 * block
  return 2 * (inputs * p.in_bytes + outputs * block) + sums


def vmem_limit_bytes(product: Product, blocks: Blocks, chip: chips.Chip) -> int:
  """The limit to ask of the compiler: what is needed, and what it spills."""
  most = chip.vmem_bytes_per_tensor_core
  needed = vmem_bytes(product, blocks) + most // 5
  return min(most, max(needed, most // 4))


def choose(product: Product, chip: chips.Chip) -> Blocks:
  """The blocks that take least time by `seconds` and fit VMEM."""
  budget = _VMEM_SHARE * chip.vmem_bytes_per_tensor_core
  fitting = [
    b for b in _candidates(product) if vmem_bytes(product, b) <= budget
  ]
  return min(fitting, key=lambda b: seconds(product, b, chip))


def seconds(product: Product, blocks: Blocks, chip: chips.Chip) -> float:
  """Modelled time on a device: a lower bound of each step, in sequence.

  A step takes as long as its products on the matrix units or its copies over
  the HBM that the cores share; the first copies in and the last one out are in
  nobody's shadow.
  """
  p, b = product, blocks
  cores = chip.tensor_cores_per_device
  grid_rows, grid_columns = (
    math.ceil(p.rows / b.rows),
    math.ceil(p.columns / b.columns),
  )
  if b.split == "rows":
    outer = p.batch * math.ceil(grid_rows / cores) * grid_columns
  else:
    outer = p.batch * grid_rows * math.ceil(grid_columns / cores)
  inner = math.ceil(p.inner / b.inner)
  # An int8 or 8-bit float product runs at the rate of bfloat16 here, which is
  # right for the choice between blocks.
  flops = chip.bf16_flops_per_second_per_tensor_core or 1
  clock = chip_clock_hz(chip)
  per_step = 2 * p.num_weights * b.rows * b.columns * b.inner / flops
  per_step += _STEP_CYCLES / clock
  # Sums are read and written once a step, an element a lane and cycle.
  lanes = chip.lanes * chip.sublanes
  sums = 0 if inner == 1 else p.num_weights * b.rows * b.columns / lanes
  per_step += 0.25 * sums / clock
  per_second = chip.hbm_bytes_per_second_per_device / cores
  loaded = p.in_bytes * (b.rows + p.num_weights * b.columns) * b.inner
  reused = inner == 1 and grid_columns > 1
  steady = loaded - (p.in_bytes * b.rows * b.inner if reused else 0)
  stored = (p.out_bytes + p.full_bytes) * b.rows * b.columns
  copied = (steady + stored / inner) / per_second
  ends = 2 * _LATENCY_SECONDS + (loaded + stored) / per_second
  return outer * inner * max(per_step, copied) + ends


def chip_clock_hz(chip: chips.Chip) -> float:
  """The clock at which the matrix units reach the peak of JAX's table."""
  flops = chip.bf16_flops_per_second_per_tensor_core or 1
  per_cycle = 2 * chip.mxus_per_tensor_core * chip.mxu_columns**2
  return flops / per_cycle


def _candidates(product: Product) -> Iterator[Blocks]:
  def sizes(extent: int, tile: int) -> list[int]:
    whole = -(-extent // tile) * tile
    halves = {-(-whole // n // tile) * tile for n in (1, 2, 4)}
    return sorted(
      {s for s in _SIZES if s < whole}
      | {s for s in halves if 0 < s <= _SIZES[-1] * 2}
    )

  for rows, columns, inner, split in itertools.product(
    sizes(product.rows, product.row_tile),
    sizes(product.columns, 128),
    sizes(product.inner, 128),
    ("rows", "columns"),
  ):
    yield Blocks(rows=rows, columns=columns, inner=inner, split=split)
