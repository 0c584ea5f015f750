"""The time of a program on a TPU, from its machine code."""

from collections.abc import Mapping, Sequence
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from coremesh import chips, errors
from coremesh.compiler import aot
from coremesh.compiler.compiled import Compiled, Operation
from coremesh.profile import (
  activity,
  around,
  bundles,
  dma,
  estimates,
  hlo,
  log,
  loops,
  rates,
  scalar,
  units,
)
from coremesh.profile.details import Details
from coremesh.profile.events import Trace
from coremesh.profile.prediction import (
  CorePrediction,
  HotRange,
  OperationPrediction,
  Prediction,
)

_WHICH = estimates.MODELS
_MOST_HOT = 10
_ZEROS = "its operands that are single numbers are not known; assumed 0"
# The program around all operations; it is not one of them.
_AROUND = ("TLP", "<late-initialization>", "<late-finalization>")


def predict(
  compiled_or_fn: Any,
  *args: Any,
  chip: str | chips.Chip | None = None,
) -> Prediction:
  """Predicts how long a program takes on a TPU that need not be there.

  The scalar instructions of each operation are run, so that trip counts,
  predication and offsets are those of the machine code; a bundle takes a
  cycle; copies take what a model of HBM says, whose uncertainty is the range
  of the result. What data decide is named and the result marked as assumed.

  Not modelled: signals and copies between cores and devices, SparseCores, the
  time between operations, strides of copies.

  Args:
    compiled_or_fn: a `cm.Compiled`, or a function as for `cm.compile`.
    *args: the arguments of the program, arrays or `jax.ShapeDtypeStruct`.
      Integers that steer a kernel (scalar prefetch, group sizes) are read from
      arrays; they are not known from a ShapeDtypeStruct.
    chip: as for `cm.compile`.

  Returns:
    Cycles and time for each operation and core, what limits them and where.

  Raises:
    UnsupportedError: a kernel holds something that is not modelled, such as a
      copy to another core.
    ChipError: chip is not the one the program was compiled for.

  Example:
    print(cm.predict(jax.jit(kernel), x, chip="v5p:2x2x1"))
  """
  return of_compiled(compiled_for(compiled_or_fn, args, chip), args)


def compiled_for(
  compiled_or_fn: Any, args: Sequence[Any], chip: str | chips.Chip | None
) -> Compiled:
  """The program of `predict`, compiled if it is not.

  Raises:
    ChipError: chip is not the one it was compiled for.
  """
  if not isinstance(compiled_or_fn, Compiled):
    return aot.compile(compiled_or_fn, *args, chip=chip)
  asked = chips.chip(chip) if isinstance(chip, str) else chip
  made_for = chip_of(compiled_or_fn)
  if asked is not None and asked.generation != made_for.generation:
    raise errors.ChipError(
      f"chip is {asked.name}, but the program was compiled for"
      f" {compiled_or_fn.chip}. Leave chip out."
    )
  return compiled_or_fn


def of_compiled(
  compiled: Compiled, args: Sequence[Any], details: Details | None = None
) -> Prediction:
  """Predicts a compiled program; see `predict`.

  Args:
    compiled: the program.
    args: its arguments.
    details: what to keep beside the result. With it a kernel that cannot be
      predicted is left out and not an error.
  """
  start = time.perf_counter()
  device = chip_of(compiled)
  program = hlo.parse(compiled.text("hlo"))
  counts = loops.executions(compiled.text("hlo"))
  leaves = [_leaf(x) for x in jax.tree.leaves(args)]
  predicted, left_out = [], []
  for operation in compiled.operations:
    if operation.name in _AROUND:
      continue
    words = _words(compiled, program, operation, leaves)
    if details is not None:
      details.starts(operation.name)
    try:
      found = _operation(operation, device, words, details)
    except errors.UnsupportedError as error:
      if operation.kernel is not None and details is not None:
        details.refused[operation.name] = str(error)
      elif operation.kernel is not None:
        raise errors.UnsupportedError(
          f"The kernel {operation.kernel!r} cannot be predicted. {error}"
        ) from error
      left_out.append(f"{operation.name}: {error}")
      continue
    predicted.append(_repeated(found, counts, program))
  copies, others = around.of_program(
    program, compiled, predicted, chip=device, counts=counts
  )
  return Prediction(
    chip=compiled.chip,
    operations=(*copies, *predicted),
    left_out=(*left_out, *others),
    predict_seconds=time.perf_counter() - start,
  )


