"""Sizes of the blocks of a grouped matrix product, chosen by a model."""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import math

from coremesh import chips
from coremesh.kernels._grouped.visits import LARGE_PIECES
from coremesh.kernels._matmul.blocks import Blocks
from coremesh.kernels._matmul.memory import VMEM_SHARE
from coremesh.kernels._matmul.streams import chip_clock_hz

# Of a copy: as long for all blocks, so that it decides nothing between them.
_LATENCY_SECONDS = 0.4e-6
# Cycles between two steps in which no product starts.
_STEP_CYCLES = 350
# What of the shorter of products and copies the longer does not hide, as steps
# differ: a guess, that tells apart blocks of which the longer is the same.
_UNHIDDEN = 0.02
# Rows that matrix units multiply in the largest piece of a block, whose code is
# a straight line: this many take half a minute to compile.
_MOST_UNROLLED = 2**17
_SIZES = (128, 256, 384, 512, 768, 1024, 1536, 2048)
# Powers of two: finding the block of a row is then a shift. Smaller ones than
# the largest piece multiply more slowly, and larger ones than 1024 keep the
# copies of weights waiting: on v6e both cost up to a third. A gradient has no
# weights to wait for, and a block of 512 is too short for its copies.
_ROW_SIZES = (64, 128, 256, 512, 1024)
_GRADIENT_ROW_SIZES = (128, 256, 512, 1024, 2048)
_MOST = 4096
# Of a group on average half a unit of `_grouped.visits` is multiplied in
# vain where it starts, and half where it stops.
_WASTED_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupedProduct:
  """What blocks are chosen for.

  Attributes:
    rows, columns, inner: M, N and K.
    num_groups: of the rows.
    num_weights: products that share x.
    in_bytes, out_bytes: of an element.
    row_tile: what a block of rows must be a multiple of.
    is_gradient: whether rows are what is summed: [groups, inner, columns].
  """

  rows: int
  columns: int
  inner: int
  num_groups: int
  num_weights: int = 1
  in_bytes: int = 2
  out_bytes: int = 2
  row_tile: int = 8
  is_gradient: bool = False

  @property
  def axes(self) -> tuple[int, int, int]:
    """Sizes of the axes that rows, columns and inner of `Blocks` cut."""
    if self.is_gradient:
      return self.inner, self.columns, self.rows
    return self.rows, self.columns, self.inner


def vmem_bytes(product: GroupedProduct, blocks: Blocks) -> int:
  """VMEM a core needs: two blocks of each array, and the sums."""
  p, b = product, blocks
  inputs = b.rows * b.inner + p.num_weights * b.inner * b.columns
  block = b.rows * b.columns
  has_sums = p.is_gradient or b.inner < p.inner
  sums = 4 * p.num_weights * block * has_sums
  return 2 * (inputs * p.in_bytes + block * p.out_bytes) + sums


def choose(product: GroupedProduct, chip: chips.Chip) -> Blocks:
  """The blocks that take least time by `seconds` and fit VMEM."""
  budget = VMEM_SHARE * chip.vmem_bytes_per_tensor_core
  fitting = [
    b
    for b in _candidates(product)
    if vmem_bytes(product, b) <= budget
    and _unrolled(product, b, chip) <= _MOST_UNROLLED
  ]
  return min(fitting, key=lambda b: seconds(product, b, chip))


def seconds(product: GroupedProduct, blocks: Blocks, chip: chips.Chip) -> float:
  """Modelled time on a device, of groups of any sizes that fill the rows."""
  p, b = product, blocks
  cores = chip.tensor_cores_per_device
  grid = [
    math.ceil(n / size)
    for n, size in zip(p.axes, (b.rows, b.columns, b.inner), strict=True)
  ]
  shared = grid[0 if b.split == "rows" else 1]
  uneven = math.ceil(shared / cores) * cores / shared
  uneven *= grid[1] * b.columns / p.columns
  row_blocks = grid[2] if p.is_gradient else grid[0]
  visits = row_blocks + p.num_groups - 1
  tiles = grid[0] * grid[1] if p.is_gradient else grid[1] * grid[2]
  steps = visits * tiles
  wasted = min(_WASTED_ROWS, p.rows) * p.num_groups
  flops = 2 * p.num_weights * p.columns * p.inner * (p.rows + wasted)
  clock = chip_clock_hz(chip)
  summed = p.is_gradient or grid[2] > 1
  # Sums are read and written once a step, an element a lane and cycle; those of
  # a gradient once a piece, of which a visit of a part of a block has several.
  sums = p.num_weights * b.rows * b.columns * summed
  each = 2 if p.is_gradient else 0.25
  overhead = _STEP_CYCLES + each * sums / (chip.lanes * chip.sublanes)
  busy = flops / (chip.bf16_flops_per_second_per_tensor_core or 1)
  busy = uneven * (busy + steps * overhead / clock) / cores
  copied = _num_bytes(p, b, grid, visits) / chip.hbm_bytes_per_second_per_device
  first = b.inner * (b.rows + p.num_weights * b.columns) * p.in_bytes
  ends = (first + b.rows * b.columns * p.out_bytes) * cores
  ends /= chip.hbm_bytes_per_second_per_device
  longer, shorter = max(busy, copied), min(busy, copied)
  return longer + _UNHIDDEN * shorter + ends + 2 * _LATENCY_SECONDS


def _unrolled(p: GroupedProduct, b: Blocks, chip: chips.Chip) -> float:
  """Rows that matrix units multiply in the largest piece of a block."""
  cells = b.rows * b.columns * b.inner
  block = b.inner if p.is_gradient else b.rows
  cells = cells // block * min(block, LARGE_PIECES[0])
  return p.num_weights * cells / chip.mxu_columns**2


def _num_bytes(p: GroupedProduct, b: Blocks, grid, visits: int) -> int:
  """Read and written, of a device."""
  cells = p.num_groups * p.inner * p.columns
  x, d = p.rows * p.inner, p.rows * p.columns
  if p.is_gradient:
    inputs = x * grid[1] + d * grid[0]
    return inputs * p.in_bytes + cells * p.out_bytes
  w = cells
  if grid[2] > 1:  # Then no block of x or of weights stays.
    w = visits * p.inner * p.columns
    x = visits * b.rows * p.inner
  return (x * grid[1] + p.num_weights * w) * p.in_bytes + d * p.out_bytes


def _candidates(product: GroupedProduct) -> Iterator[Blocks]:
  inner = _sizes(product.inner)
  rows = _row_sizes(product.rows, _ROW_SIZES, LARGE_PIECES[0])
  if product.is_gradient:
    rows = _row_sizes(product.rows, _GRADIENT_ROW_SIZES, 1024)
    rows, inner = inner, rows
  columns = _sizes(product.columns)
  for r, c, i, split in itertools.product(
    rows, columns, inner, ("columns", "rows")
  ):
    yield Blocks(rows=r, columns=c, inner=i, split=split)


def _sizes(extent: int) -> list[int]:
  """Sizes of blocks: some, and even parts of an axis."""
  whole = -(-extent // 128) * 128
  halves = {-(-whole // n // 128) * 128 for n in (1, 2, 4)}
  sizes = {s for s in _SIZES if s < whole} | {s for s in halves if s > 0}
  return sorted(s for s in sizes if s <= _MOST)


def _row_sizes(extent: int, sizes: Sequence[int], least: int) -> Sequence[int]:
  """Sizes hardly longer than the rows: from `least` on, else the largest."""
  fitting = [n for n in sizes if n < 2 * extent] or sizes[:1]
  return [n for n in fitting if n >= least] or fitting[-1:]
