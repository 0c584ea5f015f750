"""Addresses for what machine code names: operands, allocations, pointers."""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import re

from coremesh import errors
from coremesh.profile.bundles import Address, Operand, Program

_VMEM_UNIT_BYTES = 512
# Allocations have names, not addresses. Pointers to VMEM are shifted left by 4
# bits; nothing may overlap, nor reach the sign bit.
_ALLOCATION_STEP = 0x40000
_ALLOCATIONS_START = 0x40000
_SPILLS_START = 0x30000000
# The receiver of a signal has its semaphore in so many numbers.
_MOST_SEMAPHORES = 1 << 13
_SEMAPHORE_OPERANDS = ("dst_syncflagno", "src_syncflagno")
_MOST_POINTER = 1 << 31

_POINTERS = ("scalar_lea.", "int_to_ptr.", "inlined_call_operand.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
  """Where an operand is taken to be."""

  space: str
  shape: str
  pointer: int
  units: int
  unit_bytes: int

  def offset_words(self, source: str, address: int) -> int | None:
    """Words from the start of the operand to an address, None if not in it."""
    if source != self.space:
      return None
    # A DMA takes pointers to VMEM in granules.
    shift = 4 if source == "vmem" else 0
    offset = address - (self.pointer << shift)
    if not 0 <= offset < self.units << shift:
      return None
    return offset * (self.unit_bytes >> shift) // 4


def bases(program: Program) -> dict[str, int]:
  """An address for each allocation a program names."""
  found: dict[str, int] = {}
  semaphores = _semaphores(program)
  spills = numbered = 0
  for name in _allocations(program):
    if name in found:
      continue
    if name.endswith("_spill"):
      found[name] = _SPILLS_START + spills
      spills += 1
    elif name in semaphores:
      numbered += 1
      found[name] = numbered * (_MOST_SEMAPHORES // (len(semaphores) + 1))
    else:
      step = len(found) - spills
      found[name] = _ALLOCATIONS_START + step * _ALLOCATION_STEP
  return found


def semaphores(program: Program, found: Mapping[str, int]) -> frozenset[int]:
  """The numbers of the semaphores among the `bases` of a program."""
  return frozenset(found[name] for name in _semaphores(program))


def _semaphores(program: Program) -> set[str]:
  """The allocations that are semaphores, or begin an array of them."""
  found = set()
  for slot in program.slots:
    operands: list[Operand | None] = []
    if slot.opcode.startswith(("vsync", "vwait", "dma.done")):
      operands = [*slot.operands[:1]]
    elif slot.opcode.startswith("dma."):
      operands = [slot.operand(n) for n in _SEMAPHORE_OPERANDS]
    elif slot.opcode == "scalar_lea.sflag":
      operands = [*slot.operands]
    for operand in operands:
      if isinstance(operand, Address):
        found.update(t for t in operand.terms if isinstance(t, str))
  return found


def spaces(program: Program) -> dict[int, str]:
  """The memory each value that is a pointer points to."""
  found = {}
  for slot in program.slots:
    if slot.result is not None and slot.opcode.startswith(_POINTERS):
      found[slot.result.value] = slot.opcode.rpartition(".")[2]
  return found


def _allocations(program: Program) -> Iterator[str]:
  for slot in program.slots:
    for operand in slot.operands:
      if isinstance(operand, Address):
        yield from (t for t in operand.terms if isinstance(t, str))


def places(program: Program, hbm_unit_bytes: int) -> dict[int, Place]:
  """Where the operands of a program are."""
  units = {"hbm": hbm_unit_bytes, "vmem": _VMEM_UNIT_BYTES, "smem": 4}
  found: dict[int, tuple[str, str, int, int]] = {}
  for slot in program.slots:
    if slot.opcode.startswith("inlined_call_operand."):
      space = slot.opcode.removeprefix("inlined_call_operand.")
      index, shape = slot.operands
      unit = units.get(space, 4)
      if isinstance(index, int):
        size = -(-_padded_bytes(str(shape)) // unit)
        found[index] = (space, str(shape), unit, size)
  placed, pointers = {}, {}
  for index, (space, shape, unit, size) in sorted(found.items()):
    # VMEM operands come after all allocations, at addresses of their own.
    pointer = pointers.get(space, 0x4000000 if space == "vmem" else 0x1000)
    pointers[space] = pointer + size + 1
    placed[index] = Place(
      space=space, shape=shape, pointer=pointer, units=size, unit_bytes=unit
    )
  if pointers.get("hbm", 0) >= _MOST_POINTER:
    raise errors.UnsupportedError(
      "The operands in HBM take more than 64 GB, which is not modelled."
    )
  return placed


def _padded_bytes(shape: str) -> int:
  """Bytes of an operand such as "bf16[8,300]", padded to tiles."""
  match = re.fullmatch(r"([a-z]+)(\d*)\w*\[([\d,]*)\]", shape)
  if match is None:
    return 1 << 20
  bits = int(match[2] or 8)
  *leading, rows, columns = (1, 1, *(int(n) for n in match[3].split(",") if n))
  packing = max(1, 32 // bits)
  rows = -(-rows // (8 * packing)) * 8 * packing
  columns = -(-columns // 128) * 128
  return max(1, math.prod(leading) * rows * columns * bits // 8)
