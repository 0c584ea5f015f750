"""Source for control flow: calls, branches, loops, scopes, and the grid."""

from typing import Any

import numpy as np

from coremesh import errors
from coremesh._compat import kernel_ir
from coremesh.simulate import emitter, unsupported


def _call(em: emitter.Emitter, eqn: Any) -> None:
  jaxpr = kernel_ir.custom_call_jaxpr(eqn)
  count = len(jaxpr.invars)
  args = em.atoms(eqn.invars)
  em.bind(eqn, em.inline(jaxpr, args[len(args) - count :]))


def _cond(em: emitter.Emitter, eqn: Any) -> None:
  index, *args = em.atoms(eqn.invars)
  branches = eqn.params["branches"]
  results = [em.name() for _ in eqn.outvars]
  last = len(branches) - 1
  with em.nest():
    for i, branch in enumerate(branches):
      # An index out of range chooses the first or the last branch.
      test = "else:" if i == last else f"{'el' if i else ''}if {index} <= {i}:"
      with em.block(test if last else "if True:"):
        em.assign(results, em.inline(branch, args))
  em.bind(eqn, results)


def _while(em: emitter.Emitter, eqn: Any) -> None:
  params, args = eqn.params, em.atoms(eqn.invars)
  num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
  cond_args = args[:num_cond]
  body_args = args[num_cond : num_cond + num_body]
  state = em.carried(args[num_cond + num_body :])
  first = len(em.loads)
  with em.nest(), em.block("while True:"):
    (goes_on,) = em.inline(params["cond_jaxpr"], [*cond_args, *state])
    with em.block(f"if not {goes_on}:"):
      em.line("break")
    em.assign(state, em.inline(params["body_jaxpr"], [*body_args, *state]))
    if em.loads[first:]:  # It may wait for what another worker writes.
      values = "".join(f"{v}, " for v in state if not em.is_ref(v))
      round_ = f"m.goes_round(w, ({values}), {em.loads[-1]})"
      with em.block(f"if {round_}:"):
        em.line("yield")
  em.bind(eqn, state)


def _scan(em: emitter.Emitter, eqn: Any) -> None:
  constants, carry, arrays = kernel_ir.scan_parts(eqn, em.atoms(eqn.invars))
  state = em.carried(carry)
  count = eqn.params["length"]
  order = f"range({count})"
  if eqn.params["reverse"]:
    order = f"range({count - 1}, -1, -1)"
  outs = kernel_ir.scan_results(eqn, eqn.outvars)[1]
  stacked = [
    em.let(
      f"np.empty({tuple(v.aval.shape)}, {em.constant(np.dtype(v.aval.dtype))})"
    )
    for v in outs
  ]
  i = em.name("i")
  with em.nest(), em.block(f"for {i} in {order}:"):
    slices = [em.let(f"{a}[{i}]") for a in arrays]
    results = em.inline(eqn.params["jaxpr"], [*constants, *state, *slices])
    new_state, rows = kernel_ir.scan_results(eqn, results)
    for array, row in zip(stacked, rows, strict=True):
      em.line(f"{array}[{i}] = {row}")
    em.assign(state, new_state)
  em.bind(eqn, [*state, *stacked])


def _parallel_loop(em: emitter.Emitter, eqn: Any) -> None:
  lower, upper, step, constants, carry = eqn.params["tree"].unflatten(
    em.atoms(eqn.invars)
  )
  state = em.carried(carry)
  order = f"range(int({lower}), int({upper}), int({step}))"
  if not carry:  # Its iterations may run in any order.
    order = f"m.shuffled({order})"
  i = em.name("i")
  with em.nest(), em.block(f"for {i} in {order}:"):
    index = em.let(f"np.int32({i})")
    results = em.inline(eqn.params["jaxpr"], [index, *state], list(constants))
    em.assign(state, results)
  em.bind(eqn, state)


