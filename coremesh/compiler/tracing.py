"""A function as the compiler takes it: traced and lowered, not compiled."""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any
import warnings

import jax
from jax.experimental.pallas import tpu_sc as plsc
import jax.extend.core as jex_core

from coremesh import _compat, chips, errors, topology
from coremesh._compat import aot as jax_aot
from coremesh.compiler import failures, sites, usage

_CALLBACKS = {"debug_callback", "io_callback", "pure_callback", "debug_print"}


def as_chip(asked: str | chips.Chip) -> chips.Chip:
  """The slice that was asked for.

  Raises:
    ChipError: there is none, or it is no name.
  """
  if isinstance(asked, chips.Chip):
    return asked
  if not isinstance(asked, str):
    raise errors.ChipError(
      f"chip must be a name such as 'v5p:2x2x1', or a cm.Chip; got {asked!r}."
    )
  return chips.chip(asked)


def lowered(
  fn: Any, args: Sequence[Any], chip: chips.Chip | None
) -> tuple[jax_aot.Lowered, jex_core.Jaxpr]:
  """A function as a module, and what it was traced to.

  Args:
    fn, args, chip: as for `traced`.

  Raises:
    CompileError: Pallas or Mosaic refuses a kernel.
    UnsupportedError: as for `traced`; or the kernels were traced for the
      simulator; or it calls back to Python.
    DTypeError: an argument is no array.
  """
  with _environment(chip):
    program = traced(fn, args, chip)
    jaxpr = program.jaxpr.jaxpr
    _check_callbacks(jaxpr)
    if any(k.is_simulated for k in usage.of_program(jaxpr)):
      raise failures.of_devices(["cpu"])
    try:
      return jax_aot.lower(program), jaxpr
    except errors.CoreMeshError:
      raise
    except Exception as error:
      text = f"{type(error).__name__}: {error}"
      causes = f"{text}\n{error.__cause__}\n{error.__context__}"
      before = jax_aot.frames_in(causes) or jax_aot.frames_before(error)
      raise failures.of_program(text, jaxpr, before, said=causes) from error


def traced(
  fn: Any, args: Sequence[Any], chip: chips.Chip | None
) -> jax.stages.Traced:
  """A function, traced with the types of its arguments.

  Args:
    fn: a function, jitted or not.
    args: arrays, numbers, or `jax.ShapeDtypeStruct` in their place.
    chip: what for; None if a mesh within `fn` says so.

  Raises:
    UnsupportedError: `fn` is no function that JAX can trace.
    DTypeError: an argument is no array.
  """
  jitted = _jitted(fn)
  with _environment(chip):
    return jitted.trace(*jax.tree.map(_shape_of, args))


@contextlib.contextmanager
def _environment(chip: chips.Chip | None) -> Iterator[None]:
  """Where JAX has no device but those of a chip."""
  topology.keep_jax_on_cpu()
  devices = contextlib.nullcontext()
  if chip is not None:
    devices = _compat.empty_device_context(chip.abstract_device(platform="tpu"))
  with devices, warnings.catch_warnings():
    # emit_pipeline names a semaphore for every copy; nobody can change that.
    warnings.simplefilter("ignore", plsc.SparseCorePushStreamWarning)
    yield


def _jitted(fn: Any) -> Any:
  if not callable(fn):
    raise errors.UnsupportedError(
      f"fn must be a function, jitted or not; got {type(fn).__name__}. Pass the"
      " function itself, and its arguments after it: cm.compile(fn, x)."
    )
  if isinstance(fn, jax.stages.Compiled):
    raise errors.UnsupportedError(
      "fn must be a function, jitted or not; got one that JAX has compiled."
      " Pass what was lowered: cm.compile(fn, x), not"
      " cm.compile(fn.lower(x).compile(), x)."
    )
  return fn if hasattr(fn, "trace") else jax.jit(fn)


def _check_callbacks(jaxpr: jex_core.Jaxpr) -> None:
  names = {eqn.primitive.name for eqn in _compat.walk(jaxpr)}
  if not names & _CALLBACKS:
    return
  outside = {s.operation for s in sites.of_program(jaxpr) if not s.kernels}
  if found := outside & _CALLBACKS:  # A kernel prints by itself.
    raise errors.UnsupportedError(
      f"fn calls back to Python ({', '.join(sorted(found))}), which a program"
      " that is compiled in another process cannot. Leave it out."
    )


def _shape_of(leaf: Any) -> Any:
  """The type of an array; Python's numbers stay, as JAX has types for them."""
  if isinstance(leaf, jax.ShapeDtypeStruct | bool | int | float | complex):
    return leaf
  try:
    dtype = jax.numpy.result_type(leaf)
  except TypeError as error:
    raise errors.DTypeError(
      "The arguments of fn must be arrays, numbers or jax.ShapeDtypeStruct; got"
      f" {type(leaf).__name__}. Pass what is none by functools.partial."
    ) from error
  return jax.ShapeDtypeStruct(
    jax.numpy.shape(leaf), dtype, weak_type=getattr(leaf, "weak_type", False)
  )
