"""Source for what touches memory: loads, stores, semaphores and DMAs."""

import math
from typing import Any

import jax
import numpy as np

from coremesh import errors
from coremesh._compat import kernel_ir
from coremesh.simulate import access, emitter, memory

# --- loads and stores --------------------------------------------------------


def _load(em: emitter.Emitter, part: access.Part) -> str:
  """Source of the value of a part of a ref."""
  site = em.site(f"load of {part.declaration.name!r}")
  steps = part.steps(site)
  return f"m.load(w, {part.name}, {steps}, {site})"


def _store(em: emitter.Emitter, part: access.Part, value: str) -> None:
  site = em.site(f"store to {part.declaration.name!r}")
  steps = part.steps(site)
  em.line(f"m.store(w, {part.name}, {steps}, {value}, {site})")


def _is_used(eqn: Any) -> bool:
  return not isinstance(eqn.outvars[0], kernel_ir.DropVar)


def _get(em: emitter.Emitter, eqn: Any) -> None:
  ref, *rest = em.atoms(eqn.invars)
  transforms = jax.tree.unflatten(eqn.params["tree"], rest)
  em.bind(eqn, [em.let(_load(em, access.Part(em, ref, transforms)))])


def _swap(em: emitter.Emitter, eqn: Any) -> None:
  ref, value, *rest = em.atoms(eqn.invars)
  transforms = jax.tree.unflatten(eqn.params["tree"], rest)
  part = access.Part(em, ref, transforms)
  old = em.let(_load(em, part)) if _is_used(eqn) else emitter.Name("None")
  _store(em, part, value)
  em.bind(eqn, [old])


def _addupdate(em: emitter.Emitter, eqn: Any) -> None:
  ref, value, *rest = em.atoms(eqn.invars)
  part = access.Part(em, ref, jax.tree.unflatten(eqn.params["tree"], rest))
  _store(em, part, em.let(f"{_load(em, part)} + {value}"))
  em.bind(eqn, [])


def _masked_load(em: emitter.Emitter, eqn: Any) -> None:
  ref, transforms, mask, other = eqn.params["args_tree"].unflatten(
    em.atoms(eqn.invars)
  )
  value = em.let(_load(em, access.Part(em, ref, transforms)))
  if mask is not None:
    # Without `other` the hardware leaves what it had: poison shows its use.
    other = other or em.constant(
      memory.poison(np.dtype(eqn.outvars[0].aval.dtype))
    )
    dtype = em.constant(np.dtype(eqn.outvars[0].aval.dtype))
    value = em.let(f"np.where({mask}, {value}, {other}).astype({dtype})")
  em.bind(eqn, [value])


def _masked_swap(em: emitter.Emitter, eqn: Any) -> None:
  ref, transforms, value, mask = eqn.params["args_tree"].unflatten(
    em.atoms(eqn.invars)
  )
  part = access.Part(em, ref, transforms)
  old: Any = emitter.Name("None")
  if _is_used(eqn) or mask is not None:
    old = em.let(_load(em, part))
  if mask is not None:
    value = em.let(f"np.where({mask}, {value}, {old})")
  _store(em, part, value)
  em.bind(eqn, [old])


def _sc_load(em: emitter.Emitter, eqn: Any) -> None:
  ref, *rest = em.atoms(eqn.invars)
  mask = rest.pop() if eqn.params["has_mask"] else None
  part = access.Part(em, ref, jax.tree.unflatten(eqn.params["tree"], rest))
  value = em.let(_load(em, part))
  if mask is not None:
    value = em.let(f"expanded({value}, {mask})")
  em.bind(eqn, [value])


