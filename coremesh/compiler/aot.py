"""Ahead-of-time compilation by libtpu, with no TPU."""

import dataclasses
import time
from typing import Any
import warnings

import jax
from jax.experimental.pallas import tpu_sc as plsc

from coremesh import errors
from coremesh.compiler import usage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """A program that libtpu has compiled.

  Attributes:
    executable: JAX's compiled program; `.as_text()` is its HLO.
    kernels: what each kernel in it holds, counted before compilation.
    code_bytes: size of the machine code.
    temporary_bytes_per_device: HBM for intermediate results.
    compile_seconds: wall time of lowering and compiling, this machine.
  """

  executable: jax.stages.Compiled
  kernels: tuple[usage.KernelUsage, ...]
  code_bytes: int
  temporary_bytes_per_device: int
  compile_seconds: float


def compile(fn: Any, *args: Any) -> Compiled:  # pylint: disable=redefined-builtin
  """Compiles a function for TPU devices that need not be there.

  Args:
    fn: a function over a compile-only device mesh: `jax.jit(jax.shard_map(...,
      mesh=chip.device_mesh(..., on="compiler")))`, jitted or not.
    *args: arrays, or `jax.ShapeDtypeStruct` in their place.

  Returns:
    The compiled program and what its kernels hold. The compiler's own errors
    pass through.

  Raises:
    UnsupportedError: the mesh of `fn` holds CPU devices, so that the kernels
      were traced for the simulator.

  Example:
    mesh = cm.chip("v6e:2x2").device_mesh("device", on="compiler")
    fn = jax.shard_map(kernel, mesh=mesh, in_specs=P("device"),
                       out_specs=P("device"))
    cm.compile(fn, jax.ShapeDtypeStruct((32, 256), jnp.float32)).code_bytes
  """
  jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
  shapes = jax.tree.map(_shape_of, args)
  start = time.perf_counter()
  traced = jitted.trace(*shapes)
  kernels = tuple(usage.of_program(traced.jaxpr.jaxpr))
  with warnings.catch_warnings():
    # emit_pipeline names a semaphore for every copy; nobody can change that.
    warnings.simplefilter("ignore", plsc.SparseCorePushStreamWarning)
    executable = traced.lower().compile()
  seconds = time.perf_counter() - start
  shardings = jax.tree.leaves(
    (executable.input_shardings, executable.output_shardings)
  )
  platforms = {d.platform for s in shardings for d in s.device_set}
  if platforms != {"tpu"} or any(k.is_simulated for k in kernels):
    raise errors.UnsupportedError(
      f"fn was compiled for {sorted(platforms)} devices. Make it over a mesh"
      ' of devices that compile: chip.device_mesh(..., on="compiler").'
    )
  memory = executable.memory_analysis()
  assert memory is not None  # libtpu always reports it.
  return Compiled(
    executable=executable,
    kernels=kernels,
    code_bytes=memory.generated_code_size_in_bytes,
    temporary_bytes_per_device=memory.temp_size_in_bytes,
    compile_seconds=seconds,
  )


def _shape_of(leaf: Any) -> Any:
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf
  return jax.ShapeDtypeStruct(
    jax.numpy.shape(leaf), jax.numpy.result_type(leaf)
  )
