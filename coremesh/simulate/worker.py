"""Workers: the cores and subcores that run a kernel's programs."""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

import numpy as np

from coremesh.simulate import clocks, memory


@dataclasses.dataclass(eq=False, slots=True)
class Site:
  """A place in a kernel: what is done there, and the user's line.

  Attributes:
    what: the operation, in words: "load of 'acc'".
    line: "kernel.py:12 (body)".
    ref: the name of the ref that it looks at, "" if it is something else.
  """

  what: str
  line: str
  ref: str = ""

  def __str__(self) -> str:
    return f"{self.what} at {self.line}"


class Worker:
  """One core (or subcore) of one device, running its program.

  Attributes:
    device: its index in the device mesh.
    device_coords: that index by axis.
    coords: the core's place on its mesh, by axis.
    thread: its number among the threads whose events clocks count.
    clock: what it knows of all threads.
    streams: its DMAs that raise no semaphore when they are done, and that it
      has not waited for.
    blocked_on: the semaphore or meeting it waits for, None if it can run.
    rounds: how often it has come to the end of a loop that loads.
    round_state: what such a loop carried when that was last looked at.
    polled_at: where it last looked at something without waiting for it.
    busy_ps: picoseconds of its own work so far, if a timeline is asked for.
  """

  __slots__ = (
    "blocked_at",
    "blocked_on",
    "busy_ps",
    "clock",
    "coords",
    "device",
    "device_coords",
    "machine",
    "mesh",
    "mesh_index",
    "mxu",
    "need",
    "polled_at",
    "prng",
    "program",
    "read_numbers",
    "round_state",
    "rounds",
    "slots",
    "streams",
    "thread",
    "write_numbers",
  )

  def __init__(self, machine: Any, device: int, mesh_index: int):
    self.machine = machine
    self.device = device
    self.mesh_index = mesh_index
    self.mesh: Any = None
    self.device_coords: Mapping[Any, int] = {}
    self.coords: Mapping[Any, int] = {}
    self.thread = machine.threads.add()
    self.clock: clocks.Clock = np.zeros(0, np.int64)
    self.slots: list[list[int]] = []
    self.streams: list[Any] = []
    self.program: Iterator[None] = iter(())
    self.blocked_on: Any = None
    self.blocked_at: Any = None
    self.need = 0
    self.polled_at: Any = None
    self.busy_ps = 0
    self.rounds = 0
    self.round_state: Any = None
    self.prng: Any = None
    self.mxu: Any = None
    # Of the accesses of this event, by their sites.
    self.read_numbers: dict[Site, int] = {}
    self.write_numbers: dict[Site, int] = {}

  def __str__(self) -> str:
    return memory.describe(
      (self.device, *self.coords.values()), tuple(self.coords)
    )

  @property
  def event(self) -> int:
    return int(self.clock[self.thread])

  def knows(self, other: "Worker", event: int) -> bool:
    """Whether this worker knows that `other` has passed an event."""
    return clocks.reaches(self.clock, other.thread, event)

  def release(self) -> clocks.Clock:
    """What it knows now, to be handed on; what it does next is after that."""
    given = self.clock
    self.clock = given.copy()
    self.advance()
    return given

  def advance(self) -> None:
    """Begins a new event."""
    self.clock[self.thread] += 1
    self.read_numbers.clear()
    self.write_numbers.clear()

  def acquire(self, clock: clocks.Clock) -> None:
    self.clock = clocks.joined(self.clock, clock)

  def slot(self) -> list[int]:
    """A thread for a DMA: [number, last event], free of older DMAs."""
    for slot in self.slots:
      if clocks.reaches(self.clock, slot[0], slot[1]):
        return slot
    slot = [self.machine.threads.add(), 0]
    self.slots.append(slot)
    return slot


class Meeting:
  """A barrier of the subcores of one SparseCore."""

  def __init__(self, size: int, where: str):
    self.size = size
    self.where = where
    self.arrived: list[Worker] = []

  def __str__(self) -> str:
    there = f"{len(self.arrived)} of {self.size}"
    return f"subcore_barrier of {self.where} ({there} are there)"
