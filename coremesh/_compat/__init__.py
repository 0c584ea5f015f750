"""The only module that touches `jax._src` or depends on a JAX version."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import re
from typing import Any
import weakref

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import hardware_utils as _hardware_utils
from jax._src import tpu_info as _tpu_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.pallas import core as _pallas_core
from jax._src.pallas import mpmd as _mpmd
from jax._src.pallas.mosaic import primitives as _mosaic_primitives
from jax._src.state import primitives as _state_primitives
from jax._src.state import types as _state_types
from jax.experimental.pallas import tpu as pltpu
import jax.extend.core as jex_core
import numpy as np

from coremesh import errors
from coremesh._compat import kernel_ir

AbstractDevice = jax.sharding.AbstractDevice

type Revise = Callable[[dict[str, Any]], dict[str, Any]]


# --- machine ---------------------------------------------------------------


def num_attached_tpu_chips() -> int:
  """TPU chips on this machine's PCI bus, found without starting JAX."""
  return _hardware_utils.num_available_tpu_chips_and_device_id()[0]


def backends_started() -> bool:
  """Whether JAX has fixed its devices, so that their number can't change."""
  return _xla_bridge.backends_are_initialized()


def requested_platforms() -> str | None:
  """The platforms the user named (`JAX_PLATFORMS`), or None."""
  return _config.jax_platforms.value or None


def requested_cpu_devices() -> int:
  """The CPU devices the user asked JAX for, 1 if they did not."""
  return max(1, _config.config.jax_num_cpu_devices)


def num_processes() -> int:
  """Processes of this program, known without starting JAX's devices."""
  return _distributed.global_state.num_processes or 1


def chip_version(device_kind: str) -> pltpu.ChipVersion | None:
  """The chip a JAX device kind names, or None if it names no TPU."""
  return _tpu_info.chip_version_from_device_kind(device_kind)


def empty_device_context(device: AbstractDevice) -> Any:
  """A context in which JAX takes `device` for the device traced for."""
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  return jax.sharding.use_abstract_mesh(mesh)


# --- meshes ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SimulatedDevice(AbstractDevice):
  """A TPU device that CPU devices of `num_processes` processes stand in for."""

  num_processes: int = 1


class SimulatedMesh(jax.sharding.Mesh):
  """A mesh of CPU devices that tells the tracer it is a mesh of TPU devices.

  JAX asks the abstract mesh in scope which chip it is tracing for. A plain
  mesh of CPU devices answers "cpu", and every Pallas helper that needs a
  tile size or a core count fails.
  """

  simulated_device: SimulatedDevice

  def __new__(
    cls,
    devices: np.ndarray,
    axis_names: Sequence[str],
    simulated_device: SimulatedDevice,
  ):
    return _interned_mesh(
      devices.shape, tuple(devices.flat), tuple(axis_names), simulated_device
    )

  @functools.cached_property
  def abstract_mesh(self):
    return jax.sharding.AbstractMesh(
      self.axis_sizes,
      self.axis_names,
      axis_types=self.axis_types,
      abstract_device=self.simulated_device,
    )

  def __reduce__(self):
    args = (self.devices, self.axis_names, self.simulated_device)
    return SimulatedMesh, args


@functools.cache
def _interned_mesh(shape, devices, axis_names, simulated_device):
  # JAX compares meshes by identity, so equal arguments must give one object.
  plain = jax.sharding.Mesh(np.array(devices).reshape(shape), axis_names)
  mesh = object.__new__(SimulatedMesh)
  mesh.__dict__.update(plain.__dict__)
  mesh.__dict__.pop("abstract_mesh", None)
  mesh.__dict__["simulated_device"] = simulated_device
  return mesh


def bound_axis_sizes() -> dict[str, int]:
  """Every axis name in scope where this is called, with its size."""
  return dict(_core.get_axis_env().axis_sizes)


# --- kernels ---------------------------------------------------------------


def forced_interpret_params() -> pltpu.InterpretParams | None:
  """What `pltpu.force_tpu_interpret_mode` has set, None outside it."""
  return _config.pallas_tpu_interpret_mode_context_manager.value or None


def is_ref_type(aval: Any) -> bool:
  """Whether a type is that of a ref."""
  return isinstance(aval, _state_types.AbstractRef)


def memory_space(ref: Any) -> Any:
  """The memory a ref, or a part of one, is in; None if it is not said."""
  if isinstance(ref, _state_types.TransformedRef):
    return memory_space_of_type(ref)
  return memory_space_of_type(jax.typeof(ref))


def memory_space_of_type(ref_type: Any) -> Any:
  """The memory a ref of this type is in; None if it is not said."""
  space = getattr(ref_type, "memory_space", None)
  # A core's own memory, `VMEM @ mesh`, names the memory inside.
  if isinstance(space, _pallas_core.CoreMemorySpace):
    return space.memory_space
  return None if isinstance(space, _core.MemorySpace) else space


