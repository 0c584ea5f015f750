"""Whether what a worker holds at once fits into its memories."""

from collections.abc import Sequence
import math
from typing import Any

import jax
import numpy as np

from coremesh import chips, tiles
from coremesh.simulate import cores

_MAX_NAMED = 4


class Holdings:
  """The memory that a program holds, scope by scope, and the most it held.

  Scopes that follow one another use the same memory, so that the sum over all
  would be too much.
  """

  def __init__(self):
    self._held: list[Any] = []
    self._most: dict[str, tuple[int, tuple[Any, ...]]] = {}

  def hold(self, declaration: Any) -> None:
    """A scope of a declared memory begins."""
    memory = _memory_of(declaration)
    if memory not in _AMOUNTS:
      return
    self._held.append(declaration)
    there = tuple(d for d in self._held if _memory_of(d) == memory)
    amount = sum(map(_AMOUNTS[memory], there))
    if amount > self._most.get(memory, (0, ()))[0]:
      self._most[memory] = amount, there

  def drop(self, declaration: Any) -> None:
    """The scope ends."""
    if declaration in self._held:
      self._held.remove(declaration)

  def excess(self, chip: chips.Chip, mesh: Any) -> list[str]:
    """What does not fit into the memories of a core of the chip, in words.

    Args:
      chip: the chip.
      mesh: of cores of one kind.
    """
    kind = cores.kind_of(mesh)
    found = []
    for memory, have in _sizes(chip, kind).items():
      held, declarations = self._most.get(memory, (0, ()))
      if have and held > have:
        written = str if memory == "semaphores" else _bytes
        found.append(
          f"A {cores.NAMES[kind]} of {chip.generation} has {written(have)} of"
          f" {memory.upper()}, but the kernel holds {written(held)} at once,"
          f" tiles filled up: {_named(declarations)}. Use smaller blocks or"
          " fewer buffers."
        )
    if kind == "vector":
      found += self._excess_of_sparse_core(chip)
    return found

  def _excess_of_sparse_core(self, chip: chips.Chip) -> list[str]:
    """VMEM_SHARED takes its part of the memory that subcores' VMEM is in."""
    shared, declarations = self._most.get("vmem_shared", (0, ()))
    own, _ = self._most.get("vmem", (0, ()))
    subcores = chip.vector_subcores_per_sparse_core
    have = chip.shared_vmem_bytes_per_sparse_core
    if not shared or shared + subcores * own <= have:
      return []
    return [
      f"A SparseCore of {chip.generation} has {_bytes(have)} for VMEM_SHARED"
      f" and the VMEM of its {subcores} subcores, but the kernel holds"
      f" {_bytes(shared)} of VMEM_SHARED ({_named(declarations)}) and"
      f" {_bytes(own)} of VMEM on each. Use smaller buffers."
    ]


def _memory_of(declaration: Any) -> str:
  return "semaphores" if declaration.is_semaphore else declaration.space


def _sizes(chip: chips.Chip, kind: cores.Kind) -> dict[str, int]:
  """What a core has of each of its own memories, 0 where nobody says."""
  if kind == "tensor":
    vmem, smem = (
      chip.vmem_bytes_per_tensor_core,
      chip.smem_bytes_per_tensor_core,
    )
  else:
    vmem = chip.vmem_bytes_per_vector_subcore if kind == "vector" else 0
    smem = chip.smem_bytes_per_subcore(kind)
  semaphores = chip.semaphores_per_core(kind)
  return {"vmem": vmem, "smem": smem, "semaphores": semaphores}


def size_bytes(declaration: Any) -> int:
  """Bytes of a declared memory, with what fills up its tiles."""
  if declaration.is_of_tensor_core:
    size = tiles.padded_bytes(declaration.shape, declaration.dtype)
  else:
    bits = jax.dtypes.itemsize_bits(declaration.dtype)
    size = -(-math.prod(declaration.shape) * bits // 8)
  return declaration.num_buffers * size


_AMOUNTS = {
  "vmem": size_bytes,
  "smem": size_bytes,
  "vmem_shared": size_bytes,
  "semaphores": lambda declaration: math.prod(declaration.shape),
}


def _named(declarations: Sequence[Any]) -> str:
  amount = _AMOUNTS[_memory_of(declarations[0])]
  largest = sorted(declarations, key=amount, reverse=True)
  parts = [_described(d) for d in largest[:_MAX_NAMED]]
  more = len(largest) - _MAX_NAMED
  return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _described(declaration: Any) -> str:
  text = f"{declaration.name!r} {declaration.shape}"
  if declaration.is_semaphore:
    return text
  text += f" of {np.dtype(declaration.dtype).name}"
  text += f", {_bytes(size_bytes(declaration))}"
  count = declaration.num_buffers
  return text + (f" in {count} buffers" if count > 1 else "")


def _bytes(size: int) -> str:
  for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
    if size >= scale:
      return f"{size / scale:.6g} {unit}"
  return f"{size} bytes"
