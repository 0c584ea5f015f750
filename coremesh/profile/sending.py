"""What an operation sends to other cores and devices, and how fast it could."""

from collections import Counter
from collections.abc import Iterable, Iterator
import dataclasses

from coremesh import chips
from coremesh.profile import interconnect
from coremesh.profile.events import Event, Repeat, Trace, Way
from coremesh.profile.rates import Rates

CORE_TO_CORE = "core to core"
# In the order in which they are shown.
_NAMES: dict[Way, str] = {
  "link": "ICI",
  "die": "die to die",
  "core": CORE_TO_CORE,
}
WAYS = tuple(_NAMES.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sending:
  """What one device sends one kind of way.

  Attributes:
    way: "ICI", "die to die" for the other device of a chip, or "core to core"
      for the other core of a device.
    sent_bytes: by all cores of the device, to all receivers.
    busiest_bytes: of them, those for the receiver that gets most. As in the
      prediction, each device is reached over a link of its own: that the ways
      to several share a link, or carry what others send, would take longer.
    assumed_bytes_per_second: to one receiver, one way; the central value of
      the prediction, see `interconnect.bytes_per_second`.
  """

  way: str
  sent_bytes: int
  busiest_bytes: int
  assumed_bytes_per_second: float

  @property
  def floor_seconds(self) -> float:
    """What the busiest receiver's bytes take, latency left out."""
    return self.busiest_bytes / self.assumed_bytes_per_second


def of_traces(
  traces: Iterable[Trace], *, chip: chips.Chip, rates: Rates
) -> tuple[Sending, ...]:
  """What the cores of one device send; () if nothing.

  Args:
    traces: of each core, receivers by the numbers of the program.
    chip: their slice.
    rates: of the chip.

  Raises:
    UnsupportedError: the rate of a way is not known for the chip.
  """
  amounts: dict[Way, Counter[tuple[int, int]]]
  amounts = {way: Counter() for way in _NAMES}
  for trace in traces:
    for event, times in _sends(trace):
      if event.to is not None:
        num_bytes = event.amount * event.unit_bytes * times
        receiver = (event.to.device, event.to.route)
        amounts[event.to.way][receiver] += num_bytes
  return tuple(
    Sending(
      way=_NAMES[way],
      sent_bytes=by_receiver.total(),
      busiest_bytes=max(by_receiver.values()),
      assumed_bytes_per_second=interconnect.bytes_per_second(
        way, chip=chip, rates=rates
      ),
    )
    for way, by_receiver in amounts.items()
    if by_receiver.total()
  )


def _sends(trace: Trace) -> Iterator[tuple[Event, int]]:
  """Each copy to another core, and how often."""
  for found in trace.events if trace.sends else ():
    is_repeat = isinstance(found, Repeat)
    inner, times = (found.events, found.times) if is_repeat else ((found,), 1)
    yield from ((event, times) for event in inner if event.kind == "send")
