"""Runs an operation on the TensorCores of the devices it takes."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools

import numpy as np

from coremesh import chips, errors
from coremesh.compiler.compiled import Operation
from coremesh.profile import (
  bundles,
  devices,
  dma,
  estimates,
  interconnect,
  produced,
  rates,
)
from coremesh.profile.core import CoreTiming
from coremesh.profile.log import Log
from coremesh.profile.servers import Links
from coremesh.profile.timed import Timed
from coremesh.profile.translate import Code

_ZEROS = "its operands that are single numbers are not known; assumed 0"


def timed(
  operation: Operation,
  chip: chips.Chip,
  words: Mapping[int, np.ndarray],
  *,
  num_devices: int,
  models: Sequence[str] = estimates.MODELS,
) -> Timed:
  """What each TensorCore of a device issues, and when in each model.

  Args:
    operation: one with a stage "bundles".
    chip: the slice it is for.
    words: of its operands, by their number.
    num_devices: that the program is for.
    models: which of `estimates.MODELS` to time; "central" among them.

  Raises:
    UnsupportedError: it holds something that is not modelled, or cores wait
      for what nobody sends.
  """
  rate = rates.rates(chip)
  code = _code(operation.text("bundles"), rate.delay_slots, num_devices)
  try:
    return _run(code, chip, words, models)
  except errors.UnsupportedError:
    scalars = _unknown_scalars(code.program, words)
    if operation.kernel is not None or not scalars:
      raise
  words = {**words, **scalars}
  found = _run(code, chip, words, models)
  return dataclasses.replace(found, assumed=(*found.assumed, _ZEROS))


# Of a program that is checked and then timed.
@functools.lru_cache(maxsize=8)
def _code(text: str, delay_slots: int, num_devices: int) -> Code:
  return Code(
    bundles.parse(text), delay_slots=delay_slots, num_devices=num_devices
  )


def _run(
  code: Code,
  chip: chips.Chip,
  words: Mapping[int, np.ndarray],
  models: Sequence[str],
) -> Timed:
  rate, program = rates.rates(chip), code.program
  cast = devices.cast(
    code, chip, rate, num_devices=code.num_devices, operands=words
  )

  def links(which: str) -> Links | None:
    return interconnect.links(chip, rate, which) if cast.sends else None

  def timings(which: str, log: Log | None = None) -> tuple[CoreTiming, ...]:
    hbm = rate.hbm(which)
    try:
      return dma.timings(cast.traces, hbm, log, links=links(which))
    except errors.UnsupportedError as error:
      if not cast.assumed:
        raise
      text = f"{error} Assumed: {'; '.join(cast.assumed)}."
      raise errors.UnsupportedError(text) from error

  assumed = cast.assumed + ((interconnect.ASSUMED,) if cast.sends else ())
  is_alike = len({t.device for t in cast.traces}) == 1
  if not is_alike:
    cast = cast.first(_slowest(cast, timings("central")))
  log = Log()
  found = {
    which: timings(which, log if which == "central" else None)
    for which in models
  }
  shown = [t for t in cast.traces if t.device == cast.traces[0].device]
  return Timed(
    program=program,
    rates=rate,
    traces=tuple(shown),
    timings={which: all_[: len(shown)] for which, all_ in found.items()},
    log=log,
    links=links("central"),
    results=produced.words(shown, len(program.bundles)) if is_alike else {},
    assumed=assumed,
  )


def _slowest(cast: devices.Cast, found: tuple[CoreTiming, ...]) -> int:
  """The device whose last core ends last."""
  pairs = zip(cast.traces, found, strict=True)
  return max(pairs, key=lambda pair: pair[1].cycles)[0].device


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
