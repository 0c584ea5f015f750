"""Kinds of dtypes, and how numpy computes in those it does not know."""

from collections.abc import Callable, Mapping, Sequence
import operator
from typing import Any

from jax import dtypes
import ml_dtypes
import numpy as np

type Function = Callable[..., Any]
"""Takes numpy values, gives the value, or a sequence of them."""

type Rule = Callable[
  [Mapping[str, Any], Sequence[Any], Sequence[Any]], Function
]
"""Takes an equation's params, in_avals and out_avals; see `RULES`."""


def is_float(dtype: np.dtype) -> bool:
  """Whether it holds real floats: ml_dtypes' floats are of kind V."""
  return dtypes.issubdtype(dtype, np.floating)


def is_integer(dtype: np.dtype) -> bool:
  """Whether it holds integers of any width; bool is none."""
  return dtypes.issubdtype(dtype, np.integer)


def is_signed(dtype: np.dtype) -> bool:
  """Whether it holds integers with a sign."""
  return dtypes.issubdtype(dtype, np.signedinteger)


def is_foreign(dtype: np.dtype) -> bool:
  """Whether it is of ml_dtypes: bfloat16, float8_*, int4 and their like."""
  return dtype.isbuiltin != 1


def bits(dtype: np.dtype) -> int:
  """Bits of one value: 4 for int4, although it fills a byte."""
  if is_integer(dtype):
    return ml_dtypes.iinfo(dtype).bits
  return dtype.itemsize * 8


def unsigned(dtype: np.dtype) -> np.dtype:
  """The builtin unsigned integer of the same storage."""
  return np.dtype(f"u{dtype.itemsize}")


def wide(dtype: np.dtype) -> np.dtype:
  """The builtin dtype that computes for `dtype`: float32, int8, or itself.

  float16 is builtin but has no arithmetic units, so it widens as well.
  """
  if is_float(dtype):
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
  if is_foreign(dtype):
    return np.dtype(np.int8 if is_signed(dtype) else np.uint8)
  return dtype


def widener(dtype: np.dtype) -> Function:
  """Function from values of `dtype` to the same in `wide(dtype)`."""
  target = wide(dtype)
  if target == dtype:
    return lambda x: x
  if is_float(dtype) and dtype.itemsize == 1:
    # A look-up is four times as fast as ml_dtypes' conversion.
    table = np.arange(256, dtype=np.uint8).view(dtype).astype(target)
    return lambda x: table.take(x.view(np.uint8))
  return operator.methodcaller("astype", target)


def lifted(function: Function, avals: Sequence[Any], out: Any) -> Function:
  """`function` computed in the wide dtypes, then rounded or wrapped once.

  Args:
    function: takes and returns builtin values.
    avals: the arguments' avals, each with its own dtype.
    out: the result's dtype, or None where `function` already gives it.
  """
  inputs = [aval.dtype for aval in avals]
  if all(wide(dtype) == dtype for dtype in inputs):
    if out is None or wide(out) == out:
      return function
  widen = [widener(dtype) for dtype in inputs]
  if out is None:
    match widen:
      case [a]:
        return lambda x: function(a(x))
      case [a, b]:
        return lambda x, y: function(a(x), b(y))
    return lambda *xs: function(*(w(x) for w, x in zip(widen, xs, strict=True)))
  match widen:
    case [a]:
      return lambda x: function(a(x)).astype(out)
    case [a, b]:
      return lambda x, y: function(a(x), b(y)).astype(out)
  return lambda *xs: function(
    *(w(x) for w, x in zip(widen, xs, strict=True))
  ).astype(out)


def total_order(dtype: np.dtype) -> Function:
  """Function from floats to integers ordered as the floats' total order.

  -NaN < -inf < ... < -0 < +0 < ... < inf < NaN; integers and bool are
  returned as they are, in a builtin dtype.
  """
  if not is_float(dtype):
    return widener(dtype)
  signed = np.dtype(f"i{dtype.itemsize}")
  sign_bit, magnitude = signed.itemsize * 8 - 1, np.iinfo(signed).max

  def key(x):
    pattern = x.view(signed)
    return pattern ^ ((pattern >> sign_bit) & magnitude)

  return key
