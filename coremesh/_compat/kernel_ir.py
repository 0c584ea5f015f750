"""A kernel's program as JAX traced it: what the simulator reads of it."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import logging
import pathlib
from typing import Any

import jax
from jax._src import callback as _callback
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import dtypes as _dtypes
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import mlir as _mlir
from jax._src.pallas import core as _pallas_core
from jax._src.pallas import helpers as _pallas_helpers
from jax._src.pallas import mpmd as _mpmd
from jax._src.pallas import pallas_call as _pallas_call
from jax._src.pallas import primitives as _pallas_primitives
from jax._src.pallas.mosaic import core as _mosaic_core
from jax._src.pallas.mosaic import pipeline as _pipeline
from jax._src.pallas.mosaic import primitives as _mosaic_primitives
from jax._src.pallas.mosaic import sc_core as _sc_core
from jax._src.pallas.mosaic import sc_primitives as _sc_primitives
from jax._src.random import prng as _prng
from jax._src.state import indexing as _indexing
from jax._src.state import primitives as _state_primitives
from jax._src.state import types as _state_types
from jax.experimental.pallas import tpu as pltpu
import jax.extend.core as jex_core
import numpy as np

# Primitives of different modules share names ("load", "swap", "gather"), so
# those of Pallas are told apart by where they are defined.
_MODULES = {
  "state": _state_primitives,
  "pallas": _pallas_primitives,
  "helpers": _pallas_helpers,
  "tpu": _mosaic_primitives,
  "random": _prng,
  "pipeline": _pipeline,
  "sc": _sc_primitives,
  "checkify": _checkify,
  "debugging": _debugging,
}


@functools.cache
def _qualified_names() -> Mapping[Any, str]:
  return {
    primitive: f"{prefix}.{attribute.removesuffix('_p')}"
    for prefix, module in reversed(_MODULES.items())
    for attribute, primitive in vars(module).items()
    if isinstance(primitive, _core.Primitive)
    and attribute.endswith("_p")
    and primitive.name not in ("broadcast_in_dim", "convert_element_type")
  }


def qualified_name(primitive: Any) -> str:
  """A primitive's name, as "tpu.dma_start"; those of `lax` have no prefix."""
  return _qualified_names().get(primitive, primitive.name)


def primitive_names() -> Sequence[str]:
  """Every primitive that Pallas has for TPUs, qualified."""
  return sorted(set(_qualified_names().values()))


NDIndexer = _indexing.NDIndexer
Slice = _indexing.Slice
Indices = _sc_core.Indices
ReshapeTransform = _state_types.ReshapeTransform
BitcastTransform = _state_types.BitcastTransform
TransposeTransform = _state_types.TransposeTransform
SelectTransform = _state_types.SelectTransform
SharedSliceTransform = _sc_core.SharedMemRefSliceTransform
# They change what the compiler assumes, and no value.
PLAIN_TRANSFORMS = (
  _state_types.MemorySpaceCastTransform,
  _mosaic_core.AccessAssumptionTransform,
)
TransformedRef = _state_types.TransformedRef
Literal = jex_core.Literal
DropVar = _core.DropVar


def split_ref(value: Any) -> tuple[Any, tuple[Any, ...]]:
  """A ref and the transforms on it, of a ref or a part of one."""
  transforms: tuple[Any, ...] = ()
  while isinstance(value, _state_types.TransformedRef):
    transforms = (*value.transforms, *transforms)
    value = value.ref
  return value, transforms


def transformed_type(ref_type: Any, transforms: Sequence[Any]) -> Any:
  """The type of a part of a ref."""
  for transform in transforms:
    ref_type = transform.transform_type(ref_type)
  return ref_type


def is_semaphore_type(ref_type: Any) -> bool:
  """Whether the ref is a semaphore or an array of them."""
  dtype = getattr(ref_type, "dtype", None)
  return dtype is not None and _dtypes.issubdtype(
    dtype, _pallas_core.semaphore_dtype
  )


def counts_bytes(ref_type: Any) -> bool:
  """Whether a copy raises the semaphore by its bytes, and not by one."""
  return _dtypes.issubdtype(ref_type.dtype, _mosaic_core.dma_semaphore)


