"""What launches of the kernels of grouped products have in common."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coremesh import _compat, errors, launch, place, tiles
from coremesh.kernels import launches
from coremesh.kernels._grouped import blocks as grouped_matmul_blocks
from coremesh.kernels._grouped.blocks import GroupedProduct
from coremesh.kernels._grouped.visits import Rows
from coremesh.kernels._matmul.blocks import Blocks
from coremesh.kernels._matmul.memory import vmem_limit_bytes


def blocks_of(problem: GroupedProduct, given: Blocks | None) -> Blocks:
  """The blocks that are given, or those that are chosen.

  Raises:
    ShapeError: the given ones have a part, or another split.
  """
  if given is None:
    return grouped_matmul_blocks.choose(problem, place.current_chip())
  if given.part is not None:
    raise errors.ShapeError(
      f"part of Blocks must be None for a grouped product; got {given.part}."
    )
  if given.split not in ("rows", "columns"):
    raise errors.ShapeError(
      "split of Blocks must be 'rows' or 'columns' for a grouped product; got"
      f" {given.split!r}."
    )
  return given


def rows_in_blocks(problem: GroupedProduct, block: int) -> Rows:
  """The rows in blocks that are hardly larger than there are rows.

  Raises:
    ShapeError: they are no whole tiles, or their tables too large for SMEM.
  """
  most = max(problem.row_tile, 2 ** (problem.rows - 1).bit_length())
  rows = Rows(
    size=problem.rows,
    num_groups=problem.num_groups,
    block=min(block, most),
    tile=problem.row_tile,
  )
  if rows.block % problem.row_tile:
    raise errors.ShapeError(
      f"rows of Blocks must be a multiple of {problem.row_tile} for these"
      f" dtypes; got {block}."
    )
  limit = place.current_chip().smem_bytes_per_tensor_core
  if rows.smem_bytes >= limit:
    raise errors.ShapeError(
      f"{rows.num_groups} groups and {rows.num_blocks} blocks of rows take"
      f" {rows.smem_bytes} bytes of SMEM, and a core has {limit}. Call it for"
      " some of the groups at a time, or with larger blocks."
    )
  return rows


def lane_block(size: int, block: int) -> int:
  """A block along lanes that reaches hardly beyond an axis.

  It is in whole tiles: its place is known at run time only.
  """
  return min(block, -(-size // tiles.LANES) * tiles.LANES)


def kernel(
  body: Callable[..., None],
  *,
  problem: GroupedProduct,
  blocks: Blocks,
  out: jax.ShapeDtypeStruct,
  scratch: Sequence[Any],
  name: str,
) -> launch.Kernel:
  """A kernel on all TensorCores with the VMEM that the blocks need."""
  chip = place.current_chip()
  needed = grouped_matmul_blocks.vmem_bytes(problem, blocks)
  return launches.kernel(
    body,
    out=out,
    scratch=scratch,
    vmem_limit_bytes=vmem_limit_bytes(needed, chip),
    name=name,
  )


def zeros(x: jax.Array, out: jax.ShapeDtypeStruct) -> jax.Array:
  """Zeros that vary over the devices as x does."""
  return _compat.varying_as(jax.typeof(x), jnp.zeros(out.shape, out.dtype))
