"""Sizes of the blocks of a matrix product: from a table, or by a model."""

from collections.abc import Iterator
import dataclasses
import functools
import itertools
import math
from typing import Literal

import jax.numpy as jnp

from coremesh import chips, errors, tiles
from coremesh.kernels._matmul import table

# Copies start to arrive after this long: the DMA latency of a v5p that
# `profile/rates.py` takes from published times.
_LATENCY_SECONDS = 0.76e-6
# Cycles in which the matrix units fill and drain, between two parts.
_PART_CYCLES = 225
# Cycles between two steps in which nothing is multiplied.
_STEP_CYCLES = 60
# Fewer rows would leave the matrix units idle between two strips.
_STRIP_ROWS = 256
# The rest of VMEM is for what the compiler spills.
VMEM_SHARE = 0.8
# What it spills of a strip of the output, in float32 for each element: the sums
# of each chunk of the first block, those of the code of a step, and what is on
# the way through an epilogue. All are bounds of what libtpu was seen to spill.
_STEP_SPILLS = 3
_EPILOGUE_SPILLS = 6
_SIZES = (128, 256, 384, 512, 768, 1024, 1536, 2048)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
  """How a product is cut into blocks.

  Attributes:
    rows: of the output, a multiple of 8, or all.
    columns: of the output, a multiple of 128, or all.
    inner: of the axis that is summed, a multiple of 128, or all.
    split: whether the cores share the blocks of rows or those of columns.
    part: columns of a block of the output that are multiplied at a time, and
      copied out while the next are: a multiple of 128 that divides `columns`.
      Default: all of them.
  """

  rows: int
  columns: int
  inner: int
  split: Literal["rows", "columns"] = "rows"
  part: int | None = None

  def __post_init__(self):
    for name, tile in (
      ("rows", 8),
      ("columns", 128),
      ("inner", 128),
      ("part", 128),
    ):
      size = getattr(self, name)
      if name == "part" and size is None:
        continue
      if not isinstance(size, int) or size < 1 or size % tile:
        raise errors.ShapeError(
          f"{name} of Blocks must be a positive multiple of {tile}; got"
          f" {size!r}."
        )
    if self.columns % (self.part or self.columns):
      raise errors.ShapeError(
        f"part of Blocks must divide columns={self.columns}; got {self.part}."
      )
    if self.split not in ("rows", "columns"):
      raise errors.ShapeError(
        f"split of Blocks must be 'rows' or 'columns'; got {self.split!r}."
      )

  @property
  def columns_at_a_time(self) -> int:
    return self.part or self.columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
  """What blocks are chosen for.

  Attributes:
    batch, rows, columns, inner: sizes of the product.
    num_weights: products that share x.
    dtype, out_dtype: names of the dtypes of x and w, and of the output.
    transpose_x, transpose_w: whether x and w have their last axes swapped.
    has_epilogue: whether something is done to the sums.
    operand_bytes: of an element of all operands of the epilogue that are as
      large as the output.
  """

  batch: int
  rows: int
  columns: int
  inner: int
  num_weights: int = 1
  dtype: str = "bfloat16"
  out_dtype: str = "bfloat16"
  transpose_x: bool = False
  transpose_w: bool = False
  has_epilogue: bool = False
  operand_bytes: int = 0

  @property
  def in_bytes(self) -> int:
    """Of an element of x and w."""
    return _bytes(self.dtype)

  @property
  def out_bytes(self) -> int:
    """Of an element of the output."""
    return _bytes(self.out_dtype)

  @property
  def row_tile(self) -> int:
    """What a partial block of rows must be a multiple of."""
    return tiles.LANES if self.transpose_x else 32 // self.in_bytes


def vmem_bytes(product: Product, blocks: Blocks) -> int:
  """VMEM a core needs: two blocks of each array, and the sums."""
  p, b = product, blocks
  inputs = b.rows * b.inner + p.num_weights * b.inner * b.columns
  outputs = p.out_bytes + p.operand_bytes
  block = b.rows * b.columns
  sums = p.num_weights * 4 * block
  return 2 * (inputs * p.in_bytes + outputs * block) + sums


