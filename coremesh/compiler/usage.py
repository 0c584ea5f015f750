"""What a traced kernel holds on each core: memories and semaphores."""

import dataclasses
import math
from typing import Any

from jax.experimental.pallas import tpu as pltpu
import jax.extend.core as jex_core

from coremesh import _compat, tiles
from coremesh._compat import aot

# libtpu makes room for the buffers of scopes by as much.
_SCOPED_UNIT_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
  """The most a core holds at once, counted from the traced program.

  Buffers that the compiler adds by itself are not in it.

  Attributes:
    vmem_bytes_per_core: vector memory, each buffer padded to whole tiles as
      libtpu pads it; see `padded_bytes`.
    smem_bytes_per_core: scalar memory, padded likewise.
    semaphores_per_core: semaphores of all kinds but the barrier semaphore.
  """

  vmem_bytes_per_core: int = 0
  smem_bytes_per_core: int = 0
  semaphores_per_core: int = 0

  def __add__(self, other: "Usage") -> "Usage":
    return self._combine(other, lambda a, b: a + b)

  def __or__(self, other: "Usage") -> "Usage":
    """The larger of each: two things that are not held at the same time."""
    return self._combine(other, max)

  def _combine(self, other, operation):
    fields = [f.name for f in dataclasses.fields(self)]
    return Usage(
      **{n: operation(getattr(self, n), getattr(other, n)) for n in fields}
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelUsage:
  """One kernel launch of a program.

  Attributes:
    name: the kernel's name, or that of its body.
    meshes: the cores it runs on; () for a `pl.pallas_call`.
    usage: what each of them holds.
    uses_barrier: whether it uses the barrier semaphore.
    collective_id: which one.
    is_simulated: whether it was traced for the simulator.
  """

  name: str
  meshes: tuple[Any, ...]
  usage: Usage
  uses_barrier: bool
  collective_id: int | None
  is_simulated: bool


def of_program(jaxpr: jex_core.Jaxpr) -> list[KernelUsage]:
  """The kernels of a traced program, in order.

  Args:
    jaxpr: for instance `jax.jit(fn).trace(*args).jaxpr.jaxpr`.
  """
  return [_of_kernel(eqn) for eqn in kernels(jaxpr)]


def kernels(jaxpr: jex_core.Jaxpr) -> list[jex_core.JaxprEqn]:
  """The equations that are kernels, in order, inner programs included."""
  return [
    eqn
    for eqn in _compat.walk(jaxpr)
    if eqn.primitive.name in aot.KERNEL_PRIMITIVES and not _is_of_xla(eqn)
  ]


def _is_of_xla(eqn: jex_core.JaxprEqn) -> bool:
  """Whether JAX makes operations of XLA's of it: pallas_call, interpreted."""
  is_call = eqn.primitive.name != _compat.KERNEL_PRIMITIVE
  return is_call and bool(eqn.params["interpret"])


def _of_kernel(eqn: jex_core.JaxprEqn) -> KernelUsage:
  params = eqn.params
  meshes = tuple(params.get("meshes") or ())
  bodies = aot.kernel_bodies(eqn)
  usage, uses_barrier = Usage(), False
  for mesh, jaxpr in zip(meshes or (None,), bodies, strict=True):
    # Every body is passed the scratch of all; it holds that of its own mesh.
    own = sum(
      (
        _of_ref(v.aval, copies=aot.windows(eqn).get(number))
        for number, v in enumerate(jaxpr.invars)
        if _compat.core_mesh_of_type(v.aval) in (None, mesh)
      ),
      start=Usage(),
    )
    usage = usage | (own + peak_of_scopes(jaxpr, is_sparse=is_sparse(mesh)))
    uses_barrier |= _compat.count_barrier_semaphores(jaxpr) > 0
  return KernelUsage(
    name=aot.body_name(eqn),
    meshes=meshes,
    usage=usage,
    uses_barrier=uses_barrier,
    collective_id=getattr(params["compiler_params"], "collective_id", None),
    is_simulated=bool(params["interpret"]),
  )


def is_sparse(mesh: Any) -> bool:
  """Whether a mesh is of SparseCores; None is of a TensorCore."""
  return mesh is not None and not isinstance(mesh, pltpu.TensorCoreMesh)


def peak_of_scopes(jaxpr: jex_core.Jaxpr, *, is_sparse: bool) -> Usage:
  """The most that the scopes inside a program hold at once.

  Args:
    jaxpr: the body of a kernel.
    is_sparse: whether it runs on a SparseCore.
  """
  peak = Usage()
  for eqn in jaxpr.eqns:
    held = Usage()
    if eqn.primitive.name == "run_scoped":
      for v in eqn.params["jaxpr"].invars:
        held += _of_ref(v.aval) if is_sparse else _of_scoped_ref(v.aval)
    for inner in _compat.inner_jaxprs(eqn):
      peak = peak | (held + peak_of_scopes(inner, is_sparse=is_sparse))
  return peak


def _of_scoped_ref(aval: Any) -> Usage:
  """What the buffer of a scope takes on a TensorCore."""
  if _compat.memory_space_of_type(aval) != pltpu.VMEM:
    return _of_ref(aval)
  num_bytes = padded_bytes(aval)
  *rows, columns = aval.shape or (1,)
  is_word = tiles.packing(aval.dtype) == 1
  if rows and columns <= tiles.LANES and is_word:
    # Rows that fill no more than the lanes lie one after the other.
    num_bytes = math.prod(rows) * tiles.LANES * 4
  return Usage(
    vmem_bytes_per_core=tiles.rounded_up(num_bytes, _SCOPED_UNIT_BYTES)
  )


def _of_ref(aval: Any, *, copies: int | None = None) -> Usage:
  """What a buffer takes; `copies` is how many are held of a block."""
  space = _compat.memory_space_of_type(aval)
  if copies is not None and aot.is_default_space(space):
    space = pltpu.VMEM
  if space == pltpu.VMEM:
    return Usage(vmem_bytes_per_core=padded_bytes(aval) * (copies or 1))
  if space == pltpu.SMEM:
    return Usage(smem_bytes_per_core=padded_bytes(aval) * (copies or 1))
  if space == pltpu.SEMAPHORE:
    return Usage(semaphores_per_core=math.prod(aval.shape))
  return Usage()


def padded_bytes(aval: Any) -> int:
  """Bytes of a VMEM or SMEM buffer of this type; see `tiles.padded_bytes`."""
  return tiles.padded_bytes(aval.shape, aval.dtype)
