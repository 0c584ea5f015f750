"""Layer norm and RMS norm over the last axis."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from coremesh import _compat, errors, spec
from coremesh.kernels import checks, costs
from coremesh.kernels._rows import rows as rows
from coremesh.kernels._rows.operations import RowOperation, Sweep, sum_sweep


def layer_norm(
  x: jax.Array,
  scale: jax.Array | None = None,
  offset: jax.Array | None = None,
  *,
  epsilon: float = 1e-6,
  block_bytes: int | None = None,
) -> jax.Array:
  """(x - mean) / sqrt(variance + epsilon) * scale + offset, row by row.

  Each row is read from HBM once. A first sweep in VMEM sums it to its mean, a
  second the squares of what differs from it, so that a large mean costs no
  digits, and a third writes. Rows too wide for VMEM are read three times.

  All in float32; the sums are off by at most (width / 512 + 9) roundings. Moves
  the bytes of `x` twice; holds 4 * block_bytes in VMEM. The backward kernel
  reads `x` and the gradient once, and sums those of `scale` and `offset` on
  the way.

  Args:
    x: float32 or bfloat16 [..., width] in HBM, of one device.
    scale: float32 or bfloat16 [width]; None: 1.
    offset: float32 or bfloat16 [width]; None: 0.
    epsilon: added to the variance, at least 0.
    block_bytes: of `x` in VMEM at once; default `blocks.BLOCK_BYTES`.

  Returns:
    As `x`.

  Raises:
    ShapeError, DTypeError: an argument that is not as above.

  Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.
  """
  return _call(x, scale, offset, epsilon, block_bytes, is_centred=True)


def rms_norm(
  x: jax.Array,
  scale: jax.Array | None = None,
  *,
  epsilon: float = 1e-6,
  block_bytes: int | None = None,
) -> jax.Array:
  """x / sqrt(mean(x**2) + epsilon) * scale, row by row.

  As `layer_norm`, without its first sweep.

  Args:
    x: float32 or bfloat16 [..., width] in HBM, of one device.
    scale: float32 or bfloat16 [width]; None: 1.
    epsilon: added to the mean of squares, at least 0.
    block_bytes: of `x` in VMEM at once; default `blocks.BLOCK_BYTES`.

  Returns:
    As `x`.

  Raises:
    ShapeError, DTypeError: an argument that is not as above.

  Source: Zhang and Sennrich, "Root Mean Square Layer Normalization",
    arXiv:1910.07467.
  """
  return _call(x, scale, None, epsilon, block_bytes, is_centred=False)


def layer_norm_reference(
  x: jax.Array,
  scale: jax.Array | None = None,
  offset: jax.Array | None = None,
  *,
  epsilon: float = 1e-6,
) -> jax.Array:
  """`layer_norm` in plain `jnp`."""
  wide = _wide(x)
  centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
  return _scaled(centred, scale, offset, epsilon).astype(x.dtype)


def rms_norm_reference(
  x: jax.Array, scale: jax.Array | None = None, *, epsilon: float = 1e-6
) -> jax.Array:
  """`rms_norm` in plain `jnp`."""
  return _scaled(_wide(x), scale, None, epsilon).astype(x.dtype)


def _scaled(wide, scale, offset, epsilon):
  mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  y = wide * jax.lax.rsqrt(mean_square + epsilon)
  if scale is not None:
    y = y * jnp.broadcast_to(scale.astype(y.dtype), y.shape)
  if offset is not None:
    y = y + jnp.broadcast_to(offset.astype(y.dtype), y.shape)
  return y


def _wide(x):
  return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


# --- the kernels ------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Norm:
  """Which norm.

  Attributes:
    is_centred: whether the mean is subtracted.
    has_scale: whether there is one.
    has_offset: whether there is one.
    epsilon: added to the mean of squares.
    block_bytes: of `x` in VMEM at once, None for the default.
  """

  is_centred: bool
  has_scale: bool
  has_offset: bool
  epsilon: float
  block_bytes: int | None

  @property
  def name(self) -> str:
    """Of the function, and of its kernel."""
    return "layer_norm" if self.is_centred else "rms_norm"

  def forward(self, width: int) -> RowOperation:
    """From x, scale and offset to the norm."""

    def write(chunk, known):
      x, *rest = chunk.values
      y = _normalised(x, known)
      if self.has_scale:
        y = y * rest[0]
      if self.has_offset:
        y = y + rest[-1]
      return (y,), ()

    return RowOperation(
      name=self.name, sweeps=self._statistics(width), write=write
    )

  def backward(self, width: int) -> RowOperation:
    """From x, dy and scale to dx, and the sums dscale and doffset."""

    def gradients(chunk, known):
      x, dy, *scale = chunk.values
      return _normalised(x, known), dy * scale[0] if scale else dy

    def terms(chunk, known):
      y, dy = gradients(chunk, known)
      return (y * dy, dy) if self.is_centred else (y * dy,)

    def means(_, sums):
      return tuple(s / width for s in sums)

    def write(chunk, known):
      known, (along, *common) = (
        known[: len(known) // 2],
        known[len(known) // 2 :],
      )
      y, dy = gradients(chunk, known)
      dx = (dy - y * along - sum(common)) * known[-1]
      sums = []
      if self.has_scale:
        sums.append(y * chunk.values[1])
      if self.has_offset:
        sums.append(chunk.values[1])
      return (dx,), tuple(sums)

    sums = sum_sweep(terms, means, num_sums=2 if self.is_centred else 1)
    return RowOperation(
      name=f"{self.name}_grad",
      sweeps=(*self._statistics(width), sums),
      write=write,
      num_sums=self.has_scale + self.has_offset,
    )

  def _statistics(self, width: int) -> tuple[Sweep, ...]:
    """To the mean, if it is subtracted, and to 1 / sqrt(variance)."""

    def mean(_, sums):
      return (sums[0] / width,)

    def squares(chunk, means):
      return (jnp.square(_centred(chunk.values[0], means)),)

    def inverse_deviation(_, sums):
      return (jax.lax.rsqrt(sums[0] / width + self.epsilon),)

    sweeps = [sum_sweep(squares, inverse_deviation)]
    if self.is_centred:
      sweeps.insert(0, sum_sweep(lambda chunk, _: chunk.values[:1], mean))
    return tuple(sweeps)


def _centred(x, means):
  return x - means[0] if means else x


def _normalised(x, known):
  *means, inverse_deviation = known
  return _centred(x, means) * inverse_deviation


# --- the function -----------------------------------------------------------


def _call(x, scale, offset, epsilon, block_bytes, *, is_centred) -> jax.Array:
  """Checks the arguments and runs the kernel."""
  checks.has_last_axis("x", x)
  checks.dtype_is_one_of("x", x)
  checks.is_block_size(block_bytes)
  vectors = dict(scale=scale, offset=offset)
  vectors = {name: v for name, v in vectors.items() if v is not None}
  for name, vector in vectors.items():
    checks.dtype_is_one_of(name, vector)
    checks.has_shape(name, vector, x.shape[-1:])
  epsilon = _checked_epsilon(epsilon)
  norm = _Norm(
    is_centred=is_centred,
    has_scale=scale is not None,
    has_offset=offset is not None,
    epsilon=epsilon,
    block_bytes=block_bytes,
  )
  return _norm(norm, *_compat.varying_together([x, *vectors.values()]))


def _checked_epsilon(epsilon: Any) -> float:
  try:
    number = -1.0 if isinstance(epsilon, bool | str) else float(epsilon)
  except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
    number = -1.0
  if not 0 <= number < math.inf:
    raise errors.ShapeError(
      "epsilon must be a finite number of at least 0 that is known when the"
      f" kernel is traced; got {epsilon!r}."
    )
  return number


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(norm, x, *vectors):
  outs, _ = rows.run(
    norm.forward(x.shape[-1]),
    (x, *vectors),
    out_dtypes=[x.dtype],
    block_bytes=norm.block_bytes,
  )
  return outs[0]


def _norm_forward(norm, *arrays):
  return _norm(norm, *arrays), arrays


def _norm_backward(norm, arrays, dy):
  x, *vectors = arrays
  outs, sums = rows.run(
    norm.backward(x.shape[-1]),
    (x, dy, *vectors[: norm.has_scale]),
    out_dtypes=[x.dtype],
    block_bytes=norm.block_bytes,
  )
  pairs = zip(sums, vectors, strict=True)
  return outs[0], *(total.astype(vector.dtype) for total, vector in pairs)


_norm.defvjp(_norm_forward, _norm_backward)


def _cases(num_vectors: int) -> dict[str, spec.Case]:
  def case(*shape: int, dtype: Any = jnp.float32) -> spec.Case:
    return costs.case(shape, *[shape[-1:]] * num_vectors, dtype=dtype)

  return {
    "8192x8192 f32": case(8192, 8192),
    "8192x8192 bf16": case(8192, 8192, dtype=jnp.bfloat16),
    "4x2048x4096 bf16": case(4, 2048, 4096, dtype=jnp.bfloat16),
    "1000x777 f32": case(1000, 777),
  }


SPECS = LAYER_NORM, RMS_NORM = (
  costs.memory_bound_spec(
    layer_norm,
    layer_norm_reference,
    name="layer_norm",
    cases=_cases(2),
    # A sum; a difference, a square and a sum; two scalings and an offset.
    flops_per_element=8,
  ),
  costs.memory_bound_spec(
    rms_norm,
    rms_norm_reference,
    name="rms_norm",
    cases=_cases(1),
    # A square and a sum; two scalings.
    flops_per_element=4,
  ),
)
