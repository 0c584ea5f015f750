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
  hlo,
  loops,
  overlap,
  rates,
  sparse_cores,
  summary,
  tensor_cores,
  units,
)
from coremesh.profile.details import Details
from coremesh.profile.prediction import OperationPrediction, Prediction

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

  Cores that signal or send to each other, on one device or several, are run
  together; kernels of subcores from the SparseCore's own code. What these rest
  on is not calibrated, and is named in the result.

  Not modelled: the time between operations, strides of copies.

  Args:
    compiled_or_fn: a `cm.Compiled`, or a function as for `cm.compile`.
    *args: the arguments of the program, arrays or `jax.ShapeDtypeStruct`.
      Integers that steer a kernel (scalar prefetch, group sizes) are read from
      arrays; they are not known from a ShapeDtypeStruct.
    chip: as for `cm.compile`.

  Returns:
    Cycles and time for each operation and core, what limits them and where.

  Raises:
    UnsupportedError: a kernel holds something that is not modelled, or its
      cores wait for what nobody sends.
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
  made: dict[str, dict[int, np.ndarray]] = {}
  for operation in _in_order(compiled, program):
    if operation.name in _AROUND:
      continue
    words = _words(compiled, program, operation, leaves, made)
    if details is not None:
      details.starts(operation.name)
    try:
      found, results = _operation(compiled, operation, words, details)
    except errors.UnsupportedError as error:
      if operation.kernel is not None and details is not None:
        details.refused[operation.name] = str(error)
      elif operation.kernel is not None:
        raise errors.UnsupportedError(
          f"The kernel {operation.kernel!r} cannot be predicted. {error}"
        ) from error
      left_out.append(f"{operation.name}: {error}")
      continue
    made[operation.name] = _results(program, operation.name, results)
    predicted.append(_repeated(found, counts, program))
  copies, others = around.of_program(
    program, compiled, predicted, chip=device, counts=counts
  )
  operations = (*copies, *predicted)
  return Prediction(
    chip=compiled.chip,
    operations=operations,
    left_out=(*left_out, *others),
    overlap_microseconds=overlap.microseconds(
      side_by_side(compiled, [o.name for o in operations], program),
      operations,
      rates.rates(device),
    ),
    predict_seconds=time.perf_counter() - start,
  )


def side_by_side(
  compiled: Compiled,
  predicted: Sequence[str],
  program: Mapping[str, hlo.Instruction],
) -> list[overlap.Beside]:
  """What SparseCores and TensorCores of a program do at the same time.

  Args:
    compiled: the program.
    predicted: the operations of which the time is known.
    program: its HLO.
  """
  sparse = {o.name for o in compiled.operations if "bundles" not in o.texts}
  return overlap.groups(
    program,
    [name for name in predicted if name in sparse],
    [name for name in predicted if name not in sparse],
  )


def _in_order(
  compiled: Compiled, program: dict[str, hlo.Instruction]
) -> list[Operation]:
  """The operations as they are run: what one makes may steer a later one."""
  places = {name: i for i, name in enumerate(program)}
  return sorted(compiled.operations, key=lambda o: places.get(o.name, -1))


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
  made: Mapping[str, Mapping[int, np.ndarray]],
) -> dict[int, np.ndarray]:
  """What is known of the operands of an operation, as words of memory."""
  found = hlo.operand_words(program, operation.name, leaves, made)
  given = [k for k in compiled.operands if k.kernel == operation.kernel]
  alike = [o for o in compiled.operations if o.kernel == operation.kernel]
  if len(given) == len(alike) == 1:
    found = hlo.words_of(program, operation.name, given[0].values) | found
  return found


def _results(
  program: dict[str, hlo.Instruction],
  name: str,
  words: Mapping[int, np.ndarray],
) -> dict[int, np.ndarray]:
  """What is known of results, which are operands after all others."""
  if name not in program:
    return {}
  count = len(program[name].operands)
  return {i - count: found for i, found in words.items() if i >= count}


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
  compiled: Compiled,
  operation: Operation,
  words: Mapping[int, np.ndarray],
  details: Details | None,
) -> tuple[OperationPrediction, dict[int, np.ndarray]]:
  """What is predicted, and the words it is known to leave in operands."""
  chip, count = chip_of(compiled), compiled.num_devices
  if "bundles" in operation.texts:
    found = tensor_cores.timed(operation, chip, words, num_devices=count)
  else:
    hlo_text = compiled.text("hlo")
    found = sparse_cores.timed(operation, chip, hlo=hlo_text, num_devices=count)
  if details is not None:
    details.programs[operation.name] = found.program
    details.activities[operation.name] = activity.of_operation(
      found.traces,
      found.timings["central"],
      log=found.log,
      busy=units.busy(found.program, found.rates),
    )
  return summary.of_operation(operation, found, chip), dict(found.results)
