"""Compiles a function and says what came out and how long it takes."""

from collections.abc import Mapping
import importlib.metadata
from typing import Any

from coremesh import chips, errors
from coremesh._compat import aot as jax_aot
from coremesh.compiler import digests
from coremesh.compiler.compiled import Compiled
from coremesh.explanation import hot_lines, roofline, stages
from coremesh.explanation.explanation import Explanation
from coremesh.profile import predict
from coremesh.profile import prediction as predictions
from coremesh.profile.details import Details
from coremesh.profile.prediction import Prediction

# Names that JAX or Python make up.
_NAMELESS = ("wrapped", "<lambda>")


def explain(
  compiled_or_fn: Any,
  *args: Any,
  chip: str | chips.Chip | None = None,
  progress: bool | None = None,
) -> Explanation:
  """Says what a function's kernels hold, how long they take and why.

  The function is compiled for a TPU that need not be there. What each buffer
  takes is set against the chip's limits; the time is predicted from the machine
  code, see `cm.predict`, and nothing is measured.

  Args:
    compiled_or_fn: a function with Pallas kernels as for `cm.compile`, or a
      `cm.Compiled`.
    *args: the arguments of the function, arrays or `jax.ShapeDtypeStruct`.
      Integers that steer a kernel are read from arrays.
    chip: as for `cm.compile`.
    progress: whether to say on standard error what is going on; None: on
      a terminal.

  Returns:
    The explanation. A kernel whose time cannot be predicted is in its
    `unpredicted`, with the reason.

  Raises:
    UnsupportedError: the first argument is no function, or has no kernel.
    CompileError: libtpu refuses the program.
    ChipError: there is no such chip, or it is not that of the program.

  Example:
    print(cm.explain(kernel, x, chip="v5p:2x2x1"))
    cm.explain(kernel, x, chip="v6e:2x2").save("out")
  """
  if not isinstance(compiled_or_fn, Compiled) and not callable(compiled_or_fn):
    raise errors.UnsupportedError(
      "compiled_or_fn must be a function or what cm.compile returns; got"
      f" {compiled_or_fn!r}."
    )
  name = getattr(compiled_or_fn, "__name__", "")
  name = "" if name in _NAMELESS else name
  with stages.on_terminal(progress) as stage:
    stage(f"Compiling {name}".rstrip())
    compiled = predict.compiled_for(compiled_or_fn, args, chip)
    kernels = [o.kernel for o in compiled.operations if o.kernel is not None]
    if not kernels:
      raise errors.UnsupportedError(
        f"{name or 'The program'} holds no Pallas kernel once it is compiled;"
        " cm.predict takes programs of XLA's operations alone."
      )
    details = Details(starts=lambda which: stage(f"Predicting {which}"))
    prediction = predict.of_compiled(compiled, args, details)
  device = predict.chip_of(compiled)
  sparse = {o.name for o in compiled.operations if "bundles" not in o.texts}
  rooflines = {
    o.name: found
    for o in prediction.operations
    if o.name not in sparse
    and (
      found := roofline.of_operation(
        o, device, [a.trace for a in details.activities.get(o.name, ())]
      )
    )
  }
  return Explanation(
    name=name or ", ".join(dict.fromkeys(kernels)),
    chip=compiled.chip,
    versions=_versions(),
    arguments=digests.of_arguments(args),
    codes={o.name: digests.of_code([o]) for o in compiled.operations},
    compile_seconds=compiled.compile_seconds,
    is_from_cache=compiled.from_cache,
    memory_bytes_per_device=_memory(compiled),
    ledgers=compiled.ledgers,
    prediction=prediction,
    unpredicted=details.refused,
    dropped=compiled.dropped,
    labels={
      o.name: predictions.label(o.name, o.kernel) for o in compiled.operations
    },
    rooflines=rooflines,
    hot_lines=_hot_lines(prediction, details),
    activities=details.activities,
  )


def _versions() -> dict[str, str]:
  """What decides the code, and coremesh, whose model says what it takes."""
  try:
    own = importlib.metadata.version("coremesh")
  except importlib.metadata.PackageNotFoundError:
    own = "not installed"
  return jax_aot.versions() | {"coremesh": own}


def _memory(compiled: Compiled) -> Mapping[str, int]:
  return {
    name.removesuffix("_size_in_bytes"): amount
    for name, amount in compiled.memory.items()
    if name.endswith("_size_in_bytes") and not name.startswith("host_")
  }


def _hot_lines(
  prediction: Prediction, details: Details
) -> dict[str, tuple[hot_lines.HotLine, ...]]:
  """Of each operation with machine code of its own, on its slowest core."""
  found = {}
  for operation in prediction.operations:
    activities = details.activities.get(operation.name)
    if activities:
      slowest = max(activities, key=lambda a: a.cycles)
      program = details.programs[operation.name]
      found[operation.name] = hot_lines.of_core(program, slowest)
  return found
