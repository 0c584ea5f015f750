"""Source for the other workers that an equation names by `device_id`."""

import math
from typing import Any

from coremesh import errors
from coremesh.simulate import access, emitter


def target(em: emitter.Emitter, device_id: Any, core_index: Any) -> str | None:
  """Source of (device, coordinates) of another worker; None for this one."""
  if device_id is None and core_index is None:
    return None
  if em.retarget == "own target":
    return None
  changes: dict[Any, str] = {}
  core = None if core_index is None else _number(core_index)
  if isinstance(device_id, dict):
    for axis, index in device_id.items():
      changes |= _along(em, axis, index)
  elif isinstance(device_id, tuple | list):
    axes = [
      *em.device_axes,
      *(em.core_axes if len(device_id) > len(em.device_axes) else ()),
    ]
    changes = dict(zip(axes, map(_number, device_id), strict=True))
  elif device_id is not None:
    em.crosses_devices = True
    coords = _coords(em, {}, core)
    number = _moved(em, _number(device_id), math.prod(em.device_axes.values()))
    return f"(m.device(w, {number}), {coords})"
  else:
    axis = next(iter(em.core_axes))
    core = _moved(em, str(core), em.core_axes[axis])
  unknown = [a for a in changes if a not in {**em.device_axes, **em.core_axes}]
  if unknown:
    raise errors.AxisError(
      f"device_id names {unknown}, which are axes of neither the device mesh"
      f" {list(em.device_axes)} nor the cores {list(em.core_axes)}."
    )
  for axis in list(changes)[:1]:
    size = {**em.device_axes, **em.core_axes}[axis]
    changes[axis] = _moved(em, changes[axis], size)
  device = "w.device"
  if any(axis in em.device_axes for axis in changes):
    em.crosses_devices = True
    number = "0"
    for axis, size in em.device_axes.items():
      own = f"w.device_coords[{em.constant(axis, 'a')}]"
      name, index = em.constant(axis, "a"), changes.get(axis, own)
      number = f"({number}) * {size} + m.along(w, {name}, {index}, {size})"
    device = number
  return f"({device}, {_coords(em, changes, core)})"


def _moved(em: emitter.Emitter, index: str, size: int) -> str:
  """The first coordinate of a target, or the next in a mutant."""
  em.num_targets = size
  if em.retarget != "next target":
    return index
  return f"({index} + 1) % {size}"


def _along(em: emitter.Emitter, axis: Any, index: Any) -> dict[Any, str]:
  """Coordinates by axis, of an index along one axis or several taken as one."""
  if not isinstance(axis, tuple):
    return {axis: _number(index)}
  sizes = {**em.device_axes, **em.core_axes}
  coords, rest = {}, _number(index)
  for name in reversed(axis):
    coords[name] = f"({rest}) % {sizes[name]}"
    rest = f"({rest}) // {sizes[name]}"
  return coords


def _number(value: Any) -> str:
  is_name = isinstance(value, emitter.Name)
  return f"int({value})" if is_name else str(int(value))


def _coords(em: emitter.Emitter, changes: Any, core: str | None) -> str:
  entries = {
    axis: index for axis, index in changes.items() if axis in em.core_axes
  }
  if core is not None:
    entries[next(iter(em.core_axes))] = core
  if not entries:
    return "w.coords"
  items = ", ".join(f"{em.constant(a, 'a')}: {i}" for a, i in entries.items())
  return f"{{**w.coords, {items}}}"


def reached(em, part: access.Part, target: str | None, site: Any) -> Any:
  missing = [
    axis
    for axis in part.declaration.axes
    if axis not in em.mesh.shape
    and f"{em.constant(axis, 'a')}: " not in (target or "")
  ]
  if missing:
    raise errors.AxisError(
      f"{em.constants[str(site)]}: {part.declaration.name!r} is on the cores of"
      f" {part.declaration.mesh}: device_id must name {missing}."
    )
  if target is None:
    return part.name
  part.declaration.is_shared = True
  return em.let(f"m.peer(w, {part.name}, {target}, {site})", "r")