def stored_dtype(dtype: Any) -> tuple[np.dtype, tuple[int, ...]]:
  """How an element is stored: a numpy dtype, and its own shape.

  PRNG keys are arrays of words; everything else has the shape ().
  """
  if is_key(dtype):
    return np.dtype(np.uint32), tuple(dtype._impl.key_shape)
  return np.dtype(dtype), ()


def place_of_type(ref_type: Any, mesh: Any) -> tuple[str, Any]:
  """The memory a kernel's ref is in, and the mesh whose memory it is.

  Args:
    ref_type: the ref's type.
    mesh: the mesh of the worker that holds it.

  Returns:
    "hbm", "vmem", "vmem_shared", "smem", "semaphore_mem", "accumulator" or
    "host", and a mesh.
  """
  space = getattr(ref_type, "memory_space", None)
  if isinstance(space, _pallas_core.CoreMemorySpace):
    space, mesh = space.memory_space, space.mesh
  if isinstance(space, _core.MemorySpace):
    return ("host" if space is _core.MemorySpace.Host else "hbm"), mesh
  if space in (None, _pallas_core.MemorySpace.ANY):
    return "hbm", mesh
  if space is _pallas_core.MemorySpace.DEFAULT:
    return "vmem", mesh
  if space is _pallas_core.MemorySpace.INDEX:
    return "smem", mesh
  if isinstance(space, _mosaic_core.AccMemorySpace):
    return "accumulator", mesh
  return str(space), mesh


_PACKAGE = str(pathlib.Path(__file__).parents[1])
_JAX = jax.__file__.removesuffix("__init__.py")


def source_line(eqn: Any) -> str:
  """Where in the user's code an equation is, "file.py:12 (name)", or ""."""
  frames = _source_info_util.user_frames(eqn.source_info.traceback)
  for frame in frames:
    if not frame.file_name.startswith(_PACKAGE):
      file = frame.file_name.rsplit("/", 1)[-1]
      return f"{file}:{frame.start_line} ({frame.function_name})"
  return ""


# The scopes that JAX's pipelines name about their own copies, and their starts.
_PIPELINE_SCOPES = "ep_initialize_", "ep_copy_in", "ep_copy_out"


def is_of_pipeline(eqn: Any) -> bool:
  """Whether JAX's pipelines wrote a copy, and not the body of one.

  In the backward pass of a `jax.custom_vjp` the traceback is that of the
  forward pass: there the scope tells, which a pipeline may leave out.
  """
  scopes = str(eqn.source_info.name_stack).split("/")
  if scopes[-1].startswith(_PIPELINE_SCOPES):
    return True
  traceback = eqn.source_info.traceback
  for frame in traceback.frames if traceback else ():  # The innermost first.
    if frame.file_name == _pipeline.__file__:
      return True
    if not frame.file_name.startswith(_JAX):
      return False
  return False


def eqn_types(eqn: Any) -> tuple[list[Any], list[Any]]:
  """The types of an equation's operands and results."""
  return [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]


def rebound(eqn: Any) -> Callable[..., Any]:
  """A function that runs an equation's primitive by itself on arrays.

  PRNG keys are given as their words.
  """
  params = eqn.primitive.get_bind_params(eqn.params)
  function = functools.partial(eqn.primitive.bind, **params)
  dtypes = [v.aval.dtype for v in eqn.invars]
  if not any(map(is_key, dtypes)):
    return function
  return lambda *values: function(*map(_restored, values, dtypes))


def runs_by_itself(primitive: Any) -> bool:
  """Whether JAX can run a primitive by itself, outside any program."""
  return "impl" in vars(primitive)


def is_key(dtype: Any) -> bool:
  """Whether elements are PRNG keys."""
  return _dtypes.issubdtype(dtype, _dtypes.prng_key)


def _restored(value: Any, dtype: Any) -> Any:
  """The inverse of `stored`."""
  if is_key(dtype):
    return jax.random.wrap_key_data(value, impl=dtype._impl)
  return value


def scan_parts(eqn: Any, values: Sequence[Any]) -> list[list[Any]]:
  """What a scan is given: constants, first carries, and arrays to scan."""
  parts = eqn.params["ft_in"].update(values).unpack()
  return [list(part) for part in parts]


