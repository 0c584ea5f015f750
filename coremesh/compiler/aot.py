"""Ahead-of-time compilation by libtpu, with no TPU."""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib.util
import itertools
import os
import pathlib
import tempfile
import time
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.extend.core as jex_core

from coremesh import _compat, chips, errors
from coremesh._compat import aot as jax_aot
from coremesh.compiler import (
  cache,
  dumps,
  failures,
  ledger,
  libtpu_flags,
  matching,
  operands,
  sites,
  tracing,
  usage,
  used,
  workers,
)
from coremesh.compiler.compiled import Compiled, Operation

# Part of the key: an entry of another layout is not looked at.
_RESULT_VERSION = "5"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Target:
  """Where a program is compiled for."""

  name: str
  chip: chips.Chip | None
  slice_name: tuple[str, bool] | None
  serialized: bytes | None
  device_ids: tuple[int, ...]


def compile(  # pylint: disable=redefined-builtin
  fn: Any,
  *args: Any,
  chip: str | chips.Chip | None = None,
  flags: Mapping[str, Any] | None = None,
  timeout_seconds: float = 300.0,
) -> Compiled:
  """Compiles a function for TPUs that need not be there.

  The function may hold any Pallas kernels and XLA operations. It is traced and
  lowered in this process; libtpu compiles it in a worker process, which is
  kept for the next program. What was compiled before comes from a cache on
  disk; see `coremesh cache`.

  Args:
    fn: a function, jitted or not, for one device of `chip`; or one over a
      compile-only mesh: `jax.shard_map(..., mesh=chip.device_mesh(...,
      on="compiler"))`.
    *args: arrays, numbers, or `jax.ShapeDtypeStruct` in their place. Numbers
      may be static arguments of `jax.jit`; what else is static goes into `fn`
      by functools.partial.
    chip: the slice, such as "v5p:2x2x1"; not needed for a compile-only mesh.
    flags: of libtpu, such as {"xla_tpu_scoped_vmem_limit_kib": 32768}. Each
      set of flags takes a worker of its own.
    timeout_seconds: how long the worker may take, its start included.

  Returns:
    The compiled program: its machine code and other texts, its memory, and
    what its kernels hold.

  Raises:
    CompileError: the compiler refuses the program, dies or takes too long.
    UnsupportedError: the mesh of `fn` holds CPU devices, so that the kernels
      were traced for the simulator; or it calls back to Python.
    ChipError: there is no such chip, or the mesh of `fn` is of another.
    DTypeError: an argument is no array.

  Example:
    compiled = cm.compile(
      kernel, jax.ShapeDtypeStruct((32, 256), jnp.float32), chip="v6e:2x2"
    )
    print(compiled.code_bytes, compiled.text("bundles"))
  """
  start = time.perf_counter()
  asked = None if chip is None else tracing.as_chip(chip)
  lowered, jaxpr = tracing.lowered(fn, args, asked)
  target = _target(lowered, asked, jaxpr)
  kernels = tuple(usage.of_program(jaxpr))
  _check_cores(kernels, target.chip, jaxpr)
  words = libtpu_flags.words(flags or {})
  predicted = ()
  if target.chip is not None:
    limit = libtpu_flags.scoped_vmem_bytes(words)
    predicted = ledger.of_program(jaxpr, target.chip, vmem_limit_bytes=limit)
  _check_vmem(predicted, jaxpr)
  request = {
    "module": lowered.module,
    "options": lowered.options(target.device_ids),
    "topology": target.serialized,
    "chip": target.slice_name,
    "device_ids": target.device_ids,
  }
  disk = cache.Cache()
  program = lowered.text()
  key = _key(request, words, program, jaxpr)
  found = disk.get(key)
  answer = found
  if answer is None:
    answer = _ask(request, words, timeout_seconds, jaxpr, predicted)
    disk.put(key, answer)
  vmem_bytes = used.vmem_bytes_by_operation(answer["texts"]["hlo"])
  matches = matching.of_kernels(
    usage.kernels(jaxpr),
    [dumps.Texts(**fields) for fields in answer["operations"]],
    vmem_bytes,
  )
  kept = [not match.is_left_out for match in matches]
  return Compiled(
    chip=target.name,
    num_devices=lowered.num_devices,
    kernels=tuple(itertools.compress(kernels, kept)),
    dropped=tuple(
      k.name for k, m in zip(kernels, matches, strict=True) if m.is_left_out
    ),
    ledgers=used.with_used(
      tuple(itertools.compress(predicted, kept)),
      [m.operation for m in matches if predicted and not m.is_left_out],
      vmem_bytes,
      report=answer["texts"].get("vmem-report", ""),
    ),
    operations=tuple(Operation(**fields) for fields in answer["operations"]),
    texts={"stablehlo": program} | answer["texts"],
    memory=answer["memory"],
    costs=answer["costs"],
    compile_seconds=time.perf_counter() - start,
    from_cache=found is not None,
    operands=operands.of_kernels(jaxpr, jax.tree.leaves(args)),
  )


def ledgers(
  fn: Any, *args: Any, chip: str | chips.Chip
) -> tuple[ledger.Ledger, ...]:
  """What the kernels of a function hold, buffer by buffer, not compiled.

  Args:
    fn: a function, jitted or not, as for `compile`.
    *args: arrays, or `jax.ShapeDtypeStruct` in their place.
    chip: the slice, such as "v5p:2x2x1".

  Returns:
    A ledger for each kernel, in order. `Compiled.ledgers` also says what
    libtpu used.

  Example:
    for one in cm.ledgers(kernel, x, chip="v6e:2x2"):
      print(one)
  """
  asked = tracing.as_chip(chip)
  traced = tracing.traced(fn, args, asked)
  return ledger.of_program(traced.jaxpr.jaxpr, asked)


