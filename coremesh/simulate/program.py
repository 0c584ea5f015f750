"""A kernel's programs, compiled to Python functions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import linecache
import re
from typing import Any
import weakref

from coremesh import chips
from coremesh._compat import kernel_ir
from coremesh.simulate import (
  access,
  control,
  cores,
  costs,
  effects,
  emitter,
  grid,
  loads,
  machine,
  rates,
  stateful,
  synchronisation,
  tensor_core,
  values,
  vector_subcore,
)

_NUMBERS = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
  """The program of the workers of one mesh.

  Attributes:
    function: called with the machine, the worker, and its refs.
    mesh: the mesh.
    core_axes: its axes with their sizes.
    is_sparse: whether the workers are on SparseCores.
    source: the Python source, to be read when something goes wrong.
  """

  function: Callable[..., Iterator[None]]
  mesh: Any
  core_axes: Mapping[Any, int]
  is_sparse: bool
  source: str

  def start(
    self, mach: machine.Machine, worker: machine.Worker, refs: Sequence[Any]
  ) -> Iterator[None]:
    return self.function(mach, worker, *refs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
  """All programs of a kernel.

  Attributes:
    parts: one for each mesh.
    operands: what the programs are given: inputs, outputs, scratch; None for
      a number that the body captures.
    num_arrays: how many of these are inputs and outputs.
    aliases: from an output to the input that it is.
    crosses_devices: whether a program reaches other devices.
    scoped: the memory that programs allocate themselves.
    excess: what does not fit into the chip's memories, in words.
  """

  parts: tuple[Part, ...]
  operands: tuple[emitter.Declaration | None, ...]
  num_arrays: int
  aliases: Mapping[int, int]
  crosses_devices: bool
  scoped: tuple[emitter.Declaration, ...]
  excess: tuple[str, ...] = ()

  def changers(self, name: str) -> list[str]:
    """The lines that signal semaphores, or write to memory, of a name."""
    lines = [
      line
      for declaration in (*self.operands, *self.scoped)
      if declaration is not None and declaration.name == name
      for line in declaration.changers
    ]
    return sorted(set(lines))


def compile_program(
  kernel: kernel_ir.KernelProgram,
  *,
  num_cores: int = 1,
  operations: synchronisation.Operations | None = None,
  timed_on: rates.Rates | None = None,
) -> Program:
  """Compiles a kernel.

  Args:
    kernel: as JAX traced it.
    num_cores: TensorCores of a device, which share the parallel dimensions of
      a `pallas_call`.
    operations: notes what synchronises, and may change it.
    timed_on: writes what the programs cost on this chip, for a timeline.

  Raises:
    UnsupportedError: it holds an operation that the simulator does not know.
  """
  if kernel.grid is not None:
    mesh = grid.mesh_of(kernel, num_cores)
    kernel = dataclasses.replace(kernel, meshes=(mesh,))
  operands = _operands(kernel)
  num_arrays = len(kernel.in_types) + len(kernel.out_types)
  meshes = [*kernel.meshes, *(d.mesh for d in operands if d is not None)]
  core_axes = {a: size for mesh in meshes for a, size in mesh.shape.items()}
  parts, crosses, scoped, excess = [], False, [], []
  chip = chip_of(kernel)
  for mesh, jaxpr in zip(kernel.meshes, kernel.jaxprs, strict=True):
    em = emitter.Emitter(
      mesh=mesh,
      chip=chip,
      device_axes=kernel.device_axes,
      core_axes=core_axes,
      rules=RULES,
      value_rules=VALUE_RULES,
      operations=operations,
      costs=_costs(timed_on, mesh),
    )
    for declaration in operands[num_arrays:]:
      if declaration is not None and declaration.mesh == mesh:
        em.holdings.hold(declaration)
    parts.append(_compile_part(em, kernel, jaxpr, operands))
    excess += em.holdings.excess(chip, mesh)
    crosses |= em.crosses_devices
    scoped += em.scoped
  return Program(
    parts=tuple(parts),
    operands=tuple(operands),
    num_arrays=num_arrays,
    aliases=kernel.aliases,
    crosses_devices=crosses,
    scoped=tuple(scoped),
    excess=tuple(excess),
  )


def chip_of(kernel: kernel_ir.KernelProgram) -> chips.Chip:
  """The chip a kernel was traced for; outside `jax.shard_map` the default."""
  return chips.chip_of_device_kind(kernel.device_kind) or chips.chip()


def _operands(
  kernel: kernel_ir.KernelProgram,
) -> list[emitter.Declaration | None]:
  """What the programs are given; None for a number."""
  if kernel.grid is not None:
    types = grid.operand_types(kernel)
  else:
    types = [
      var.aval if hasattr(var.aval, "inner_aval") else None
      for var in kernel.jaxprs[0].invars
    ]
  num_arrays = len(kernel.in_types) + len(kernel.out_types)
  return [
    None
    if type_ is None
    else emitter.declare(
      _operand_name(kernel, i), type_, kernel.meshes[0], is_array=i < num_arrays
    )
    for i, type_ in enumerate(types)
  ]


def _costs(timed_on: rates.Rates | None, mesh: Any) -> costs.Costs | None:
  if timed_on is None:
    return None
  return costs.Costs(
    timed_on,
    is_sparse=cores.is_sparse(mesh),
    uncounted=frozenset(control.RULES),
  )


def _compile_part(
  em: emitter.Emitter,
  kernel: kernel_ir.KernelProgram,
  jaxpr: Any,
  operands: Sequence[emitter.Declaration | None],
) -> Part:
  names = [emitter.Name(f"r{i}_") for i in range(len(operands))]
  for ref, declaration in zip(names, operands, strict=True):
    if declaration is not None:
      em.refs[ref.text] = declaration
  em.grid = [
    (f"w.coords[{em.constant(axis, 'a')}]", str(size))
    for axis, size in em.mesh.shape.items()
  ]
  if kernel.grid is not None:
    grid.emit(em, kernel, names)
  else:
    em.inline(jaxpr, names)
  source = em.source([ref.text for ref in names])
  return Part(
    function=_function(kernel.name, source, em.constants),
    mesh=em.mesh,
    core_axes=dict(em.mesh.shape),
    is_sparse=em.is_sparse,
    source=source,
  )


def _function(name: str, source: str, constants: Mapping[str, Any]) -> Any:
  file = f"<coremesh simulation {next(_NUMBERS)} of {name}>"
  # Tracebacks can then show the lines.
  linecache.cache[file] = (len(source), None, source.splitlines(True), file)
  namespace = {**HELPERS, **constants}
  exec(compile(source, file, "exec"), namespace)
  function = namespace["program"]
  weakref.finalize(function, linecache.cache.pop, file, None)
  return function


def _operand_name(kernel: kernel_ir.KernelProgram, index: int) -> str:
  """What the user calls an operand: `x_hbm`, or "input 0" if it has no name.

  Of what is in a dict it is the key.
  """
  names = kernel.jaxprs[0].debug_info.arg_names or ()
  if kernel.grid is not None:  # The body is not given the sizes of the grid.
    names = (*[""] * kernel.grid.num_dynamic_grid_bounds, *names)
  name = names[index] if index < len(names) else ""
  if by_key := re.search(r"\['([\w. ]+)'\]((\[\d+\])*)$", name):
    return by_key[1] + by_key[2]
  if name and not name.startswith(("args", "refs")):
    return name
  num_in, num_out = len(kernel.in_types), len(kernel.out_types)
  if index < num_in:
    return f"input {index}"
  if index < num_in + num_out:
    return f"output {index - num_in}"
  return f"scratch {index - num_in - num_out}"


RULES = {**control.RULES, **effects.RULES, **loads.RULES, **stateful.RULES}
VALUE_RULES = {**values.RULES, **vector_subcore.RULES, **tensor_core.RULES}
HELPERS = {
  **access.HELPERS,
  **loads.HELPERS,
  **grid.HELPERS,
  **stateful.HELPERS,
  "Transfer": machine.Transfer,
}