def scan_results(eqn: Any, values: Sequence[Any]) -> list[list[Any]]:
  """What a scan's body returns: carries, and slices of results."""
  parts = eqn.params["ft_out"].update(values).unpack()
  return [list(part) for part in parts]


def custom_call_jaxpr(eqn: Any) -> Any:
  """The program of an equation that calls one (jit, custom derivatives)."""
  for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    if name in eqn.params:
      return eqn.params[name]
  raise KeyError(eqn.primitive.name)


def expanded_pipeline(eqn: Any, sizes: Mapping[Any, int]) -> Any:
  """The program of `emit_pipeline`: its loops, copies and buffers.

  Args:
    eqn: the equation of `emit_pipeline`.
    sizes: the core axes of the kernel, with their sizes.
  """
  with _config._check_vma(False), _core.extend_axis_env_nd(sizes.items()):
    return _pipeline.emit_pipeline_to_jaxpr(
      [v.aval for v in eqn.invars],
      grid_names=tuple(sizes),
      grid_sizes=tuple(sizes.values()),
      **eqn.params,
    )


def pipeline_dims(eqn: Any, values: Sequence[Any]) -> list[Any]:
  """The grid of an `emit_pipeline`, as the body may ask for it."""
  mapping = eqn.params["grid_mapping"]
  args = eqn.params["args_tree"].unflatten(values)
  dynamic = iter(args.dynamic_grid_spec)
  grid = [d if isinstance(d, int) else next(dynamic) for d in mapping.grid]
  return [d for i, d in enumerate(grid) if i not in mapping.vmapped_dims]


def unflattened_body(eqn: Any, values: Sequence[Any]) -> tuple[Any, Any, Any]:
  """A pipeline body's operands: grid indices, constants, and refs."""
  step, constants, refs = eqn.params["in_tree"].unflatten(values)
  indices = (list(step.index), jax.tree.leaves(step))
  return indices, list(constants), list(refs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelProgram:
  """A kernel as JAX hands it to a backend.

  Attributes:
    name: what the user called it.
    meshes: the meshes of cores it runs on, one for each program.
    jaxprs: for each mesh a program over refs: inputs, outputs, scratch.
    in_types: types of the arrays (or refs) it is given.
    out_types: types of the arrays it returns.
    aliases: from the index of an output to that of the input it overwrites.
    collective_id: which barrier semaphore, or None.
    grid: the `pallas_call` grid to run over, or None.
    dimension_semantics: of that grid, or None.
    device_axes: the axes of the device mesh around it, with their sizes.
    device_kind: the TPU it was traced for, "" if that is not known.
  """

  name: str
  meshes: tuple[Any, ...]
  jaxprs: tuple[Any, ...]
  in_types: tuple[Any, ...]
  out_types: tuple[Any, ...]
  aliases: Mapping[int, int]
  collective_id: int | None
  grid: Any = None
  dimension_semantics: tuple[str, ...] | None = None
  device_axes: Mapping[Any, int] = dataclasses.field(default_factory=dict)
  device_kind: str = ""


def failed_check(eqn: Any, values: Sequence[Any]) -> tuple[Any, str]:
  """A `debug_check`: the operand that is true if it fails, and its message."""
  error = jax.tree.unflatten(eqn.params["err_tree"], values)
  (failed,) = error._pred.values()
  (tree,) = error._metadata.values()
  (payload,) = error._payload.values()
  return failed, jax.tree.unflatten(tree, payload).fmt_string


def debug_checks_enabled() -> bool:
  """Whether kernels traced now check what `pl.debug_check` says."""
  return _pallas_core.debug_checks_enabled()


# Called with the device's index in its mesh and arrays; returns arrays.
type HostFunction = Callable[..., Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSimulator(pltpu.InterpretParams):
  """Interpret parameters that run a kernel by other means than JAX's.

  What `compile_kernel` returns is called on the host once for each device each
  time the kernel runs.
  """

  def compile_kernel(self, program: KernelProgram) -> HostFunction:
    """Prepares a kernel; errors that need no values are raised here."""
    raise NotImplementedError


class _Quiet(logging.Filter):
  """Drops records of errors that are raised all the same."""

  def __init__(self, kind: type[BaseException]):
    super().__init__()
    self._kind = kind

  def filter(self, record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], self._kind))


