"""What copies go through: the HBM of each device and the links between them.

Each serves copies in the order in which they are started: a copy of B bytes
holds it for B / bandwidth, and is done a latency after that. Strides, banks and
refresh are not modelled, nor that copies which cross a chip share its links.
"""

from collections.abc import Iterable
import dataclasses
import math

from coremesh.profile.events import Target

# Times are whole numbers of these, so that no rounding builds up.
TICKS = 1024  # a cycle


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hbm:
  """The HBM of one device, as its cores see it.

  Attributes:
    bytes_per_cycle: reads and writes of all cores together.
    latency_cycles: from the end of a transfer to when its semaphore says so.
    core_bytes_per_cycle: of one core; None if it can take all of them.
    free_cores: cores that can, by their number, where others cannot.
  """

  bytes_per_cycle: float
  latency_cycles: float
  core_bytes_per_cycle: float | None = None
  free_cores: frozenset[int] = frozenset()

  def __post_init__(self):
    rates = (self.bytes_per_cycle, self.core_bytes_per_cycle or 1)
    if min(rates) <= 0 or self.latency_cycles < 0:
      raise ValueError(
        "bytes_per_cycle must be positive and latency_cycles not negative; got"
        f" {self}."
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Links:
  """What lies between the cores of a slice.

  Attributes:
    bytes_per_cycle: one way over one link of ICI.
    die_bytes_per_cycle: one way between two devices of one chip.
    hop_cycles: what a link adds to the latency of a copy, and takes a signal.
    core_cycles: from a core to another of the same chip.
  """

  bytes_per_cycle: float
  die_bytes_per_cycle: float
  hop_cycles: float
  core_cycles: float

  def __post_init__(self):
    rates = (self.bytes_per_cycle, self.die_bytes_per_cycle)
    if min(rates) <= 0 or min(self.hop_cycles, self.core_cycles) < 0:
      raise ValueError(
        "bytes a cycle must be positive and cycles of latency not negative;"
        f" got {self}."
      )


class Server:
  """Serves one copy after the other. Times are ticks.

  Attributes:
    free: when all copies so far are through.
  """

  def __init__(self, bytes_per_cycle: float):
    self._ticks_per_byte = TICKS / bytes_per_cycle
    self.free = 0

  def transfer(self, num_bytes: int) -> int:
    """How long a copy of so many bytes takes alone."""
    return math.ceil(num_bytes * self._ticks_per_byte)

  def serve(self, start: int, num_bytes: int) -> int:
    """When a copy that is started at a time is through."""
    self.free = max(start, self.free) + self.transfer(num_bytes)
    return self.free


class Servers:
  """The servers of all devices that are timed together.

  Attributes:
    all: each of them, in an order that does not change.
  """

  def __init__(
    self,
    hbm: Hbm,
    links: Links | None,
    cores: Iterable[tuple[int, int]],
    targets: Iterable[tuple[int, Target]],
  ):
    """Makes the servers.

    Args:
      hbm: of each device.
      links: between them; None if no targets need any.
      cores: the device and number of each core.
      targets: the device that sends and the receiver, of all copies.
    """
    self._links = links
    self._latency = round(hbm.latency_cycles * TICKS)
    cores = list(cores)
    self._hbm = {
      device: Server(hbm.bytes_per_cycle)
      for device in dict.fromkeys(device for device, _ in cores)
    }
    own = hbm.core_bytes_per_cycle
    limited = [core for core in cores if core[1] not in hbm.free_cores]
    self._own = {core: Server(own) for core in limited} if own else {}
    self._ways: dict[tuple[int, Target], Server] = {}
    made: dict[tuple[int, int, int, str], Server] = {}
    for device, to in targets:
      if links is None:
        raise ValueError(f"links must be given for a copy or signal to {to}.")
      way = (device, to.device, to.route, to.way)
      rate = {
        "core": hbm.bytes_per_cycle,
        "die": links.die_bytes_per_cycle,
        "link": links.bytes_per_cycle,
      }[to.way]
      if way not in made:
        made[way] = Server(rate)
      self._ways[device, to] = made[way]
    servers = (self._hbm, self._own, made)
    self.all = tuple(server for of in servers for server in of.values())

  def copy(self, device: int, core: int, start: int, num_bytes: int) -> int:
    """When a copy from or to HBM is done."""
    through = self._hbm[device].serve(start, num_bytes)
    if own := self._own.get((device, core)):
      through = max(through, own.serve(start, num_bytes))
    return through + self._latency

  def local(self, device: int, core: int, start: int, num_bytes: int) -> int:
    """When a copy inside a core is done: no slower than one over HBM."""
    if own := self._own.get((device, core)):
      return own.serve(start, num_bytes)
    return start + self._hbm[device].transfer(num_bytes)

  def send(
    self, device: int, to: Target, start: int, num_bytes: int
  ) -> tuple[int, int]:
    """When a copy to another core has left, and when it has arrived."""
    left = self._ways[device, to].serve(start, num_bytes) + self._latency
    if to.source == "hbm":
      read = self._hbm[device].serve(start, num_bytes) + self._latency
      left = max(left, read)
    arrived = left + self.way(to)
    if to.place == "hbm":
      written = self._hbm[to.device].serve(start, num_bytes) + self._latency
      arrived = max(arrived, written + self.way(to))
    return left, arrived

  def way(self, to: Target) -> int:
    """How long a signal is on its way."""
    assert self._links is not None
    cycles = self._links.core_cycles
    if to.way == "link":
      cycles = to.hops * self._links.hop_cycles
    return round(cycles * TICKS)
