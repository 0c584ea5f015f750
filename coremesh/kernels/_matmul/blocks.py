"""Sizes of the blocks of a matrix product, and what they are chosen for."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from coremesh import errors, tiles
from coremesh.partition import num_blocks

# What the cores share: the blocks along an axis of the output, or of K.
type Split = Literal["rows", "columns", "batch", "inner"]
SPLITS: tuple[Split, ...] = ("rows", "columns", "batch", "inner")
# So that of two cores the first block of each is whole.
LEAST_INNER_BLOCKS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
  """How a product is cut into blocks.

  Attributes:
    rows: of the output, a multiple of 8, or all.
    columns: of the output, a multiple of 128, or all.
    inner: of the axis that is summed, a multiple of 128, or all.
    split: whether the cores share the blocks of rows or of columns of the
      output, or the longest of the leading axes ("batch"). "inner": the blocks
      of the axis that is summed; each core then sums its own, and sends its
      sums of half of the output to the other. That is for an output of one
      block, and at least 4 of that axis.
    part: columns of a block of the output that are multiplied at a time, and
      copied out while the next are: a multiple of 128 that divides `columns`.
      Default: all of them.
  """

  rows: int
  columns: int
  inner: int
  split: Split = "rows"
  part: int | None = None

  def __post_init__(self):
    for name, tile in (
      ("rows", 8),
      ("columns", 128),
      ("inner", 128),
      ("part", 128),
    ):
      size = getattr(self, name)
      if name == "part" and size is None:
        continue
      if not isinstance(size, int) or size < 1 or size % tile:
        raise errors.ShapeError(
          f"{name} of Blocks must be a positive multiple of {tile}; got"
          f" {size!r}."
        )
    if self.columns % (self.part or self.columns):
      raise errors.ShapeError(
        f"part of Blocks must divide columns={self.columns}; got {self.part}."
      )
    if self.split not in SPLITS:
      raise errors.ShapeError(
        f"split of Blocks must be one of {', '.join(map(repr, SPLITS))}; got"
        f" {self.split!r}."
      )

  @property
  def columns_at_a_time(self) -> int:
    return self.part or self.columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
  """What blocks are chosen for.

  Attributes:
    batch, rows, columns, inner: sizes of the product.
    num_weights: products that share x.
    dtype, out_dtype: names of the dtypes of x and w, and of the output.
    transpose_x, transpose_w: whether x and w have their last axes swapped.
    has_epilogue: whether something is done to the sums.
    operand_bytes: of an element of all operands of the epilogue that are as
      large as the output.
  """

  batch: int
  rows: int
  columns: int
  inner: int
  num_weights: int = 1
  dtype: str = "bfloat16"
  out_dtype: str = "bfloat16"
  transpose_x: bool = False
  transpose_w: bool = False
  has_epilogue: bool = False
  operand_bytes: int = 0

  @property
  def in_bytes(self) -> int:
    """Of an element of x and w."""
    return _bytes(self.dtype)

  @property
  def out_bytes(self) -> int:
    """Of an element of the output."""
    return _bytes(self.out_dtype)

  @property
  def row_tile(self) -> int:
    """What a partial block of rows must be a multiple of."""
    return tiles.LANES if self.transpose_x else 32 // self.in_bytes


def split_fault(product: Product, blocks: Blocks) -> str | None:
  """What must hold for the split of blocks, if it does not."""
  p, b = product, blocks
  if b.split == "batch" and p.batch == 1:
    return "needs a product with leading axes, of more than one element"
  if b.split != "inner":
    return None
  if p.batch > 1 or b.rows < p.rows or b.columns < p.columns:
    return (
      f"needs one block of the output, but that is {p.batch} x {p.rows} x"
      f" {p.columns} in blocks of {b.rows} x {b.columns}"
    )
  if num_blocks(p.inner, b.inner) < LEAST_INNER_BLOCKS:
    return (
      f"needs at least {LEAST_INNER_BLOCKS} blocks of the axis that is summed,"
      f" but that is {p.inner} in blocks of {b.inner}"
    )
  return None


def _bytes(dtype: str) -> int:
  return jnp.dtype(dtype).itemsize
