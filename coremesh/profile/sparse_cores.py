"""Runs a kernel on the subcores of a device's SparseCores.

The scalar subcore of each runs its own program, which may be all of the kernel
or no more than what starts the vector subcores. Scalar instructions are run as
those of a TensorCore are; a stream is a copy. No published time of a SparseCore
kernel is known to us: clock and rates are assumed, and the range is wide for
that.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re

from coremesh import chips, errors
from coremesh.compiler.compiled import Operation
from coremesh.profile import (
  addresses,
  bundles,
  dma,
  effects,
  estimates,
  interconnect,
  rates,
  scalar,
  sparse_addresses,
  sparse_assembly,
)
from coremesh.profile.events import Target, Trace
from coremesh.profile.log import Log
from coremesh.profile.servers import Links
from coremesh.profile.sparse_addresses import SCALAR
from coremesh.profile.sparse_effects import SparseEffects
from coremesh.profile.timed import Timed
from coremesh.profile.translate import Code

_CORES = re.compile(r'"core_type":"CORE_TYPE_SC".*?"core_ids":\[([^\]]*)\]')


def timed(
  operation: Operation,
  chip: chips.Chip,
  *,
  hlo: str,
  num_devices: int = 1,
  models: Sequence[str] = estimates.MODELS,
) -> Timed:
  """What each subcore of a device issues, and when in each model.

  Args:
    operation: one with a stage "sparsecore".
    chip: the slice it is for.
    hlo: the compiled program, which says on which SparseCores it runs.
    num_devices: that the program is for.
    models: which of `estimates.MODELS` to time; "central" among them.

  Raises:
    UnsupportedError: it holds something that is not modelled, or subcores wait
      for what nobody sends.
  """
  text = operation.text("sparsecore")
  program, vector, own = _program(text)
  groups = _sparse_cores(operation, hlo, chip)
  run = functools.partial(_device, groups, vector, own, chip)
  traces = run(0)
  if any(True for trace in traces for _ in trace.targets()):
    _check_alike(run, num_devices)
  place = addresses.Slice(chip=chip, table=range(num_devices))
  find = functools.cache(functools.partial(_receiver, place))
  traces = [trace.with_targets(find) for trace in traces]
  rate, log = _rates(chip), Log()
  sends = any(True for trace in traces for _ in trace.targets())
  links = functools.partial(_links, sends, chip, rate)
  timings = {
    which: dma.timings(
      traces,
      hbm(chip, rate.hbm(which)),
      log if which == "central" else None,
      links=links(which),
    )
    for which in models
  }
  return Timed(
    program=program,
    rates=rate,
    traces=tuple(traces),
    timings=timings,
    log=log,
    num_starters=len(groups) if vector else 0,
    links=links("central") if _sends_far(traces) else None,
    assumed=_assumed(program, traces, chip=chip, num_devices=num_devices),
  )


# Of a program that is checked and then timed.
@functools.lru_cache(maxsize=8)
def _program(text: str) -> tuple[bundles.Program, Code | None, Code]:
  """All bundles: those of the vector subcores, then of the scalar subcore."""
  found = [
    function.program
    for function in sparse_assembly.functions(text)
    if function.name.startswith("execute")
  ]
  if len(found) > 1:
    raise errors.UnsupportedError(
      f"It runs {len(found)} programs on the vector subcores of a SparseCore;"
      " cm.predict models one."
    )
  own = sparse_assembly.scalar_function(text).program
  first = len(found[0].bundles) if found else 0
  moved = [_moved(bundle, first) for bundle in own.bundles]
  parts = (*(found[0].bundles if found else ()), *moved)
  program = bundles.Program(bundles=parts)
  make = functools.partial(Code, program, delay_slots=0)
  vector = make(part=(0, first)) if found else None
  return program, vector, make(part=(first, len(parts)))


def _moved(bundle: bundles.Bundle, by: int) -> bundles.Bundle:
  slots = tuple(
    slot
    if slot.target is None
    else dataclasses.replace(slot, target=slot.target + by)
    for slot in bundle.slots
  )
  return dataclasses.replace(bundle, index=bundle.index + by, slots=slots)


def _device(
  groups: Sequence[int],
  vector: Code | None,
  own: Code,
  chip: chips.Chip,
  device: int,
) -> list[Trace]:
  """What the subcores of a device issue, by their numbers."""
  found = []
  for group in groups:
    found += _group(group, vector, own, chip=chip, device=device)
  return sorted(found, key=lambda trace: trace.core)


def _check_alike(run: Callable[[int], list[Trace]], num_devices: int) -> None:
  """Refuses devices that do not all do the same, in some of them."""

  def kinds(device: int) -> list[list[tuple[int, str]]]:
    return [
      [(e.cycle, e.kind) for e in trace.each_event()] for trace in run(device)
    ]

  first = kinds(0)
  for device in {num_devices // 2, num_devices - 1} - {0}:
    if kinds(device) != first:
      raise errors.UnsupportedError(
        "What its subcores do depends on the number of their device, as where"
        " one of them collects what others signal: cm.predict models those of"
        " one device, for which all must do the same."
      )


def _group(
  group: int, vector: Code | None, own: Code, *, chip: chips.Chip, device: int
) -> list[Trace]:
  """What the subcores of a SparseCore issue."""

  def begun(code: Code, member: int) -> tuple[SparseEffects, effects.Place]:
    core = sparse_addresses.core_number(group, member, chip)
    # Each runs as if on the first device, but for the number it reads.
    place = effects.Place(core=core, group=group, member=member)
    return SparseEffects(code, place, number=device), place

  done, place = begun(own, SCALAR)
  done.begin_scalar(chip)
  found = scalar.run(own, done, place)
  # Barriers are of vector subcores.
  traces = [dataclasses.replace(found, group=-1 - group)]
  if vector is None:
    return traces
  if done.arguments is None:
    raise errors.UnsupportedError(
      "Its scalar subcore does not start the vector subcores in a form that is"
      " known."
    )
  for member in range(chip.vector_subcores_per_sparse_core):
    here, place = begun(vector, member)
    here.begin_vector(done.arguments)
    traces.append(scalar.run(vector, here, place))
  return traces


def _receiver(place: addresses.Slice, target: Target) -> Target:
  """Who stands for a receiver: its like on the first device."""
  found = sparse_addresses.receiver(target, place, 0)
  return found._replace(device=0, route=found.device)


def _links(
  sends: bool, chip: chips.Chip, rate: rates.Rates, which: str
) -> Links | None:
  return interconnect.links(chip, rate, which) if sends else None


def _sends_far(traces: Sequence[Trace]) -> bool:
  return any(to.way != "core" for trace in traces for to in trace.targets())


def hbm(chip: chips.Chip, shared: dma.Hbm) -> dma.Hbm:
  """HBM as subcores see it: each vector subcore can take only so much.

  Args:
    chip: whose SparseCores.
    shared: the HBM of a device.
  """
  scalar_subcores = (
    sparse_addresses.core_number(group, SCALAR, chip)
    for group in range(chip.sparse_cores_per_device)
  )
  return dataclasses.replace(
    shared,
    core_bytes_per_cycle=chip.sparse_core_dma_granule_bytes,
    free_cores=frozenset(scalar_subcores),
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
  traces: Sequence[Trace],
  *,
  chip: chips.Chip,
  num_devices: int,
) -> tuple[str, ...]:
  granule = chip.sparse_core_dma_granule_bytes
  found = [
    "a subcore is assumed to run at half to all of the TensorCore's clock, and"
    f" to copy {granule} bytes a cycle, or all that HBM gives if it is a scalar"
    " subcore",
  ]
  opcodes = {slot.opcode for slot in program.slots}
  if "task.clear_ibuf" in opcodes:
    found.append(
      "two copies of code, of 64 bytes a bundle, are assumed for the scalar"
      " subcore to start the others"
    )
  streams = (s for s in program.slots if s.opcode.startswith("stream."))
  if any(slot.operands[2:] != (1,) for slot in streams):
    found.append("rows chosen by indices are assumed to cost their bytes alone")
  if "fetch" in opcodes:
    found.append("words of the scalar subcore are assumed to be read at once")
  if _sends_far(traces):
    found.append(interconnect.ASSUMED)
  if _sends_far(traces) and num_devices > 1:
    found.append(
      f"all {num_devices} devices are assumed to do as the first does, and each"
      " to receive as it sends"
    )
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
