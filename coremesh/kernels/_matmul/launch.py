"""From the arrays of a matrix product to the kernel's launch."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from coremesh import _compat, chips, errors, place, tiles
from coremesh.kernels import launches, layouts
from coremesh.kernels._matmul import body, choice, memory, streams
from coremesh.kernels._matmul.blocks import Blocks, Product, split_fault
from coremesh.kernels._matmul.call import (
  Call,
  default_out_dtype,
  of_rank,
  parted,
  sum_dtype,
)
from coremesh.kernels._matmul.plan import Axis, Plan

# Axes of the plan that blocks are shared along.
_SHARED = {"rows": "m", "columns": "n", "batch": "b", "inner": "k"}


def run(call: Call, *arrays: jax.Array) -> jax.Array:
  """The product and its epilogue, by one launch."""
  x, weights, operands = parted(call, arrays)
  batch, m, n, k = call.product(x, weights[0])
  shape = (*batch, m, n)
  if 0 in (*shape, k):
    return _without_sum(call, shape, arrays)
  if (rows := _as_rows(call, batch, arrays)) is not None:
    return run(call, *rows).reshape(shape)
  if _is_better_transposed(call, shape):
    turned = dataclasses.replace(
      call, transpose_x=not call.transpose_w, transpose_w=not call.transpose_x
    )
    return layouts.transposed(run(turned, *weights, x))
  call, x, weights = _as_they_lie(call, x, weights)
  return _launched(call, shape, k, x, weights, of_rank(2, operands))


def _is_better_transposed(call: Call, shape: tuple[int, ...]) -> bool:
  """Whether to compute the transpose: XLA would copy the product to it.

  Blocks that are given are not of that, and an epilogue may depend on which
  axis is which.
  """
  is_bare = call.epilogue is None and call.blocks is None
  return is_bare and layouts.lies_transposed(shape)


def _as_they_lie(call: Call, x: jax.Array, weights: Sequence[jax.Array]):
  """The factors turned to how XLA lays them out, so that it copies none.

  But for x if given blocks cut it where only the other way is allowed.
  """
  m = x.shape[-1 if call.transpose_x else -2]
  cut = call.blocks.rows if call.blocks else tiles.LANES
  if layouts.lies_transposed(x.shape) and (cut >= m or cut % tiles.LANES == 0):
    call = dataclasses.replace(call, transpose_x=not call.transpose_x)
    x = layouts.transposed(x)
  if layouts.lies_transposed(weights[0].shape):
    call = dataclasses.replace(call, transpose_w=not call.transpose_w)
    weights = [layouts.transposed(w) for w in weights]
  return call, x, weights


def product_of_types(x: Any, w: Any, **options: Any) -> Product:
  """What the blocks of `matmul(x, w, **options)` are chosen for.

  Args:
    x, w: arrays, or their types, that have leading axes both or not at all.
      Their product is of a shape that XLA does not lay out transposed.
    **options: of matmul, without an epilogue.
  """
  options.setdefault("out_dtype", default_out_dtype(x))
  call = Call(**options)
  batch, m, n, k = call.product(x, w)
  flips = [layouts.lies_transposed(array.shape) for array in (x, w)]
  call = dataclasses.replace(
    call,
    transpose_x=call.transpose_x != flips[0],
    transpose_w=call.transpose_w != flips[1],
  )
  return _product(call, (*batch, m, n), k, x.dtype)


def _product(
  call: Call, shape: Sequence[int], k: int, dtype: Any, operands: Any = ()
) -> Product:
  """What the blocks are chosen for.

  Args:
    call: what is asked for.
    shape: of the output.
    k: the size of the axis that is summed.
    dtype: of x and w.
    operands: of the epilogue.
  """
  *batch, m, n = shape
  full = [o for o in operands if o.shape[-2:] == (m, n)]
  return Product(
    batch=math.prod(batch),
    rows=m,
    columns=n,
    inner=k,
    num_weights=call.num_weights,
    dtype=jnp.dtype(dtype).name,
    out_dtype=jnp.dtype(call.out_dtype).name,
    transpose_x=call.transpose_x,
    transpose_w=call.transpose_w,
    has_epilogue=call.epilogue is not None,
    operand_bytes=sum(o.dtype.itemsize for o in full),
  )


def _launched(call: Call, shape, k: int, x, weights, operands) -> jax.Array:
  chip = place.current_chip()
  product = _product(call, shape, k, x.dtype, operands)
  blocks = call.blocks or choice.choose(product, chip)
  _check_blocks(product, blocks)
  plan = _plan(call, shape[:-2], product, blocks, chip)
  out = jax.ShapeDtypeStruct(shape, call.out_dtype)
  limit = memory.vmem_limit_bytes(
    memory.vmem_bytes(product, blocks, chip),
    chip,
    spilled_bytes=memory.spilled_bytes(product, blocks, chip),
  )
  kernel = launches.kernel(
    functools.partial(body.product, plan),
    out=out,
    scratch=body.scratch(plan, x, weights[0], operands, out),
    vmem_limit_bytes=limit,
    name="matmul",
  )
  return kernel(x, *weights, *operands)


def _plan(
  call: Call, batch, product: Product, blocks: Blocks, chip: chips.Chip
) -> Plan:
  chunks = streams.first_chunks(product, blocks, chip)
  columns = blocks.columns_at_a_time
  num_parts = -(-min(product.columns, blocks.columns) // columns)
  whole_part = columns if num_parts > 1 else tiles.LANES
  return Plan(
    call=call,
    batch=tuple(batch),
    m=_axis(product.rows, blocks.rows, product.row_tile),
    n=_axis(product.columns, blocks.columns, whole_part, num_parts),
    k=_axis(product.inner, blocks.inner, tiles.LANES, len(chunks)),
    columns=columns,
    num_strips=streams.num_strips(product, blocks, chip),
    chunks=chunks,
    split=_SHARED[blocks.split],
    num_cores=chip.tensor_cores_per_device,
    num_slots=streams.num_slots(product, blocks, chip),
    is_small=streams.blocks_in_latency(product, blocks, chip) > 1,
  )


def _axis(size: int, block: int, tile: int, num_parts: int = 1) -> Axis:
  """An axis: one block of all of it, if it fits and is not taken apart."""
  if block >= size and num_parts == 1:
    return Axis(size=size, block=size)
  return Axis(size=size, block=min(block, -(-size // tile) * tile))


def _check_blocks(product: Product, blocks: Blocks) -> None:
  if blocks.rows < product.rows and blocks.rows % product.row_tile:
    raise errors.ShapeError(
      f"rows of Blocks must be a multiple of {product.row_tile} for"
      f" {product.dtype} with transpose_x={product.transpose_x}, or at least"
      f" all {product.rows}; got {blocks.rows}."
    )
  if fault := split_fault(product, blocks):
    raise errors.ShapeError(f"split={blocks.split!r} of Blocks {fault}.")


def _without_sum(call: Call, shape: tuple[int, ...], arrays) -> jax.Array:
  """A product without elements, or whose sums have no terms."""
  x, _, operands = parted(call, arrays)
  zeros = _compat.varying_as(
    jax.typeof(x), jnp.zeros(shape, sum_dtype(x.dtype))
  )
  if call.epilogue is not None and 0 not in shape:
    operands = of_rank(zeros.ndim, operands)
    zeros = call.epilogue(*[zeros] * call.num_weights, *operands)
  return zeros.astype(call.out_dtype)


def _as_rows(call: Call, batch, arrays) -> Sequence[jax.Array] | None:
  """The arrays with the leading axes of x as rows, if that is the same."""
  x, weights, operands = parted(call, arrays)
  if not batch or call.transpose_x or any(w.ndim > 2 for w in weights):
    return None
  rows = []
  for o in operands:
    if o.ndim < 2 or o.shape[:-1] == (1,) * (o.ndim - 1):
      rows.append(o.reshape(o.shape[-1:]) if o.ndim else o)
    elif o.shape[:-1] == x.shape[:-1]:
      rows.append(o.reshape(-1, o.shape[-1]))
    else:
      return None
  return [x.reshape(-1, x.shape[-1]), *weights, *rows]
