"""What the value primitives of Pallas and of a TPU TensorCore compute.

A rule is called once for an equation of a kernel and gives a function that is
called each time the equation runs. Names are those of the attributes of
`jax._src.pallas.mosaic.primitives` ("tpu.") and `jax._src.pallas.primitives`
("pallas."), without `_p`.

A PRNG key is its data, uint32 [1, 2]. The matrix unit and the hardware PRNG
have state: see `matrix_unit` and `hardware_random`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from coremesh.simulate import convolution, packing

type Function = Callable[..., Any]
type Rule = Callable[
  [Mapping[str, Any], Sequence[Any], Sequence[Any]], Function
]


# --- moving bits -----------------------------------------------------------


def _bitcast(params, in_avals, out_avals) -> Function:
  """Merges or splits neighbours along `dim`, the first in the lowest bits."""
  del in_avals
  (out,) = out_avals
  dim = params["dim"]
  return lambda x: packing.bitcast(x, out.dtype, dim)


def _roll(params, in_avals, out_avals) -> Function:
  """Moves element i to i + shift (+ stride * row) modulo the axis."""
  del out_avals
  shape, axis = in_avals[0].shape, params["axis"]
  size = shape[axis]
  before = (slice(None),) * axis
  if params["stride"] is None:

    def roll(x, shift):
      split = size - int(shift) % size
      parts = x[*before, split:], x[*before, :split]
      return np.concatenate(parts, axis=axis)

    return roll

  def along(dim):
    return np.arange(shape[dim]).reshape(
      [-1 if i == dim else 1 for i in range(len(shape))]
    )

  source = along(axis) - params["stride"] * along(params["stride_axis"])

  def roll_with_stride(x, shift):
    return np.take_along_axis(x, (source - int(shift)) % size, axis=axis)

  return roll_with_stride


def _pack_elementwise(params, in_avals, out_avals) -> Function:
  """Joins the k-th value of each source in one word, the first lowest."""
  del in_avals
  (out,) = out_avals
  packed_dtype = params["packed_dtype"]
  width = packing.bits_of(packed_dtype)
  word = packing.container(out.dtype)
  mask = word.type((1 << width) - 1)
  floating = packing.is_floating(packed_dtype)

  def field(x):
    if floating:
      return packing.narrow(x, packed_dtype).view(f"u{width // 8}").astype(word)
    return packing.raw(x) & mask  # integers lose their high bits

  def pack(*xs):
    packed = field(xs[0])
    for i, x in enumerate(xs[1:], start=1):
      packed = packed | field(x) << word.type(i * width)
    return packed.view(out.dtype)

  return pack


def _unpack_elementwise(params, in_avals, out_avals) -> Function:
  """The values of one position in each word, converted.

  Integers extend by their sign, unsigned ones too: Mosaic has no unsigned
  types, so the lowering makes `packed_dtype` signed.
  """
  (x_aval,), (out,) = in_avals, out_avals
  packed_dtype = packing.signed(params["packed_dtype"])
  width = packing.bits_of(packed_dtype)
  shift = packing.container(x_aval.dtype).type(params["index"] * width)
  mask = (1 << width) - 1
  narrow = packing.container(packed_dtype)

  def unpack(x):
    field = ((packing.raw(x) >> shift) & mask).astype(narrow)
    return field.view(packed_dtype).astype(out.dtype)

  return unpack


# --- arithmetic ------------------------------------------------------------


def _reciprocal(params, in_avals, out_avals) -> Function:
  """1 / x; the approximate one is that of `x` rounded to bfloat16.

  So XLA computes it on a CPU. It is coarser than a TPU's, so a kernel that
  bears it bears the hardware. `full_range` makes no difference here.
  """
  del in_avals
  dtype = out_avals[0].dtype
  if not params["approx"]:
    one = np.ones((), dtype)[()]
    return lambda x: np.divide(one, x)

  def approximate(x):
    coarse = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.divide(np.float32(1), coarse).astype(dtype)

  return approximate


def _stochastic_round(params, in_avals, out_avals) -> Function:
  """Rounds away from 0 as often as the part that is cut off says.

  The random bits are added to the bits to be cut off, from the lowest up, and
  the sum is truncated; which bits the hardware takes is not documented. Above
  the largest value of `target_dtype` it gives what a cast gives.
  """
  del params, in_avals
  (out,) = out_avals
  if packing.is_integer(out.dtype):
    return _stochastic_integer(out.dtype)
  info = ml_dtypes.finfo(out.dtype)
  random_bits = 23 - info.nmant  # what float32 has more
  random_mask = np.uint32((1 << random_bits) - 1)

  def stochastic_round(x, bits):
    magnitude = np.abs(x).astype(np.float64)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, info.minexp)
    steps = np.ldexp(magnitude, info.nmant - exponent)
    steps = np.floor(steps + np.ldexp((bits & random_mask) * 1.0, -random_bits))
    rounded = np.copysign(np.ldexp(steps, exponent - info.nmant), x)
    return np.where(np.isfinite(x), rounded, x).astype(out.dtype)

  return stochastic_round


def _stochastic_integer(dtype: Any) -> Function:
  info = ml_dtypes.iinfo(dtype)

  def stochastic_round(x, bits):
    steps = np.floor(np.abs(x).astype(np.float64) + np.ldexp(bits * 1.0, -32))
    rounded = np.nan_to_num(np.copysign(steps, x))
    return np.clip(rounded, info.min, info.max).astype(np.int8).astype(dtype)

  return stochastic_round


# --- keys, hints and what leaves no value ----------------------------------


def _split_key(params, in_avals, out_avals) -> Function:
  del params, in_avals, out_avals
  return lambda key: tuple(key.reshape(-1))


def _join_key(params, in_avals, out_avals) -> Function:
  del params, in_avals, out_avals
  return lambda *words: np.array([words], np.uint32)


def _nothing(params, in_avals, out_avals) -> Function:
  """Primitives that leave no value: they concern the compiler, or time."""
  del params, in_avals, out_avals
  return lambda *values: ()


def _broadcast_to(params, in_avals, out_avals):
  shape = out_avals[0].shape
  return lambda value: np.broadcast_to(value, shape)


def _same(params, in_avals, out_avals):
  return lambda value: value


RULES: Mapping[str, Rule] = {
  "pallas.delay": _nothing,
  "pallas.reciprocal": _reciprocal,
  "state.broadcast_to": _broadcast_to,
  "state.with_memory_space_constraint": _same,
  "tpu.bitcast": _bitcast,
  "tpu.conv": convolution.rule,
  "tpu.join_key": _join_key,
  "tpu.pack_elementwise": _pack_elementwise,
  "tpu.roll": _roll,
  "tpu.split_key": _split_key,
  "tpu.stochastic_round": _stochastic_round,
  "tpu.touch": _nothing,
  "tpu.trace_value": _nothing,
  "tpu.unpack_elementwise": _unpack_elementwise,
}
