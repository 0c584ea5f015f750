"""How blocks of a matrix product come and leave: chunks, slots and strips."""

import math

from coremesh import chips, tiles
from coremesh.kernels._matmul.blocks import Blocks, Product
from coremesh.partition import num_blocks

# Copies start to arrive after this long: the DMA latency of a v5p that
# `profile/rates.py` takes from published times.
LATENCY_SECONDS = 0.76e-6
# Of blocks that take 0.98 times that to copy, more on their way are
# predicted to be slower, of those that take 0.84 times that to be faster.
_SMALL_SECONDS = 0.9 * LATENCY_SECONDS
MOST_SLOTS = 8
# The least rows of a strip, in widths of the matrix units: fewer would leave
# these idle between two strips.
_STRIP_WIDTHS = 2


def first_chunks(
  product: Product, blocks: Blocks, chip: chips.Chip
) -> tuple[int, ...]:
  """Parts along K of the first block, to be multiplied as they arrive.

  The first is small, so that the matrix units start early; each other is as
  large as what arrives while the one before is multiplied.
  """
  p, b = product, blocks
  total = depth(product, blocks)
  cycles = p.num_weights * product_cycles(p, b.rows, b.columns, 1, chip)
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


def depth(product: Product, blocks: Blocks) -> int:
  """What a step sums over, in whole tiles."""
  return min(blocks.inner, tiles.rounded_up(product.inner, tiles.LANES))


def num_slots(product: Product, blocks: Blocks, chip: chips.Chip) -> int:
  """Blocks of each array in VMEM: 2, or more where these are small.

  While one is multiplied, copies are under way of as much as HBM gives a core
  in the time that the first of it takes to arrive. A power of two; of few steps
  the least that holds all.
  """
  ahead = min(
    blocks_in_latency(product, blocks, chip),
    num_steps(product, blocks, chip) - 1,
  )
  return next((n for n in (2, 4) if ahead <= n - 1), MOST_SLOTS)


def blocks_in_latency(
  product: Product, blocks: Blocks, chip: chips.Chip
) -> float:
  """Steps whose blocks HBM gives a core in the time that a copy starts in."""
  per_second = chip.hbm_bytes_per_second_per_device
  arriving = _SMALL_SECONDS * per_second / chip.tensor_cores_per_device
  return arriving / loaded_bytes(product, blocks)


def num_steps(product: Product, blocks: Blocks, chip: chips.Chip) -> int:
  """Steps of the core that has most."""
  p, b = product, blocks
  counts = dict(
    batch=p.batch,
    rows=num_blocks(p.rows, b.rows),
    columns=num_blocks(p.columns, b.columns),
    inner=num_blocks(p.inner, b.inner),
  )
  counts[b.split] = num_blocks(counts[b.split], chip.tensor_cores_per_device)
  return math.prod(counts.values())


def loaded_bytes(product: Product, blocks: Blocks) -> int:
  """Bytes of x and the weights that a step copies in, but where rows begin."""
  p, b = product, blocks
  rows = min(b.rows, tiles.rounded_up(p.rows, tiles.SUBLANES))
  columns = p.num_weights * b.columns
  if b.inner >= p.inner and b.columns < p.columns:
    rows = 0  # The block of x stays.
  elif b.inner >= p.inner and p.batch == 1 and b.rows < p.rows:
    columns = 0
  return p.in_bytes * (rows + columns) * depth(product, blocks)


def num_strips(product: Product, blocks: Blocks, chip: chips.Chip) -> int:
  """Strips of rows in which a part of the output leaves for HBM.

  One, if the last would lie beyond the arrays; with an epilogue, which is in
  the shadow of the products of its own strip only; and after a join of sums.
  """
  p, b = product, blocks
  count = b.rows // (_STRIP_WIDTHS * chip.mxu_columns)
  is_late = p.has_epilogue or b.split == "inner"
  if is_late or p.rows % b.rows or count < 2:
    return 1
  return count if b.rows % (count * p.row_tile) == 0 else 1


def product_cycles(
  product: Product, rows: int, columns: int, inner: int, chip: chips.Chip
) -> float:
  """Cycles of the matrix units of a core for one product of blocks.

  A unit of which a block fills only some columns takes as long.
  """
  # An int8 or 8-bit float product runs at the rate of bfloat16 here, which is
  # right for the choice between blocks.
  flops = chip.bf16_flops_per_second_per_tensor_core or 1
  rows = max(min(rows, tiles.rounded_up(product.rows, 8)), 1)
  columns = tiles.rounded_up(columns, chip.mxu_columns)
  return 2 * rows * columns * inner / flops * chip_clock_hz(chip)


def chip_clock_hz(chip: chips.Chip) -> float:
  """The clock at which the matrix units reach the peak of JAX's table."""
  flops = chip.bf16_flops_per_second_per_tensor_core or 1
  per_cycle = 2 * chip.mxus_per_tensor_core * chip.mxu_columns**2
  return flops / per_cycle