def chip_of(compiled: Compiled) -> chips.Chip:
  """The chip a program was compiled for."""
  try:
    return chips.chip(compiled.chip)
  except errors.ChipError:
    found = chips.chip_of_device_kind(compiled.chip)
    if found is None:
      raise
    return found


def _words(
  compiled: Compiled,
  program: dict[str, hlo.Instruction],
  operation: Operation,
  leaves: Sequence[object],
) -> dict[int, np.ndarray]:
  """What is known of the operands of an operation, as words of memory."""
  found = hlo.operand_words(program, operation.name, leaves)
  given = [k for k in compiled.operands if k.kernel == operation.kernel]
  alike = [o for o in compiled.operations if o.kernel == operation.kernel]
  if len(given) == len(alike) == 1:
    found = hlo.words_of(program, operation.name, given[0].values) | found
  return found


def _repeated(
  found: OperationPrediction,
  counts: Mapping[str, int | None],
  program: dict[str, hlo.Instruction],
) -> OperationPrediction:
  """An operation as often as the loops around it run it."""
  is_known = found.name in counts or found.name not in program
  times = counts.get(found.name, 1)
  if times is not None and is_known:
    return dataclasses.replace(found, times=times)
  text = "it is in a loop or a branch of XLA's; counted once"
  return dataclasses.replace(found, assumed=(*found.assumed, text))


def _leaf(leaf: Any) -> Any:
  """The values of an argument, where there are any."""
  is_there = isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float)
  return np.asarray(jax.numpy.asarray(leaf)) if is_there else leaf


def _operation(
  operation: Operation,
  chip: chips.Chip,
  words: Mapping[int, np.ndarray],
  details: Details | None,
) -> OperationPrediction:
  if "bundles" not in operation.texts:
    what = "SparseCore" if "sparsecore" in operation.texts else "no TensorCore"
    raise errors.UnsupportedError(
      f"It runs on a {what}; cm.predict models TensorCores."
    )
  rate = rates.rates(chip)
  program = bundles.parse(operation.text("bundles"))
  try:
    traces, logs, found = _timed(program, chip, words)
  except errors.UnsupportedError:
    scalars = _unknown_scalars(program, words)
    if operation.kernel is not None or not scalars:
      raise
    traces, logs, found = _timed(program, chip, {**words, **scalars})
    traces = [
      dataclasses.replace(t, assumed=(*t.assumed, _ZEROS)) for t in traces
    ]
  if details is not None:
    details.programs[operation.name] = program
    details.activities[operation.name] = activity.of_operation(
      traces,
      found["central"],
      log=logs["central"],
      busy=units.busy(program, rate),
    )
  return _prediction(operation, program, traces, found, chip)


def _timed(
  program: bundles.Program, chip: chips.Chip, words: Mapping[int, np.ndarray]
) -> tuple[list[Trace], dict[str, log.Log], dict[str, Any]]:
  """What each TensorCore issues, and when in each model of HBM."""
  rate = rates.rates(chip)
  traces = [
    scalar.trace(
      program,
      core=core,
      delay_slots=rate.delay_slots,
      operands=words,
      hbm_unit_bytes=rate.hbm_unit_bytes,
    )
    for core in range(chip.tensor_cores_per_device)
  ]
  logs = {w: log.Log() for w in _WHICH}
  found = {w: dma.timings(traces, rate.hbm(w), logs[w]) for w in _WHICH}
  return traces, logs, found


def _unknown_scalars(
  program: bundles.Program, words: Mapping[int, np.ndarray]
) -> dict[int, np.ndarray]:
  """Zeros for the operands that are single numbers nobody knows."""
  return {
    slot.operands[0]: np.zeros(1, np.uint32)
    for slot in program.slots
    if slot.opcode == "inlined_call_operand.<no memory space>"
    and isinstance(slot.operands[0], int)
    and slot.operands[0] not in words
  }


