"""Softmax and log-softmax along the last axis, of scores some of which count.

The scores that count are those a mask is True for, and are not -inf. A row in
which none does has the softmax 0 and the log-softmax -inf, not NaN, and passes
no gradient. No finite number stands for -inf, so that no score is too low.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from coremesh import _compat
from coremesh.kernels import checks, costs
from coremesh.kernels._rows import rows as rows
from coremesh.kernels._rows.operations import (
  Chunk,
  RowOperation,
  Sweep,
  over_lanes,
  repeated,
  sum_sweep,
)

_INFINITY = float("inf")


def softmax(
  x: jax.Array,
  mask: jax.Array | None = None,
  *,
  block_bytes: int | None = None,
) -> jax.Array:
  """exp(x) / sum(exp(x)) along the last axis.

  Each row is read from HBM once. One sweep in VMEM keeps, in every lane, the
  largest score so far and the sum of exponentials relative to it; the lanes are
  joined; a second sweep writes. Rows too wide for VMEM are read twice.

  An element is off by at most 4 roundings, and (width / 512 + 12) of the sum's,
  before it is rounded to the dtype of `x`. Moves the bytes of `x` twice, and of
  `mask` once; holds 4 * block_bytes in VMEM.

  Args:
    x: float32 or bfloat16 [..., width] in HBM, of one device.
    mask: bool, which scores count; broadcasts to the shape of `x`. What `x`
      holds where it is False, NaN for instance, changes nothing.
    block_bytes: of `x` in VMEM at once; default `blocks.BLOCK_BYTES`.

  Returns:
    As `x`; rows in which no score counts hold 0. Its gradient is a kernel, too.

  Raises:
    ShapeError, DTypeError: an argument that is not as above.

  Source: Milakov and Gimelshein, "Online normalizer calculation for softmax",
    arXiv:1805.02867.
  """
  return _call(_softmax, x, mask, block_bytes)


def log_softmax(
  x: jax.Array,
  mask: jax.Array | None = None,
  *,
  block_bytes: int | None = None,
) -> jax.Array:
  """x - log(sum(exp(x))) along the last axis.

  The algorithm, arguments, errors, bytes and VMEM are those of `softmax`.

  Returns:
    As `x`; -inf for scores that do not count. Its gradient is a kernel, too.
  """
  return _call(_log_softmax, x, mask, block_bytes)


def softmax_reference(x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
  """`softmax` in plain `jnp`."""
  scores = _scores_reference(x, mask)
  largest = jnp.max(scores, axis=-1, keepdims=True, initial=-_INFINITY)
  largest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0, largest))
  terms = jnp.exp(scores - largest)
  total = jnp.sum(terms, axis=-1, keepdims=True)
  return (terms / jnp.where(total == 0, 1, total)).astype(x.dtype)


def log_softmax_reference(
  x: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
  """`log_softmax` in plain `jnp`."""
  scores = _scores_reference(x, mask)
  largest = jnp.max(scores, axis=-1, keepdims=True, initial=-_INFINITY)
  largest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0, largest))
  total = jnp.sum(jnp.exp(scores - largest), axis=-1, keepdims=True)
  log_total = jnp.log(jnp.where(total == 0, 1, total))
  y = jnp.where(jnp.isneginf(scores), -_INFINITY, scores - largest - log_total)
  return y.astype(x.dtype)


def _scores_reference(x, mask):
  wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
  return wide if mask is None else jnp.where(mask, wide, -_INFINITY)


# --- the kernels ------------------------------------------------------------


def _scores(chunk: Chunk, x: jax.Array, *masks: jax.Array) -> jax.Array:
  """The scores that count; -inf for others, and beyond the row."""
  for mask in masks:
    x = jnp.where(mask != 0, x, -_INFINITY)
  return chunk.keep(x, -_INFINITY)


def _sum_of_exponentials(
  scores_of: Callable[[Chunk], jax.Array],
) -> Sweep:
  """Folds a row into its maximum, 0 if it is -inf, and sum(exp(x - that))."""

  def fold(chunk, _, so_far):
    largest, total = so_far
    scores = scores_of(chunk)
    new = jnp.maximum(largest, over_lanes(jnp.maximum, scores))
    base = _finite(new)
    terms = jnp.exp(scores - repeated(base, scores.shape[1]))
    total = total * jnp.exp(largest - base)
    return new, total + over_lanes(jnp.add, terms)

  def finish(_, so_far):
    largest, total = so_far
    base = _finite(jnp.max(largest, axis=1, keepdims=True))
    total = total * jnp.exp(largest - base)
    return base, jnp.sum(total, axis=1, keepdims=True)

  return Sweep(start=(-_INFINITY, 0.0), fold=fold, finish=finish)


def _finite(largest: jax.Array) -> jax.Array:
  # Without scores any finite number will do: what is left is exp(-inf) = 0.
  return jnp.where(largest == -_INFINITY, 0.0, largest)


def _write_softmax(chunk, known):
  base, total = known
  scale = jnp.where(total == 0, 0.0, 1 / total)
  return (jnp.exp(_scores(chunk, *chunk.values) - base) * scale,), ()


def _write_log_softmax(chunk, known):
  base, total = known
  return (_scores(chunk, *chunk.values) - base - _log(total),), ()


def _log(total: jax.Array) -> jax.Array:
  return jnp.where(total == 0, 0.0, jnp.log(total))


_SWEEP = _sum_of_exponentials(lambda chunk: _scores(chunk, *chunk.values))
_SOFTMAX = RowOperation(name="softmax", sweeps=(_SWEEP,), write=_write_softmax)
_LOG_SOFTMAX = RowOperation(
  name="log_softmax", sweeps=(_SWEEP,), write=_write_log_softmax
)


def _softmax_terms(chunk, _):
  y, dy = chunk.values
  # 0 * NaN would be NaN: what does not count takes no part.
  return (jnp.where(y == 0, 0.0, y * dy),)


def _write_softmax_grad(chunk, known):
  y, dy = chunk.values
  return (jnp.where(y == 0, 0.0, y * (dy - known[0])),), ()


_SOFTMAX_GRAD = RowOperation(
  name="softmax_grad",
  sweeps=(sum_sweep(_softmax_terms),),
  write=_write_softmax_grad,
)


def _log_softmax_terms(chunk, _):
  *scores, dy = chunk.values
  return (jnp.where(_scores(chunk, *scores) == -_INFINITY, 0.0, dy),)


def _write_log_softmax_grad(chunk, known):
  base, total, sum_dy = known
  *inputs, dy = chunk.values
  scores = _scores(chunk, *inputs)
  dx = dy - jnp.exp(scores - base) * jnp.where(total == 0, 0.0, sum_dy / total)
  return (jnp.where(scores == -_INFINITY, 0.0, dx),), ()


_LOG_SOFTMAX_GRAD = RowOperation(
  name="log_softmax_grad",
  sweeps=(
    _sum_of_exponentials(lambda chunk: _scores(chunk, *chunk.values[:-1])),
    sum_sweep(_log_softmax_terms),
  ),
  write=_write_log_softmax_grad,
)

# --- the functions ----------------------------------------------------------


def _call(kernel, x, mask, block_bytes) -> jax.Array:
  """Checks the arguments and runs the kernel."""
  checks.has_last_axis("x", x)
  checks.dtype_is_one_of("x", x)
  checks.is_block_size(block_bytes)
  if mask is None:
    return kernel(block_bytes, x)
  checks.dtype_is_one_of("mask", mask, [jnp.bool_])
  checks.broadcasts("mask", mask, x.shape)
  arrays = _compat.varying_together([x, mask.astype(jnp.int8)])
  return kernel(block_bytes, *arrays)


def _run(operation, arrays, block_bytes) -> jax.Array:
  x = arrays[0]
  outs, _ = rows.run(
    operation, arrays, out_dtypes=[x.dtype], block_bytes=block_bytes
  )
  return outs[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(block_bytes, x, *mask):
  return _run(_SOFTMAX, (x, *mask), block_bytes)


def _softmax_forward(block_bytes, x, *mask):
  y = _softmax(block_bytes, x, *mask)
  return y, (y, len(mask))


def _softmax_backward(block_bytes, residuals, dy):
  y, num_masks = residuals
  dx = _run(_SOFTMAX_GRAD, (y, dy), block_bytes)
  return dx, *(None,) * num_masks


_softmax.defvjp(_softmax_forward, _softmax_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_softmax(block_bytes, x, *mask):
  return _run(_LOG_SOFTMAX, (x, *mask), block_bytes)


def _log_softmax_forward(block_bytes, *arrays):
  return _log_softmax(block_bytes, *arrays), arrays


def _log_softmax_backward(block_bytes, arrays, dy):
  dx = _run(_LOG_SOFTMAX_GRAD, (*arrays, dy), block_bytes)
  return dx, *(None,) * (len(arrays) - 1)


_log_softmax.defvjp(_log_softmax_forward, _log_softmax_backward)

_ROWS = {
  "8192x8192 f32": costs.case((8192, 8192)),
  "8192x8192 bf16": costs.case((8192, 8192), dtype=jnp.bfloat16),
  "32x1024x1024 f32": costs.case((32, 1024, 1024)),
  "4096x32000 bf16": costs.case((4096, 32000), dtype=jnp.bfloat16),
  "1000x777 f32": costs.case((1000, 777)),
  "64x1048576 f32": costs.case((64, 2**20)),
}
SPECS = SOFTMAX, LOG_SOFTMAX = tuple(
  costs.memory_bound_spec(
    function,
    reference,
    name=name,
    cases=_ROWS,
    # A maximum, a difference, an exponential, a sum and a scaling.
    flops_per_element=5,
  )
  for name, function, reference in (
    ("softmax", softmax, softmax_reference),
    ("log_softmax", log_softmax, log_softmax_reference),
  )
)
