"""The gradient of the weights of a grouped matrix product."""

import functools
import math
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from coremesh import _compat, errors, place
from coremesh.kernels import checks, costs
from coremesh.kernels._grouped import gradient_body
from coremesh.kernels._grouped.blocks import GroupedProduct
from coremesh.kernels._grouped.call import as_sizes, check_gradient, even_case
from coremesh.kernels._grouped.launch import (
  blocks_of,
  kernel,
  lane_block,
  rows_in_blocks,
  zeros,
)
from coremesh.kernels._matmul.blocks import Blocks
from coremesh.kernels._matmul.call import default_out_dtype, sum_dtype
from coremesh.kernels.blocks import (
  LANES,
  copied_rows,
  tile_rows,
  with_copied_rows,
)
from coremesh.spec import Case, KernelSpec

_SEARCHED = (
  None,
  *(
    Blocks(rows=rows, columns=columns, inner=inner, split=split)
    for rows in (1024, 2048)
    for columns in (768, 1024, 2048)
    for inner in (512, 1024, 2048)
    for split in ("rows", "columns")
  ),
)


def grouped_weight_gradient(
  x: jax.Array,
  d: jax.Array,
  group_sizes: jax.Array,
  *,
  out_dtype: Any = None,
  precision: Any = None,
  blocks: Blocks | None = None,
) -> jax.Array:
  """x.T @ d of the rows of each group: a gradient of `grouped_matmul`.

  1. The scalar core lists which group has rows in which block of rows.
  2. For each block of the output the list is walked, and the products of the
     rows of a group summed in VMEM, in float32 or int32.
  3. The cores share the blocks of the output.

  Reads x once for each block of columns of d, d once for each of x, and writes
  the output once. VMEM holds two blocks of each array and the sum.

  Args:
    x: [rows, K], as for `grouped_matmul`.
    d: [rows, N] of the same dtype.
    group_sizes: int32[groups], as there. Rows after the last group count for
      nothing, whatever is in them.
    out_dtype: default that of x; int32 for int8.
    precision: of float32 products: None, a `jax.lax.Precision` or its name.
    blocks: of [K, N] of the output, `inner` of the rows that are summed;
      default the fastest by a model of the chip.

  Returns:
    [groups, K, N] of `out_dtype`, 0 for a group without rows.

  Raises:
    ShapeError, DTypeError: as `grouped_matmul`.
  """
  group_sizes = as_sizes(group_sizes)
  check_gradient(x, d, group_sizes)
  name = "grouped_weight_gradient"
  checks.is_blocks(f"blocks of {name}", blocks, Blocks)
  precision = checks.checked_precision(f"precision of {name}", precision)
  dtype = checks.checked_out_dtype(
    f"out_dtype of {name}", out_dtype, default=default_out_dtype(x)
  )
  arrays = (jnp.asarray(group_sizes), x, d)
  group_sizes, x, d = _compat.varying_together(arrays)
  out = jax.ShapeDtypeStruct(
    (group_sizes.shape[0], x.shape[1], d.shape[1]), dtype
  )
  if 0 in (*out.shape, x.shape[0]):
    return zeros(x, out)
  chip = place.current_chip()
  problem = GroupedProduct(
    rows=x.shape[0],
    columns=d.shape[1],
    inner=x.shape[1],
    num_groups=group_sizes.shape[0],
    in_bytes=x.dtype.itemsize,
    out_bytes=dtype.itemsize,
    row_tile=tile_rows([x.dtype]),
    is_gradient=True,
  )
  blocks = blocks_of(problem, blocks)
  if blocks.rows < x.shape[1] and blocks.rows % LANES:
    raise errors.ShapeError(
      f"rows of Blocks must be a multiple of {LANES} for a gradient of weights,"
      f" or at least all {x.shape[1]}; got {blocks.rows}."
    )
  plan = gradient_body.Plan(
    rows=rows_in_blocks(problem, blocks.inner),
    inner=lane_block(x.shape[1], blocks.rows),
    columns=lane_block(d.shape[1], blocks.columns),
    split=blocks.split,
    num_cores=chip.tensor_cores_per_device,
    precision=precision,
  )
  total = pltpu.VMEM((plan.inner, plan.columns), sum_dtype(x.dtype))
  body = functools.partial(gradient_body.gradient, plan)
  scratch = [*plan.rows.scratch, total]
  groups, inner, columns = out.shape
  gradient = kernel(
    body,
    problem=problem,
    blocks=blocks,
    out=out.update(shape=(groups, copied_rows(inner, columns), columns)),
    scratch=scratch,
    name=name,
  )
  x, d = with_copied_rows(x), with_copied_rows(d)
  return gradient(group_sizes, x, d)[:, :inner]


def grouped_weight_gradient_reference(
  x: jax.Array,
  d: jax.Array,
  group_sizes: jax.Array,
  *,
  out_dtype: Any = None,
  precision: Any = None,
) -> jax.Array:
  """What `grouped_weight_gradient` computes, in plain `jnp`."""
  stop = jnp.cumsum(group_sizes, dtype=jnp.int32)
  row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]

  def product(group):
    start = stop[group] - group_sizes[group]
    inside = (row >= start) & (row < stop[group])
    left, right = (jnp.where(inside, a, jnp.zeros_like(a)) for a in (x, d))
    return jnp.matmul(
      left.T,
      right,
      precision=precision,
      preferred_element_type=sum_dtype(x.dtype),
    )

  result = jax.lax.map(product, jnp.arange(group_sizes.shape[0]))
  return result.astype(out_dtype or default_out_dtype(x))


def _num_flops(x, d, group_sizes, **_) -> int:
  """Of groups that fill the rows."""
  return 2 * math.prod(x.shape) * d.shape[1]


def _num_bytes(x, d, group_sizes, **options) -> int:
  dtype = jnp.dtype(options.get("out_dtype") or default_out_dtype(x))
  cells = group_sizes.shape[0] * x.shape[1] * d.shape[1]
  return costs.bytes_of(x, d, group_sizes) + cells * dtype.itemsize


def _case(m: int, n: int, k: int, groups: int) -> Case:
  return even_case((m, k), (m, n), num_groups=groups)


SPEC = KernelSpec(
  name="grouped_weight_gradient",
  function=grouped_weight_gradient,
  reference=grouped_weight_gradient_reference,
  cases={
    "1000x512 by 8, 1000x384": _case(1000, 384, 512, 8),
    "8192x4096 by 8, 8192x14336": _case(8192, 14336, 4096, 8),
    "131072x2048 by 128, 131072x768": _case(131072, 768, 2048, 128),
  },
  search_space={"blocks": _SEARCHED},
  num_flops=_num_flops,
  num_bytes=_num_bytes,
)
