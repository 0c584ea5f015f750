"""Whether what a worker holds at once fits into its memories."""

from collections.abc import Sequence
import math
from typing import Any

import jax
import numpy as np

from coremesh import chips, tiles

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
    if declaration.is_semaphore or declaration.space not in ("vmem", "smem"):
      return
    self._held.append(declaration)
    there = tuple(d for d in self._held if d.space == declaration.space)
    size = sum(map(size_bytes, there))
    if size > self._most.get(declaration.space, (0, ()))[0]:
      self._most[declaration.space] = size, there

  def drop(self, declaration: Any) -> None:
    """The scope ends."""
    if declaration in self._held:
      self._held.remove(declaration)

  def excess(self, chip: chips.Chip, *, is_sparse: bool) -> list[str]:
    """What does not fit into the memories of a core of the chip, in words.

    JAX's table has no size for the memory that subcores share, the scalar
    memory of a SparseCore, and semaphores, so that these always fit.
    """
    core = "vector subcore" if is_sparse else "TensorCore"
    have = {
      "vmem": chip.vmem_bytes_per_vector_subcore
      if is_sparse
      else chip.vmem_bytes_per_tensor_core,
      "smem": 0 if is_sparse else chip.smem_bytes_per_tensor_core,
    }
    return [
      f"A {core} of {chip.generation} has {_bytes(have[space])} of"
      f" {space.upper()}, but the kernel holds {_bytes(size)} at once, tiles"
      f" filled up: {_named(declarations)}. Use smaller blocks or fewer"
      " buffers."
      for space, (size, declarations) in self._most.items()
      if have.get(space) and size > have[space]
    ]


def size_bytes(declaration: Any) -> int:
  """Bytes of a declared memory, with what fills up its tiles."""
  if declaration.is_of_tensor_core:
    size = tiles.padded_bytes(declaration.shape, declaration.dtype)
  else:
    bits = jax.dtypes.itemsize_bits(declaration.dtype)
    size = -(-math.prod(declaration.shape) * bits // 8)
  return declaration.num_buffers * size


def _named(declarations: Sequence[Any]) -> str:
  largest = sorted(declarations, key=size_bytes, reverse=True)
  parts = [
    f"{d.name!r} {d.shape} of {np.dtype(d.dtype).name}, {_bytes(size_bytes(d))}"
    + (f" in {d.num_buffers} buffers" if d.num_buffers > 1 else "")
    for d in largest[:_MAX_NAMED]
  ]
  more = len(largest) - _MAX_NAMED
  return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _bytes(size: int) -> str:
  for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
    if size >= scale:
      return f"{size / scale:.6g} {unit}"
  return f"{size} bytes"