def vmem_limit_bytes(
  needed_bytes: int, chip: chips.Chip, *, spilled_bytes: int = 0
) -> int:
  """The limit to ask of the compiler: what is needed, and what it spills.

  Args:
    needed_bytes: of what a kernel holds.
    chip: whose VMEM it is.
    spilled_bytes: the least that is left for spilled registers.
  """
  most = chip.vmem_bytes_per_tensor_core
  spilled_bytes = max(spilled_bytes, most // 5)
  return min(most, max(needed_bytes + spilled_bytes, most // 4))


def spilled_bytes(product: Product, blocks: Blocks, chip: chips.Chip) -> int:
  """A bound of what the compiler spills of a strip of the output."""
  rows = blocks.rows // num_strips(product, blocks)
  spills = len(first_chunks(product, blocks, chip)) + _STEP_SPILLS
  spills += _EPILOGUE_SPILLS * product.has_epilogue
  return 4 * spills * product.num_weights * rows * blocks.columns_at_a_time


def choose(product: Product, chip: chips.Chip) -> Blocks:
  """The blocks of the table, or those that take least time by `seconds`."""
  found = tabulated(product, chip)
  if found is not None and fits(product, found, chip):
    return found
  return best(product, chip, count=1)[0]


def tabulated(product: Product, chip: chips.Chip) -> Blocks | None:
  """The blocks that the predictor found fastest, if it was asked."""
  key = table.key(product, chip)
  row = table.BLOCKS.get(key)
  if row is None:
    return None
  rows, columns, inner, split, part = row
  return Blocks(rows=rows, columns=columns, inner=inner, split=split, part=part)


@functools.cache
def best(
  product: Product, chip: chips.Chip, *, count: int
) -> tuple[Blocks, ...]:
  """The blocks that fit VMEM and take least time by `seconds`, in order."""
  fitting = (b for b in _candidates(product) if fits(product, b, chip))
  ranked = sorted(fitting, key=lambda b: seconds(product, b, chip))
  return tuple(ranked[:count])


def clipped(product: Product, blocks: Blocks) -> Blocks:
  """The blocks without what lies beyond the arrays: the same ones."""
  p, b = product, blocks
  columns = min(b.columns, tiles.rounded_up(p.columns, b.columns_at_a_time))
  part = b.part if b.columns_at_a_time < columns else None
  return dataclasses.replace(
    b,
    rows=min(b.rows, tiles.rounded_up(p.rows, p.row_tile)),
    columns=columns,
    inner=min(b.inner, tiles.rounded_up(p.inner, tiles.LANES)),
    part=part,
  )


def fits(product: Product, blocks: Blocks, chip: chips.Chip) -> bool:
  """Whether VMEM holds blocks, and tiles allow their rows."""
  if blocks.rows < product.rows and blocks.rows % product.row_tile:
    return False
  needed, most = vmem_bytes(product, blocks), chip.vmem_bytes_per_tensor_core
  return (
    needed <= VMEM_SHARE * most
    and needed + spilled_bytes(product, blocks, chip) <= most
  )


def seconds(product: Product, blocks: Blocks, chip: chips.Chip) -> float:
  """Modelled time on a device: a lower bound of each step, in sequence.

  A step takes as long as its products on the matrix units or its copies over
  the HBM that the cores share; the first chunks in and the last part out are in
  nobody's shadow.
  """
  p, b = product, blocks
  cores = chip.tensor_cores_per_device
  grid_rows, grid_columns, inner = (
    math.ceil(p.rows / b.rows),
    math.ceil(p.columns / b.columns),
    math.ceil(p.inner / b.inner),
  )
  if b.split == "rows":
    outer = p.batch * math.ceil(grid_rows / cores) * grid_columns
  else:
    outer = p.batch * grid_rows * math.ceil(grid_columns / cores)
  clock = chip_clock_hz(chip)
  depth = min(b.inner, tiles.rounded_up(p.inner, tiles.LANES))
  parts = b.columns // b.columns_at_a_time
  in_step = p.num_weights * _product_cycles(p, b.rows, b.columns, depth, chip)
  in_step += parts * _PART_CYCLES + _STEP_CYCLES
  # Sums are read and written once a step, a register a cycle.
  lanes = chip.lanes * chip.sublanes
  sums = 0 if inner == 1 else p.num_weights * b.rows * b.columns / lanes
  in_step += 0.25 * sums
  per_second = chip.hbm_bytes_per_second_per_device / cores
  loaded = p.in_bytes * (b.rows + p.num_weights * b.columns) * depth
  reused = inner == 1 and grid_columns > 1
  steady = loaded - (p.in_bytes * b.rows * depth if reused else 0)
  stored = (p.out_bytes + p.operand_bytes) * b.rows * b.columns
  moved = steady + stored / inner
  # One copy is on its way while another block is multiplied.
  copied = max(
    moved / per_second, _LATENCY_SECONDS + moved / (per_second * cores)
  )
  chunks = first_chunks(product, blocks, chip)
  ends = 2 * _LATENCY_SECONDS
  last = stored / parts / num_strips(product, blocks)
  ends += (loaded / depth * chunks[0] + last) / per_second
  ends += (len(chunks) - 1) * parts * _PART_CYCLES / clock
  return outer * inner * max(in_step / clock, copied) + ends


def first_chunks(
  product: Product, blocks: Blocks, chip: chips.Chip
) -> tuple[int, ...]:
  """Parts along K of the first block, to be multiplied as they arrive.

  The first is small, so that the matrix units start early; each other is as
  large as what arrives while the one before is multiplied.
  """
  p, b = product, blocks
  total = min(b.inner, tiles.rounded_up(p.inner, tiles.LANES))
  cycles = p.num_weights * _product_cycles(p, b.rows, b.columns, 1, chip)
  per_second = chip.hbm_bytes_per_second_per_device
  loaded = p.in_bytes * (b.rows + p.num_weights * b.columns)
  loaded *= chip.tensor_cores_per_device
  growth = min(cycles / chip_clock_hz(chip) / (loaded / per_second), 8.0)
  chunks, size = [], tiles.LANES
  while total > 0:
    size = min(size, total)
    if total - size < size // 2:
      size = total
    chunks.append(size)
    total -= size
    arriving = int(size * growth) // tiles.LANES * tiles.LANES
    size = max(size + tiles.LANES, arriving)
  return tuple(chunks)


def num_strips(product: Product, blocks: Blocks) -> int:
  """Strips of rows in which a part of the output leaves for HBM.

  One, if the last would lie beyond the arrays; and with an epilogue, which is
  in the shadow of the products of its own strip only.
  """
  p, b = product, blocks
  count = b.rows // _STRIP_ROWS
  if p.has_epilogue or p.rows % b.rows or count < 2:
    return 1
  return count if b.rows % (count * p.row_tile) == 0 else 1


def _product_cycles(
  product: Product, rows: int, columns: int, inner: int, chip: chips.Chip
) -> float:
  """Cycles of the matrix units of a core for one product of blocks."""
  # An int8 or 8-bit float product runs at the rate of bfloat16 here, which is
  # right for the choice between blocks.
  flops = chip.bf16_flops_per_second_per_tensor_core or 1
  rows = max(min(rows, tiles.rounded_up(product.rows, 8)), 1)
  return 2 * rows * columns * inner / flops * chip_clock_hz(chip)


def chip_clock_hz(chip: chips.Chip) -> float:
  """The clock at which the matrix units reach the peak of JAX's table."""
  flops = chip.bf16_flops_per_second_per_tensor_core or 1
  per_cycle = 2 * chip.mxus_per_tensor_core * chip.mxu_columns**2
  return flops / per_cycle


def _candidates(product: Product) -> Iterator[Blocks]:
  def sizes(extent: int, tile: int, most: int) -> list[int]:
    whole = tiles.rounded_up(extent, tile)
    shares = {tiles.rounded_up(-(-whole // n), tile) for n in (1, 2, 3, 4)}
    return sorted(
      {s for s in _SIZES if s < whole and s % tile == 0}
      | {s for s in shares if 0 < s <= most}
    )

  for rows, columns, inner, split, part in itertools.product(
    sizes(product.rows, product.row_tile, 2048),
    sizes(product.columns, tiles.LANES, 4096),
    sizes(product.inner, tiles.LANES, 4096),
    ("rows", "columns"),
    (256, 512, 1024),
  ):
    if part < columns and columns % part == 0:
      yield Blocks(
        rows=rows, columns=columns, inner=inner, split=split, part=part
      )
    elif part == 256 and columns <= 1024:
      yield Blocks(rows=rows, columns=columns, inner=inner, split=split)


def _bytes(dtype: str) -> int:
  return jnp.dtype(dtype).itemsize