def _prediction(
  operation: Operation,
  program: bundles.Program,
  traces: Sequence[Trace],
  timings: Mapping[str, Sequence[dma.CoreTiming]],
  chip: chips.Chip,
) -> OperationPrediction:
  rate = rates.rates(chip)
  central = timings["central"]
  read = sum(t.read_bytes for t in central)
  written = sum(t.written_bytes for t in central)
  total = estimates.bounded_by_bytes(
    {w: max(t.cycles for t in timings[w]) for w in _WHICH}, read + written, rate
  )
  hbm = rate.hbm("central")
  moved = {
    "DMA read": read / hbm.bytes_per_cycle / max(1.0, total.central),
    "DMA write": written / hbm.bytes_per_cycle / max(1.0, total.central),
  }
  busy = units.busy(program, rate)
  cores = []
  for i, trace in enumerate(traces):
    executions = trace.executions(len(program.bundles))
    cycles = estimates.of_models({w: timings[w][i].cycles for w in _WHICH})
    whole = max(1.0, cycles.central)
    shares = {u: n / whole for u, n in busy.of(executions).items()}
    shares["waiting"] = central[i].waiting_cycles / whole
    cores.append(
      CorePrediction(
        core=i,
        cycles=cycles,
        issued_cycles=trace.cycles,
        waiting_cycles=central[i].waiting_cycles,
        shares=shares,
        read_bytes=central[i].read_bytes,
        written_bytes=central[i].written_bytes,
      )
    )
  slowest = max(range(len(cores)), key=lambda i: cores[i].cycles.central)
  shares = {**cores[slowest].shares, **moved}
  peak = chip.hbm_bytes_per_second_per_device
  return OperationPrediction(
    name=operation.name,
    kernel=operation.kernel,
    cycles=total,
    microseconds=estimates.microseconds(total, rate),
    floor_microseconds=(read + written) / peak * 1e6,
    limit=_limit(shares),
    shares=shares,
    cores=tuple(cores),
    hottest=_hottest(program, traces[slowest], central[slowest], busy),
    assumed=tuple(dict.fromkeys(a for t in traces for a in t.assumed)),
  )


def _limit(shares: Mapping[str, float]) -> str:
  """What is busy for the largest share of the time.

  A core that mostly waits is bound by HBM if that is busy at least half the
  time, else by the latency of its copies.
  """
  moved = shares.get("DMA read", 0.0) + shares.get("DMA write", 0.0)
  rest = {n: s for n, s in shares.items() if not n.startswith("DMA")}
  name = max(rest, key=lambda n: rest[n])
  if moved >= rest[name] or (name == "waiting" and moved >= 0.5):
    return "DMA"
  return name


def _hottest(
  program: bundles.Program,
  trace: Trace,
  timing: dma.CoreTiming,
  busy: units.Busy,
) -> tuple[HotRange, ...]:
  """The ranges of bundles, issued equally often, that take longest."""
  executions = trace.executions(len(program.bundles))
  edges = [0, *(np.flatnonzero(np.diff(executions)) + 1), len(executions)]
  found = []
  for start, end in zip(edges, edges[1:], strict=False):
    start, end = int(start), int(end)
    times = int(executions[start]) if start < end else 0
    if not times:
      continue
    waited = sum(
      c for b, c in timing.waiting_by_bundle.items() if start <= b < end
    )
    cycles = times * (end - start) + waited
    held = {u: float(a[start:end].sum()) for u, a in busy.by_unit.items()}
    shares = {u: n * times / cycles for u, n in held.items()}
    found.append(
      HotRange(
        start=start,
        end=end,
        executions=times,
        cycles=cycles,
        share=cycles / max(1.0, timing.cycles),
        limit=_limit({**shares, "waiting": waited / cycles}),
        sources=units.sources(program, start, end),
      )
    )
  return tuple(sorted(found, key=lambda h: -h.cycles)[:_MOST_HOT])
