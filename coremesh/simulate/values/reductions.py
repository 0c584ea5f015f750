"""Reductions and scans along axes.

Sums and products of narrow floats run in float32 and are rounded once, as the
TPU's units do; float32 is added in numpy's order, which is not XLA's.
"""

from collections.abc import Mapping
from functools import partial

import ml_dtypes
import numpy as np

from coremesh.simulate.values.kinds import (
  Function,
  Rule,
  is_integer,
  lifted,
  wide,
)


def _limit(dtype: np.dtype, *, largest: bool):
  """The identity of min (the largest value) or of max, in `wide(dtype)`."""
  if dtype == np.bool_:
    return largest
  if is_integer(dtype):
    info = ml_dtypes.iinfo(dtype)
    return int(info.max if largest else info.min)
  return np.inf if largest else -np.inf


def _reduction(ufunc: np.ufunc, *, largest: bool | None = None) -> Rule:
  """A reduction by `ufunc`.

  Args:
    ufunc: combines two values.
    largest: of max and min, what an empty axis gives; None where numpy has an
      identity.
  """

  def rule(params, in_avals, out_avals):
    dtype = in_avals[0].dtype
    options = {"axis": tuple(params["axes"]), "dtype": wide(dtype)}
    if largest is not None and 0 in in_avals[0].shape:
      options["initial"] = _limit(dtype, largest=largest)
    return lifted(partial(ufunc.reduce, **options), in_avals, dtype)

  return rule


def _arg(function: Function) -> Rule:
  def rule(params, in_avals, out_avals):
    [axis], dtype = params["axes"], out_avals[0].dtype
    # The first NaN wins, then the first of equals: numpy's rule is XLA's.
    return lifted(lambda x: function(x, axis).astype(dtype), in_avals, None)

  return rule


def _scan(ufunc: np.ufunc) -> Rule:
  def rule(params, in_avals, out_avals):
    axis, dtype = params["axis"], in_avals[0].dtype
    accumulate = partial(ufunc.accumulate, axis=axis, dtype=wide(dtype))
    scan = accumulate
    if params["reverse"]:
      back = (slice(None),) * axis + (slice(None, None, -1),)
      scan = lambda x: accumulate(x[back])[back]
    return lifted(scan, in_avals, dtype)

  return rule


RULES: Mapping[str, Rule] = {
  "argmax": _arg(np.argmax),
  "argmin": _arg(np.argmin),
  "cumlogsumexp": _scan(np.logaddexp),
  "cummax": _scan(np.maximum),
  "cummin": _scan(np.minimum),
  "cumprod": _scan(np.multiply),
  "cumsum": _scan(np.add),
  "reduce_and": _reduction(np.bitwise_and),
  "reduce_max": _reduction(np.maximum, largest=False),
  "reduce_min": _reduction(np.minimum, largest=True),
  "reduce_or": _reduction(np.bitwise_or),
  "reduce_prod": _reduction(np.multiply),
  "reduce_sum": _reduction(np.add),
  "reduce_xor": _reduction(np.bitwise_xor),
}
