"""Bits, comparisons and selection."""

from collections.abc import Mapping
import operator

import numpy as np

from coremesh.simulate.values.kinds import (
  Function,
  Rule,
  bits,
  is_foreign,
  is_signed,
  lifted,
  total_order,
  unsigned,
  widener,
)


def _bitwise(ufunc: Function, scalar: Function) -> Rule:
  def rule(params, in_avals, out_avals):
    dtype = out_avals[0].dtype
    if out_avals[0].shape == () and not is_foreign(dtype):
      return scalar
    return lifted(ufunc, in_avals, dtype)

  return rule


def _shift(ufunc: Function, *, signed: bool | None) -> Rule:
  """A shift of integers, of the given signedness or their own (None).

  numpy takes the count as unsigned and shifts everything out where it is the
  width or more, which is XLA's rule too.
  """

  def rule(params, in_avals, out_avals):
    dtype = out_avals[0].dtype
    if is_foreign(dtype):
      return _narrow_shift(ufunc, dtype, signed=signed)
    if signed is None or signed == is_signed(dtype):
      return ufunc
    view = np.dtype(f"{'i' if signed else 'u'}{dtype.itemsize}")
    return lambda x, y: ufunc(x.view(view), y.view(view)).view(dtype)

  return rule


def _narrow_shift(
  ufunc: Function, dtype: np.dtype, *, signed: bool | None
) -> Function:
  width = bits(dtype)
  mask, room = np.uint8((1 << width) - 1), np.int8(8 - width)

  def shift(x, y):
    # The value at the top of a byte, so that its sign is the byte's.
    count = y.astype(np.int8).view(np.uint8) & mask
    value = x.astype(np.int8)
    if ufunc is np.right_shift:
      value = value << room
      if not signed:
        value = value.view(np.uint8)
      value = ufunc(value, count.astype(value.dtype)).view(np.int8) >> room
    else:
      value = ufunc(value, count.view(np.int8))
    return value.astype(dtype)

  return shift


def _population_count(params, in_avals, out_avals):
  dtype = out_avals[0].dtype
  pattern, mask = unsigned(dtype), (1 << bits(dtype)) - 1
  if not is_foreign(dtype):
    return lambda x: np.bitwise_count(x.view(pattern)).astype(dtype)
  return lambda x: np.bitwise_count(
    x.astype(np.int8).view(np.uint8) & mask
  ).astype(dtype)


def _clz(params, in_avals, out_avals):
  dtype = out_avals[0].dtype
  width = bits(dtype)
  if width > 32:
    raise NotImplementedError(f"clz of {dtype}: float64 holds 53 bits")
  pattern, mask = unsigned(dtype), (1 << width) - 1
  widen = widener(dtype)

  def clz(x):
    values = widen(x).view(pattern) & pattern.type(mask)
    # A float's exponent is the place of its leading one.
    return (width - np.frexp(values.astype(np.float64))[1]).astype(dtype)

  return clz


def _not(params, in_avals, out_avals):
  return lifted(np.invert, in_avals, out_avals[0].dtype)


def _comparison(ufunc: Function, scalar: Function) -> Rule:
  def rule(params, in_avals, out_avals):
    if out_avals[0].shape == ():
      return scalar
    return lifted(ufunc, in_avals, None)

  return rule


def _total_comparison(ufunc: Function) -> Rule:
  """Compares floats by the total order: -NaN < -0 < +0 < NaN."""

  def rule(params, in_avals, out_avals):
    key = total_order(in_avals[0].dtype)
    return lambda x, y: ufunc(key(x), key(y))

  return rule


def _is_finite(params, in_avals, out_avals):
  return lifted(np.isfinite, in_avals, None)


def _nextafter(params, in_avals, out_avals):
  # Not lifted: the neighbour is that of the narrow dtype.
  return np.nextafter


def _select_n(params, in_avals, out_avals):
  which, *cases = in_avals
  if which.shape == ():
    if len(cases) == 2:
      return lambda which, x, y: y if which else x
    return lambda which, *xs: xs[int(which)]
  dtype = out_avals[0].dtype
  # numpy moves ml_dtypes one by one, and integers in bulk.
  moved = unsigned(dtype) if is_foreign(dtype) else dtype
  if len(cases) == 2 and moved == dtype:
    if which.dtype == np.bool_:
      return lambda which, x, y: np.where(which, y, x)
    return lambda which, x, y: np.where(which != 0, y, x)

  def select(which, *xs):
    result = xs[0].view(moved)
    for number, x in enumerate(xs[1:], 1):
      result = np.where(which == number, x.view(moved), result)
    return result.view(dtype)

  return select


RULES: Mapping[str, Rule] = {
  "and": _bitwise(np.bitwise_and, operator.and_),
  "clz": _clz,
  "eq": _comparison(np.equal, operator.eq),
  "eq_to": _total_comparison(np.equal),
  "ge": _comparison(np.greater_equal, operator.ge),
  "gt": _comparison(np.greater, operator.gt),
  "is_finite": _is_finite,
  "le": _comparison(np.less_equal, operator.le),
  "le_to": _total_comparison(np.less_equal),
  "lt": _comparison(np.less, operator.lt),
  "lt_to": _total_comparison(np.less),
  "ne": _comparison(np.not_equal, operator.ne),
  "nextafter": _nextafter,
  "not": _not,
  "or": _bitwise(np.bitwise_or, operator.or_),
  "population_count": _population_count,
  "select_n": _select_n,
  "shift_left": _shift(np.left_shift, signed=None),
  "shift_right_arithmetic": _shift(np.right_shift, signed=True),
  "shift_right_logical": _shift(np.right_shift, signed=False),
  "xor": _bitwise(np.bitwise_xor, operator.xor),
}
