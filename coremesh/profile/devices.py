"""Which devices of a program are run to predict it.

All devices run the same program. Where they also do the same but for whom they
send to, and what each sends another sends to it, one of them stands for all:
what it sends comes back to it from its like. Otherwise all are run.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools

import numpy as np

from coremesh import chips, errors
from coremesh.profile import effects, scalar
from coremesh.profile.addresses import Slice
from coremesh.profile.events import Target, Trace
from coremesh.profile.rates import Rates
from coremesh.profile.translate import Code

# All devices are run if they are no more than that, or do little.
MOST_DEVICES = 16
_MOST_EVENTS = 50_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
  """The cores that are run.

  Attributes:
    traces: what each core issues, those of a device together.
    assumed: what was taken for granted about the others.
  """

  traces: tuple[Trace, ...]
  assumed: tuple[str, ...] = ()

  @property
  def sends(self) -> bool:
    """Whether a core sends to another."""
    return any(True for trace in self.traces for _ in trace.targets())

  def first(self, device: int) -> "Cast":
    """The same with the cores of a device before all others."""
    ordered = sorted(self.traces, key=lambda t: t.device != device)
    return dataclasses.replace(self, traces=tuple(ordered))


def cast(
  code: Code,
  chip: chips.Chip,
  rates: Rates,
  *,
  num_devices: int,
  operands: Mapping[int, np.ndarray],
) -> Cast:
  """Runs the scalar slots of a program on as many devices as it takes.

  Args:
    code: the program.
    chip: the slice it is for.
    rates: of the chip.
    num_devices: that the program is for.
    operands: words of operands by their number.

  Raises:
    UnsupportedError: as `scalar.trace`, or a receiver is none of the program.
  """
  run = functools.partial(
    _device, code, chip, rates=rates, operands=dict(operands)
  )
  first = run(0)
  is_alone = not any(True for trace in first for _ in trace.targets())
  if is_alone and not code.identity.device_words:
    return Cast(traces=first)
  table = code.identity.table or tuple(range(num_devices))
  assumed = []
  if not is_alone and not code.identity.table and num_devices > 1:
    assumed.append(effects.NUMBERED)
  place = Slice(chip=chip, table=table)
  which = _sample(num_devices, sum(len(trace.events) for trace in first))

  def of_device(device: int) -> list[Trace]:
    find = functools.cache(functools.partial(_receiver, code, place, device))
    traces = run(device) if device else first
    return [trace.with_targets(find) for trace in traces]

  found = [of_device(device) for device in which]
  ways = {to.way for device in found for t in device for to in t.targets()}
  if "link" in ways and not place.is_known:
    assumed.append(
      f"how the {num_devices} devices lie is not known; each way is assumed to"
      " be one link. Compile for a named slice, chip=..."
    )
  return _chosen(found, num_devices, assumed)


def _sample(num_devices: int, num_events: int) -> Sequence[int]:
  """All devices, or as many as are run, evenly spread."""
  is_little = num_devices * num_events <= _MOST_EVENTS
  if num_devices <= MOST_DEVICES or is_little:
    return range(num_devices)
  step = num_devices / MOST_DEVICES
  return [int(i * step) for i in range(MOST_DEVICES)]


def _device(
  code: Code,
  chip: chips.Chip,
  device: int,
  *,
  rates: Rates,
  operands: Mapping[int, np.ndarray],
) -> tuple[Trace, ...]:
  return tuple(
    scalar.trace_code(
      code,
      effects.Place(core=core, device=device),
      operands=operands,
      hbm_unit_bytes=rates.hbm_unit_bytes,
    )
    for core in range(chip.tensor_cores_per_device)
  )


def _receiver(code: Code, place: Slice, sender: int, target: Target) -> Target:
  """A receiver by the numbers of the program, and its semaphore."""
  flag = target.flag
  if flag < min(code.semaphores, default=0):
    # libtpu has put its address in: it is the kernel's barrier semaphore.
    if code.identity.barrier is None:
      raise errors.UnsupportedError(
        f"A signal goes to semaphore {flag} of a core, and which of the"
        " kernel's that is cannot be told."
      )
    flag = code.bases[code.identity.barrier]
  return place.receiver(target._replace(flag=flag), sender)


def _chosen(
  found: Sequence[Sequence[Trace]], num_devices: int, assumed: list[str]
) -> Cast:
  """One device that stands for all, or all."""
  first = found[0]
  is_all = len(found) == num_devices
  alike = all(
    _is_alike(one, other)
    for device in found[1:]
    for one, other in zip(first, device, strict=True)
  )
  if not alike and is_all:
    return Cast(traces=tuple(t for device in found for t in device))
  if not alike:
    assumed.append(
      f"what a device does depends on its number; all {num_devices} are assumed"
      " to do as device 0 does"
    )
    found = found[:1]
  elif not is_all:
    assumed.append(
      f"{len(found)} of {num_devices} devices do the same; the others are"
      " assumed to"
    )
  receivers = [_columns(found, core) for core in range(len(first))]
  columns = [column for core in receivers for column in core]
  if alike and not all(map(_is_permutation, columns)):
    if is_all:
      return Cast(traces=tuple(t for device in found for t in device))
    assumed.append(
      "several devices send to one; each is assumed to receive as it sends"
    )
  if not all(len({to.hops for to in column}) == 1 for column in columns):
    if is_all:
      return Cast(traces=tuple(t for device in found for t in device))
    assumed.append("each way is assumed as long as the longest of its kind")
  return Cast(
    traces=tuple(
      _folded(trace, core) for trace, core in zip(first, receivers, strict=True)
    ),
    assumed=tuple(assumed),
  )


def _columns(
  found: Sequence[Sequence[Trace]], core: int
) -> list[tuple[Target, ...]]:
  """The receivers of each event of a core, one for each device."""
  return list(zip(*(device[core].targets() for device in found), strict=True))


def _is_permutation(column: Sequence[Target]) -> bool:
  return len({to.device for to in column}) == len(column)


def _is_alike(one: Trace, other: Trace) -> bool:
  """Whether two devices do the same, but for whom they send to."""

  def without(target: Target) -> Target:
    return target._replace(device=0, way="link", hops=0)

  a, b = one.with_targets(without), other.with_targets(without)
  return (a.cycles, a.events, a.assumed) == (b.cycles, b.events, b.assumed)


def _folded(trace: Trace, columns: Iterable[Sequence[Target]]) -> Trace:
  """A device that receives what it sends, over the longest of the ways."""
  ways = iter(
    [
      max(column, key=lambda to: to.hops)._replace(
        device=trace.device, route=column[0].device
      )
      for column in columns
    ]
  )
  return trace.with_targets(lambda _: next(ways))
