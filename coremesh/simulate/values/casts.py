"""Changes of dtype: by value, by bit pattern, and of precision only."""

from collections.abc import Mapping
import operator

from jax import dtypes
import ml_dtypes
import numpy as np

from coremesh.simulate.values.kinds import (
  Function,
  Rule,
  bits,
  is_float,
  is_foreign,
  is_integer,
  unsigned,
  widener,
)


def conversion(source: np.dtype, target: np.dtype) -> Function:
  """Function from values of `source` to `target`, as XLA converts.

  Integers wrap; floats become integers by truncation, held within the range,
  NaN 0; floats round to nearest even, and overflow as the target's does.
  """
  if source == target:
    return lambda x: x
  if dtypes.issubdtype(source, np.complexfloating):
    if dtypes.issubdtype(target, np.complexfloating):
      return operator.methodcaller("astype", target)
    part = conversion(np.dtype(f"f{source.itemsize // 2}"), target)
    return lambda x: part(x.real)
  if target == np.bool_:
    widen = widener(source)
    return lambda x: widen(x) != 0
  if is_float(source) and is_integer(target):
    return _saturated(source, target)
  if is_integer(source) and is_float(target) and target.itemsize < 4:
    # By way of float32, as XLA does.
    return lambda x: x.astype(np.float32).astype(target)
  if is_integer(source) and is_foreign(target):
    # ml_dtypes converts from int8 only without a look at the range.
    return lambda x: x.astype(np.int8).astype(target)
  return operator.methodcaller("astype", target)


def _saturated(source: np.dtype, target: np.dtype) -> Function:
  info = ml_dtypes.iinfo(target)
  widen = widener(source)
  # float32 holds the limits of 16 bits, float64 those of 32.
  exact = np.float32 if bits(target) <= 16 else np.float64
  low, high = exact(info.min), exact(info.max)
  # ml_dtypes has no integers of 8 bits and more, numpy none of fewer.
  middle = np.dtype(np.int8) if is_foreign(target) else target

  def convert(x):
    x = widen(x).astype(exact)
    x = np.minimum(np.maximum(x, low), high)
    x = np.where(x == x, x, exact(0)).astype(middle)
    return x if middle == target else x.astype(target)

  def convert_scalar(x):
    value = float(x)
    if value != value:
      value = 0
    clipped = int(min(max(value, info.min), info.max))
    return np.array(clipped, middle).astype(target)[()]

  return lambda x: convert(x) if x.ndim else convert_scalar(x)


def _convert_element_type(params, in_avals, out_avals):
  return conversion(in_avals[0].dtype, out_avals[0].dtype)


def _bitcast(params, in_avals, out_avals):
  source, target = in_avals[0].dtype, out_avals[0].dtype
  shape = out_avals[0].shape
  if bits(source) == bits(target):
    return lambda x: x.view(target)
  if {bits(source), bits(target)} & {1, 2, 4}:
    raise NotImplementedError(
      f"a bitcast from {source} to {target} changes how many values share a "
      "byte, which numpy does not store"
    )
  if shape == ():
    return lambda x: np.ascontiguousarray(x).view(target)[0]
  return lambda x: (
    np.ascontiguousarray(x).reshape(-1).view(target).reshape(shape)
  )


def _reduce_precision(params, in_avals, out_avals):
  """XLA's rounding on the bit pattern; subnormal results become zero."""
  dtype = in_avals[0].dtype
  info = ml_dtypes.finfo(dtype)
  if dtype.itemsize == 1:
    raise NotImplementedError(f"reduce_precision of {dtype}")
  drop = max(info.nmant - params["mantissa_bits"], 0)
  narrows = params["exponent_bits"] < info.nexp
  pattern = unsigned(dtype)
  sign = pattern.type(1 << (info.bits - 1))
  infinity = pattern.type(((1 << info.nexp) - 1) << info.nmant)
  bias = (1 << (info.nexp - 1)) - 1
  # No more bits than there are: then nothing is out of reach.
  reach = (1 << (min(params["exponent_bits"], info.nexp) - 1)) - 1
  largest = pattern.type((bias + reach) << info.nmant)
  smallest = pattern.type((bias - reach) << info.nmant)
  half = pattern.type((1 << drop >> 1) - 1 if drop else 0)
  keep = ~pattern.type((1 << drop) - 1)

  def reduce(x):
    x = np.asarray(x)
    p = x.view(pattern)
    if drop:
      # Half, less one where the last kept bit is 0: ties go to even.
      p = (p + (((p >> pattern.type(drop)) & pattern.type(1)) + half)) & keep
    if narrows:
      exponent = p & infinity
      p = np.where(exponent > largest, (p & sign) | infinity, p)
      p = np.where(exponent <= smallest, p & sign, p)
    return np.where(x == x, p.view(dtype), x)[()]

  return reduce


RULES: Mapping[str, Rule] = {
  "bitcast_convert_type": _bitcast,
  "convert_element_type": _convert_element_type,
  "reduce_precision": _reduce_precision,
}
