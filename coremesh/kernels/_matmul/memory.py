"""The VMEM of a matrix product: its blocks, its sums, what is spilled."""

from coremesh import chips
from coremesh.kernels._matmul import streams
from coremesh.kernels._matmul.blocks import Blocks, Product, split_fault

# The rest of VMEM is for what the compiler spills.
VMEM_SHARE = 0.8
# What it spills of a strip of the output, in float32 for each element: the sums
# of each chunk of the first block, those of the code of a step, and what is on
# the way through an epilogue. All are bounds of what libtpu was seen to spill.
_STEP_SPILLS = 3
_EPILOGUE_SPILLS = 6


def vmem_bytes(product: Product, blocks: Blocks, chip: chips.Chip) -> int:
  """VMEM a core needs: blocks in slots, the sums, and those of another core."""
  p, b = product, blocks
  inputs = b.rows * b.inner + p.num_weights * b.inner * b.columns
  outputs = p.out_bytes + p.operand_bytes
  block = b.rows * b.columns
  sums = p.num_weights * 4 * block * (2 if b.split == "inner" else 1)
  slots = streams.num_slots(product, blocks, chip)
  return slots * (inputs * p.in_bytes + outputs * block) + sums


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
  rows = blocks.rows // streams.num_strips(product, blocks, chip)
  spills = len(streams.first_chunks(product, blocks, chip)) + _STEP_SPILLS
  spills += _EPILOGUE_SPILLS * product.has_epilogue
  return 4 * spills * product.num_weights * rows * blocks.columns_at_a_time


def fits(product: Product, blocks: Blocks, chip: chips.Chip) -> bool:
  """Whether VMEM holds blocks, and tiles allow their rows."""
  if blocks.rows < product.rows and blocks.rows % product.row_tile:
    return False
  if split_fault(product, blocks):
    return False
  needed = vmem_bytes(product, blocks, chip)
  most = chip.vmem_bytes_per_tensor_core
  return (
    needed <= VMEM_SHARE * most
    and needed + spilled_bytes(product, blocks, chip) <= most
  )
