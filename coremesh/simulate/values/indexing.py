"""Gathers and scatters: windows at computed places."""

from collections.abc import Mapping, Sequence
import math

from jax import lax
import ml_dtypes
import numpy as np

from coremesh.simulate.values.kinds import (
  Function,
  Rule,
  is_float,
  is_integer,
  wide,
)

_MODES = (
  lax.GatherScatterMode.CLIP,
  lax.GatherScatterMode.FILL_OR_DROP,
  lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def _check_mode(mode: lax.GatherScatterMode) -> None:
  if mode not in _MODES:
    raise NotImplementedError(f"gather and scatter in mode {mode}")


def _places(
  *,
  shape: Sequence[int],
  sizes: Sequence[int],
  index_map: Sequence[int],
  window_axes: Sequence[int],
  batching: Mapping[int, int],
  batch: Sequence[int],
) -> Function:
  """Function from indices to where each window's values lie.

  Args:
    shape: of the operand.
    sizes: of the window, for each axis of the operand.
    index_map: the operand's axis of each entry of an index vector.
    window_axes: the operand's axes that the windows keep.
    batching: the operand's axes that follow one of the indices'.
    batch: shape of the indices without the vectors.

  Returns:
    From int [*batch, len(index_map)] to the index arrays, one for each axis of
    the operand, that broadcast to [*batch, *window], and bool [*batch],
    whether the window lay inside before it was moved there.
  """
  room = np.array([shape[axis] - sizes[axis] for axis in index_map], np.int64)
  kept = len(window_axes)
  rank = len(batch) + kept
  fixed: list = []
  for axis, size in enumerate(sizes):
    line = np.zeros((1,) * rank, np.int64)
    if axis in batching:
      along = batching[axis]
      line = np.arange(batch[along])
      line = line.reshape([-1 if d == along else 1 for d in range(rank)])
    elif axis in window_axes:
      along = len(batch) + window_axes.index(axis)
      line = np.arange(size)
      line = line.reshape([-1 if d == along else 1 for d in range(rank)])
    fixed.append(line)

  def places(indices):
    indices = indices.astype(np.int64)
    inside = ((indices >= 0) & (indices <= room)).all(-1)
    starts = np.minimum(np.maximum(indices, 0), room)
    found = list(fixed)
    for number, axis in enumerate(index_map):
      start = starts[..., number].reshape((*batch, *(1,) * kept))
      found[axis] = start + fixed[axis]
    return tuple(found), inside

  return places


def _order(places: Sequence[int], rank: int) -> list[int]:
  """The transposition that brings [*batch, *window] to the order of JAX.

  Args:
    places: where the window's axes are, among all.
    rank: of the result.
  """
  batch = iter(range(rank - len(places)))
  window = iter(range(rank - len(places), rank))
  return [next(window if axis in places else batch) for axis in range(rank)]


def _fill_value(value, dtype: np.dtype):
  if value is not None:
    return np.asarray(value).astype(dtype)
  if is_integer(dtype):
    info = ml_dtypes.iinfo(dtype)
    return np.asarray(info.min if info.min else info.max).astype(dtype)
  if dtype == np.bool_:
    return np.asarray(True)
  return np.asarray(np.nan).astype(dtype)


def _taken_axis(numbers, sizes, shape) -> int | None:
  """The operand's axis that np.take can gather along, if that is all."""
  if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
    return None
  [axis] = numbers.start_index_map
  whole = [*shape[:axis], 1, *shape[axis + 1 :]]
  alone = tuple(numbers.collapsed_slice_dims) == (axis,)
  return axis if alone and list(sizes) == whole else None


def _take(axis: int, size: int, order: list[int], batch_rank: int) -> Function:
  """The gather along one axis, with `order` of [*batch, *window]."""
  # np.take leaves the batch at the axis, not at the front.
  moved = [*range(axis, axis + batch_rank), *range(axis)]
  moved += range(axis + batch_rank, len(order))
  order = [moved[place] for place in order]

  def take(x, indices):
    # First to a dtype that holds the size: indices may be uint8.
    starts = indices[..., 0].astype(np.intp)
    starts = np.minimum(np.maximum(starts, 0), size - 1)
    return x.take(starts, axis).transpose(order)

  return take


def _gather(params, in_avals, out_avals):
  numbers, mode = params["dimension_numbers"], params["mode"]
  _check_mode(mode)
  dtype, shape = out_avals[0].dtype, in_avals[0].shape
  dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
  batch = in_avals[1].shape[:-1]
  places = _places(
    shape=shape,
    sizes=params["slice_sizes"],
    index_map=numbers.start_index_map,
    window_axes=[axis for axis in range(len(shape)) if axis not in dropped],
    batching=dict(
      zip(
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
        strict=True,
      )
    ),
    batch=batch,
  )
  order = _order(numbers.offset_dims, len(out_avals[0].shape))
  fills = mode == lax.GatherScatterMode.FILL_OR_DROP
  fill = _fill_value(params["fill_value"], dtype)
  spread = (*batch, *(1,) * len(numbers.offset_dims))

  axis = _taken_axis(numbers, params["slice_sizes"], shape)
  if axis is not None and not fills and shape[axis] and order:
    return _take(axis, shape[axis], order, len(batch))

  def gather(x, indices):
    found, inside = places(indices)
    result: np.ndarray = x[found]
    if fills and not inside.all():
      result = np.where(inside.reshape(spread), result, fill)
    return result.transpose(order)[()]

  return gather


def _scatter(combine: np.ufunc | None) -> Rule:
  """The rule of a scatter that combines by `combine`, None to replace."""

  def rule(params, in_avals, out_avals):
    operand, indices, updates = in_avals
    numbers, mode = params["dimension_numbers"], params["mode"]
    _check_mode(mode)
    shape, batch = operand.shape, indices.shape[:-1]
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window_axes = [axis for axis in range(len(shape)) if axis not in dropped]
    sizes = [1] * len(shape)
    for axis, place in zip(
      window_axes, numbers.update_window_dims, strict=True
    ):
      sizes[axis] = updates.shape[place]
    places = _places(
      shape=shape,
      sizes=sizes,
      index_map=numbers.scatter_dims_to_operand_dims,
      window_axes=window_axes,
      batching=dict(
        zip(
          numbers.operand_batching_dims,
          numbers.scatter_indices_batching_dims,
          strict=True,
        )
      ),
      batch=batch,
    )
    order = np.argsort(_order(numbers.update_window_dims, len(updates.shape)))
    clips = mode == lax.GatherScatterMode.CLIP
    dtype = operand.dtype
    # One after the other, each rounded, as XLA does; but int4 has no ufunc.at.
    working = dtype if is_float(dtype) or combine is None else wide(dtype)
    whole = tuple(batch) + tuple(sizes[axis] for axis in window_axes)

    def scatter(x, indices, updates):
      result = np.array(x, working)
      updates = np.asarray(updates).transpose(order)
      found, inside = places(indices)
      if not clips and not inside.all():
        found = tuple(np.broadcast_to(f, whole)[inside] for f in found)
        updates = updates[inside]
      if combine is None:
        result[found] = updates
      else:
        combine.at(result, found, updates.astype(working, copy=False))
      return result.astype(dtype, copy=False)[()]

    if math.prod(updates.shape) == 0:
      return lambda x, indices, updates: x
    return scatter

  return rule


RULES: Mapping[str, Rule] = {
  "gather": _gather,
  "scatter": _scatter(None),
  "scatter-add": _scatter(np.add),
  "scatter-max": _scatter(np.maximum),
  "scatter-min": _scatter(np.minimum),
  "scatter-mul": _scatter(np.multiply),
  "scatter-sub": _scatter(np.subtract),
}