def core_mesh_of_type(ref_type: Any) -> Any:
  """The mesh whose memory a ref of this type is in, `VMEM @ mesh`, or None."""
  space = getattr(ref_type, "memory_space", None)
  return getattr(space, "mesh", None)


def is_memory_type(leaf: Any) -> bool:
  """Whether this is a shape in a Pallas memory, such as `pltpu.HBM(...)`."""
  return isinstance(leaf, _pallas_core.MemoryRef)


def output_in_memory(leaf: Any, *, manual_axis_type: Any) -> Any:
  """A Pallas memory type as the type of an output that varies over devices."""
  return leaf.get_array_aval().update(
    sharding=_core.get_cur_mesh_sharding(), manual_axis_type=manual_axis_type
  )


def joint_manual_axis_type(avals: Any) -> Any:
  """The device axes that any of the types varies over, as JAX writes it."""
  varying = frozenset()
  for aval in jax.tree.leaves(avals):
    manual = getattr(aval, "manual_axis_type", None)
    varying |= manual.varying if manual is not None else frozenset()
  return _core.ManualAxisType(varying=varying)


def aliased_kernel(
  body: Callable[..., None],
  out: Any,
  *,
  mesh: Any,
  scratch_types: Any,
  **options: Any,
) -> Callable[..., Any]:
  """What `core_map` over closed-over refs becomes when JAX lowers it.

  Outputs are allocated outside and aliased, and the body writes the aliased
  inputs. `core_map` itself rejects refs under `check_vma=True` and cannot be
  inside a custom derivative.
  """
  leaves, tree = jax.tree.flatten(out)

  def call(*args):
    num_inputs = len(jax.tree.leaves(args))
    empties = [varying_as(t, jax.lax.empty(t.shape, t.dtype)) for t in leaves]

    def on_refs(*refs, **named_refs):
      inputs, outputs = refs[: len(args)], refs[len(args) :][: len(leaves)]
      scratch = refs[len(args) + 2 * len(leaves) :]
      outputs = jax.tree.unflatten(tree, outputs)
      outputs = outputs if isinstance(out, list | tuple) else (outputs,)
      return body(*inputs, *outputs, *scratch, **named_refs)

    launch = _mpmd._mpmd_map(
      [(mesh, on_refs)],
      leaves,
      input_output_aliases={num_inputs + i: i for i in range(len(leaves))},
      scratch_types=scratch_types,
      **options,
    )
    return jax.tree.unflatten(tree, launch(*args, *empties))

  return call


def varying_as(type_: Any, array: jax.Array) -> jax.Array:
  """`array`, as one that varies over the device axes that `type_` names."""
  varying = tuple(type_.manual_axis_type.varying)
  is_checked = varying and _config._check_vma.value
  return jax.lax.pcast(array, varying, to="varying") if is_checked else array


