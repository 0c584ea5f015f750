"""From a body and a mesh of cores to a JAX function: `cm.kernel`."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from coremesh import _compat, arguments, collective, errors, hbm, scope, shapes
from coremesh import place as places

type Route = Literal["kernel", "core_map"]

_LINKS = "coremesh_links"
_COPY, _NEIGHBOUR = "cm.copy", "cm.neighbour_barrier"
_SEND, _RECEIVE = "cm.put send", "cm.put receive"
_SIDE_EFFECTING = pltpu.SideEffectType.SIDE_EFFECTING


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
  """A kernel that can be called on arrays; make one with `cm.kernel`.

  Equal to itself only, as a function is, so that JAX can cache what it makes of
  it whatever `out` and `scratch` hold.

  Attributes: as the arguments of `cm.kernel`, `bodies` and `meshes` in pairs.
  """

  bodies: tuple[Callable[..., None], ...]
  meshes: tuple[Any, ...]
  out: Any
  scratch: Any = ()
  route: Route = "kernel"
  collective_id: int | None = None
  num_links: int = 4
  compiler_params: pltpu.CompilerParams = pltpu.CompilerParams()
  interpret: Any = None
  cost_estimate: pl.CostEstimate | None = None
  debug: bool = False
  name: str = ""
  metadata: Mapping[str, str] | None = None

  def __post_init__(self):
    if self.route not in ("kernel", "core_map"):
      raise errors.UnsupportedError(
        f"route must be 'kernel' or 'core_map'; got {self.route!r}."
      )
    if len(self.bodies) != len(self.meshes) or not self.bodies:
      raise errors.ChipError(
        "body and mesh must be one each, or two sequences of one length;"
        f" got {len(self.bodies)} bodies and {len(self.meshes)} meshes."
      )
    if self.route == "core_map" and len(self.bodies) > 1:
      raise errors.UnsupportedError(
        "route='core_map' launches one body on one mesh; use"
        " route='kernel' for several."
      )
    collective.check(self.explicit_collective_id)
    if type(self.num_links) is not int or self.num_links < 0:
      raise errors.CollectiveError(
        f"num_links must be an int of at least 0; got {self.num_links!r}."
      )

  @property
  def __name__(self) -> str:
    """What JAX calls the function in its errors and profiles."""
    return self.name

  @property
  def explicit_collective_id(self) -> int | None:
    """The id the user chose, by either argument."""
    by_params = self.compiler_params.collective_id
    if self.collective_id is not None and by_params is not None:
      raise errors.CollectiveError(
        "collective_id is given twice, as"
        f" cm.kernel(collective_id={self.collective_id}) and in"
        f" compiler_params ({by_params}). Give it once."
      )
    return by_params if self.collective_id is None else self.collective_id

  @property
  def cores(self) -> dict[str, int]:
    """The cores along each axis of the meshes."""
    return {n: s for mesh in self.meshes for n, s in mesh.shape.items()}

  def __call__(self, *args: Any) -> Any:
    """Runs the kernel on arrays (or refs) of one device.

    Args:
      *args: pytrees of arrays; the body gets an HBM ref for each.

    Returns:
      Arrays of the types `out` names.

    Raises:
      DTypeError: an argument of 64 bits.
      AxisError, ChipError, CollectiveError, ShapeError, UnsupportedError: see
        the helpers.
    """
    avals = [
      jax.tree.map(jax.typeof, arg)
      for arg in arguments.checked(self.name, args)
    ]
    place = places.find(self.interpret)
    places.check(self.name, self.meshes, place)
    arguments.check_axis_names(self.name, self.cores)
    with place.tracing_context():
      out = shapes.resolve_out(self.out, avals)
      if shapes.all_empty(out) and not self._has_other_effects(avals):
        return jax.tree.map(functools.partial(_zeros, avals=avals), out)
      call, scopes = self._pallas_call(avals, out)
      revise = functools.partial(self._revise, place=place, scopes=scopes)
      args = jax.tree.map(shapes.without_empty_axes, args)
      if not place.is_simulated:
        args = hbm.kept(args, meshes=self.meshes, chip=place.chip)
      with (
        arguments.explained(self.name, self.cores),
        _compat.revising_launches(revise),
      ):
        results = call(*args)
    return jax.tree.map(shapes.with_empty_axes, results, out)

  def _has_other_effects(self, avals) -> bool:
    """Whether it does more than write its outputs."""
    has_refs = any(map(_compat.is_ref_type, jax.tree.leaves(avals)))
    side_effects = self.compiler_params.has_side_effects
    return has_refs or side_effects in (True, _SIDE_EFFECTING)

  def _pallas_call(self, avals, out) -> tuple[Callable[..., Any], list[Any]]:
    """The Pallas call to trace, and the scopes its bodies will fill."""
    scopes: list[scope.KernelScope] = []
    outs = list(out) if isinstance(out, list | tuple) else [out]
    bodies = [
      functools.partial(self._traced_body, body, mesh, scopes, [*avals, *outs])
      for body, mesh in zip(self.bodies, self.meshes, strict=True)
    ]
    for wrapped, body in zip(bodies, self.bodies, strict=True):
      functools.update_wrapper(wrapped, body)
    out = jax.tree.map(functools.partial(_varying_like, avals=avals), out)
    out = jax.tree.map(shapes.type_without_empty_axes, out)
    scratch = self._scratch(avals)
    options: dict[str, Any] = dict(
      compiler_params=dataclasses.replace(
        self.compiler_params, collective_id=None
      ),
      cost_estimate=self.cost_estimate,
      debug=self.debug,
      name=self.name,
      metadata=None if self.metadata is None else dict(self.metadata),
    )
    if self.route == "core_map":
      call = _compat.aliased_kernel(
        bodies[0],
        out,
        mesh=self.meshes[0],
        scratch_types=scratch,
        **options,
      )
      return call, scopes
    call = pl.kernel(
      bodies if len(bodies) > 1 else bodies[0],
      out_type=out,
      mesh=self.meshes if len(bodies) > 1 else self.meshes[0],
      scratch_types=scratch,
      **options,
    )
    return call, scopes

  def _scratch(self, avals):
    """The scratch types, with the links of `cm.put` added."""
    scratch = shapes.resolve_scratch(self.scratch, avals, self.cores)
    if not self._has_links:
      return scratch
    dma = pltpu.SemaphoreType.DMA
    # The simulator's findings call each by its key.
    links = {
      _COPY: dma,
      _NEIGHBOUR: pltpu.SemaphoreType.REGULAR,
      _SEND: (dma,) * self.num_links,
      _RECEIVE: (dma,) * self.num_links,
    }
    if isinstance(scratch, Mapping):
      if _LINKS in scratch:
        raise errors.ShapeError(f"scratch must not be named {_LINKS!r}.")
      return {**scratch, _LINKS: links}
    return (*scratch, links)

  @property
  def _has_links(self) -> bool:
    return len(self.meshes) == 1  # Of several, a scratch belongs to one.

  def _traced_body(self, body, mesh, scopes, types, *refs, **named_refs) -> Any:
    given: Mapping[str, Any] = {}
    if self._has_links:
      if _LINKS in named_refs:
        given = named_refs.pop(_LINKS)
      else:
        *refs, given = refs
    here = scope.KernelScope(
      name=self.name,
      core_axes=tuple(mesh.shape),
      copy_sem=given.get(_COPY),
      links=tuple(
        zip(given.get(_SEND, ()), given.get(_RECEIVE, ()), strict=True)
      ),
      num_links=self.num_links,
      neighbour_sem=given.get(_NEIGHBOUR),
    )
    scopes.append(here)
    arrays = [
      jax.tree.map(shapes.as_empty_ref, type_, ref)
      for ref, type_ in zip(refs, types, strict=False)
    ]
    with scope.entered(here):
      # JAX refuses a result: a body writes its outputs.
      return body(*arrays, *refs[len(types) :], **named_refs)

  def _revise(self, params, *, place, scopes) -> dict[str, Any]:
    """The kernel's parameters, once its body is known."""
    own = [sem for s in scopes for sem in s.semaphores]
    jaxprs = tuple(
      _compat.without_idle_inputs(jaxpr, own) for jaxpr in params["jaxprs"]
    )
    counts = list(map(_compat.count_barrier_semaphores, jaxprs))
    own_signals = []
    for here, count, jaxpr in zip(scopes, counts, jaxprs, strict=True):
      has_own_barriers = count > here.num_barriers
      here.check_end(has_own_barriers=has_own_barriers)
      if has_own_barriers:
        own_signals.append(_compat.stable_text(jaxpr))
    barriers, collective_id = any(counts), None
    if barriers:
      patterns = [*(s.barrier_pattern for s in scopes), *own_signals]
      collective_id = self._chosen_collective_id(patterns)
    interpret: Any = False
    if place.is_simulated:
      num_cores = next(iter(self.cores.values()))
      if barriers:
        places.check_waiting(self.name, num_cores, place)
      interpret = places.interpret_params(num_cores=num_cores, place=place)
      if collective_id is not None and place.uses_jax_interpreter:
        collective_id = places.interpreter_collective_id(collective_id)
    return dict(
      jaxprs=jaxprs,
      compiler_params=dataclasses.replace(
        self.compiler_params, collective_id=collective_id
      ),
      interpret=interpret,
    )

  def _chosen_collective_id(self, patterns) -> int:
    if self.explicit_collective_id is not None:
      return self.explicit_collective_id
    return collective.automatic_id(self.meshes, patterns)