def _run_scoped(em: emitter.Emitter, eqn: Any) -> None:
  jaxpr = eqn.params["jaxpr"]
  names = getattr(jaxpr.debug_info, "arg_names", None)
  site = em.site("run_scoped")
  refs = []
  for i, var in enumerate(jaxpr.invars):
    name = names[i] if names and i < len(names) and names[i] else f"scoped {i}"
    refs.append(allocate(em, name, var.aval, site))
  results = em.inline(jaxpr, refs, em.atoms(eqn.invars))
  for ref in refs:
    em.line(f"m.free(w, {ref}, {site})")
    em.holdings.drop(em.refs[str(ref)])
  em.bind(eqn, results)


def allocate(
  em: emitter.Emitter, name: str, type_: Any, site: Any, num_buffers: int = 1
) -> Any:
  """Writes the allocation of a ref that the program makes itself."""
  declaration = emitter.declare(name, type_, em.mesh)
  declaration.num_buffers = num_buffers
  em.scoped.append(declaration)
  em.holdings.hold(declaration)
  ref = em.let(f"m.allocate(w, {em.constant(declaration, 'd')}, {site})", "r")
  em.refs[str(ref)] = declaration
  return ref


def _empty_ref(em: emitter.Emitter, eqn: Any) -> None:
  site = em.site("empty_ref")
  ref = allocate(em, "empty_ref", eqn.outvars[0].aval, site)
  em.bind(eqn, [ref])


def _new_ref(em: emitter.Emitter, eqn: Any) -> None:
  site = em.site("new_ref")
  ref = allocate(em, "new_ref", eqn.outvars[0].aval, site)
  (value,) = em.atoms(eqn.invars)
  inside = "".join(f"slice(0, {n}), " for n in eqn.outvars[0].aval.shape)
  em.line(f"m.store(w, {ref}, (({inside}),), {value}, {site})")
  em.bind(eqn, [ref])


def _get_global(em: emitter.Emitter, eqn: Any) -> None:
  declaration = emitter.declare("global", eqn.outvars[0].aval, em.mesh)
  em.scoped.append(declaration)
  ref = em.let(f"m.get_global(w, {em.constant(declaration, 'd')})", "r")
  em.refs[str(ref)] = declaration
  em.bind(eqn, [ref])


def _check(em: emitter.Emitter, eqn: Any) -> None:
  if not eqn.params["debug"]:
    raise unsupported.error("checkify.check", em.place)
  if kernel_ir.debug_checks_enabled():
    failed, message = kernel_ir.failed_check(eqn, em.atoms(eqn.invars))
    site = em.site("debug_check")
    with em.block(f"if {failed}:"):
      em.line(f"m.fail_check(w, {message!r}, {site})")
  em.bind(eqn, [])


def _multiple_of(em: emitter.Emitter, eqn: Any) -> None:
  """Gives the value back, if the kernel's promise about it holds."""
  (value,) = em.atoms(eqn.invars)
  known = em.numbers.get(str(value))
  for multiple in eqn.params["values"]:
    if known is None or known % multiple:
      site = em.site("pl.multiple_of")
      em.line(f"m.check_multiple(w, {value}, {multiple}, {site})")
  em.bind(eqn, [value])


def _free_ref(em: emitter.Emitter, eqn: Any) -> None:
  (ref,) = em.atoms(eqn.invars)
  em.line(f"m.free(w, {ref}, {em.site('free_ref')})")
  em.holdings.drop(em.refs[str(ref)])
  em.bind(eqn, [])


def _touch(em: emitter.Emitter, eqn: Any) -> None:
  em.bind(eqn, em.atoms(eqn.invars)[: len(eqn.outvars)])


def _has_memory_space(em: emitter.Emitter, eqn: Any) -> None:
  """Whether a ref in `pl.ANY` is in a memory: the simulator has it in HBM."""
  ref, _ = kernel_ir.split_ref(em.atom(eqn.invars[0]))
  space = em.refs[str(ref)].space
  answer = np.bool_(space == str(eqn.params["memory_space"]))
  em.bind(eqn, [em.constant(answer)])


