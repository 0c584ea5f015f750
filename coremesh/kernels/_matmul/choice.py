"""The choice of the blocks of a matrix product: from a table, or by a model."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools

from coremesh import chips, tiles
from coremesh.kernels._matmul import streams, table
from coremesh.kernels._matmul.blocks import SPLITS, Blocks, Product, Split
from coremesh.kernels._matmul.memory import fits
from coremesh.partition import num_blocks

# Cycles in which the matrix units fill and drain, between two parts.
_PART_CYCLES = 225
# Cycles between two steps in which nothing is multiplied: 64 steps of 128^3 are
# predicted to take 350 each, on a v5p, a v6e and a tpu7x.
_STEP_CYCLES = 300
# A barrier of two cores, and the copy of the sums of one to the other.
_JOIN_SECONDS = 2e-6
_SIZES = (128, 256, 384, 512, 768, 1024, 1536, 2048)


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
  fitting = (b for b in _candidates(product, chip) if fits(product, b, chip))
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


def seconds(product: Product, blocks: Blocks, chip: chips.Chip) -> float:
  """Modelled time on a device: a lower bound of each step, in sequence.

  A step takes as long as its products on the matrix units or its copies over
  the HBM that the cores share; the first chunks in and the last part out are in
  nobody's shadow.
  """
  p, b = product, blocks
  cores = chip.tensor_cores_per_device
  steps = streams.num_steps(product, blocks, chip)
  inner = num_blocks(p.inner, b.inner)
  clock = streams.chip_clock_hz(chip)
  depth = streams.depth(product, blocks)
  parts = b.columns // b.columns_at_a_time
  in_step = p.num_weights * streams.product_cycles(
    p, b.rows, b.columns, depth, chip
  )
  in_step += parts * _PART_CYCLES + _STEP_CYCLES
  # Sums are read and written once a step, a register a cycle.
  lanes = chip.lanes * chip.sublanes
  sums = 0 if inner == 1 else p.num_weights * b.rows * b.columns / lanes
  in_step += 0.25 * sums
  per_second = chip.hbm_bytes_per_second_per_device / cores
  loaded = p.in_bytes * (b.rows + p.num_weights * b.columns) * depth
  stored = (p.out_bytes + p.operand_bytes) * b.rows * b.columns
  moved = streams.loaded_bytes(product, blocks) + stored / inner
  # Copies to all slots but one are on their way while a block is multiplied; of
  # few steps all are from the start.
  ahead = streams.num_slots(product, blocks, chip) - 1
  alone = streams.LATENCY_SECONDS + moved / (per_second * cores)
  copied = moved / per_second
  if steps > 1 and (ahead == 1 or ahead < steps - 1):
    copied = max(copied, alone / ahead)
  chunks = streams.first_chunks(product, blocks, chip)
  ends = 2 * streams.LATENCY_SECONDS
  last = stored / parts / streams.num_strips(product, blocks, chip)
  ends += (loaded / depth * chunks[0] + last) / per_second
  ends += (len(chunks) - 1) * parts * _PART_CYCLES / clock
  if b.split == "inner" and cores > 1:
    ends += _JOIN_SECONDS + 4 * p.num_weights * b.rows * b.columns / per_second
  return steps * max(in_step / clock, copied) + ends


def splits(chip: chips.Chip) -> Sequence[Split]:
  """Those that differ: a single core shares with nobody."""
  return SPLITS if chip.tensor_cores_per_device > 1 else SPLITS[:1]


def _candidates(product: Product, chip: chips.Chip) -> Iterator[Blocks]:
  def sizes(extent: int, tile: int, most: int) -> list[int]:
    whole = tiles.rounded_up(extent, tile)
    shares = {tiles.rounded_up(-(-whole // n), tile) for n in (1, 2, 3, 4)}
    return sorted(
      {s for s in _SIZES if s < whole and s % tile == 0}
      | {s for s in shares if 0 < s <= most}
    )

  for rows, columns, inner, split in itertools.product(
    sizes(product.rows, product.row_tile, 2048),
    sizes(product.columns, tiles.LANES, 4096),
    sizes(product.inner, tiles.LANES, 4096),
    splits(chip),
  ):
    for part in _parts(columns, split):
      yield Blocks(
        rows=rows, columns=columns, inner=inner, split=split, part=part
      )


def _parts(columns: int, split: Split) -> Sequence[int | None]:
  """Parts of a block of so many columns."""
  if split == "inner":  # One for each of two cores.
    return [columns // 2 if columns % (2 * tiles.LANES) == 0 else None]
  parts = [p for p in (256, 512, 1024) if p < columns and columns % p == 0]
  return parts or [None] * (columns <= 1024)
