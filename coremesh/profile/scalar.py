"""Runs the scalar slots of machine code: what is issued, when, how often.

Time here is that of bundles alone; waiting for DMAs comes later, because what
is issued does not depend on it.
"""

from collections.abc import Mapping

import numpy as np

from coremesh.profile import translate
from coremesh.profile.bundles import Program
from coremesh.profile.effects import Effects, Place
from coremesh.profile.events import Run, Trace
from coremesh.profile.machine import Machine
from coremesh.profile.skipping import Skipper


def trace(
  program: Program,
  *,
  core: int,
  delay_slots: int,
  operands: Mapping[int, np.ndarray] | None = None,
  hbm_unit_bytes: int = 32,
) -> Trace:
  """Runs the scalar slots of a program on one core of one device.

  Args:
    program: the machine code.
    core: its number, which the program may read.
    delay_slots: bundles after a branch that are issued before it is taken.
    operands: words of integer operands by their number, for those the program
      may read into SMEM.
    hbm_unit_bytes: what an HBM pointer counts.

  Raises:
    UnsupportedError: the program holds something that is not modelled, does
      not end, or is not as this reader takes it.
  """
  code = translate.Code(program, delay_slots=delay_slots)
  return trace_code(
    code, Place(core=core), operands=operands, hbm_unit_bytes=hbm_unit_bytes
  )


def trace_code(
  code: translate.Code,
  place: Place,
  *,
  operands: Mapping[int, np.ndarray] | None = None,
  hbm_unit_bytes: int = 32,
) -> Trace:
  """Runs a program where it shares its translation with other cores.

  Args:
    code: the program.
    place: where it runs.
    operands: as for `trace`.
    hbm_unit_bytes: what an HBM pointer counts.

  Raises:
    UnsupportedError: as `trace`.
  """
  return run(code, Effects(code, place, operands or {}, hbm_unit_bytes), place)


def run(code: translate.Code, done: Effects, place: Place) -> Trace:
  """Runs a program to its end.

  Args:
    code: the program.
    done: what it has done before it starts: nothing, or the least it needs.
    place: where it runs.

  Raises:
    UnsupportedError: as `trace`.
  """
  machine = Machine(code, done)
  skipper = Skipper(machine)
  while not machine.is_over:
    machine.advance()
    if not machine.is_over:
      skipper.try_here()
  return Trace(
    core=place.core,
    cycles=machine.cycle,
    runs=tuple(
      Run(start=start, end=start + entry[1], count=entry[5])
      for start, entry in sorted(machine.table.items())
    ),
    events=tuple(done.events),
    assumed=tuple(done.assumed),
    skipped=skipper.cycles,
    path=tuple(machine.path),
    device=place.device,
    group=place.group,
    lines=done.lines,
    sends=done.sends,
    results=tuple(done.results),
  )
