"""Moves of whole arrays: shape, order of axes, joining and padding.

Views wherever numpy has one; nothing here looks at a value.
"""

from collections.abc import Mapping
import math
import operator

import numpy as np

from coremesh.simulate.values.kinds import Function, Rule

# Below this, filling memory is faster than np.broadcast_to's own work.
_SMALL_VALUES = 4096


def identity(params, in_avals, out_avals) -> Function:
  """The rule of what changes no value."""
  return lambda x: x


def _sequence(params, in_avals, out_avals):
  return lambda *xs: xs


def _broadcast_in_dim(params, in_avals, out_avals):
  shape, dtype = out_avals[0].shape, out_avals[0].dtype
  source = in_avals[0].shape
  if shape == source:
    return lambda x: x
  # Each axis of the argument, at its place among the new ones.
  placed = [1] * len(shape)
  for axis, size in zip(params["broadcast_dimensions"], source, strict=True):
    placed[axis] = size
  placed = tuple(placed)
  if placed == shape:
    return lambda x: x.reshape(shape)
  if math.prod(shape) > _SMALL_VALUES:
    return lambda x: np.broadcast_to(x.reshape(placed), shape)

  def fill(x):
    result = np.empty(shape, dtype)
    result[...] = x.reshape(placed) if x.ndim else x
    return result

  return fill


def _reshape(params, in_avals, out_avals):
  shape, order = out_avals[0].shape, params.get("dimensions")
  if shape == ():
    return operator.itemgetter((0,) * len(in_avals[0].shape))
  if order is None or tuple(order) == tuple(range(len(order))):
    return lambda x: x.reshape(shape)
  return lambda x: x.transpose(order).reshape(shape)


def _squeeze(params, in_avals, out_avals):
  # Its `dimensions` are the axes to drop, those of a reshape are an order.
  return _reshape({}, in_avals, out_avals)


def _transpose(params, in_avals, out_avals):
  order = params["permutation"]
  return lambda x: x.transpose(order)


def _rev(params, in_avals, out_avals):
  axes = params["dimensions"]
  if not axes:
    return lambda x: x
  back, all_of = slice(None, None, -1), slice(None)
  return operator.itemgetter(
    tuple(
      back if axis in axes else all_of
      for axis in range(max(axes, default=0) + 1)
    )
  )


def _concatenate(params, in_avals, out_avals):
  axis = params["dimension"]
  return lambda *xs: np.concatenate(xs, axis)


def _stack(params, in_avals, out_avals):
  axis = params["axis"]
  return lambda *xs: np.stack(xs, axis)


def _unstack(params, in_avals, out_avals):
  axis, count = params["axis"], len(out_avals)
  lead = (slice(None),) * axis
  return lambda x: [x[*lead, number] for number in range(count)]


def _split(params, in_avals, out_avals):
  ends = np.cumsum((0, *params["sizes"])).tolist()
  lead = (slice(None),) * params["axis"]
  parts = [
    (*lead, slice(*ends[n : n + 2])) for n in range(len(params["sizes"]))
  ]
  return lambda x: [x[part] for part in parts]


def _tile(params, in_avals, out_avals):
  reps = params["reps"]
  return lambda x: np.tile(x, reps)


def _pad(params, in_avals, out_avals):
  shape, dtype = out_avals[0].shape, out_avals[0].dtype
  taken, places = [], []
  for (low, _, interior), size, result in zip(
    params["padding_config"], in_avals[0].shape, shape, strict=True
  ):
    step = interior + 1
    # Value i lands at low + i * step; negative padding cuts off both ends.
    first = max(-(low // step), 0)
    last = min(size, -((low - result) // step))
    taken.append(slice(first, max(first, last)))
    start = low + first * step
    count = max(last - first, 0)
    places.append(slice(start, start + max((count - 1) * step + 1, 0), step))
    if not count:
      places[-1] = slice(0, 0)
  taken, places = tuple(taken), tuple(places)

  def pad(x, value):
    result = np.full(shape, value, dtype)
    result[places] = x[taken]
    return result

  return (lambda x, value: x) if shape == () else pad


def _iota(params, in_avals, out_avals):
  shape, axis = out_avals[0].shape, params["dimension"]
  line = np.arange(shape[axis]).astype(out_avals[0].dtype)
  line = line.reshape([-1 if d == axis else 1 for d in range(len(shape))])
  result = np.ascontiguousarray(np.broadcast_to(line, shape))
  result.flags.writeable = False
  return lambda: result


def _empty(params, in_avals, out_avals):
  result = np.zeros(out_avals[0].shape, out_avals[0].dtype)
  result.flags.writeable = False
  return lambda: result


def _complex(params, in_avals, out_avals):
  def join(real, imag):
    result = np.empty(out_avals[0].shape, out_avals[0].dtype)
    result.real, result.imag = real, imag
    return result[()]

  return join


def _function(function: Function) -> Rule:
  return lambda params, in_avals, out_avals: function


RULES: Mapping[str, Rule] = {
  "broadcast_in_dim": _broadcast_in_dim,
  "complex": _complex,
  "concatenate": _concatenate,
  "conj": _function(np.conj),
  "copy": identity,
  "copy_p": identity,
  "empty": _empty,
  "empty2": _empty,
  "imag": _function(operator.attrgetter("imag")),
  "iota": _iota,
  "name": identity,
  "optimization_barrier": _sequence,
  "pad": _pad,
  "pvary": identity,
  "real": _function(operator.attrgetter("real")),
  "reshape": _reshape,
  "rev": _rev,
  "split": _split,
  "squeeze": _squeeze,
  "stack": _stack,
  "stop_gradient": identity,
  "tie": _function(lambda x, y: y),
  "tile": _tile,
  "transpose": _transpose,
  "unstack": _unstack,
}
