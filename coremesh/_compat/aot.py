"""A program between two processes: lowered in one, compiled in the other."""

import base64
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import os
import pathlib
import re
import threading
import traceback
from typing import Any

import jax
from jax._src import config as _config
from jax._src import source_info_util as _source_info_util
from jax._src import tpu_custom_call as _tpu_custom_call
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax
from jax._src.lib import tpu as _tpu
from jax._src.lib import xla_client as _xla_client
import jax.extend.core as jex_core
from jaxlib.mlir import ir, passmanager
import numpy as np

_LOWERING = threading.RLock()


# --- in the user's process --------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered:
  """A program as libtpu takes it.

  Attributes:
    module: StableHLO as MLIR bytecode, kernels and source lines included.
    platform: of the devices the program was traced over.
    device_kind: of those devices.
    device_ids: of those devices, or None if it was traced over an abstract
      mesh.
    num_devices: how many it is for.
    topology: the slice of those devices, serialised; None unless they are
      TPUs.
    lowering: JAX's own object; it knows the rest.
    compiler_options: those of `jax.jit`.
  """

  module: bytes
  platform: str
  device_kind: str
  device_ids: tuple[int, ...] | None
  num_devices: int
  topology: bytes | None
  lowering: Any
  compiler_options: dict[str, Any]

  def options(self, device_ids: tuple[int, ...]) -> bytes:
    """XLA's compile options for these devices, serialised."""
    args = self.lowering.compile_args
    to_inputs, to_outputs = _pxla.get_prop_to_input_output(
      args["in_shardings"], args["out_shardings"], len(args["ordered_effects"])
    )
    options = _pxla.create_compile_options(
      self.lowering.stablehlo(),
      args["tuple_args"],
      to_inputs,
      to_outputs,
      args["backend"],
      np.array(device_ids),
      dict(self.compiler_options),
    )
    return options.SerializeAsString()

  def text(self) -> str:
    """The StableHLO as text, without lines of the source."""
    module = self.lowering.stablehlo()
    return _mlir.module_to_string(module, enable_debug_info=False)


def lower(traced: jax.stages.Traced) -> Lowered:
  """Lowers a traced program for TPUs, which need not be known to JAX."""
  with _for_the_installed_libtpu(), _with_the_users_lines():
    lowered = traced.lower(lowering_platforms=("tpu",))
  lowering: Any = lowered._lowering
  args = lowering.compile_args
  devices = list(lowering._device_list or ())
  platform = devices[0].platform if devices else "tpu"
  topology = None
  if devices and platform == "tpu":
    topology = _xla_client.get_topology_for_devices(devices).serialize()
  return Lowered(
    module=_mlir.module_to_bytecode(lowering.stablehlo()),
    platform=platform,
    device_kind=devices[0].device_kind if devices else "",
    device_ids=tuple(d.id for d in devices) or None,
    num_devices=args["num_devices"],
    topology=topology,
    lowering=lowering,
    compiler_options=dict(lowering._compiler_options_kvs),
  )


@contextlib.contextmanager
def _for_the_installed_libtpu() -> Iterator[None]:
  """Lets kernels be written as the installed libtpu reads them.

  Without a TPU client JAX takes the compiler for a month older and writes an
  older version of Mosaic, which cannot express every kernel.
  """
  with _LOWERING:
    before = _tpu_custom_call._FWD_COMPAT_VERSION
    _tpu_custom_call._FWD_COMPAT_VERSION = None  # pyright: ignore
    try:
      yield
    finally:
      _tpu_custom_call._FWD_COMPAT_VERSION = before


def versions() -> dict[str, str]:
  """The versions that decide what a program is compiled to."""
  names = ("jax", "jaxlib", "libtpu")
  found = {}
  for name in names:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = "none"
  return found


@contextlib.contextmanager
def _with_the_users_lines() -> Iterator[None]:
  """Lets each operation be marked with one line, and that one the user's.

  libtpu keeps the innermost line alone, which would be one of JAX's or of
  coremesh's. Those of coremesh's kernels stay: these are read, and explained.
  """
  info, package = _source_info_util, pathlib.Path(__file__).parents[1]
  with _LOWERING:
    before = info._exclude_paths[:], info._include_paths[:]
    info.register_exclusion(f"{package}{os.sep}")
    info.register_inclusion(f"{package / 'kernels'}{os.sep}")
    try:
      with _config.include_full_tracebacks_in_locations(False):
        yield
    finally:
      info._exclude_paths[:], info._include_paths[:] = before
      info._exclude_path_regex.cache_clear()
      info._include_path_regex.cache_clear()
      info.is_user_filename.cache_clear()


# --- where in the user's files ----------------------------------------------

KERNEL_PRIMITIVES = ("pallas_call", "mpmd_map")

type Frames = list[tuple[str, str, int]]
"""Function, file and line of each frame, the innermost first."""

_FRAME = re.compile(r'"(?P<name>[^"()]*)"\("(?P<file>[^"]+)":(?P<line>\d+):')


