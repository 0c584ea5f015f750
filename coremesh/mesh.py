"""Axes inside a kernel: which worker am I, who is beside me, what is mine.

A *worker* is one core of one device: the place a body runs. It is addressed by
one index for each axis in scope: the axes of the device mesh (from
`jax.shard_map`) and those of the kernel's core mesh.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
import numpy as np

from coremesh import _compat, errors, scope

type Axes = str | Sequence[str]
type Index = int | jax.Array


def device_axes() -> tuple[str, ...]:
  """The axes of the device mesh in scope, () outside `jax.shard_map`."""
  bound = _compat.bound_axis_sizes()
  names = jax.sharding.get_abstract_mesh().axis_names
  return tuple(n for n in names if n in bound)


def core_axes() -> tuple[str, ...]:
  """The axes of the core meshes in scope, () outside a kernel."""
  current = scope.current()
  if current is not None:
    return current.core_axes
  devices = set(jax.sharding.get_abstract_mesh().axis_names)
  return tuple(n for n in _compat.bound_axis_sizes() if n not in devices)


def as_axes(axes: Axes, *, argument: str = "axes") -> tuple[str, ...]:
  """One or more axis names as a tuple, each checked to be in scope.

  Raises:
    AxisError: a name that is no axis here, or one that is given twice.
  """
  names = (axes,) if isinstance(axes, str) else tuple(axes)
  bound = _compat.bound_axis_sizes()
  unknown = [n for n in names if n not in bound]
  if unknown:
    raise errors.AxisError(
      f"{argument} must name axes in scope; {unknown} are not. In scope:"
      f" device axes {list(device_axes())}, core axes {list(core_axes())}."
      " Device axes come from jax.shard_map(mesh=...), core axes from the"
      " kernel's mesh."
    )
  if len(set(names)) != len(names) or not names:
    raise errors.AxisError(
      f"{argument} must be one or more different names; got {names}."
    )
  return names


def axis_sizes(axes: Axes) -> tuple[int, ...]:
  """The workers along each of `axes`."""
  bound = _compat.bound_axis_sizes()
  return tuple(bound[n] for n in as_axes(axes))


def num_workers(axes: Axes) -> int:
  """The workers along all of `axes` together."""
  return math.prod(axis_sizes(axes))


def worker_index(axes: Axes) -> jax.Array:
  """This worker's place along `axes`, the first axis slowest.

  Returns:
    An int32 scalar in [0, num_workers(axes)).
  """
  names = as_axes(axes)
  index = jax.lax.axis_index(names[0])
  for name, size in zip(names[1:], axis_sizes(names)[1:], strict=True):
    index = jax.lax.mul(index, np.int32(size))
    index = jax.lax.add(index, jax.lax.axis_index(name))
  return index


def coordinates(index: Index, axes: Axes) -> dict[str, Index]:
  """The index along each of `axes` of the worker at place `index`.

  The inverse of `worker_index`: pass the result as `to=` of `cm.put`.
  """
  names = as_axes(axes)
  rest = _as_int32(index)
  result: dict[str, Index] = {}
  for name, size in zip(names[:0:-1], axis_sizes(names)[:0:-1], strict=True):
    result[name] = jax.lax.rem(rest, np.int32(size))
    rest = jax.lax.div(rest, np.int32(size))
  return {names[0]: rest} | {name: result[name] for name in names[1:]}


def shifted(axes: Axes, steps: Index = 1) -> dict[str, Index]:
  """The worker `steps` ahead along the ring of `axes`, for `to=`.

  Args:
    axes: the ring; several axes form one ring, the last fastest.
    steps: how far, negative for behind; a Python int or an int32 scalar with
      magnitude below the number of workers.
  """
  size = num_workers(axes)
  if isinstance(steps, int):
    ahead = np.int32(steps % size)
  else:
    ahead = jax.lax.add(_as_int32(steps), np.int32(size))
  place = jax.lax.add(worker_index(axes), ahead)
  return coordinates(jax.lax.rem(place, np.int32(size)), axes)


def next_core(axis: str = "core") -> jax.Array:
  """The index of the core after this one along `axis`, round the end."""
  return _as_int32(shifted(axis)[axis])


def previous_core(axis: str = "core") -> jax.Array:
  """The index of the core before this one along `axis`, round the end."""
  return _as_int32(shifted(axis, -1)[axis])


def slab(ref: Any, *, axis: int = 0, over: Axes = "core") -> pl.Slice:
  """The equal share of one axis of `ref` that this worker owns.

  Args:
    ref: a ref or array, any memory space.
    axis: the axis of `ref` to share out; negative counts from the end.
    over: the mesh axes to share it over.

  Returns:
    `pl.ds(worker_index(over) * size, size)`, size static.

  Raises:
    ShapeError: the axis does not divide by the workers; see `cm.split`.
  """
  axis = check_ref_axis(ref, axis)
  workers = num_workers(over)
  if ref.shape[axis] % workers:
    raise errors.ShapeError(
      f"Axis {axis} of ref must divide by the {workers} workers along"
      f" {over!r}; got shape {tuple(ref.shape)}. Pad it to a multiple of"
      f" {workers}, or share it unevenly with cm.split."
    )
  size = ref.shape[axis] // workers
  start = jax.lax.mul(worker_index(over), np.int32(size))
  return pl.ds(start, size)


def check_ref_axis(ref: Any, axis: int) -> int:
  """`axis` counted from the front, checked against the rank of `ref`."""
  rank = len(ref.shape)
  if not -rank <= axis < rank:
    raise errors.ShapeError(
      f"axis must be in [-{rank}, {rank}) for a ref of shape"
      f" {tuple(ref.shape)}; got {axis}."
    )
  return axis % rank


def device_id(to: Mapping[str, Index]) -> dict[str, Index]:
  """`to`, checked, as Pallas takes it.

  An axis that is not named means this worker's own index. In a body launched
  by plain `pl.kernel`, device axes are named all the same: JAX resolves a
  missing one while it lowers the kernel, which fails under `check_vma=True`.

  Raises:
    AxisError: a key that is no axis in scope, or an index outside its axis.
  """
  if not to:
    raise errors.AxisError(
      "to must name at least one axis, such as {'core': other}; got {}."
    )
  names = as_axes(tuple(to), argument="to")
  for name, size in zip(names, axis_sizes(names), strict=True):
    index = to[name]
    if isinstance(index, int) and not 0 <= index < size:
      raise errors.AxisError(
        f"to[{name!r}] must be in [0, {size}); got {index}."
      )
  address = {name: _as_int32(index) for name, index in to.items()}
  if scope.current() is not None:
    return address
  here = {n: jax.lax.axis_index(n) for n in device_axes() if n not in to}
  return here | address


def _as_int32(index: Any) -> Any:
  """An index as int32, without a word in the program if it is that already."""
  if isinstance(index, int | np.integer):
    return np.int32(index)
  return jax.lax.convert_element_type(index, np.int32)
