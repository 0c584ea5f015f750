"""Source for loads and stores."""

from typing import Any

import jax
import numpy as np

from coremesh.simulate import access, emitter, memory, reach, views


def _load(em: emitter.Emitter, part: access.Part, counts: Any = True) -> str:
  """Source of the value of a part of a ref.

  Args:
    em: the emitter.
    part: of a ref.
    counts: where the elements count: True, False, or a mask.
  """
  name = part.declaration.name
  site = em.site(f"load of {name!r}", name)
  reach.check(em, part, site)
  em.loads.append(site)
  operands = f"w, {part.name}, {part.steps(site)}, {site}"
  if counts is True:
    return f"m.load({operands})"
  if counts is False:
    return f"m.load({operands}, counts=False)"
  return f"loaded_where(m, {operands}, {counts})"


def loaded_where(m, w, buffer, steps, site, mask) -> Any:
  """A load of whose elements those count where a mask is set."""
  if buffer.unwritten is not None and np.any(mask):
    m.check_written(w, buffer, _where(steps, mask), site)
  return m.load(w, buffer, steps, site, counts=False)


def _where(steps, mask) -> tuple[views.Step, ...]:
  """Steps to the elements of a part where a mask is set."""
  if np.ndim(mask) == 0:
    return steps
  return (*steps, views.Rows(np.nonzero(mask), None, 0))


def leading(mask: np.ndarray) -> np.ndarray:
  """A mask of as many elements, the first."""
  return np.arange(mask.size) < mask.sum()


def _store(
  em: emitter.Emitter, part: access.Part, value: Any, mask: Any = None
) -> None:
  site = em.site(f"store to {part.declaration.name!r}")
  reach.check(em, part, site)
  part.declaration.changers.append(em.constants[str(site)].line)
  steps = part.steps(site)
  if mask is None:
    em.line(f"m.store(w, {part.name}, {steps}, {value}, {site})")
  else:
    em.line(f"masked(m, w, {part.name}, {steps}, {value}, {mask}, {site})")


def masked(m, w, buffer, steps, value, mask, site) -> None:
  """A store that touches nothing where the mask is not set."""
  if np.ndim(mask) == 0:
    if mask:
      m.store(w, buffer, steps, value, site)
    return
  value = np.broadcast_to(value, mask.shape)[mask]
  m.store(w, buffer, _where(steps, mask), value, site)


def _counts(em: emitter.Emitter, eqn: Any, mask: Any = None) -> Any:
  """Where the elements count that an equation loads; see `_load`."""
  if eqn.outvars[0] not in em.counted:
    return False
  return True if mask is None else mask


def _is_used(em: emitter.Emitter, eqn: Any) -> bool:
  return eqn.outvars[0] not in em.unused


def _get(em: emitter.Emitter, eqn: Any) -> None:
  ref, *rest = em.atoms(eqn.invars)
  transforms = jax.tree.unflatten(eqn.params["tree"], rest)
  part = access.Part(em, ref, transforms)
  em.bind(eqn, [em.let(_load(em, part, _counts(em, eqn)))])


def _swap(em: emitter.Emitter, eqn: Any) -> None:
  ref, value, *rest = em.atoms(eqn.invars)
  transforms = jax.tree.unflatten(eqn.params["tree"], rest)
  part = access.Part(em, ref, transforms)
  old: Any = emitter.Name("None")
  if _is_used(em, eqn):
    old = em.let(_load(em, part, _counts(em, eqn)))
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
  part = access.Part(em, ref, transforms)
  value = em.let(_load(em, part, _counts(em, eqn, mask)))
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
  if _is_used(em, eqn):
    old = em.let(_load(em, part, _counts(em, eqn, mask)))
  _store(em, part, value, mask)
  em.bind(eqn, [old])


def _sc_load(em: emitter.Emitter, eqn: Any) -> None:
  ref, *rest = em.atoms(eqn.invars)
  mask = rest.pop() if eqn.params["has_mask"] else None
  part = access.Part(em, ref, jax.tree.unflatten(eqn.params["tree"], rest))
  first = None if mask is None else f"leading({mask})"
  value = em.let(_load(em, part, _counts(em, eqn, first)))
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
  compresses = params["compress"] and mask is not None
  if _is_used(em, eqn) or compresses or params["add"]:
    counts = _counts(em, eqn, mask)
    if params["add"]:
      counts = f"leading({mask})" if compresses else (mask or True)
    old = em.let(_load(em, part, counts))
  if compresses:
    value = em.let(f"compressed({old}, {value}, {mask}, {params['add']})")
  elif params["add"]:
    value = em.let(f"{old} + {value}")
  _store(em, part, value, None if compresses else mask)
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
  name = part.declaration.name
  site = em.site(f"load_gather of {name!r}", name)
  em.loads.append(site)
  em.bind(
    eqn,
    [
      em.let(
        f"gathered(m, w, {part.name}, {part.steps(site)}, {_tuple(indices)},"
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
    f"scattered(m, w, {part.name}, {part.steps(site)}, {_tuple(indices)},"
    f" {value}, {mask}, {eqn.params['add']}, {site})"
  )
  em.bind(eqn, [])


def _tuple(names: Any) -> str:
  return f"({''.join(f'{name}, ' for name in names)})"


def gathered(m, w, buffer, steps, indices, mask, site) -> np.ndarray:
  """`load_gather`: lanes that the mask leaves out hold poison."""
  key, lanes = _lanes(buffer, steps, indices, mask, w, site)
  values = m.load(w, buffer, (*steps, views.Rows(key, None, 0)), site)
  if mask is None:
    return values
  result = np.full(mask.shape, memory.poison(values.dtype), values.dtype)
  result[lanes] = values
  return result


def scattered(m, w, buffer, steps, indices, value, mask, add, site) -> None:
  """`store_scatter` and `addupdate_scatter`, where lanes may meet."""
  key, lanes = _lanes(buffer, steps, indices, mask, w, site)
  part = (*steps, views.Rows(key, None, 0))
  if mask is not None:
    value = value[lanes]
  if not add:
    m.store(w, buffer, part, value, site)
    return
  old = m.load(w, buffer, part, site)
  shape = _shape(buffer, steps)
  place = np.ravel_multi_index(key, shape)
  _, first, back = np.unique(place, return_index=True, return_inverse=True)
  sums = old[first]
  np.add.at(sums, back, value)
  m.store(w, buffer, part, sums[back], site)


def _shape(buffer, steps) -> tuple[int, ...]:
  return np.shape(views.read(buffer.data, steps)) if steps else buffer.shape


def _lanes(buffer, steps, indices, mask, w, site) -> Any:
  """The index of the lanes that take part, checked, and their mask."""
  lanes = slice(None) if mask is None else mask
  key = tuple(index[lanes] for index in indices)
  shape = _shape(buffer, steps)
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
  site = em.site(f"fetch_and_add to {declaration.name!r}", declaration.name)
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


HELPERS = {
  "masked": masked,
  "loaded_where": loaded_where,
  "leading": leading,
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
}
