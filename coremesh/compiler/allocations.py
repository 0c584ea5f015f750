"""What the compiler allocates for a kernel, read from what Mosaic writes."""

from collections.abc import Iterator
import dataclasses
import math
import re

_ARGUMENTS = re.compile(r"^\s*func\.func @\w+\((?P<types>.*)$", re.MULTILINE)
_MEMREF = re.compile(
  r"memref<(?P<shape>[^,]*), #tpu\.tiled<(?P<tiles>[^\[]*)\[[^\]]*\]>,"
  r" #(?:sc_)?tpu\.memory_space<(?P<space>\w+)"
)
_ALLOCATION = re.compile(
  r"= llo\.alloca_(?P<kind>vmem|smem|sflag) (?P<amount>\d+)"
  r"|= memref\.alloca\(\)(?: \{[^}]*\})? : (?P<memref>memref<.*)"
)
_TILE = re.compile(r"\(([\d,]+)\)")
_SCRATCH = re.compile(r"scratch_operands = (\d+)")
# How libtpu calls the memories of a TensorCore and of a SparseCore.
_MEMORIES = {
  "vmem": "VMEM",
  "tile_spmem": "VMEM",
  "smem": "SMEM",
  "sflag": "semaphores",
  "sflag_tile": "semaphores",
  "sflag_scs": "semaphores",
  "semaphore_mem": "semaphores",
}
# Bytes, or semaphores, of what an allocation of a TensorCore counts in.
_UNITS = {"vmem": 8 * 128 // 2, "smem": 4, "sflag": 1}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Allocations:
  """What a core holds of each memory while it runs a kernel, the most at once.

  Arguments and what scopes allocate; blocks that libtpu copies by itself, with
  their semaphores, come later and are not in it.

  Attributes:
    vmem_bytes: of the scopes and scratch; TileSpmem on a subcore.
    scoped_vmem_bytes: of these, what is allocated in the body.
    smem_bytes: likewise.
    semaphores: likewise, of all kinds but the barrier semaphore.
    num_scratch: how many of the last arguments are scratch.
  """

  vmem_bytes: int
  scoped_vmem_bytes: int
  smem_bytes: int
  semaphores: int
  num_scratch: int


def of_module(text: str) -> Allocations | None:
  """Reads a program; None if it has no function, or is of another form.

  Args:
    text: of a kernel, at the stage "llo" or "mosaic-layouts".
  """
  header = _ARGUMENTS.search(text)
  scratch = _SCRATCH.search(text)
  if header is None or scratch is None:
    return None
  held: dict[str, int] = dict.fromkeys(_MEMORIES.values(), 0)
  for match in _MEMREF.finditer(header["types"]):
    _add(held, _of_memref(match))
  most, arguments_bytes = dict(held), held["VMEM"]
  # An allocation lives until the region ends that it is made in.
  inside: list[tuple[int, tuple[str, int] | None]] = []
  for line in text[header.end() :].splitlines():
    depth = len(line) - len(line.lstrip())
    while inside and inside[-1][0] > depth:
      _add(held, inside.pop()[1], sign=-1)
    for allocation in _allocations(line):
      inside.append((depth, allocation))
      _add(held, allocation)
    most = {memory: max(n, held[memory]) for memory, n in most.items()}
  return Allocations(
    vmem_bytes=most["VMEM"],
    scoped_vmem_bytes=most["VMEM"] - arguments_bytes,
    smem_bytes=most["SMEM"],
    semaphores=most["semaphores"],
    num_scratch=int(scratch[1]),
  )


def _add(
  held: dict[str, int], allocation: tuple[str, int] | None, sign: int = 1
) -> None:
  if allocation is not None:
    held[allocation[0]] += sign * allocation[1]


def _allocations(line: str) -> Iterator[tuple[str, int]]:
  for match in _ALLOCATION.finditer(line):
    if kind := match["kind"]:
      yield _MEMORIES[kind], int(match["amount"]) * _UNITS[kind]
    elif memref := _MEMREF.match(match["memref"]):
      if found := _of_memref(memref):
        yield found


def _of_memref(match: re.Match[str]) -> tuple[str, int] | None:
  """Memory and amount of a buffer, its last axes padded to its tile."""
  memory = _MEMORIES.get(match["space"])
  if memory is None:
    return None
  *sizes, dtype = match["shape"].split("x")
  padded = [int(n) for n in sizes]
  if memory == "semaphores":
    return memory, math.prod(padded)
  tile = _TILE.search(match["tiles"])
  tiled = [int(n) for n in tile[1].split(",")] if tile else []
  for axis, size in enumerate(reversed(tiled), start=1):
    if axis <= len(padded):
      padded[-axis] = -(-padded[-axis] // size) * size
  bits = int(re.sub(r"\D", "", dtype.partition("E")[0]) or 32)
  return memory, math.prod(padded) * max(bits, 8) // 8
