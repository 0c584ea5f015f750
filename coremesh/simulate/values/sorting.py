"""Orders: sort by keys, and the largest few."""

from collections.abc import Mapping

import numpy as np

from coremesh.simulate.values.kinds import Rule, total_order, widener


def _sort(params, in_avals, out_avals):
  """Always stable; NaN is last, -0 equals +0."""
  axis, count = params["dimension"], params["num_keys"]
  widen = [widener(aval.dtype) for aval in in_avals[:count]]
  dtype = in_avals[0].dtype

  def sort_one(x):
    x = np.sort(widen[0](x), axis, kind="stable")
    return [x.astype(dtype, copy=False)]

  def sort_by_one(*xs):
    order = np.argsort(widen[0](xs[0]), axis, kind="stable")
    return [np.take_along_axis(x, order, axis) for x in xs]

  def sort_by_many(*xs):
    # lexsort's last key is the first to decide.
    keys = [w(x) for w, x in zip(widen, xs, strict=False)]
    order = np.lexsort(keys[::-1], axis)
    return [np.take_along_axis(x, order, axis) for x in xs]

  if len(in_avals) == 1:
    return sort_one
  return sort_by_one if count == 1 else sort_by_many


def _top_k(params, in_avals, out_avals):
  """By the total order, NaN first; of equals the first ones."""
  axis, k = params["axis"], params["k"]
  key = total_order(in_avals[0].dtype)
  index_dtype = out_avals[1].dtype
  lead = (slice(None),) * axis

  def top_k(x):
    # The complement turns the order round, and keeps that of equals.
    order = np.argsort(~key(x), axis, kind="stable")[*lead, :k]
    return [np.take_along_axis(x, order, axis), order.astype(index_dtype)]

  return top_k


RULES: Mapping[str, Rule] = {"sort": _sort, "top_k": _top_k}