def _pipeline(em: emitter.Emitter, eqn: Any) -> None:
  jaxpr = kernel_ir.expanded_pipeline(eqn, dict(em.mesh.shape))
  args = em.atoms(eqn.invars)
  outer, dims = em.grid, kernel_ir.pipeline_dims(eqn, args)
  em.grid = [("np.int32(0)", str(d)) for d in dims] + list(outer)
  em.bind(eqn, em.inline(jaxpr, args))
  em.grid = outer


def _pipeline_body(em: emitter.Emitter, eqn: Any) -> None:
  (indices, leaves), constants, refs = kernel_ir.unflattened_body(
    eqn, em.atoms(eqn.invars)
  )
  outer = em.grid
  em.grid = [(index, outer[i][1]) for i, index in enumerate(indices)] + outer[
    len(indices) :
  ]
  args = leaves if eqn.params["_explicit_indices"] else []
  em.inline(eqn.params["jaxpr"], [*args, *refs], constants)
  em.grid = outer


def _program_id(em: emitter.Emitter, eqn: Any) -> None:
  em.bind(eqn, [em.let(f"np.int32({em.grid[eqn.params['axis']][0]})")])


def _num_programs(em: emitter.Emitter, eqn: Any) -> None:
  em.bind(eqn, [em.let(f"np.int32({em.grid[eqn.params['axis']][1]})")])


def _platform_index(em: emitter.Emitter, eqn: Any) -> None:
  """Which branch of `jax.lax.platform_dependent` a TPU takes."""
  platforms = eqn.params["platforms"]
  for i, names in enumerate(platforms):
    if names is None or "tpu" in names:
      em.bind(eqn, [em.literal(i, eqn.outvars[0].aval)])
      return
  raise errors.UnsupportedError(
    "jax.lax.platform_dependent in a kernel needs a branch for 'tpu', or a"
    f" default; at {em.place} it has {[n for ns in platforms for n in ns]}."
  )


def _axis_index(em: emitter.Emitter, eqn: Any) -> None:
  axis = eqn.params["axis_name"]
  names = axis if isinstance(axis, tuple) else (axis,)
  index = "0"
  for name in names:
    size = {**em.device_axes, **em.core_axes}[name]
    place = "coords" if name in em.core_axes else "device_coords"
    part = f"w.{place}[{em.constant(name, 'a')}]"
    index = part if index == "0" else f"({index}) * {size} + {part}"
  em.bind(eqn, [em.let(f"np.int32({index})")])


def _nothing(em: emitter.Emitter, eqn: Any) -> None:
  em.bind(eqn, [emitter.Name("None")] * len(eqn.outvars))


def _debug_print(em: emitter.Emitter, eqn: Any) -> None:
  values = ", ".join(map(str, em.atoms(eqn.invars)))
  params = em.constant(dict(eqn.params))
  em.line(f"m.print(w, {params}, [{values}])")
  em.bind(eqn, [])


RULES = {
  **dict.fromkeys(
    (
      *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call"),
      *("custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint", "remat"),
      "remat2",
    ),
    _call,
  ),
  "cond": _cond,
  "while": _while,
  "scan": _scan,
  "sc.parallel_loop": _parallel_loop,
  "pallas.run_scoped": _run_scoped,
  "empty_ref": _empty_ref,
  "new_ref": _new_ref,
  "free_ref": _free_ref,
  "pallas.get_global": _get_global,
  "checkify.check": _check,
  "tpu.touch": _touch,
  "tpu.has_memory_space": _has_memory_space,
  "pipeline.emit_pipeline": _pipeline,
  "pipeline.pipeline_body": _pipeline_body,
  "pallas.program_id": _program_id,
  "pallas.num_programs": _num_programs,
  "pallas.multiple_of": _multiple_of,
  "axis_index": _axis_index,
  "platform_index": _platform_index,
  "pallas.delay": _nothing,
  "tpu.trace_value": _nothing,
  "debugging.debug_print": _debug_print,
}
