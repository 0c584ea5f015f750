"""Axes inside a kernel: which worker am I, who is beside me, what is mine.

A *worker* is one core of one device: the place a body runs. It is addressed by
one index for each axis in scope: the axes of the device mesh (from
`jax.shard_map`) and those of the kernel's core mesh.
"""

from collections.abc import Mapping, Sequence
import math
import operator
from typing import Any

import jax
import jax.core
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


def on_vector_subcore() -> bool:
  """Whether the body runs on vector subcores: the only mesh of two axes."""
  return len(core_axes()) == 2


def as_axes(axes: Axes, *, argument: str = "axes") -> tuple[str, ...]:
  """One or more axis names as a tuple, each checked to be in scope.

  Raises:
    AxisError: a name that is no axis here, or one that is given twice.
  """
  names = (axes,) if isinstance(axes, str) else tuple(axes)
  devices, cores = device_axes(), core_axes()
  unknown = [n for n in names if n not in devices + cores]
  if unknown:
    raise errors.AxisError(
      f"{argument} must name axes in scope; {unknown} are not. In scope:"
      f" device axes {list(devices)}, core axes {list(cores)}. Device axes"
      " come from jax.shard_map(mesh=...), core axes from the kernel's mesh."
    )
  if len(set(names)) != len(names) or not names:
    raise errors.AxisError(
      f"{argument} must be one or more different names; got {names}."
    )
  return names


def with_several(names: Sequence[str]) -> tuple[str, ...]:
  """Those of the axes that have more than one worker."""
  bound = _compat.bound_axis_sizes()
  return tuple(n for n in names if bound[n] > 1)


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
  first, *rest = as_axes(axes)
  index = jax.lax.axis_index(first)
  for name in rest:
    (size,) = axis_sizes(name)
    index = jax.lax.mul(index, np.int32(size))
    index = jax.lax.add(index, jax.lax.axis_index(name))
  return index


def coordinates(index: Index, axes: Axes) -> dict[str, Index]:
  """The index along each of `axes` of the worker at place `index`.

  The inverse of `worker_index`: pass the result as `to=` of `cm.put`.

  Args:
    index: in [0, num_workers(axes)); an array is not checked.
    axes: the axes, the first slowest.

  Raises:
    AxisError: a Python int outside that range.
  """
  first, *rest = as_axes(axes)
  index = _checked_index("index", index, num_workers(axes))
  result: dict[str, Index] = {}
  for name in reversed(rest):
    (size,) = axis_sizes(name)
    result[name] = jax.lax.rem(index, np.int32(size))
    index = jax.lax.div(index, np.int32(size))
  result[first] = index
  return dict(reversed(result.items()))


def shifted(axes: Axes, steps: Index = 1) -> dict[str, Index]:
  """The worker `steps` ahead along the ring of `axes`, for `to=`.

  Args:
    axes: the ring; several axes form one ring, the last fastest.
    steps: how far, negative for behind; a Python int or an int32 scalar.
  """
  size = num_workers(axes)
  if isinstance(steps, jax.Array):
    ahead = jax.lax.rem(_as_int32(steps), np.int32(size))
    ahead = jax.lax.add(ahead, np.int32(size))
  else:
    ahead = np.int32(operator.index(steps) % size)
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

  An axis that is not named means this worker's own index. Some are named all
  the same. A lone core axis is, because JAX's interpreter counts a signal that
  names no core on core 0. In a body launched by plain `pl.kernel` device axes
  are, because JAX resolves a missing one while it lowers the kernel, which
  fails under `check_vma=True`.

  Raises:
    AxisError: a key that is no axis in scope, or an index outside its axis.
  """
  if not to:
    raise errors.AxisError(
      "to must name at least one axis, such as {'core': other}; got {}."
    )
  names = as_axes(tuple(to), argument="to")
  address = {
    name: _checked_index(f"to[{name!r}]", to[name], size)
    for name, size in zip(names, axis_sizes(names), strict=True)
  }
  own = _lone_core_axis()
  if scope.current() is None:
    own += device_axes()
  here = {n: jax.lax.axis_index(n) for n in own if n not in to}
  return here | address


def own_device_id() -> dict[str, Index] | None:
  """The address of this worker; None where JAX takes that for its own."""
  cores = _lone_core_axis()
  return device_id({n: jax.lax.axis_index(n) for n in cores}) if cores else None


def _lone_core_axis() -> tuple[str, ...]:
  """The core axis, if it is the only one and has several cores."""
  cores = core_axes()
  return with_several(cores) if len(cores) == 1 else ()


def _checked_index(argument: str, index: Any, size: int) -> Any:
  """`index` as an int32 scalar, its range checked where it is known."""
  if isinstance(index, jax.core.Tracer):
    if index.ndim or not np.issubdtype(index.dtype, np.integer):
      raise errors.AxisError(
        f"{argument} must be an integer scalar; got"
        f" {index.dtype}{list(index.shape)}."
      )
    return _as_int32(index)
  try:
    known = operator.index(index)
  except TypeError as error:
    raise errors.AxisError(
      f"{argument} must be an integer; got {index!r}."
    ) from error
  if not 0 <= known < size:
    raise errors.AxisError(f"{argument} must be in [0, {size}); got {known}.")
  return np.int32(known)


def _as_int32(index: Index) -> jax.Array:
  """An int32 scalar, without a word in the program if it is that already."""
  return jax.lax.convert_element_type(index, np.int32)
