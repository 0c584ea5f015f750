"""Blocks of an array of a matrix product, and their copies to and from VMEM."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import tiles
from coremesh.kernels._matmul.plan import Indices, Plan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
  """A part of a block.

  Attributes:
    number: of its semaphore.
    at: where it is in the block, a `pl.ds` for each of the axes "m", "n" and
      "k" of which it is not all.
  """

  number: Any
  at: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Window:
  """An array in HBM, and the blocks of it that are in VMEM.

  Attributes:
    plan: of the product.
    axes: what the last two axes of the array are, of "m", "n" and "k".
    hbm: the array. It has the leading axes of the output or the last of them;
      an axis of size 1 is broadcast.
    vmem: [slots, rows, columns], in VMEM.
    sems: [slots, parts], of DMAs.
  """

  plan: Plan
  axes: str
  hbm: Any
  vmem: Any
  sems: Any

  @staticmethod
  def scratch(plan: Plan, axes: str, array: Any, *, num_parts: int = 1) -> Any:
    """The types of `vmem` and `sems`."""
    block = [
      1 if size == 1 else plan.axes[axis].block
      for size, axis in zip(array.shape[-2:], axes, strict=True)
    ]
    return (
      pltpu.VMEM((plan.num_slots, *block), array.dtype),
      pltpu.SemaphoreType.DMA((plan.num_slots, num_parts)),
    )

  def changes(self, before: Indices, after: Indices) -> Any:
    """Whether two steps take different blocks."""
    changes = jnp.bool_(False)
    for old, new in zip(self._block(before), self._block(after), strict=True):
      if old is not new:
        changes |= old != new
    return changes

  def copy_in(self, step: Indices, slot: Any, part: Part | None = None) -> Any:
    """The copy of a block, or of a part of it, to VMEM."""
    hbm, vmem, sem = self._ends(step, slot, part)
    return pltpu.make_async_copy(hbm, vmem, sem)

  def copy_out(self, step: Indices, slot: Any, part: Part | None = None) -> Any:
    """The copy of a block, or of a part of it, to HBM."""
    hbm, vmem, sem = self._ends(step, slot, part)
    return pltpu.make_async_copy(vmem, hbm, sem)

  def _block(self, step: Indices) -> list[Any]:
    """The index of a block along each axis of the array."""
    axes = [self.plan.axes[name] for name in self.axes]
    lead = self.hbm.ndim - 2
    at = dict(zip("mnk", step[-3:], strict=True))
    indices = (*step[:-3][len(step) - 3 - lead :], *(at[a] for a in self.axes))
    counts = (*self.hbm.shape[:-2], *(axis.num_blocks for axis in axes))
    is_one = [
      n == 1 or size == 1
      for n, size in zip(counts, self.hbm.shape, strict=True)
    ]
    return [
      np.int32(0) if one else index
      for one, index in zip(is_one, indices, strict=True)
    ]

  def _ends(self, step: Indices, slot: Any, part: Part | None) -> Any:
    block = self._block(step)
    hbm, vmem = block[:-2], [slot]
    for position in (-2, -1):
      axis = self.plan.axes[self.axes[position]]
      if self.hbm.shape[position] == 1:
        hbm.append(pl.ds(0, 1))
        vmem.append(pl.ds(0, 1))
        continue
      tile = tiles.LANES
      if position == -2:
        tile = tiles.tile_rows(self.hbm.shape[-2], self.hbm.dtype)
      start, length = 0, axis.block
      if part is not None and self.axes[position] in part.at:
        along = part.at[self.axes[position]]
        start, length = along.start, along.size
      first = block[position] * np.int32(axis.block) + start
      if axis.num_blocks > 1 or length < axis.block:
        first = pl.multiple_of(first, tile)
      size = axis.inside(block[position], start=start, length=length, tile=tile)
      hbm.append(pl.ds(first, size))
      vmem.append(pl.ds(start, size))
    sem = self.sems.at[slot, 0 if part is None else part.number]
    return self.hbm.at[tuple(hbm)], self.vmem.at[tuple(vmem)], sem
