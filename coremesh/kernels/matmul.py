"""Matrix products with an epilogue, on all TensorCores of a device."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coremesh import _compat
from coremesh.kernels import checks, costs
from coremesh.kernels._matmul import launch
from coremesh.kernels._matmul.blocks import Blocks
from coremesh.kernels._matmul.call import (
  Call,
  Epilogue,
  as_weights,
  check,
  default_out_dtype,
  of_rank,
  parted,
  sum_dtype,
)
from coremesh.spec import Case, KernelSpec

_SEARCHED = (
  None,
  *(
    Blocks(
      rows=rows,
      columns=columns,
      inner=inner,
      split=split,
      part=min(512, columns),
    )
    for rows in (256, 512, 1024)
    for columns in (256, 512, 1024)
    for inner in (512, 1024, 2048, 4096)
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
     summed in VMEM over blocks of K, in float32 or int32. Of an output of one
     block each core sums over a part of K, and they add up their sums.
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
    precision: of float32 products: None, a `jax.lax.Precision` or its name.
    blocks: sizes of the blocks; default the fastest by a model of the chip.

  Returns:
    [..., M, N] of `out_dtype`.

  Raises:
    ShapeError: shapes that do not fit each other; an epilogue that takes other
      arguments, mixes elements, makes another shape or closes over an array;
      an option that is not as above.
    DTypeError: dtypes that differ, or that are not those above.

  Example:
    def gelu(total, bias):
      return jax.nn.gelu(total + bias)

    y = kernels.matmul(x, w, bias, epilogue=gelu)
  """
  checks.is_array("x of matmul", x)
  checks.is_blocks("blocks of matmul", blocks, Blocks)
  weights = as_weights(w)
  call = Call(
    epilogue=epilogue,
    out_dtype=checks.checked_out_dtype(
      "out_dtype of matmul", out_dtype, default=default_out_dtype(x)
    ),
    transpose_x=checks.checked_flag("transpose_x of matmul", transpose_x),
    transpose_w=checks.checked_flag("transpose_w of matmul", transpose_w),
    precision=checks.checked_precision("precision of matmul", precision),
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
  operands = tuple(of_rank(totals[0].ndim, operands))
  result = epilogue(*totals, *operands) if epilogue else totals[0]
  return result.astype(out_dtype or default_out_dtype(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: Call, *arrays: jax.Array) -> jax.Array:
  return _in_one_launch(call, *arrays)


def _forward(call, *arrays):
  return _matmul(call, *arrays), arrays  # So that it has a derivative too.


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
      operands = of_rank(gradient.ndim, operands)
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
    rows = math.prod(x.shape[:-1])  # -1 would be any, of no elements.
    x, d = (a.reshape(rows, a.shape[-1]) for a in (x, d))
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


def _in_one_launch(call: Call, *arrays: jax.Array) -> jax.Array:
  """The product, which under jax.vmap is one launch for all elements."""
  run = jax.custom_batching.custom_vmap(functools.partial(launch.run, call))

  @run.def_vmap
  def batched(size, is_batched, *arrays):
    return _in_one_launch(call, *_batched(call, size, is_batched, arrays)), True

  return run(*arrays)


def _batched(
  call: Call,
  size: int,
  is_batched: Sequence[bool],
  arrays: Sequence[jax.Array],
) -> list[jax.Array]:
  """The arrays of a product with one more leading axis.

  Those that jax.vmap does not batch broadcast along it.

  Args:
    call: what is asked for.
    size: of the new axis.
    is_batched: which arrays have it, in front.
    arrays: x, weights and operands.
  """
  flags = list(is_batched)
  factors = range(1 + call.num_weights)
  rank = max(arrays[i].ndim - flags[i] for i in factors)
  repeated = {0} if not any(flags[i] for i in factors) else set()
  if any(flags[i] for i in factors[1:]):  # All weights have one shape.
    repeated |= {i for i in factors[1:] if not flags[i]}
  result = []
  for i, (array, flag) in enumerate(zip(arrays, flags, strict=True)):
    if i in repeated:
      array, flag = jnp.broadcast_to(array, (size, *array.shape)), True
    if flag:
      missing = (1,) * (rank - (array.ndim - 1))
      array = array.reshape(size, *missing, *array.shape[1:])
    result.append(array)
  return result


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
  arrays = jax.tree.leaves(args)
  _, batch, m, n, _ = _sizes(*args, **options)
  dtype = options.get("out_dtype") or default_out_dtype(arrays[0])
  return costs.bytes_of(*arrays) + batch * m * n * jnp.dtype(dtype).itemsize


def _case(
  m: int, n: int, k: int, dtype: Any = jnp.bfloat16, batch: tuple[int, ...] = ()
) -> Case:
  shapes = (*batch, m, k), (*batch, k, n)
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
    "8192x28672x8192": _case(8192, 28672, 8192),
    "512x4096x4096": _case(512, 4096, 4096),
    "8x28672x8192": _case(8, 28672, 8192),
    "1000x3000x777": _case(1000, 3000, 777),
    "256x256x65536": _case(256, 256, 65_536),
    "8x128x65536": _case(8, 128, 65_536),
    "64x128^3": _case(128, 128, 128, batch=(64,)),
    "32x512x512x128": _case(512, 512, 128, batch=(32,)),
  },
  search_space={"blocks": _SEARCHED},
  num_flops=_num_flops,
  num_bytes=_num_bytes,
)
