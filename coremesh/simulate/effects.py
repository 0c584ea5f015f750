"""Source for semaphores, barriers and DMAs."""

from typing import Any

from coremesh._compat import kernel_ir
from coremesh.simulate import access, address, emitter


def _signal(em: emitter.Emitter, eqn: Any) -> None:
  ref, transforms, amount, device_id, core = eqn.params["args_tree"].unflatten(
    em.atoms(eqn.invars)
  )
  part = access.Part(em, ref, transforms)
  site = em.site(f"signal of {part.declaration.name!r}")
  part.declaration.changers.append(em.constants[str(site)].line)
  target = address.target(em, device_id, core)
  bank = address.reached(em, part, target, site)
  semaphore = part.semaphore(site, bank)
  with em.block(f"if m.signal(w, {semaphore}, {amount}, {site}):"):
    em.line("yield")
  em.bind(eqn, [])


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
  name = part.declaration.name
  site = em.site(f"semaphore_read of {name!r}", name)
  # A loop that polls must let the others run.
  em.line("yield")
  em.bind(eqn, [em.let(f"m.observe(w, {part.semaphore(site)}, {site})")])


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


def _dma_start(em: emitter.Emitter, eqn: Any) -> None:
  values = em.atoms(eqn.invars)
  src, dst, dst_sem, src_sem, device_id = eqn.params["tree"].unflatten(values)
  src, dst = access.Part(em, src), access.Part(em, dst)
  src.declaration.is_shared = dst.declaration.is_shared = True
  is_far = dst.declaration.space in ("hbm", "host")
  if kernel_ir.is_of_pipeline(eqn) and not is_far:
    dst.declaration.is_block = True
  site = em.site(
    f"copy from {src.declaration.name!r} to {dst.declaration.name!r}"
  )
  dst.declaration.changers.append(em.constants[str(site)].line)
  target = address.target(em, device_id, None)
  dst_name = address.reached(em, dst, target, site)
  size = src.num_bytes()
  src_steps = src.steps(site, reaches_padding=True)
  dst_steps = dst.steps(site, reaches_padding=True)
  semaphores = [
    _semaphore_of(em, src_sem, site, None),
    _semaphore_of(em, dst_sem, site, target),
  ]
  with em.block(
    f"if m.start(Transfer(w, {src.name}, {src_steps}, {dst_name},"
    f" {dst_steps}, {semaphores[0]}, {semaphores[1]},"
    f" {bool(eqn.params['add'])}, {site}, {size})):"
  ):
    em.line("yield")
  em.bind(eqn, [])


def _semaphore_of(em, value: Any, site: Any, target: str | None) -> str:
  if value is None:
    return "None"
  part = access.Part(em, value)
  part.declaration.changers.append(em.constants[str(site)].line)
  return part.semaphore(site, address.reached(em, part, target, site))


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


RULES = {
  "sc.barrier": _subcore_barrier,
  "pallas.semaphore_signal": _signal,
  "pallas.semaphore_wait": _wait,
  "pallas.semaphore_read": _semaphore_read,
  "tpu.get_barrier_semaphore": _barrier_semaphore,
  "tpu.dma_start": _dma_start,
  "tpu.dma_wait": _dma_wait,
}
