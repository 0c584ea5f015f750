"""Sums, products, quotients and the choice of the larger."""

from collections.abc import Mapping
import operator
from typing import Any

import numpy as np

from coremesh.simulate.values import casts
from coremesh.simulate.values.kinds import (
  Function,
  Rule,
  is_float,
  is_foreign,
  is_integer,
  is_signed,
  lifted,
)


def _binary(ufunc: Function, scalar: Function) -> Rule:
  def rule(params, in_avals, out_avals):
    dtype = out_avals[0].dtype
    # Python's operators are ten times as fast as a ufunc on one value.
    if out_avals[0].shape == () and not (
      is_foreign(dtype) and is_integer(dtype)
    ):
      return scalar
    # numpy's float16 rounds as XLA does, no slower than a detour by float32.
    return ufunc if dtype == np.float16 else lifted(ufunc, in_avals, dtype)

  return rule


def _mul(params, in_avals, out_avals):
  product = _binary(np.multiply, operator.mul)
  out = out_avals[0].dtype
  if in_avals[0].dtype == in_avals[1].dtype == out:
    return product(params, in_avals, out_avals)
  # `out_dtype`: XLA converts both factors first.
  left, right = (casts.conversion(aval.dtype, out) for aval in in_avals)
  multiply = product(params, (out_avals[0], out_avals[0]), out_avals)
  return lambda x, y: multiply(left(x), right(y))


def _unary(ufunc: Function) -> Rule:
  def rule(params, in_avals, out_avals):
    dtype = out_avals[0].dtype
    # A changed sign needs no rounding, so the narrow floats keep their own.
    if is_float(dtype):
      return ufunc
    return lifted(ufunc, in_avals, dtype)

  return rule


def _float_sign(x):
  # np.sign gives +0 for -0.
  return np.copysign(np.sign(x), x)


def _sign(params, in_avals, out_avals):
  dtype = out_avals[0].dtype
  return lifted(_float_sign if is_float(dtype) else np.sign, in_avals, dtype)


def _divide_scalars(dtype: np.dtype) -> Function:
  one, minus_one = dtype.type(1), np.array(-1).astype(dtype)[()]

  def divide(x, y):
    if y == 0:
      return minus_one
    quotient = x // y
    # Below zero the floor is one too low, unless the division is exact.
    if quotient < 0 and quotient * y != x:
      return quotient + one
    return quotient

  return divide


def _divide_integers(x, y):
  dtype = y.dtype
  if dtype.itemsize < 8:
    # Exact: the quotients of 32 bit integers that are no integers are further
    # from one than float64 rounds. int64 holds -INT_MIN, and wraps it.
    quotient = np.true_divide(x, y, dtype=np.float64)
    quotient = quotient.astype(np.int64).astype(dtype)
  else:
    quotient = (x - np.fmod(x, y)) // y
  zero = y == 0
  if zero.any():
    np.copyto(quotient, np.array(-1).astype(dtype), where=zero)
  return quotient


def _div(params, in_avals, out_avals):
  dtype = out_avals[0].dtype
  if not is_integer(dtype):
    return _binary(np.true_divide, operator.truediv)(
      params, in_avals, out_avals
    )
  if out_avals[0].shape == () and not is_foreign(dtype):
    return _divide_scalars(dtype)
  # -8 / -1 is 8 in int8, and wraps when int4 takes it.
  return lifted(_divide_integers, in_avals, dtype)


def _remainder_scalars(x, y):
  if y == 0:
    return x
  remainder = x % y
  # Python's remainder has the divisor's sign, XLA's the dividend's.
  if remainder != 0 and (remainder < 0) != (x < 0):
    return remainder - y
  return remainder


def _remainder_integers(x, y):
  remainder = np.fmod(x, y)
  zero = y == 0
  if zero.any():
    np.copyto(remainder, x, where=zero)
  return remainder


def _rem(params, in_avals, out_avals):
  dtype = out_avals[0].dtype
  if not is_integer(dtype):
    return lifted(np.fmod, in_avals, dtype)
  if out_avals[0].shape == () and not is_foreign(dtype):
    return _remainder_scalars
  return lifted(_remainder_integers, in_avals, dtype)


# The last test keeps a NaN; a NaN in y fails both.
def _larger(x, y):
  return x if x >= y or x != x else y


def _smaller(x, y):
  return x if x <= y or x != x else y


def _chooser(ufunc: Function, scalar: Function) -> Rule:
  def rule(params, in_avals, out_avals):
    if out_avals[0].shape == ():
      return scalar
    return lifted(ufunc, in_avals, out_avals[0].dtype)

  return rule


def _clamp(params, in_avals, out_avals):
  def clamp(low, x, high):
    return np.minimum(np.maximum(x, low), high)

  if out_avals[0].shape == ():
    return lambda low, x, high: _smaller(_larger(x, low), high)
  return lifted(clamp, in_avals, out_avals[0].dtype)


def _power(x: Any, exponent: int) -> Any:
  """By squaring, in the order of JAX's own lowering."""
  result = None
  while exponent:
    if exponent & 1:
      result = x if result is None else result * x
    exponent >>= 1
    if exponent:
      x = x * x
  return result


def _integer_pow(params, in_avals, out_avals):
  exponent, dtype = params["y"], out_avals[0].dtype
  one = np.array(1).astype(dtype)[()]
  if exponent == 0:
    ones = np.full(out_avals[0].shape, one)
    return lambda x: ones
  if exponent == 3:
    return lifted(lambda x: x * x * x, in_avals, dtype)
  if exponent > 0:
    return lifted(lambda x: _power(x, exponent), in_avals, dtype)
  unit = one.astype(np.float32) if dtype.itemsize < 4 else one
  return lifted(lambda x: unit / _power(x, -exponent), in_avals, dtype)


def _square(params, in_avals, out_avals):
  return lifted(lambda x: x * x, in_avals, out_avals[0].dtype)


def _one_minus_square(params, in_avals, out_avals):
  # As JAX writes it: the difference first keeps the bits near |x| = 1. A
  # Python 1 takes x's dtype.
  return lifted(lambda x: (1 + x) * (1 - x), in_avals, out_avals[0].dtype)


def _polynomial(params, in_avals, out_avals):
  def horner(x, *coefficients):
    result = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
      result = result * x + coefficient
    return result

  if len(in_avals) == 2 and in_avals[1].shape != out_avals[0].shape:
    return lambda x, c: np.full(out_avals[0].shape, c)
  return lifted(horner, in_avals, out_avals[0].dtype)


def _mulhi(params, in_avals, out_avals):
  dtype = out_avals[0].dtype
  double = np.int64 if is_signed(dtype) else np.uint64
  width = dtype.itemsize * 8
  if is_foreign(dtype) or width > 32:
    raise NotImplementedError(f"mulhi needs 8 to 32 bit integers, not {dtype}")
  return lambda x, y: (
    (x.astype(double) * y.astype(double)) >> double(width)
  ).astype(dtype)


_add = _binary(np.add, operator.add)

RULES: Mapping[str, Rule] = {
  "abs": _unary(np.absolute),
  "add": _add,
  "add_any": _add,
  "clamp": _clamp,
  "div": _div,
  "integer_pow": _integer_pow,
  "max": _chooser(np.maximum, _larger),
  "min": _chooser(np.minimum, _smaller),
  "mul": _mul,
  "mulhi": _mulhi,
  "neg": _unary(np.negative),
  "one_minus_square": _one_minus_square,
  "polynomial": _polynomial,
  "rem": _rem,
  "sign": _sign,
  "square": _square,
  "sub": _binary(np.subtract, operator.sub),
}
