"""What each worker of a kernel did when: a model of it, not a measurement.

A track for each worker says when it computes, when it waits and for what, and
which of its copies are in flight. This is data only: `report`, `picture` and
`trace_events` show it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from coremesh.simulate import cores, intervals, rates, recorder, replay


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Track:
  """One worker.

  Attributes:
    index: which of the workers of its run; causes and copies name it by that.
    device: its index in the device mesh.
    kind: "TensorCore", "vector subcore" or "scalar subcore".
    coords: its place on its mesh of cores, by axis.
    intervals: what it does, one after another.
    copies: what it has in flight, which may overlap.
  """

  index: int
  device: int
  kind: str
  coords: tuple[tuple[Any, int], ...]
  intervals: tuple[intervals.Interval, ...]
  copies: tuple[intervals.Copy, ...]

  @property
  def place(self) -> tuple[Any, ...]:
    """What tells it from other workers."""
    return (self.device, self.kind, self.coords)

  @property
  def name(self) -> str:
    """As in findings: "device 0, core 1"."""
    parts = [f"device {self.device}", *(f"{a} {i}" for a, i in self.coords)]
    return ", ".join(parts)

  def waits_for_itself(self, interval: intervals.Interval) -> bool:
    """Whether a wait was ended by what the worker itself had started."""
    causes = interval.causes
    return bool(causes) and all(c.worker == self.index for c in causes)

  def compute_ps(self) -> int:
    """How long it works, issuing signals and copies included."""
    return _length(i for i in self.intervals if i.kind != "wait")

  def waiting_ps(self) -> int:
    """How long it waits."""
    return _length(i for i in self.intervals if i.kind == "wait")

  def copying_ps(self) -> int:
    """How long at least one of its copies is in flight."""
    total = end = 0
    for copy in sorted(self.copies, key=lambda c: (c.start_ps, c.end_ps)):
      total += max(0, copy.end_ps - max(end, copy.start_ps))
      end = max(end, copy.end_ps)
    return total


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
  """How long a worker waited for one thing, in all.

  Attributes:
    worker: its name.
    what: what it does: "wait for 'ready' at kernel.py:12 (body)".
    on: the semaphore or barrier, with whose it is.
    by: the name of the worker who ended it, "nobody" if it waits for ever.
    by_what: what that worker did, with its line.
    seconds: modelled.
    count: how often.
  """

  worker: str
  what: str
  on: str
  by: str
  by_what: str
  seconds: float
  count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTimeline:
  """One run of one kernel in model time, which starts at 0.

  Attributes:
    kernel: its name.
    tracks: one for each worker.
    end_ps: when the last worker and the last copy are done, in picoseconds.
    chip_rates: what the times are made from.
  """

  kernel: str
  tracks: tuple[Track, ...]
  end_ps: int
  chip_rates: rates.Rates

  @property
  def seconds(self) -> float:
    """How long the kernel takes, modelled."""
    return self.end_ps / rates.PS_PER_SECOND

  @property
  def devices(self) -> tuple[int, ...]:
    """The devices that ran it together."""
    return tuple(sorted({track.device for track in self.tracks}))

  def shares(self, track: Track) -> Mapping[str, float]:
    """Parts of the kernel's time that a worker computes, waits, and copies."""
    end = self.end_ps or 1
    return {
      "compute": track.compute_ps() / end,
      "waiting": track.waiting_ps() / end,
      "copies in flight": track.copying_ps() / end,
    }

  @functools.cached_property
  def waits(self) -> tuple[Waiting, ...]:
    """Who waited on what and on whom, the longest first."""
    total: Counter[tuple[str, ...]] = Counter()
    count: Counter[tuple[str, ...]] = Counter()
    for track in self.tracks:
      for interval in track.intervals:
        if interval.kind == "wait" and interval.end_ps > interval.start_ps:
          who = self.who_ended(interval)
          key = (track.name, interval.what, interval.on, *who)
          total[key] += interval.end_ps - interval.start_ps
          count[key] += 1
    found = sorted(total, key=lambda key: (-total[key], key))
    return tuple(
      Waiting(
        worker=key[0],
        what=key[1],
        on=key[2],
        by=key[3],
        by_what=key[4],
        seconds=total[key] / rates.PS_PER_SECOND,
        count=count[key],
      )
      for key in found
    )

  def who_ended(self, interval: intervals.Interval) -> tuple[str, str]:
    """Who ended a wait, and how, with the line."""
    if not interval.causes:
      return "nobody", ""
    last = max(interval.causes, key=lambda c: c.arrives_ps)
    return self.tracks[last.worker].name, last.what


def model(
  kernel: str,
  recorded: recorder.Recorder,
  workers: Sequence[Any],
  chip_rates: rates.Rates,
) -> KernelTimeline:
  """The timeline of a run, from what its workers noted."""
  recorded.finish(workers)
  result = replay.Replay(recorded, list(workers), chip_rates)
  copies: list[list[intervals.Copy]] = [[] for _ in workers]
  for copy in sorted(result.copies, key=lambda c: c.start_ps):
    copies[copy.worker].append(copy)
  return KernelTimeline(
    kernel=kernel,
    tracks=tuple(
      Track(
        index=i,
        device=worker.device,
        kind=cores.NAMES[cores.kind_of(worker.mesh)],
        coords=tuple(worker.coords.items()),
        intervals=tuple(result.intervals[i]),
        copies=tuple(copies[i]),
      )
      for i, worker in enumerate(workers)
    ),
    end_ps=result.end_ps,
    chip_rates=chip_rates,
  )


# Kernels, each with the picosecond at which it starts.
type Runs = tuple[tuple[int, KernelTimeline], ...]


def in_sequence(runs: Iterable[KernelTimeline]) -> Runs:
  """Kernels one after another on each device, and side by side on several."""
  free: Counter[int] = Counter()
  placed = []
  for run in runs:
    start = max((free[d] for d in run.devices), default=0)
    placed.append((start, run))
    for device in run.devices:
      free[device] = start + run.end_ps
  placed.sort(key=lambda item: (item[0], item[1].devices))
  return tuple(placed)


def seconds(runs: Runs) -> float:
  """From the start of the first kernel to the end of the last, modelled."""
  ends = [start + run.end_ps for start, run in runs]
  return max(ends, default=0) / rates.PS_PER_SECOND


def assumptions(runs: Runs) -> tuple[str, ...]:
  """What the model takes for granted."""
  texts = [t for _, run in runs for t in run.chip_rates.assumptions()]
  return tuple(dict.fromkeys(texts))


def _length(found: Iterable[intervals.Interval]) -> int:
  return sum(i.end_ps - i.start_ps for i in found)
