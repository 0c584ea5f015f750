"""Matrix products of rows with the weights of their group."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import _compat, place
from coremesh.kernels import checks, costs
from coremesh.kernels._grouped import body as grouped_matmul_body
from coremesh.kernels._grouped.blocks import GroupedProduct
from coremesh.kernels._grouped.call import Call, as_sizes, check, even_case
from coremesh.kernels._grouped.launch import (
  blocks_of,
  kernel,
  lane_block,
  rows_in_blocks,
  zeros,
)
from coremesh.kernels._matmul.blocks import Blocks
from coremesh.kernels._matmul.call import (
  Epilogue,
  as_weights,
  default_out_dtype,
  sum_dtype,
)
from coremesh.kernels.blocks import copied_rows, tile_rows, with_copied_rows
from coremesh.kernels.grouped_weight_gradient import grouped_weight_gradient
from coremesh.spec import Case, KernelSpec

_SEARCHED = (
  None,
  *(
    Blocks(rows=rows, columns=columns, inner=inner, split=split)
    for rows in (256, 512, 1024)
    for columns in (384, 768, 1024, 2048)
    for inner in (2048, 4096)
    for split in ("rows", "columns")
  ),
)


def grouped_matmul(
  x: jax.Array,
  w: jax.Array | Sequence[jax.Array],
  group_sizes: jax.Array,
  *,
  epilogue: Epilogue | None = None,
  out_dtype: Any = None,
  transpose_w: bool = False,
  precision: Any = None,
  blocks: Blocks | None = None,
) -> jax.Array:
  """Each row of x times the weights of its group; rows lie group after group.

  1. The scalar core lists which group has rows in which block of rows, from
     sizes that are known at run time only.
  2. For each block of columns the list is walked: of a block the rows of one
     group are multiplied, in pieces of 512, 128 and 64 rows, and stored; a
     block that groups share stays in VMEM until all have been there.
  3. The cores share the blocks of columns, or those of rows that are in groups,
     so that each does as much whatever the sizes are.

  Reads x once for each block of columns, each weight once if K is in one block,
  and writes the output once. VMEM holds two blocks of each array, and the sums
  if K is in several.

  Args:
    x: [rows, K] in float32, bfloat16, int8 or an 8-bit float. In HBM.
    w: [groups, K, N], or [groups, N, K] with `transpose_w`, of the same dtype.
      A sequence of such arrays makes a product of each, all for `epilogue`.
    group_sizes: int32[groups], the rows of each group, 0 or more. Their sum may
      be less than the rows: those after it are 0 in the result, whatever is in
      x and even with an epilogue. Sizes that are not known until run time
      cannot be checked: one below 0 then counts as 0, and groups end where x
      ends.
    epilogue: a function of a float32 or int32 block of each product to a block
      of that shape, by jnp operations on single elements. It may not close
      over arrays. None: the product itself.
    out_dtype: default that of x; int32 for int8.
    transpose_w: whether w is given with its last two axes swapped.
    precision: of float32 products: None, a `jax.lax.Precision` or its name.
    blocks: sizes of the blocks; default the fastest by a model of the chip.

  Returns:
    [rows, N] of `out_dtype`. The gradient of a group without rows is 0, and
    rows after the last group are in no gradient.

  Raises:
    ShapeError: shapes that do not fit each other; sizes that are known and
      negative or sum to more than the rows; more groups than SMEM holds; an
      epilogue or option as `matmul` refuses it.
    DTypeError: dtypes that differ, or that are not those above.

  Example:
    y = kernels.grouped_matmul(x, w, jnp.array([8, 0, 120], jnp.int32))
  """
  checks.is_array("x", x)
  checks.is_blocks("blocks of grouped_matmul", blocks, Blocks)
  weights = as_weights(w)
  group_sizes = as_sizes(group_sizes)
  call = Call(
    epilogue=epilogue,
    out_dtype=checks.checked_out_dtype(
      "out_dtype of grouped_matmul", out_dtype, default=default_out_dtype(x)
    ),
    transpose_w=checks.checked_flag(
      "transpose_w of grouped_matmul", transpose_w
    ),
    precision=checks.checked_precision(
      "precision of grouped_matmul", precision
    ),
    blocks=blocks,
    num_weights=len(weights),
  )
  check(call, x, weights, group_sizes)
  arrays = (jnp.asarray(group_sizes), x, *weights)
  return _product(call, *_compat.varying_together(arrays))


def grouped_matmul_reference(
  x: jax.Array,
  w: jax.Array | Sequence[jax.Array],
  group_sizes: jax.Array,
  *,
  epilogue: Epilogue | None = None,
  out_dtype: Any = None,
  transpose_w: bool = False,
  precision: Any = None,
) -> jax.Array:
  """What `grouped_matmul` computes, in plain `jnp`; arguments as there."""
  stop = jnp.cumsum(group_sizes, dtype=jnp.int32)
  row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
  is_used = row < jnp.sum(group_sizes, dtype=jnp.int32)
  x = jnp.where(is_used, x, jnp.zeros_like(x))

  def product(w):
    def add(total, group):
      part = jnp.matmul(
        x,
        w[group].T if transpose_w else w[group],
        precision=precision,
        preferred_element_type=total.dtype,
      )
      start = stop[group] - group_sizes[group]
      inside = (row >= start) & (row < stop[group])
      return jnp.where(inside, part, total), None

    shape = x.shape[0], w.shape[1 if transpose_w else 2]
    total = jnp.zeros(shape, sum_dtype(x.dtype))
    return jax.lax.scan(add, total, jnp.arange(w.shape[0]))[0]

  totals = [product(a) for a in as_weights(w)]
  result = epilogue(*totals) if epilogue else totals[0]
  result = jnp.where(is_used, result, jnp.zeros_like(result))
  return result.astype(out_dtype or default_out_dtype(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: Call, *arrays: jax.Array) -> jax.Array:
  return _forward_kernel(call, *arrays)


def _forward(call, *arrays):
  return _forward_kernel(call, *arrays), arrays


def _backward(call, arrays, gradient):
  sizes, x, *weights = arrays
  no_sizes = np.zeros(sizes.shape, jax.dtypes.float0)
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return no_sizes, *(
      np.zeros(a.shape, jax.dtypes.float0) for a in (x, *weights)
    )
  d_totals = [gradient]
  if call.epilogue is not None:
    bare = dataclasses.replace(
      call, epilogue=None, out_dtype=sum_dtype(x.dtype), num_weights=1
    )
    totals = [_product(bare, sizes, x, w) for w in weights]

    def finish(*totals):
      return call.epilogue(*totals).astype(call.out_dtype)

    d_totals = jax.vjp(finish, *totals)[1](gradient)
  d_x, d_weights = [], []
  for w, d in zip(weights, d_totals, strict=True):
    d = d.astype(x.dtype)
    options = dict(precision=call.precision, out_dtype=x.dtype)
    d_x.append(
      grouped_matmul(d, w, sizes, transpose_w=not call.transpose_w, **options)
    )
    left, right = (d, x) if call.transpose_w else (x, d)
    d_weights.append(grouped_weight_gradient(left, right, sizes, **options))
  return no_sizes, sum(d_x[1:], d_x[0]), *d_weights


_product.defvjp(_forward, _backward)


def _forward_kernel(call: Call, *arrays: jax.Array) -> jax.Array:
  sizes, x, *weights = arrays
  out = jax.ShapeDtypeStruct(
    (x.shape[0], call.columns(weights[0])), call.out_dtype
  )
  if 0 in (*out.shape, *sizes.shape):
    return zeros(x, out)
  if not x.shape[1]:
    return _without_terms(call, sizes, x, out)
  chip = place.current_chip()
  problem = GroupedProduct(
    rows=x.shape[0],
    columns=out.shape[1],
    inner=x.shape[1],
    num_groups=sizes.shape[0],
    num_weights=call.num_weights,
    in_bytes=x.dtype.itemsize,
    out_bytes=call.out_dtype.itemsize,
    row_tile=tile_rows([x.dtype, call.out_dtype]),
  )
  blocks = blocks_of(problem, call.blocks)
  plan = grouped_matmul_body.Plan(
    call=call,
    rows=rows_in_blocks(problem, blocks.rows),
    columns=lane_block(out.shape[1], blocks.columns),
    inner=min(blocks.inner, x.shape[1]),
    size=x.shape[1],
    split=blocks.split,
    num_cores=chip.tensor_cores_per_device,
  )
  total = pltpu.VMEM((plan.rows.block, plan.columns), sum_dtype(x.dtype))
  num_totals = call.num_weights if plan.num_steps > 1 else 0
  body = functools.partial(grouped_matmul_body.product, plan)
  scratch = [*plan.rows.scratch, *[total] * num_totals]
  product = kernel(
    body,
    problem=problem,
    blocks=blocks,
    out=out.update(shape=(copied_rows(*out.shape), out.shape[1])),
    scratch=scratch,
    name="grouped_matmul",
  )
  if call.transpose_w:  # N lies along rows, and is cut in blocks.
    weights = map(with_copied_rows, weights)
  return product(sizes, with_copied_rows(x), *weights)[: x.shape[0]]


def _without_terms(call: Call, sizes, x, out) -> jax.Array:
  """A product along an axis without elements."""
  zero = jnp.zeros(out.shape, sum_dtype(x.dtype))
  zero = _compat.varying_as(jax.typeof(x), zero)
  if call.epilogue is None:
    return zero.astype(out.dtype)
  row = jnp.arange(out.shape[0], dtype=jnp.int32)[:, None]
  used = row < jnp.maximum(sizes, 0).sum()
  result = call.epilogue(*[zero] * call.num_weights)
  return jnp.where(used, result, 0).astype(out.dtype)


def _num_flops(x, w, group_sizes, **options) -> int:
  """Of groups that fill the rows."""
  weights = as_weights(w)
  call = Call(transpose_w=options.get("transpose_w", False))
  return 2 * len(weights) * math.prod(x.shape) * call.columns(weights[0])


def _num_bytes(x, w, group_sizes, **options) -> int:
  weights = as_weights(w)
  call = Call(transpose_w=options.get("transpose_w", False))
  dtype = jnp.dtype(options.get("out_dtype") or default_out_dtype(x))
  inputs = costs.bytes_of(x, *weights, group_sizes)
  return inputs + x.shape[0] * call.columns(weights[0]) * dtype.itemsize


def _case(m: int, n: int, k: int, groups: int) -> Case:
  return even_case((m, k), (groups, k, n), num_groups=groups)


SPEC = KernelSpec(
  name="grouped_matmul",
  function=grouped_matmul,
  reference=grouped_matmul_reference,
  cases={
    "1000x512 by 8 of 512x384": _case(1000, 384, 512, 8),
    "8192x4096 by 8 of 4096x14336": _case(8192, 14336, 4096, 8),
    "131072x2048 by 128 of 2048x768": _case(131072, 768, 2048, 128),
  },
  search_space={"blocks": _SEARCHED},
  num_flops=_num_flops,
  num_bytes=_num_bytes,
)