def kernel(
  body: Callable[..., None] | Sequence[Callable[..., None]] | None = None,
  *,
  mesh: Any,
  out: Any = (),
  scratch: Any = (),
  route: Route = "kernel",
  collective_id: int | None = None,
  num_links: int = 4,
  compiler_params: pltpu.CompilerParams | Mapping[str, Any] | None = None,
  interpret: Any = None,
  cost_estimate: pl.CostEstimate | None = None,
  debug: bool = False,
  name: str | None = None,
  metadata: Mapping[str, str] | None = None,
) -> Any:
  """Makes a JAX function of a Pallas body that runs on every core of a mesh.

  A thin layer over `pl.kernel`: the body is an ordinary Pallas body, called
  with an HBM ref for each argument, one for each output, and the scratch. Call
  the result inside `jax.shard_map` to run on every device. On TPU devices it
  runs; on CPU devices it is simulated; for compile-only devices it compiles.
  Called outside, it runs on one device, on a CPU as on a device of `cm.chip()`.

  A body that writes or signals other workers must first meet them in a barrier
  over those axes, and must wait for every copy it starts; one that does not is
  refused.

  Where libtpu copies arguments to VMEM before a kernel, on a tpu7x, those of
  1 MiB and more stay in HBM: the kernel's own copies are hidden, those are not.

  Args:
    body: the body, or one for each of several meshes. None: a decorator.
    mesh: the cores of one device, from `chip.tensor_cores()` and its like or a
      native Pallas mesh; a sequence of meshes for a sequence of bodies.
    out: what it returns: a pytree of `cm.like(i)`, `jax.ShapeDtypeStruct`,
      arrays or Pallas memory types, or a function from the argument types to
      that. Under `check_vma=True` an output varies over the device axes that
      an argument varies over, unless it states its own `manual_axis_type`.
    scratch: memory and semaphores of each core: a dict (passed by name) or a
      sequence of Pallas memory types and `cm.vmem_slab(i)`, or a function from
      the argument types to that. With several meshes each type says whose it
      is: `pltpu.VMEM(...) @ mesh`.
    route: "kernel" launches by `pl.kernel`; "core_map" by `core_map` with refs
      closed over. The results are the same; measure which is faster.
    collective_id: which barrier semaphore. Default: one made from the cores,
      the device axes and who signals whom, so that it is the same on every
      process, and kernels share one only if their barriers may follow each
      other. It cannot tell which devices a mesh holds: give ids of your own to
      kernels in flight together on different or reordered sets of devices.
      Not used by a kernel that in the end has no barrier, as `core_barrier`
      on one core.
    num_links: DMA semaphore pairs for the `cm.put`, `cm.start_copy` and
      exchanges that name none: one for each place in the body that starts such
      a copy, a loop counting once. Not with several meshes.
    compiler_params: `pltpu.CompilerParams` or a dict of its fields.
    interpret: None chooses by the devices; False compiles; True or
      `cm.SimulatorParams` simulates; plain `pltpu.InterpretParams` runs it in
      JAX's own interpreter, on TensorCores only.
    cost_estimate: as for `pl.kernel`.
    debug: as for `pl.kernel`.
    name: default the name of the (first) body.
    metadata: as for `pl.kernel`.

  Returns:
    A `Kernel`, or a decorator that makes one. `jax.vmap` runs it once for each
    element. It has no derivative of its own: wrap it in `jax.custom_vjp`.

  Raises:
    ChipError, CollectiveError, UnsupportedError: arguments that contradict
      each other.

  Example:
    @cm.kernel(mesh=chip.tensor_cores(), out=cm.like(0),
               scratch=dict(mine=cm.vmem_slab(0)))
    def double(x_hbm, o_hbm, *, mine):
      rows = cm.slab(x_hbm)
      cm.copy(x_hbm.at[rows], mine)
      mine[...] = mine[...] * 2
      cm.copy(mine, o_hbm.at[rows])
  """
  options: dict[str, Any] = dict(
    mesh=mesh,
    out=out,
    scratch=scratch,
    route=route,
    collective_id=collective_id,
    num_links=num_links,
    compiler_params=compiler_params,
    interpret=interpret,
    cost_estimate=cost_estimate,
    debug=debug,
    name=name,
    metadata=metadata,
  )
  if body is None:
    return functools.partial(kernel, **options)
  several = isinstance(body, list | tuple)
  bodies: tuple[Any, ...] = tuple(body) if several else (body,)
  meshes = tuple(mesh) if isinstance(mesh, list | tuple) else (mesh,)
  if isinstance(compiler_params, Mapping):
    compiler_params = pltpu.CompilerParams(**compiler_params)
  options |= dict(
    compiler_params=compiler_params or pltpu.CompilerParams(),
    name=name or (_body_name(bodies) if bodies else ""),
  )
  del options["mesh"]
  return Kernel(bodies=bodies, meshes=meshes, **options)


def _varying_like(leaf: Any, *, avals: Any) -> Any:
  """An output type, varying over what any argument varies over.

  Unless it states its own `manual_axis_type`.
  """
  joint = _compat.joint_manual_axis_type(avals)
  if _compat.is_memory_type(leaf):
    return _compat.output_in_memory(leaf, manual_axis_type=joint)
  stated = getattr(leaf, "manual_axis_type", None)
  if stated is not None and not isinstance(leaf, jax.Array):
    return leaf
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, manual_axis_type=joint)


def _zeros(leaf: Any, *, avals: Any) -> jax.Array:
  type_ = _varying_like(leaf, avals=avals)
  return _compat.varying_as(type_, jnp.zeros(type_.shape, type_.dtype))


def _body_name(bodies: Sequence[Callable[..., None]]) -> str:
  body = bodies[0]
  while isinstance(body, functools.partial):
    body = body.func
  return getattr(body, "__name__", type(body).__name__)