def frames_in(text: str) -> Frames:
  """The frames that MLIR names in a message."""
  return [(m["name"], m["file"], int(m["line"])) for m in _FRAME.finditer(text)]


def frames_of(eqn: jex_core.JaxprEqn) -> Frames:
  """The frames in which an equation was traced, but JAX's."""
  found = _source_info_util.user_frames(eqn.source_info.traceback)
  return [(f.function_name, f.file_name, f.start_line) for f in found]


def frames_before(error: BaseException) -> Frames:
  """The frames in which what JAX could not lower was traced.

  JAX hangs them on the error, as the stack before its own.
  """
  found: Frames = []
  while (error := error.__cause__ or error.__context__) is not None:  # pyright: ignore
    if isinstance(error, _source_info_util.JaxStackTraceBeforeTransformation):
      for frame in reversed(traceback.extract_tb(error.__traceback__)):
        found.append((frame.name, frame.filename, frame.lineno or 0))
  return found


def definition_of(eqn: jex_core.JaxprEqn) -> Frames:
  """Where the function that is a kernel's body is defined."""
  info = kernel_bodies(eqn)[0].debug_info
  name, _, place = info.func_src_info.rpartition(" at ")
  file, _, line = place.rpartition(":")
  return [(name, file, int(line))] if line.isdecimal() else []


def kernel_names(eqn: jex_core.JaxprEqn) -> frozenset[str]:
  """The names under which the compilers know a kernel."""
  names = [b.debug_info.func_name for b in kernel_bodies(eqn)]
  names.append(eqn.params.get("name") or "")
  return frozenset(n.rpartition(".")[2] for n in names if n)


def body_name(eqn: jex_core.JaxprEqn) -> str:
  """The name of a kernel's module in Mosaic."""
  return eqn.params.get("name") or kernel_bodies(eqn)[0].debug_info.func_name


def windows(eqn: jex_core.JaxprEqn) -> dict[int, int]:
  """Of each argument of a kernel that is a block, how many are held at once.

  JAX asks for one of a block that is the whole array, as does libtpu if the
  grid has one step; else for two, unless the block says how many.
  """
  mapping = eqn.params.get("grid_mapping")
  if mapping is None:
    return {}
  single = all(isinstance(n, int) for n in mapping.grid) and (
    math.prod(mapping.grid) <= 1
  )
  found = {}
  for number, block in enumerate(mapping.block_mappings):
    copies = getattr(block.pipeline_mode, "buffer_count", 2)
    is_whole = block.transformed_block_aval.shape == block.array_aval.shape
    is_one = single or is_whole
    found[mapping.num_index_operands + number] = 1 if is_one else copies
  return found


def is_default_space(space: Any) -> bool:
  """Whether a memory space is what blocks have that name none: VMEM."""
  return space is None or getattr(space, "value", None) == "default"


def kernel_bodies(eqn: jex_core.JaxprEqn) -> list[jex_core.Jaxpr]:
  """The programs of a kernel, one for each of its meshes."""
  return list(eqn.params.get("jaxprs") or [eqn.params["jaxpr"]])


# --- in the worker ----------------------------------------------------------


@functools.lru_cache(maxsize=256)
def slice_of(topology: bytes) -> dict[int, Any]:
  """The devices of a serialised slice by their numbers."""
  _load_libtpu()
  described = _jax.DeviceTopology.deserialize(topology)
  return {d.id: d for d in described._make_compile_only_devices()}


@functools.cache
def _load_libtpu() -> None:
  # Any slice will do; a serialised one cannot be read before libtpu is there.
  _xla_bridge.make_pjrt_tpu_topology("v5e:2x2")


def compile_module(
  module: bytes, options: bytes, devices: dict[int, Any], ids: tuple[int, ...]
) -> Any:
  """Compiles a module for some devices of a slice; they load nothing."""
  chosen = tuple(devices[i] for i in ids)
  with _mlir.make_ir_context():
    return chosen[0].client.compile(
      ir.Module.parse(module),
      executable_devices=_xla_client.DeviceList(chosen),
      compile_options=_xla_client.CompileOptions.ParseFromString(options),
    )


def hlo_text(executable: Any, *, constants: bool) -> str:
  """The compiled module's HLO; `constants`: also those of many elements."""
  [module] = executable.hlo_modules()
  if not constants:
    return module.to_string()
  options = _xla_client.hlo.HloPrintOptions()
  options.print_large_constants = True
  return module.to_string(options)


def kernel_module(body: str) -> tuple[str, str] | None:
  """Name and text of the kernel that a custom call's base64 body holds."""
  with _mlir.make_ir_context() as context:
    _tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    try:
      module = ir.Module.parse(base64.b64decode(body))
      passes = "builtin.module(mosaic-serde{serialize=false})"
      passmanager.PassManager.parse(passes).run(module.operation)
    except (ir.MLIRError, ValueError):
      return None
    name = ir.StringAttr(module.operation.attributes["sym_name"]).value
    return name, str(module)
