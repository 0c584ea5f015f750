"""Runs a kernel on the vector subcores of a device's SparseCores.

Their scalar instructions are run as those of a TensorCore are; a stream is a
copy. No published time of a SparseCore kernel is known to us: clock and rates
are assumed, and the range is wide for that.
"""

from collections.abc import Sequence
import dataclasses
import re

from coremesh import chips, errors
from coremesh.compiler.compiled import Operation
from coremesh.profile import (
  bundles,
  dma,
  effects,
  estimates,
  rates,
  scalar,
  sparse_assembly,
)
from coremesh.profile.log import Log
from coremesh.profile.timed import Timed
from coremesh.profile.translate import Code

# The code of the kernel itself is copied to the subcores too.
_OWN_CODE = 1
_CORES = re.compile(r'"core_type":"CORE_TYPE_SC".*?"core_ids":\[([^\]]*)\]')


def timed(
  operation: Operation,
  chip: chips.Chip,
  *,
  hlo: str,
  models: Sequence[str] = estimates.MODELS,
) -> Timed:
  """What each vector subcore of a device issues, and when in each model.

  Args:
    operation: one with a stage "sparsecore".
    chip: the slice it is for.
    hlo: the compiled program, which says on which SparseCores it runs.
    models: which of `estimates.MODELS` to time; "central" among them.

  Raises:
    UnsupportedError: it is no kernel of vector subcores, or holds something
      that is not modelled.
  """
  text = operation.text("sparsecore")
  found = [
    function
    for function in sparse_assembly.functions(text, "tec")
    if function.name.startswith("execute")
  ]
  if len(found) != 1:
    raise errors.UnsupportedError(
      f"It runs {len(found)} programs on vector subcores of a SparseCore;"
      " cm.predict models one, and none of scalar subcores."
    )
  code = Code(found[0].program, delay_slots=0)
  traces = tuple(
    scalar.trace_code(code, place)
    for place in _places(_sparse_cores(operation, hlo, chip), chip)
  )
  rate = _rates(chip)
  log = Log()
  timings, before = {}, {}
  for which in models:
    hbm = dataclasses.replace(
      rate.hbm(which), core_bytes_per_cycle=chip.sparse_core_dma_granule_bytes
    )
    kept = log if which == "central" else None
    timings[which] = dma.timings(traces, hbm, kept)
    issued, copies = sparse_assembly.start(text)
    before[which] = issued + (copies + _OWN_CODE) * hbm.latency_cycles
  return Timed(
    program=code.program,
    rates=rate,
    traces=traces,
    timings=timings,
    log=log,
    before_cycles=before,
    assumed=_assumed(code.program, before["central"], rate, chip=chip),
  )


def _rates(chip: chips.Chip) -> rates.Rates:
  """Those of the TensorCore, but for what a vector subcore has room for.

  Its clock is taken to be that of the TensorCore, or down to half of it.
  """
  rate = rates.rates(chip)
  return dataclasses.replace(
    rate,
    clock_hz=dataclasses.replace(rate.clock_hz, slow=rate.clock_hz.central / 2),
    vector_slots=3,
    load_slots=1,
    store_slots=1,
  )


def _assumed(
  program: bundles.Program,
  before_cycles: float,
  rate: rates.Rates,
  *,
  chip: chips.Chip,
) -> tuple[str, ...]:
  microseconds = before_cycles / rate.clock_hz.central * 1e6
  granule = chip.sparse_core_dma_granule_bytes
  found = [
    "a vector subcore is assumed to run at half to all of the TensorCore's"
    f" clock and to copy {granule} bytes a cycle",
    f"{microseconds:.2g} µs are assumed for the scalar subcore to start it:"
    " what it issues, and one copy of code after the other",
  ]
  streams = (s for s in program.slots if s.opcode.startswith("stream."))
  if any(slot.operands[2:] != (1,) for slot in streams):
    found.append("rows chosen by indices are assumed to cost their bytes alone")
  return tuple(found)


def _sparse_cores(
  operation: Operation, hlo: str, chip: chips.Chip
) -> Sequence[int]:
  """On which SparseCores of a device the operation runs."""
  for line in hlo.splitlines():
    if re.match(rf"\s+(?:ROOT )?%?{re.escape(operation.name)} = ", line):
      if match := _CORES.search(line):
        return [int(n) for n in re.findall(r"\d+", match[1])]
  return range(chip.sparse_cores_per_device)


def _places(
  sparse_cores: Sequence[int], chip: chips.Chip
) -> list[effects.Place]:
  count = chip.vector_subcores_per_sparse_core
  return [
    effects.Place(core=group * count + member, group=group, member=member)
    for group in sparse_cores
    for member in range(count)
  ]
