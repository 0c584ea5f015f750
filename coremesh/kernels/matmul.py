"""Matrix products with an epilogue, on all TensorCores of a device."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import _compat, errors, launch, place
from coremesh.kernels import matmul_blocks, matmul_body
from coremesh.kernels.matmul_blocks import Blocks, Product
from coremesh.kernels.matmul_body import TILE, Plan
from coremesh.kernels.matmul_call import (
  Call,
  Epilogue,
  as_weights,
  check,
  default_out_dtype,
  parted,
  sum_dtype,
)
from coremesh.partition import num_blocks
from coremesh.spec import Case, KernelSpec

_SEARCHED = (
  None,
  *(
    Blocks(rows=rows, columns=columns, inner=inner, split=split)
    for rows in (256, 512, 1024)
    for columns in (256, 512, 1024)
    for inner in (512, 1024, 2048)
    for split in ("rows", "columns")
  ),
)


def matmul(
  x: jax.Array,
  w: jax.Array | Sequence[jax.Array],
  *operands: jax.Array,
  epilogue: Epilogue | None = None,
  out_dtype: Any = None,
  transpose_x: bool = False,
  transpose_w: bool = False,
  precision: Any = None,
  blocks: Blocks | None = None,
) -> jax.Array:
  """x @ w, then an epilogue, without the product going through HBM.

  1. The blocks of the output are shared out over the TensorCores; each is
     summed in VMEM over blocks of K, in float32 or int32.
  2. At the last block of K the epilogue is applied to the sum, once, and its
     result is rounded to `out_dtype`.
  3. The next blocks are copied meanwhile. Of a last block of K that is partial
     only what is inside the arrays is multiplied.

  Reads x once for each block of columns and w once for each block of rows;
  writes the output once. VMEM holds two blocks of each array and the sum.

  Args:
    x: [..., M, K], or [..., K, M] with `transpose_x`: float32, bfloat16, int8
      or an 8-bit float. In HBM.
    w: [..., K, N], or [..., N, K] with `transpose_w`, of the same dtype. The
      leading axes of x and w broadcast as in `jnp.matmul`. A sequence of such
      arrays makes a product of each, all for `epilogue`.
    *operands: more arguments of the epilogue, each of a shape that broadcasts
      to [..., M, N].
    epilogue: a function of a float32 or int32 block [m, n] of each product and
      of a block of each operand (1 along the axes it broadcasts along) to a
      block [m, n], by jnp operations on single elements. It may not close over
      arrays. None: the product itself.
    out_dtype: default that of x; int32 for int8.
    transpose_x: whether x is given with its last two axes swapped.
    transpose_w: whether w is.
    precision: of float32 products, as for `jnp.dot`.
    blocks: sizes of the blocks; default the fastest by a model of the chip.

  Returns:
    [..., M, N] of `out_dtype`.

  Raises:
    ShapeError: shapes that do not fit each other.
    DTypeError: dtypes that differ, or that are not those above.

  Example:
    def gelu(total, bias):
      return jax.nn.gelu(total + bias)

    y = kernels.matmul(x, w, bias, epilogue=gelu)
  """
  weights = as_weights(w)
  call = Call(
    epilogue=epilogue,
    out_dtype=jnp.dtype(out_dtype or default_out_dtype(x)),
    transpose_x=transpose_x,
    transpose_w=transpose_w,
    precision=precision,
    blocks=blocks,
    num_weights=len(weights),
  )
  check(call, x, weights, operands)
  arrays = _compat.varying_together((x, *weights, *operands))
  return _matmul(call, *arrays)


def matmul_reference(
  x: jax.Array,
  w: jax.Array | Sequence[jax.Array],
  *operands: jax.Array,
  epilogue: Epilogue | None = None,
  out_dtype: Any = None,
  transpose_x: bool = False,
  transpose_w: bool = False,
  precision: Any = None,
) -> jax.Array:
  """What `matmul` computes, in plain `jnp`; arguments as there."""
  weights = as_weights(w)
  x_ = jnp.swapaxes(x, -1, -2) if transpose_x else x
  totals = [
    jnp.matmul(
      x_,
      jnp.swapaxes(a, -1, -2) if transpose_w else a,
      precision=precision,
      preferred_element_type=sum_dtype(x.dtype),
    )
    for a in weights
  ]
  operands = tuple(_of_rank(totals[0].ndim, operands))
  result = epilogue(*totals, *operands) if epilogue else totals[0]
  return result.astype(out_dtype or default_out_dtype(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: Call, *arrays: jax.Array) -> jax.Array:
  return _forward_kernel(call, *arrays)


def _forward(call, *arrays):
  return _forward_kernel(call, *arrays), arrays


def _backward(call, arrays, gradient):
  x, weights, operands = parted(call, arrays)
  bare = dataclasses.replace(
    call, epilogue=None, out_dtype=sum_dtype(x.dtype), num_weights=1
  )
  if call.epilogue is None:
    d_totals, d_operands = [gradient], []
  else:
    totals = [_matmul(bare, x, w) for w in weights]

    def finish(*operands):
      operands = _of_rank(gradient.ndim, operands)
      return call.epilogue(*operands).astype(call.out_dtype)

    _, pull = jax.vjp(finish, *totals, *operands)
    pulled = pull(gradient)
    d_totals, d_operands = pulled[: len(totals)], pulled[len(totals) :]
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return *(_no_gradient(a) for a in (x, *weights)), *d_operands
  d_x = []
  d_weights = []
  for w, d in zip(weights, d_totals, strict=True):
    d_x.append(_input_gradient(call, d.astype(x.dtype), x, w))
    d_weights.append(_weight_gradient(call, d.astype(x.dtype), x, w))
  return sum(d_x[1:], d_x[0]), *d_weights, *d_operands


_matmul.defvjp(_forward, _backward)


def _input_gradient(call, d, x, w) -> jax.Array:
  options = dict(precision=call.precision, out_dtype=x.dtype)
  if call.transpose_x:
    full = matmul(
      w, d, transpose_x=call.transpose_w, transpose_w=True, **options
    )
  else:
    full = matmul(d, w, transpose_w=not call.transpose_w, **options)
  return _summed_to(full, x)


def _weight_gradient(call, d, x, w) -> jax.Array:
  options = dict(precision=call.precision, out_dtype=w.dtype)
  if w.ndim == 2 and not call.transpose_x:
    x, d = (a.reshape(-1, a.shape[-1]) for a in (x, d))
  if call.transpose_w:
    full = matmul(
      d, x, transpose_x=True, transpose_w=call.transpose_x, **options
    )
  else:
    full = matmul(x, d, transpose_x=not call.transpose_x, **options)
  return _summed_to(full, w)


def _summed_to(gradient: jax.Array, like: jax.Array) -> jax.Array:
  """Summed over the leading axes along which `like` was broadcast."""
  extra = gradient.ndim - like.ndim
  lost = [
    i
    for i in range(gradient.ndim - 2)
    if i < extra or gradient.shape[i] != like.shape[i - extra]
  ]
  return (
    gradient.sum(lost, dtype=jnp.float32).astype(like.dtype).reshape(like.shape)
  )


def _no_gradient(array: jax.Array) -> np.ndarray:
  return np.zeros(array.shape, jax.dtypes.float0)


def _forward_kernel(call: Call, *arrays: jax.Array) -> jax.Array:
  x, weights, operands = parted(call, arrays)
  batch, m, n, k = call.product(x, weights[0])
  out_shape = (*batch, m, n)
  if 0 in (*out_shape, k):
    return _without_sum(call, out_shape, arrays)
  if (rows := _as_rows(call, batch, arrays)) is not None:
    return _forward_kernel(call, *rows).reshape(out_shape)
  chip = place.current_chip()
  problem = Product(
    batch=math.prod(batch),
    rows=m,
    columns=n,
    inner=k,
    num_weights=call.num_weights,
    in_bytes=x.dtype.itemsize,
    out_bytes=call.out_dtype.itemsize,
    full_bytes=sum(
      o.dtype.itemsize for o in operands if o.shape[-2:] == (m, n)
    ),
    row_tile=TILE if call.transpose_x else 32 // x.dtype.itemsize,
  )
  blocks = call.blocks or matmul_blocks.choose(problem, chip)
  if blocks.rows < m and blocks.rows % problem.row_tile:
    raise errors.ShapeError(
      f"rows of Blocks must be a multiple of {problem.row_tile} for"
      f" {x.dtype} with transpose_x={call.transpose_x}, or at least all {m};"
      f" got {blocks.rows}."
    )
  plan = Plan(
    call=call,
    rank=len(out_shape),
    grid=(
      *batch,
      num_blocks(m, blocks.rows),
      num_blocks(n, blocks.columns),
      num_blocks(k, blocks.inner),
    ),
    blocks={
      "m": min(m, blocks.rows),
      "n": min(n, blocks.columns),
      "k": min(k, blocks.inner),
    },
    split="m" if blocks.split == "rows" else "n",
    inner=k,
  )
  operands = _of_rank(2, operands)
  sum_type = pltpu.VMEM(
    (plan.blocks["m"], plan.blocks["n"]), sum_dtype(x.dtype)
  )
  kernel = launch.kernel(
    functools.partial(matmul_body.product, plan, num_operands=len(operands)),
    mesh=chip.tensor_cores("core"),
    out=jax.ShapeDtypeStruct(out_shape, call.out_dtype),
    scratch=[sum_type] * (call.num_weights if plan.num_steps > 1 else 0),
    compiler_params=pltpu.CompilerParams(
      vmem_limit_bytes=matmul_blocks.vmem_limit_bytes(problem, blocks, chip)
    ),
    num_links=0,
    name="matmul",
  )
  return kernel(x, *weights, *operands)


def _of_rank(rank: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """The arrays with at least `rank` axes."""
  return [a.reshape((1,) * (rank - a.ndim) + a.shape) for a in arrays]


def _without_sum(call: Call, shape: tuple[int, ...], arrays) -> jax.Array:
  """A product without elements, or whose sums have no terms."""
  x, _, operands = parted(call, arrays)
  zeros = _compat.varying_as(
    jax.typeof(x), jnp.zeros(shape, sum_dtype(x.dtype))
  )
  if call.epilogue is not None and 0 not in shape:
    operands = _of_rank(zeros.ndim, operands)
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


def _sizes(x, w, *operands, **options) -> tuple[int, int, int, int, int]:
  """Products, leading elements, M, N and K of a call."""
  weights = as_weights(w)
  call = Call(
    transpose_x=options.get("transpose_x", False),
    transpose_w=options.get("transpose_w", False),
    num_weights=len(weights),
  )
  batch, m, n, k = call.product(x, weights[0])
  return len(weights), math.prod(batch), m, n, k


def _num_flops(*args, **options) -> int:
  products, batch, m, n, k = _sizes(*args, **options)
  return 2 * products * batch * m * n * k


def _num_bytes(*args, **options) -> int:
  x, *rest = jax.tree.leaves(args)
  _, batch, m, n, _ = _sizes(*args, **options)
  dtype = options.get("out_dtype") or default_out_dtype(x)
  inputs = sum(math.prod(a.shape) * a.dtype.itemsize for a in (x, *rest))
  return inputs + batch * m * n * jnp.dtype(dtype).itemsize


def _case(m: int, n: int, k: int, dtype: Any = jnp.bfloat16) -> Case:
  shapes = (m, k), (k, n)
  return Case(args=tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes))


SPEC = KernelSpec(
  name="matmul",
  function=matmul,
  reference=matmul_reference,
  cases={
    **{f"{n}^3": _case(n, n, n) for n in (1024, 2048, 4096, 8192)},
    "4096^3 f32": _case(4096, 4096, 4096, jnp.float32),
    "4096^3 int8": _case(4096, 4096, 4096, jnp.int8),
    "8192x14336x4096": _case(8192, 14336, 4096),
    "8192x4096x14336": _case(8192, 4096, 14336),
    "8x28672x8192": _case(8, 28672, 8192),
    "1000x3000x777": _case(1000, 3000, 777),
  },
  search_space={"blocks": _SEARCHED},
  num_flops=_num_flops,
  num_bytes=_num_bytes,
)
