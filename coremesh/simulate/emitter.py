"""From a kernel's program to Python source that runs it over numpy.

Each equation becomes a line or a few: `v7 = v3 + v5`, `v9 = f2(v7)`,
`m.store(w, r1, ((slice(0, 8),),), v9, s4)`; one whose result nobody uses, or
that is known, becomes none. Inner programs are written in place, so that loops
are Python loops. A worker's program is one generator; it yields where another
worker may run.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from coremesh import chips
from coremesh._compat import kernel_ir
from coremesh.simulate import (
  capacity,
  cores,
  costs,
  fallback,
  machine,
  memory,
  scalars,
  selects,
  synchronisation,
  unsupported,
)
from coremesh.simulate.source import Name, Source


@dataclasses.dataclass(eq=False)
class Declaration:
  """A ref of a program: what each core (or device) has one of.

  Attributes as those of `memory.Family`, which a run makes of it; and how many
  buffers of it a TPU holds, of which a run needs one.
  """

  name: str
  space: str
  shape: tuple[int, ...]
  dtype: Any
  axes: tuple[Any, ...]
  type: Any
  element_shape: tuple[int, ...] = ()
  is_tiled: bool = False
  is_shared: bool = False
  is_semaphore: bool = False
  mesh: Any = None
  num_buffers: int = 1
  is_block: bool = False
  changers: list[str] = dataclasses.field(default_factory=list)

  @property
  def is_of_tensor_core(self) -> bool:
    """Whether a TensorCore holds it, and not a SparseCore."""
    return not cores.is_sparse(self.mesh)

  @property
  def padded(self) -> tuple[int, ...]:
    """The shape that accesses may reach, padding included."""
    if not self.is_tiled:
      return self.shape
    return memory.padded_shape(self.shape, np.dtype(self.dtype))

  def family(self) -> memory.Family:
    return memory.Family(
      name=self.name,
      space=self.space,
      shape=self.shape,
      dtype=None if self.is_semaphore else np.dtype(self.dtype),
      axes=self.axes,
      element_shape=self.element_shape,
      is_tiled=self.is_tiled,
      is_shared=self.is_shared,
      mesh=self.mesh,
      is_block=self.is_block,
      counts_bytes=not self.is_semaphore or kernel_ir.counts_bytes(self.type),
    )


def declare(
  name: str, ref_type: Any, mesh: Any, *, is_array: bool = False
) -> Declaration:
  """The declaration of a ref that a worker of `mesh` is given.

  Args:
    name: what the user calls it.
    ref_type: its type.
    mesh: the mesh of the worker.
    is_array: whether it is an input or output of the kernel, which others may
      reach whatever this kernel does.
  """
  space, mesh = kernel_ir.place_of_type(ref_type, mesh)
  axes = tuple(mesh.shape) if mesh is not None else ("core",)
  is_semaphore = kernel_ir.is_semaphore_type(ref_type)
  if not is_semaphore and space in ("hbm", "host"):
    axes = ()
  elif space == "vmem_shared":
    axes = axes[:1]
  dtype, element = ref_type.dtype, ()
  if not is_semaphore:
    dtype, element = kernel_ir.stored_dtype(dtype)
  return Declaration(
    name=name,
    space=space,
    shape=tuple(map(int, ref_type.shape)),
    dtype=dtype,
    element_shape=element,
    axes=axes,
    type=ref_type,
    is_tiled=space == "hbm" or (space == "vmem" and not cores.is_sparse(mesh)),
    is_shared=is_array or space in ("hbm", "host", "vmem_shared"),
    is_semaphore=is_semaphore,
    mesh=mesh,
  )


class Emitter(Source):
  """Writes the program of one worker.

  Attributes:
    mesh: the mesh the worker is on.
    chip: the chip it is traced for.
    device_axes: the axes of the device mesh, with their sizes.
    core_axes: the core axes of all meshes of the kernel, with their sizes.
    refs: the declaration behind each name of a ref.
    holdings: the memory that is held at once.
    numbers: the value behind each name of a number that is known now.
    unused: results, of equations that do more than compute, nobody asks for.
    counted: results that count wherever they are; see `selects`.
    loads: the places of the loads written so far.
    grid: for each grid dimension of the program, its index and its size.
    crosses_devices: whether anything written so far reaches another device.
    operations: what notes, and may change, what synchronises.
    costs: counts what straight-line code costs, None without a timeline.
    retarget: how the operation written now changes its target, None as it is.
    num_targets: workers along the first axis of the last target written.
  """

  def __init__(
    self,
    *,
    mesh: Any,
    chip: chips.Chip,
    device_axes: Mapping[Any, int],
    core_axes: Mapping[Any, int],
    rules: Mapping[str, Callable[["Emitter", Any], None]],
    value_rules: Mapping[str, Callable[..., Callable[..., Any]]],
    operations: synchronisation.Operations | None = None,
    costs: costs.Costs | None = None,
  ):
    super().__init__()
    self.mesh = mesh
    self.chip = chip
    self.device_axes = device_axes
    self.core_axes = core_axes
    self.refs: dict[str, Declaration] = {}
    self.scoped: list[Declaration] = []
    self.holdings = capacity.Holdings()
    self.grid: list[tuple[str, str]] = []
    self.crosses_devices = False
    self.operations = operations
    self.costs = costs
    self.retarget: str | None = None
    self.num_targets = 0
    self.constants: dict[str, Any] = {"np": np}
    self._rules = rules
    self._value_rules = value_rules
    self._env: dict[Any, Any] = {}
    self._by_id: dict[int, Name] = {}
    self._literals: dict[Any, Name] = {}
    self.numbers: dict[str, Any] = {}
    self.unused: set[Any] = set()
    self.counted: set[Any] = set()
    self.loads: list[Name] = []
    self._live: dict[int, tuple[Any, list[Any]]] = {}
    self._line = "the kernel's start"

  # --- text ------------------------------------------------------------------

  def end_stretch(self) -> None:
    """A stretch without branches ends here: writes what it costs."""
    if self.costs is not None:
      self.costs.flush(self)

  def constant(self, value: Any, prefix: str = "k") -> Name:
    """A name for a value known now."""
    name = self._by_id.get(id(value))
    if name is None:
      name = self.name(prefix)
      self.constants[name.text] = value
      self._by_id[id(value)] = name
    return name

  @property
  def is_sparse(self) -> bool:
    """Whether the program is a SparseCore's."""
    return cores.is_sparse(self.mesh)

  @property
  def place(self) -> str:
    """The line of the user's code that is written now."""
    return self._line

  def site(self, what: str, ref: str = "") -> Name:
    """A name for this place in the user's code, of what is done to a ref."""
    return self.constant(machine.Site(what, self._line, ref), "s")

  # --- programs --------------------------------------------------------------

  def atom(self, var: Any) -> Any:
    """The name (or literal) of a variable's value."""
    if isinstance(var, kernel_ir.Literal):
      return self.literal(var.val, var.aval)
    return self._env[var]

  def literal(self, value: Any, type_: Any) -> Name:
    """A name for a number in the program, of the type it has there."""
    array = np.asarray(value, dtype=type_.dtype)
    key = (array.dtype, array.shape, array.tobytes())
    if key not in self._literals:
      name = self._literals[key] = self.name("k")
      self.constants[name.text] = array[()]
      if array.shape == ():
        self.numbers[name.text] = array[()]
    return self._literals[key]

  def atoms(self, variables: Sequence[Any]) -> list[Any]:
    return [self.atom(v) for v in variables]

  def inline(
    self, jaxpr: Any, args: Sequence[Any], constants: Sequence[Any] = ()
  ) -> list[Any]:
    """Writes a program in place; returns the names of its results."""
    if not constants and getattr(jaxpr, "consts", None):
      constants = [self.constant(np.asarray(value)) for value in jaxpr.consts]
    # Constants that are operands of the equation come before the others.
    variables = [*jaxpr.constvars, *jaxpr.invars]
    for var, value in zip(variables, [*constants, *args], strict=True):
      self._env[var] = value
    for eqn in self._needed(jaxpr):
      # What JAX wrote itself, such as a pipeline's copies, has no line of its
      # own: it belongs to the last that the user wrote.
      self._line = kernel_ir.source_line(eqn) or self._line
      self.equation(eqn)
    return self.atoms(jaxpr.outvars)

  def _needed(self, jaxpr: Any) -> list[Any]:
    """The equations without those that only compute what nobody uses."""
    if (needed := self._live.get(id(jaxpr))) is not None:
      return needed[1]
    used = {v for v in jaxpr.outvars if not isinstance(v, kernel_ir.Literal)}
    needed = []
    for eqn in reversed(jaxpr.eqns):
      if used.isdisjoint(eqn.outvars):
        if self._is_value(eqn):
          continue
        self.unused |= set(eqn.outvars)
      needed.append(eqn)
      used |= {v for v in eqn.invars if not isinstance(v, kernel_ir.Literal)}
    needed.reverse()
    self.counted |= selects.counted(jaxpr, is_value=self._is_value)
    self._live[id(jaxpr)] = jaxpr, needed
    return needed

  def _is_value(self, eqn: Any) -> bool:
    """Whether an equation does nothing but compute values."""
    if kernel_ir.qualified_name(eqn.primitive) in self._rules or eqn.effects:
      return False
    in_types, _ = kernel_ir.eqn_types(eqn)
    return not any(hasattr(t, "inner_aval") for t in in_types)

  def bind(self, eqn: Any, values: Sequence[Any]) -> None:
    for var, value in zip(eqn.outvars, values, strict=True):
      self._env[var] = value

  def equation(self, eqn: Any) -> None:
    name = kernel_ir.qualified_name(eqn.primitive)
    if self.costs is not None:
      self.costs.add(self, eqn, name)
    rule = self._rules.get(name)
    if rule is None:
      self.value(eqn, name)
    elif self.operations is None:
      rule(self, eqn)
    else:
      self.operations.write(self, eqn, rule, name, self._line)

  def value(self, eqn: Any, name: str) -> None:
    """An equation that only computes values."""
    in_types, out_types = kernel_ir.eqn_types(eqn)
    if any(hasattr(t, "inner_aval") for t in in_types) or eqn.effects:
      raise unsupported.error(name, self._line)
    rule = self._value_rules.get(name)
    is_of_keys = any(kernel_ir.is_key(t.dtype) for t in (*in_types, *out_types))
    if rule is None or is_of_keys:
      unsupported.check(eqn, name, self._line)
      function = fallback.by_jax(eqn)
    else:
      try:
        function = rule(eqn.params, in_types, out_types)
      except NotImplementedError as lacking:
        raise unsupported.form(name, self._line, lacking) from None
    operands = self.atoms(eqn.invars)
    if eqn.primitive.multiple_results:
      call = self.call(function, operands)
      self.bind(eqn, self.unpack(call, len(eqn.outvars)))
    elif (
      in_types
      and in_types[0].shape == out_types[0].shape == ()
      and not is_of_keys
    ):
      number = scalars.write(self, function, name, operands, out_types[0])
      self.bind(eqn, [number])
    else:
      self.bind(eqn, [self.let(self.call(function, operands))])

  def call(self, function: Callable[..., Any], operands: Sequence[Any]) -> str:
    """Source of a call of a function that the program does not name."""
    return f"{self.constant(function, 'f')}({', '.join(map(str, operands))})"

  # --- loops -----------------------------------------------------------------

  def carried(self, values: Sequence[Any]) -> list[Any]:
    """Names of a loop's state; refs need none, for they do not change."""
    return [v if self.is_ref(v) else self.let(str(v), "c") for v in values]

  def assign(self, names: Sequence[Any], values: Sequence[Any]) -> None:
    """Sets a loop's state for its next round, all at once."""
    pairs = [(n, v) for n, v in zip(names, values, strict=True) if n != v]
    if pairs:
      left, right = zip(*pairs, strict=True)
      self.line(f"{', '.join(map(str, left))} = {', '.join(map(str, right))}")

  def is_ref(self, value: Any) -> bool:
    return not isinstance(value, Name) or value.text in self.refs