def varying_together(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """The arrays, each varying over the device axes that any varies over.

  So that the derivative with respect to one that is the same on all devices is
  summed over them, whatever kernel made it.
  """
  joint = joint_manual_axis_type([jax.typeof(a) for a in arrays]).varying
  if not joint or not _config._check_vma.value:
    return list(arrays)
  missing = [joint - _core.typeof(a).manual_axis_type.varying for a in arrays]
  return [
    jax.lax.pcast(a, tuple(m), to="varying") if m else a
    for a, m in zip(arrays, missing, strict=True)
  ]


def walk(jaxpr: jex_core.Jaxpr) -> Iterator[jex_core.JaxprEqn]:
  """Every equation of `jaxpr`, those of its inner programs included."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in inner_jaxprs(eqn):
      yield from walk(inner)


def count_barrier_semaphores(jaxpr: jex_core.Jaxpr) -> int:
  """How often a kernel's program asks for the barrier semaphore."""
  count = 0
  for eqn in jaxpr.eqns:
    count += eqn.primitive is _mosaic_primitives.get_barrier_semaphore_p
    if eqn.effects:  # Most of a program is arithmetic, which has none.
      count += sum(map(count_barrier_semaphores, inner_jaxprs(eqn)))
  return count


def stable_text(jaxpr: jex_core.Jaxpr) -> str:
  """A program as text that is the same on every process."""
  return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


def inner_jaxprs(eqn: jex_core.JaxprEqn) -> Iterator[jex_core.Jaxpr]:
  """The programs an equation holds: branches, loop bodies, kernels."""
  for value in eqn.params.values():
    yield from _inner_jaxprs(value)


def _inner_jaxprs(value: Any) -> Iterator[jex_core.Jaxpr]:
  if isinstance(value, jex_core.ClosedJaxpr):
    yield value.jaxpr
  elif isinstance(value, jex_core.Jaxpr):
    yield value
  elif isinstance(value, tuple | list):
    for item in value:
      yield from _inner_jaxprs(item)


@contextlib.contextmanager
def recorded_accesses(
  refs: Sequence[Any],
) -> Iterator[dict[int, list[str]]]:
  """How what is traced inside touches each ref: "read" and "write", in order.

  Yields:
    By position in `refs`; filled on exit.
  """
  frame = _core.trace_ctx.trace.frame
  start = len(frame.tracing_eqns)
  accesses: dict[int, list[str]] = {}
  yield accesses
  positions = {_var(ref): i for i, ref in enumerate(refs)}
  recorded = frame.tracing_eqns[start:]
  # Equations that may yet turn out to be dead are held weakly.
  eqns = [e() if isinstance(e, weakref.ref) else e for e in recorded]
  accesses.update(_accesses(filter(None, eqns), positions))


def _var(value: Any) -> Any:
  """The variable of a ref, of a part of one, or of any traced value."""
  while isinstance(value, _state_types.TransformedRef):
    value = value.ref
  return getattr(value, "val", value)


def _accesses(
  eqns: Iterable[Any], positions: dict[Any, int]
) -> dict[int, list[str]]:
  accesses: dict[int, list[str]] = {}
  for eqn in eqns:
    kinds: dict[int, set[str]] = {}
    for effect in eqn.effects:
      position = positions.get(getattr(effect, "input", None))
      if position is not None:
        kinds.setdefault(position, set()).update(_access_kinds(effect))
    for position, both in kinds.items():
      order = sorted(both)  # A read before a write, unless seen otherwise.
      if len(both) == 2 and not _inner_reads_first(eqn, positions, position):
        order.reverse()
      accesses.setdefault(position, []).extend(order)
  return accesses


def _access_kinds(effect: Any) -> Sequence[str]:
  match effect:
    case _state_types.WriteEffect():
      return ["write"]
    case _state_types.ReadEffect():
      return ["read"]
    case _state_types.AccumEffect():
      return ["read", "write"]
    case _:
      return []


def _inner_reads_first(eqn: Any, positions: Any, position: int) -> bool:
  """Whether some program inside an equation reads the ref before writing it."""
  inner = list(inner_jaxprs(eqn))
  for jaxpr in inner:
    bound, outer = _bindings(eqn, jaxpr)
    named = {
      v: positions[o]
      for v, o in zip(bound, map(_var, outer), strict=True)
      if not _is_literal(o) and o in positions
    }
    if _accesses(jaxpr.eqns, named).get(position, [""])[0] == "read":
      return True
  return not inner


def _bindings(eqn: Any, jaxpr: jex_core.Jaxpr) -> tuple[Any, Any]:
  """The inputs of a program inside an equation, and what they are outside."""
  outer = list(eqn.invars)
  if len(jaxpr.constvars) == len(outer):  # run_scoped
    return jaxpr.constvars, outer
  if jaxpr is getattr(eqn.params.get("cond_jaxpr"), "jaxpr", None):  # while
    skipped = eqn.params["cond_nconsts"]
    outer[skipped : skipped + eqn.params["body_nconsts"]] = []
  # The branches of a cond do not get its index, nor the body of a while what
  # is for its condition.
  return jaxpr.invars, outer[len(outer) - len(jaxpr.invars) :]


def without_tracing() -> Any:
  """A context in which every JAX operation fails."""
  return _core.set_current_trace(None)


def used_arguments(function: Callable[..., Any], count: int) -> frozenset[int]:
  """Which of `count` int32 arguments the results depend on."""
  jaxpr = jax.make_jaxpr(function)(*[np.int32(0)] * count).jaxpr
  uses = {v: frozenset([i]) for i, v in enumerate(jaxpr.invars)}

  def of(atom):
    return uses.get(atom, frozenset()) if not _is_literal(atom) else frozenset()

  for eqn in jaxpr.eqns:
    used = frozenset().union(*(of(v) for v in eqn.invars))
    uses.update({v: used for v in eqn.outvars})
  return frozenset().union(*(of(v) for v in jaxpr.outvars))


def _is_literal(atom: Any) -> bool:
  return isinstance(atom, jex_core.Literal)


# A kernel launch: the primitive of `pl.kernel`, with the transformations it
# lacks. Its parameters are the same, and so is its name, by which JAX finds the
# collective ids in a program, so as not to hand them out again.
kernel_p = _core.Primitive(_mpmd.mpmd_map_p.name)
kernel_p.multiple_results = True
kernel_p.def_effectful_abstract_eval(_mpmd._mpmd_map_abstract_eval)


@kernel_p.def_impl
def _run_kernel(*args: Any, **params: Any) -> Any:
  with jax.disable_jit(False):  # Running it means compiling it.
    return jax.jit(lambda *args: kernel_p.bind(*args, **params))(*args)


def _lower_with(rule: Callable[..., Any]) -> Callable[..., Any]:
  def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    # JAX lowers parts of a kernel by tracing, and mixes a device's index, which
    # varies over devices, with plain numbers. Inside the kernel that has no
    # meaning, but under shard_map(check_vma=True) it would be refused.
    with _config._check_vma(False):
      return rule(ctx, *operands, **params)

  return lower


_mlir.register_lowering(
  kernel_p, _lower_with(_mpmd._mpmd_map_tpu_lowering), platform="tpu"
)
_mlir.register_lowering(
  kernel_p, _lower_with(kernel_ir._lower_kernel), platform="cpu"
)


def _batch_kernel(args: Any, dims: Any, **params: Any) -> Any:
  """One launch after the other: right for barriers, prefetch and check_vma."""
  is_batched = [d is not None for d in dims]
  spaces = [_core.typeof(arg).memory_space for arg in args]
  # What slices an array takes none that is kept in a memory of a TPU.
  stacked = [
    _batching.moveaxis(_moved(arg, _core.MemorySpace.Device), dim, 0)
    for arg, dim, batched in zip(args, dims, is_batched, strict=True)
    if batched
  ]

  def launch(elements):
    rest = iter(elements)
    flat = [
      _moved(next(rest), space) if batched else arg
      for arg, batched, space in zip(args, is_batched, spaces, strict=True)
    ]
    return kernel_p.bind(*flat, **params)

  results = jax.lax.map(launch, stacked)
  return results, [0] * len(results)


def _moved(array: Any, memory_space: Any) -> Any:
  if _core.typeof(array).memory_space == memory_space:
    return array
  return _state_primitives.with_memory_space_constraint(array, memory_space)


def _refuse_derivative(primals: Any, tangents: Any, **params: Any) -> Any:
  raise errors.UnsupportedError(
    f"Kernel {params['name']!r} has no derivative: wrap the call in a"
    " jax.custom_vjp function with a forward and a backward kernel, or keep it"
    " out of the derivative with jax.lax.stop_gradient on its arguments."
  )


_batching.primitive_batchers[kernel_p] = _batch_kernel
_ad.primitive_jvps[kernel_p] = _refuse_derivative
_core.custom_typechecks[kernel_p] = _mpmd._mpmd_map_typecheck_rule
# Whether a kernel whose results nobody uses may go is up to `has_side_effects`,
# which the compiler heeds.
_partial_eval.dce_rules[kernel_p] = _mpmd._mpmd_map_dce_rule

KERNEL_PRIMITIVE = _mpmd.mpmd_map_p.name


def without_idle_inputs(
  jaxpr: jex_core.Jaxpr, refs: Sequence[Any]
) -> jex_core.Jaxpr:
  """A kernel's program without those of `refs` that it does not use."""
  idle = {_var(ref) for ref in refs}
  for eqn in jaxpr.eqns:
    idle.difference_update(v for v in eqn.invars if not _is_literal(v))
  kept = [i for i, v in enumerate(jaxpr.invars) if v not in idle]
  names = jaxpr.debug_info.arg_names
  names = None if names is None else tuple(names[i] for i in kept)
  return jaxpr.replace(
    invars=[jaxpr.invars[i] for i in kept],
    debug_info=jaxpr.debug_info._replace(arg_names=names),
  )


class _LaunchTrace(_core.Trace):
  """Passes everything on, and kernel launches with their parameters revised."""

  __slots__ = ("_parent", "_revise")

  def __init__(self, parent: _core.Trace, revise: Revise):
    super().__init__()
    self.requires_low = parent.requires_low
    self._parent = parent
    self._revise = revise

  def stage_value(self, val: Any) -> Any:
    return self._parent.stage_value(val)

  def process_primitive(
    self, primitive: Any, tracers: Any, params: Any, /
  ) -> Any:
    with _core.set_current_trace(self._parent):
      if primitive is not _mpmd.mpmd_map_p:
        return primitive.bind(*tracers, **params)
      params = {**params, **self._revise(params)}
      # JAX knows how to discharge the refs of its own primitive.
      has_refs = any(is_ref_type(jax.typeof(t)) for t in tracers)
      return (primitive if has_refs else kernel_p).bind(*tracers, **params)


def revising_launches(revise: Revise) -> Any:
  """A context in which `pl.kernel` launches with its parameters revised.

  Args:
    revise: from the parameters of the launch, whose body has been traced, to
      those that should be others.
  """
  return _core.set_current_trace(_LaunchTrace(_core.trace_ctx.trace, revise))