def keep_quiet_about(kind: type[BaseException]) -> None:
  """Keeps JAX from logging a traceback for each device that raises `kind`."""
  logger = logging.getLogger(_callback.__name__)
  if not any(isinstance(f, _Quiet) for f in logger.filters):
    logger.addFilter(_Quiet(kind))


def _device_axes() -> dict[Any, int]:
  return dict(_core.get_axis_env().axis_sizes)


def _device_kind() -> str:
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.device_kind if device is not None else ""


def _run_on_host(
  function: HostFunction, out_types: Any, axes: Mapping[Any, int]
) -> Callable[..., Any]:
  """A traceable function that calls `function` on the host, in order."""
  shapes = [
    jax.ShapeDtypeStruct(*_physical_shape(type_)) for type_ in out_types
  ]

  def call(*args):
    device = np.int32(0)
    for axis, size in axes.items():
      device = device * np.int32(size) + jax.lax.axis_index(axis)
    return _callback.io_callback(function, shapes, device, *args, ordered=True)

  return call


def stored(array: Any) -> np.ndarray:
  """An array of a kernel on the host, PRNG keys as their words."""
  if isinstance(array, jax.Array) and is_key(array.dtype):
    array = jax.random.key_data(array)
  return np.asarray(array)


def _physical_shape(type_: Any) -> tuple[tuple[int, ...], Any]:
  if is_semaphore_type(type_):
    return type_.shape, np.dtype(np.int32)
  return type_.shape, type_.dtype


def _lower_kernel(ctx: Any, *operands: Any, **params: Any) -> Any:
  simulator = params["interpret"]
  if not isinstance(simulator, KernelSimulator):
    return _mpmd._mpmd_map_fallback_lowering(ctx, *operands, **params)
  aliases = dict(params["input_output_aliases"])
  axes = _device_axes()
  program = KernelProgram(
    name=params["name"] or params["jaxprs"][0].debug_info.func_name,
    meshes=tuple(params["meshes"]),
    jaxprs=tuple(params["jaxprs"]),
    in_types=tuple(ctx.avals_in),
    out_types=tuple(params["out_avals"]),
    aliases={out: in_ for in_, out in aliases.items()},
    collective_id=getattr(params["compiler_params"], "collective_id", None),
    device_axes=axes,
    device_kind=_device_kind(),
  )
  return _lower_to_host(ctx, operands, simulator.compile_kernel(program), axes)


def _lower_pallas_call(ctx: Any, *operands: Any, **params: Any) -> Any:
  simulator = params["interpret"]
  if not isinstance(simulator, KernelSimulator):
    return _pallas_call._pallas_call_lowering(ctx, *operands, **params)
  compiler_params = params["compiler_params"]
  axes = _device_axes()
  program = KernelProgram(
    name=params["name"] or params["jaxpr"].debug_info.func_name,
    meshes=(params["mesh"],),
    jaxprs=(params["jaxpr"],),
    in_types=tuple(ctx.avals_in),
    out_types=tuple(params["out_avals"]),
    # They are counted without the grid sizes, which come first.
    aliases={
      out: in_ + params["grid_mapping"].num_dynamic_grid_bounds
      for in_, out in params["input_output_aliases"]
    },
    collective_id=getattr(compiler_params, "collective_id", None),
    grid=params["grid_mapping"],
    dimension_semantics=_semantics(compiler_params),
    device_axes=axes,
    device_kind=_device_kind(),
  )
  return _lower_to_host(ctx, operands, simulator.compile_kernel(program), axes)


def _lower_to_host(
  ctx: Any, operands: Any, function: HostFunction, axes: Mapping[Any, int]
) -> Any:
  call = _run_on_host(function, ctx.avals_out, axes)
  # A device's index varies over devices and is mixed with plain numbers here,
  # which means nothing outside the program of one device.
  with _config._check_vma(False):
    return _mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


def _semantics(compiler_params: Any) -> tuple[str, ...] | None:
  semantics = getattr(compiler_params, "dimension_semantics", None)
  if semantics is None:
    return None
  return tuple(str(getattr(s, "value", s)) for s in semantics)


_mlir.register_lowering(_mpmd.mpmd_map_p, _lower_kernel, platform="cpu")
_mlir.register_lowering(
  _pallas_call.pallas_call_p, _lower_pallas_call, platform="cpu"
)
