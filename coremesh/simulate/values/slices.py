"""Slices at fixed and at computed starts."""

from collections.abc import Mapping
import operator

from coremesh.simulate.values.kinds import Function, Rule


def _slice(params, in_avals, out_avals):
  starts, limits = params["start_indices"], params["limit_indices"]
  strides = params["strides"] or (1,) * len(starts)
  if not starts:
    return lambda x: x
  return operator.itemgetter(tuple(map(slice, starts, limits, strides)))


def _window(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Function:
  """Function from starts to the index of the window, held inside `shape`."""
  limits = [
    (whole - size, size) for whole, size in zip(shape, sizes, strict=True)
  ]

  def index(starts):
    found = []
    for start, (last, size) in zip(starts, limits, strict=True):
      start = min(max(int(start), 0), last)
      found.append(slice(start, start + size))
    return tuple(found)

  return index


def _dynamic_slice(params, in_avals, out_avals):
  window = _window(in_avals[0].shape, out_avals[0].shape)
  if not in_avals[0].shape:
    return lambda x: x
  return lambda x, *starts: x[window(starts)]


def _dynamic_update_slice(params, in_avals, out_avals):
  window = _window(in_avals[0].shape, in_avals[1].shape)
  if in_avals[0].shape == in_avals[1].shape:
    return lambda x, update, *starts: update

  def update_slice(x, update, *starts):
    result = x.copy()
    result[window(starts)] = update
    return result

  return update_slice


RULES: Mapping[str, Rule] = {
  "dynamic_slice": _dynamic_slice,
  "dynamic_update_slice": _dynamic_update_slice,
  "slice": _slice,
}