def expanded(value: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """The first elements, at the lanes where the mask is set."""
  result = np.full_like(value, memory.poison(value.dtype))
  result[mask] = value[: int(mask.sum())]
  return result


def _sc_swap(em: emitter.Emitter, eqn: Any) -> None:
  ref, value, *rest = em.atoms(eqn.invars)
  params = eqn.params
  mask = rest.pop() if params["has_mask"] else None
  part = access.Part(em, ref, jax.tree.unflatten(params["tree"], rest))
  old: Any = emitter.Name("None")
  if _is_used(eqn) or mask is not None or params["add"]:
    old = em.let(_load(em, part))
  if params["compress"] and mask is not None:
    value = em.let(f"compressed({old}, {value}, {mask}, {params['add']})")
  elif params["add"]:
    value = em.let(f"{old} + {value}")
  if mask is not None and not params["compress"]:
    value = em.let(f"np.where({mask}, {value}, {old})")
  _store(em, part, value)
  em.bind(eqn, [old] * len(eqn.outvars))


def compressed(
  old: np.ndarray, value: np.ndarray, mask: np.ndarray, add: bool
) -> np.ndarray:
  """`old` with its first elements set to the masked lanes of `value`."""
  result, count = old.copy(), int(mask.sum())
  result[:count] = old[:count] + value[mask] if add else value[mask]
  return result


def _sc_gather(em: emitter.Emitter, eqn: Any) -> None:
  ref, transforms, indices, mask = eqn.params["tree"].unflatten(
    em.atoms(eqn.invars)
  )
  part = access.Part(em, ref, transforms)
  part.declaration.is_shared = True
  site = em.site(f"load_gather of {part.declaration.name!r}")
  em.bind(
    eqn,
    [
      em.let(
        f"gathered(m, w, {part.name}, {part.steps(site)}, ({', '.join(map(str, indices))},),"
        f" {mask}, {site})"
      )
    ],
  )


def _sc_scatter(em: emitter.Emitter, eqn: Any) -> None:
  ref, transforms, indices, value, mask = jax.tree.unflatten(
    eqn.params["tree"], em.atoms(eqn.invars)
  )
  part = access.Part(em, ref, transforms)
  part.declaration.is_shared = True
  site = em.site(f"store_scatter to {part.declaration.name!r}")
  em.line(
    f"scattered(m, w, {part.name}, {part.steps(site)}, ({', '.join(map(str, indices))},),"
    f" {value}, {mask}, {eqn.params['add']}, {site})"
  )
  em.bind(eqn, [])


def gathered(m, w, buffer, steps, indices, mask, site) -> np.ndarray:
  """`load_gather`: lanes that the mask leaves out hold poison."""
  key, lanes = _lanes(buffer, steps, indices, mask, w, site)
  values = m.load(w, buffer, (*steps, memory.Rows(key, None, 0)), site)
  if mask is None:
    return values
  result = np.full(mask.shape, memory.poison(values.dtype), values.dtype)
  result[lanes] = values
  return result


def scattered(m, w, buffer, steps, indices, value, mask, add, site) -> None:
  """`store_scatter` and `addupdate_scatter`, where lanes may meet."""
  key, lanes = _lanes(buffer, steps, indices, mask, w, site)
  part = (*steps, memory.Rows(key, None, 0))
  if mask is not None:
    value = value[lanes]
  if not add:
    m.store(w, buffer, part, value, site)
    return
  old = m.load(w, buffer, part, site)
  shape = np.shape(memory.read(buffer.data, steps))
  place = np.ravel_multi_index(key, shape)
  _, first, back = np.unique(place, return_index=True, return_inverse=True)
  sums = old[first]
  np.add.at(sums, back, value)
  m.store(w, buffer, part, sums[back], site)


def _lanes(buffer, steps, indices, mask, w, site) -> Any:
  """The index of the lanes that take part, checked, and their mask."""
  lanes = slice(None) if mask is None else mask
  key = tuple(index[lanes] for index in indices)
  shape = np.shape(memory.read(buffer.data, steps))
  for entry, dim in zip(key, shape, strict=False):
    if ((entry < 0) | (entry >= dim)).any():
      bad = entry[(entry < 0) | (entry >= dim)].flat[0]
      access.out_of_bounds(
        w, f"index {bad} into a dimension of {dim} of {buffer.family}", site
      )
  return key, lanes


def _fetch_and_add(em: emitter.Emitter, eqn: Any) -> None:
  ref, value, *indices, subcore = em.atoms(eqn.invars)
  declaration = em.refs[str(ref)]
  declaration.is_shared = True
  site = em.site(f"fetch_and_add to {declaration.name!r}")
  axis = tuple(em.mesh.shape)[-1]
  key = "".join(f"int({i}), " for i in indices)
  em.bind(
    eqn,
    [
      em.let(
        f"m.fetch_and_add(w, m.peer(w, {ref}, (w.device, {{**w.coords,"
        f" {axis!r}: int({subcore})}}), {site}), ({key}), {value}, {site})"
      )
    ],
  )
  with em.block("if m.switches():"):
    em.line("yield")


# --- semaphores --------------------------------------------------------------


def _target(
  em: emitter.Emitter, device_id: Any, core_index: Any, device_id_type: Any
) -> str | None:
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
      number = (
        f"({number}) * {size} + m.along({changes.get(axis, own)}, {size})"
      )
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


def _signal(em: emitter.Emitter, eqn: Any) -> None:
  ref, transforms, amount, device_id, core = eqn.params["args_tree"].unflatten(
    em.atoms(eqn.invars)
  )
  part = access.Part(em, ref, transforms)
  site = em.site(f"signal of {part.declaration.name!r}")
  part.declaration.signallers.append(em.constants[str(site)].line)
  target = _target(em, device_id, core, eqn.params["device_id_type"])
  bank = _reached(em, part, target, site)
  semaphore = part.semaphore(site, bank)
  with em.block(f"if m.signal(w, {semaphore}, {amount}, {site}):"):
    em.line("yield")
  em.bind(eqn, [])


def _reached(em, part: access.Part, target: str | None, site: Any) -> Any:
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


def _wait(em: emitter.Emitter, eqn: Any) -> None:
  ref, transforms, amount, decrement = eqn.params["args_tree"].unflatten(
    em.atoms(eqn.invars)
  )
  part = access.Part(em, ref, transforms)
  site = em.site(f"wait for {part.declaration.name!r}")
  semaphore = em.let(part.semaphore(site), "q")
  keep = "" if decrement in (True, 1) else f", decrement={bool(decrement)}"
  with em.block(f"while not m.take(w, {semaphore}, {amount}, {site}{keep}):"):
    em.line("yield")
  em.bind(eqn, [])


def _semaphore_read(em: emitter.Emitter, eqn: Any) -> None:
  ref, transforms = eqn.params["args_tree"].unflatten(em.atoms(eqn.invars))
  part = access.Part(em, ref, transforms)
  site = em.site(f"semaphore_read of {part.declaration.name!r}")
  # A loop that polls must let the others run.
  em.line("yield")
  em.bind(eqn, [em.let(f"m.observe(w, {part.semaphore(site)})")])


def _barrier_semaphore(em: emitter.Emitter, eqn: Any) -> None:
  declaration = emitter.declare("barrier", eqn.outvars[0].aval, em.mesh)
  em.scoped.append(declaration)
  tag = em.constant(eqn.params.get("tag"))
  ref = em.let(f"m.barrier(w, {em.constant(declaration, 'd')}, {tag})", "r")
  em.refs[str(ref)] = declaration
  em.crosses_devices = True
  em.bind(eqn, [ref])


def _subcore_barrier(em: emitter.Emitter, eqn: Any) -> None:
  site = em.site("subcore_barrier")
  with em.block(f"if not m.meet(w, m.meeting(w), {site}):"):
    em.line("yield")
  em.bind(eqn, [])


# --- DMAs --------------------------------------------------------------------


def _dma_start(em: emitter.Emitter, eqn: Any) -> None:
  values = em.atoms(eqn.invars)
  src, dst, dst_sem, src_sem, device_id = eqn.params["tree"].unflatten(values)
  src, dst = access.Part(em, src), access.Part(em, dst)
  src.declaration.is_shared = dst.declaration.is_shared = True
  site = em.site(
    f"copy from {src.declaration.name!r} to {dst.declaration.name!r}"
  )
  target = _target(em, device_id, None, eqn.params["device_id_type"])
  dst_name = _reached(em, dst, target, site)
  size = src.num_bytes()
  semaphores = [
    _semaphore_of(em, src_sem, site, None),
    _semaphore_of(em, dst_sem, site, target),
  ]
  with em.block(
    f"if m.start(Transfer(w, {src.name}, {src.steps(site)}, {dst_name},"
    f" {dst.steps(site)}, {semaphores[0]}, {semaphores[1]},"
    f" {bool(eqn.params['add'])}, {site}, {size})):"
  ):
    em.line("yield")
  em.bind(eqn, [])


def _semaphore_of(em, value: Any, site: Any, target: str | None) -> str:
  if value is None:
    return "None"
  part = access.Part(em, value)
  part.declaration.signallers.append(em.constants[str(site)].line)
  return part.semaphore(site, _reached(em, part, target, site))


def _dma_wait(em: emitter.Emitter, eqn: Any) -> None:
  values = em.atoms(eqn.invars)
  tree = eqn.params["tree"]
  src, _, sem, _, _ = tree.unflatten(values)
  if sem is None:
    em.line("m.drain(w)")
    em.bind(eqn, [])
    return
  part = access.Part(em, sem)
  site = em.site(f"wait for the copy of {part.declaration.name!r}")
  size = access.Part(em, src).num_bytes()
  semaphore = em.let(part.semaphore(site), "q")
  with em.block(f"while not m.take(w, {semaphore}, {size}, {site}):"):
    em.line("yield")
  em.bind(eqn, [])


HELPERS = {
  "expanded": expanded,
  "compressed": compressed,
  "gathered": gathered,
  "scattered": scattered,
}

RULES = {
  "state.get": _get,
  "state.swap": _swap,
  "state.addupdate": _addupdate,
  "pallas.load": _masked_load,
  "pallas.swap": _masked_swap,
  "sc.load": _sc_load,
  "sc.swap": _sc_swap,
  "sc.gather": _sc_gather,
  "sc.scatter": _sc_scatter,
  "sc.fetch_and_add": _fetch_and_add,
  "sc.barrier": _subcore_barrier,
  "pallas.semaphore_signal": _signal,
  "pallas.semaphore_wait": _wait,
  "pallas.semaphore_read": _semaphore_read,
  "tpu.get_barrier_semaphore": _barrier_semaphore,
  "tpu.dma_start": _dma_start,
  "tpu.dma_wait": _dma_wait,
}
