"""How a matrix product is cut up: its axes, its blocks, and their order."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from coremesh.kernels._matmul.call import Call
from coremesh.partition import num_blocks

# The index of a block along each leading axis of the output, M, N and K.
type Indices = Sequence[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
  """One of the axes M, N and K.

  Attributes:
    size: of the arrays.
    block: what a step takes of it: all, or a multiple of what tiles allow.
  """

  size: int
  block: int

  @property
  def num_blocks(self) -> int:
    return num_blocks(self.size, self.block)

  def inside(self, index: Any, *, start: Any, length: int, tile: int) -> Any:
    """How much of a part of block `index` is in the array, in whole tiles.

    The part is `length` long from `start` of the block. An int where that is
    known, and else an int32 scalar: only that may reach beyond the array, to
    the end of its last tile.
    """
    is_first = self.num_blocks == 1 and isinstance(start, int)
    if self.size % self.block == 0 or is_first and start + length <= self.size:
      return length
    rest = self.size - index * np.int32(self.block) - start
    tiles = jax.lax.div(rest + np.int32(tile - 1), np.int32(tile))
    inside = jnp.minimum(np.int32(length), tiles * np.int32(tile))
    return pl.multiple_of(inside, tile)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
  """How a product is computed.

  Attributes:
    call: what is asked for.
    batch: sizes of the leading axes of the output.
    m, n, k: the other axes.
    columns: of a block of the output, those that are computed at a time.
    num_strips: strips of rows of these, each of which leaves for HBM while the
      next is multiplied.
    chunks: parts of the first block along K, which is multiplied as it comes.
    split: the axis that the cores share, "m", "n" or "k", or "b" for one of the
      leading axes.
    num_cores: that share it.
    num_slots: blocks of each array in VMEM, a power of two.
    is_small: whether copies of blocks wait for their latency, rather than for
      the bandwidth of HBM.
  """

  call: Call
  batch: tuple[int, ...]
  m: Axis
  n: Axis
  k: Axis
  columns: int
  num_strips: int
  chunks: tuple[int, ...]
  split: str
  num_cores: int
  num_slots: int
  is_small: bool

  @property
  def axes(self) -> Mapping[str, Axis]:
    return {"m": self.m, "n": self.n, "k": self.k}

  @property
  def x_axes(self) -> str:
    """The last two axes of x."""
    return "km" if self.call.transpose_x else "mk"

  @property
  def w_axes(self) -> str:
    """The last two axes of a weight."""
    return "nk" if self.call.transpose_w else "kn"

  @property
  def shared_axis(self) -> int:
    """Which of the leading axes, M, N and K the cores share."""
    if self.split != "b":
      return len(self.batch) + "mnk".index(self.split)

    def share(axis: int) -> float:
      return num_blocks(self.batch[axis], self.num_cores) / self.batch[axis]

    return min(range(len(self.batch)), key=share)

  @property
  def joins(self) -> bool:
    """Whether each core sums over a part of K, so that sums are to be added."""
    return self.split == "k" and self.num_cores > 1

  @property
  def has_parts(self) -> bool:
    """Whether a block of the output is computed part by part."""
    return self.columns < self.n.block or self.num_strips > 1

  @property
  def strips(self) -> Sequence[Any]:
    """The rows of each strip."""
    height = self.m.block // self.num_strips
    return [pl.ds(i * height, height) for i in range(self.num_strips)]

  @property
  def has_sums(self) -> bool:
    """Whether sums over a part of K are kept."""
    return self.k.num_blocks > 1 or len(self.chunks) > 1

  def num_parts(self, indices: Indices) -> Any:
    """Parts of a block of the output: an int, or an int32 scalar."""
    axis, most = self.n, num_blocks(self.n.block, self.columns)
    last = axis.num_blocks - 1
    least = num_blocks(axis.size - last * axis.block, self.columns)
    if least == most:
      return most
    is_last = indices[-2] == last
    return jnp.where(is_last, np.int32(least), np.int32(most))

  def next_slot(self, slot: Any) -> Any:
    """The slot of the block that is copied after that in a slot."""
    return (slot + np.int32(1)) & np.int32(self.num_slots - 1)

  def part(self, number: Any) -> Any:
    """The columns of a part of a block of the output."""
    if self.columns >= self.n.block:
      return pl.ds(0, self.n.block)
    start = number * np.int32(self.columns)
    return pl.ds(pl.multiple_of(start, self.columns), self.columns)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
  """The blocks that a core takes, one after the other, K fastest.

  Attributes:
    first: the first block.
    sizes: blocks along each axis, ints or int32 scalars.
  """

  first: Indices
  sizes: Indices

  @classmethod
  def of_core(cls, plan: Plan, core: Any) -> "Steps":
    """Those of the core with that index."""
    sizes: list[Any] = [*plan.batch]
    sizes += [axis.num_blocks for axis in plan.axes.values()]
    first: list[Any] = [np.int32(0)] * len(sizes)
    shared = plan.shared_axis
    share = num_blocks(sizes[shared], plan.num_cores)
    if plan.num_cores > 1:
      first[shared] = core * np.int32(share)
    if sizes[shared] % plan.num_cores:
      left = np.int32(sizes[shared]) - first[shared]
      sizes[shared] = jnp.clip(left, np.int32(0), np.int32(share))
    else:
      sizes[shared] = share
    return cls(first=first, sizes=sizes)

  @property
  def last_of_k(self) -> Any:
    """The last block along K."""
    return self.first[-1] + self.sizes[-1] - 1

  @property
  def count(self) -> Any:
    """How many there are."""
    count: Any = 1
    for size in self.sizes:
      count = count * size
    return count

  def after_output(self, indices: Indices) -> Indices:
    """The first step of the next block of the output."""
    return self.after((*indices[:-1], self.last_of_k))

  def after(self, indices: Indices) -> Indices:
    """The step after one; after the last, the first."""
    result = []
    carry = np.int32(1)
    for i, first, size in zip(
      reversed(indices), reversed(self.first), reversed(self.sizes), strict=True
    ):
      if isinstance(size, int) and size == 1:
        result.append(i)
        continue
      wraps = i + carry >= first + size
      result.append(jnp.where(wraps, first, i + carry))
      carry = wraps.astype(np.int32)
    return result[::-1]