def _target(
  lowered: jax_aot.Lowered, chip: chips.Chip | None, jaxpr: jex_core.Jaxpr
) -> _Target:
  """The devices a program is for: those it was traced over, or the chip's."""
  if lowered.topology is not None and lowered.device_ids is not None:
    kind = lowered.device_kind
    of_kind = chips.chip_of_device_kind(kind)
    if chip is not None and chip.device_kind != kind:
      raise errors.ChipError(
        f"chip is {chip.name}, but the mesh of fn holds {kind!r} devices."
        " Leave chip out, or make the mesh of that chip."
      )
    return _Target(
      name=chip.name if chip else (of_kind.generation if of_kind else kind),
      chip=of_kind,
      slice_name=None,
      serialized=lowered.topology,
      device_ids=lowered.device_ids,
    )
  spans = [
    eqn.params["mesh"].size
    for eqn in _compat.walk(jaxpr)
    if eqn.primitive.name == "shard_map"
  ]
  if lowered.device_ids is None or (chip and max(spans, default=1) > 1):
    raise errors.UnsupportedError(
      "fn is over a mesh of several devices that do not compile. Make it over"
      ' chip.device_mesh(..., on="compiler").'
    )
  if chip is None or lowered.num_devices > 1:
    raise failures.of_devices([lowered.platform])
  return _Target(
    name=chip.name,
    chip=chip,
    slice_name=(chip.name, chip.version.supports_megacore),
    serialized=None,
    device_ids=(0,),
  )


def _check_cores(
  kernels: tuple[usage.KernelUsage, ...],
  chip: chips.Chip | None,
  jaxpr: jex_core.Jaxpr,
) -> None:
  if chip is None:
    return
  for kernel in kernels:
    meshes = [m for m in kernel.meshes if isinstance(m, pltpu.TensorCoreMesh)]
    asked = max((m.num_cores for m in meshes), default=0)
    if asked > chip.tensor_cores_per_device:
      line = sites.line_of(f":: {kernel.name}", sites.of_program(jaxpr))
      raise failures.of_cores(kernel.name, asked, chip=chip, source=line)


def _check_vmem(
  predicted: Sequence[ledger.Ledger], jaxpr: jex_core.Jaxpr
) -> None:
  for one in predicted:
    has = chips.chip(one.chip).vmem_bytes_per_tensor_core
    if not one.is_sparse and one.least_vmem_bytes > has:
      line = sites.line_of(f":: {one.kernel}", sites.of_program(jaxpr))
      raise failures.of_vmem(one, line)


def _key(
  request: Mapping[str, Any],
  flags: tuple[str, ...],
  program: str,
  jaxpr: jex_core.Jaxpr,
) -> str:
  """A digest of all that decides what a program is compiled to.

  The module itself also names the functions that called `compile`; these do
  not count, but the line of every operation does: the compiler's texts name it.
  """
  parts = {name: repr(request[name]) for name in ("topology", "chip")}
  return cache.key(
    {
      **parts,
      "program": program,
      "lines": repr([s.line for s in sites.of_program(jaxpr)]),
      "options": request["options"],
      "device_ids": repr(request["device_ids"]),
      "flags": repr(flags),
      "library": _other_library(),
      "versions": repr(jax_aot.versions()),
      "result": _RESULT_VERSION,
    }
  )


def _ask(
  request: Mapping[str, Any],
  flags: tuple[str, ...],
  seconds: float,
  jaxpr: jex_core.Jaxpr,
  predicted: Sequence[ledger.Ledger],
) -> dict[str, Any]:
  check_compiler()
  try:
    answer = workers.pool().ask(request, flags=flags, seconds=seconds)
  except OSError as error:
    raise failures.of_start(error, tempfile.gettempdir()) from error
  if isinstance(answer, workers.Silence):
    kernels = [s for s in sites.of_program(jaxpr) if s.is_kernel]
    empty = [s.line or "a kernel" for s in kernels if s.has_empty]
    raise failures.of_silence(
      answer,
      seconds=seconds,
      flags=flags,
      with_empty=next(iter(empty), None),
      ledgers=predicted,
    )
  if "no_chip" in answer:
    raise errors.ChipError(answer["no_chip"])
  if "refused" in answer:
    text = answer["refused"]
    raise failures.of_program(text, jaxpr, jax_aot.frames_in(text))
  if "failed" in answer:
    raise failures.of_reading(answer["failed"])
  return answer


def check_compiler() -> None:
  """Raises UnsupportedError if libtpu is not installed."""
  if jax_aot.versions()["libtpu"] == "none" and not _other_library():
    raise errors.UnsupportedError(
      "libtpu, the TPU compiler, is not installed. Install it with the package"
      " jax[tpu], on Linux."
    )


def _other_library() -> str:
  """The libtpu the user names; "" for the installed one, which JAX names."""
  named = os.environ.get("TPU_LIBRARY_PATH", "")
  installed = importlib.util.find_spec("libtpu")
  folders = (installed and installed.submodule_search_locations) or []
  return "" if str(pathlib.Path(named).parent) in folders else named
