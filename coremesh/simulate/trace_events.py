"""A timeline as trace events, the JSON that Perfetto and Chrome read."""

from collections.abc import Iterator
import itertools
import pathlib
from typing import Any

from coremesh import perfetto
from coremesh.simulate import intervals, kernel_timeline

_PS_PER_US = 1_000_000


def save(runs: kernel_timeline.Runs, path: pathlib.Path) -> pathlib.Path:
  """Writes the trace of a timeline."""
  return perfetto.save(as_dict(runs), path)


def as_dict(runs: kernel_timeline.Runs) -> dict[str, Any]:
  """The trace of a timeline."""
  threads = _threads(runs)
  events = list(_names(runs, threads))
  ids = itertools.count(1)
  for start, run in runs:
    events += _Run(start, run, threads, ids).events()
  return perfetto.document(
    events,
    {
      "time": "modelled, not measured",
      "assumptions": list(kernel_timeline.assumptions(runs)),
    },
  )


def _threads(runs: kernel_timeline.Runs) -> dict[tuple[Any, ...], int]:
  """A number for each worker among those of its device."""
  threads: dict[tuple[Any, ...], int] = {}
  count: dict[int, int] = {}
  for _, run in runs:
    for track in run.tracks:
      if track.place not in threads:
        count[track.device] = count.get(track.device, 0) + 1
        threads[track.place] = count[track.device]
  return threads


def _names(runs, threads) -> Iterator[dict[str, Any]]:
  tracks = {track.place: track for _, run in runs for track in run.tracks}
  for device in sorted({track.device for track in tracks.values()}):
    yield perfetto.process_name(device, f"device {device} (modelled time)")
  for place, track in tracks.items():
    where = ", ".join(f"{axis} {i}" for axis, i in track.coords)
    name = f"{track.kind} {where}"
    yield from perfetto.thread_names(track.device, threads[place], name)


class _Run:
  """The events of one run of a kernel."""

  def __init__(
    self, start_ps: int, run: kernel_timeline.KernelTimeline, threads, ids
  ):
    self._start_ps = start_ps
    self._run = run
    self._threads = threads
    self._ids = ids

  def events(self) -> Iterator[dict[str, Any]]:
    for track in self._run.tracks:
      for interval, issue in _with_issue(track.intervals):
        yield self._slice(track, interval, issue)
        for cause in interval.causes:
          yield from self._flow(track, interval, cause)
      for copy in track.copies:
        yield from self._copy(track, copy)

  def _at(self, track: kernel_timeline.Track, time_ps: int) -> dict[str, Any]:
    return {
      "pid": track.device,
      "tid": self._threads[track.place],
      "ts": (self._start_ps + time_ps) / _PS_PER_US,
    }

  def _slice(self, track, interval, issue) -> dict[str, Any]:
    args = {"kernel": self._run.kernel}
    if interval.kind == "wait":
      args["on"] = interval.on
      args["ended by"] = ": ".join(self._run.who_ended(interval))
      args["waiting_us"] = (interval.end_ps - interval.start_ps) / _PS_PER_US
    end = issue.end_ps if issue is not None else interval.end_ps
    return perfetto.interval(
      self._at(track, interval.start_ps),
      name=interval.what or "compute",
      kind=interval.kind,
      duration_us=(end - interval.start_ps) / _PS_PER_US,
      args=args,
    )

  def _flow(self, track, interval, cause) -> Iterator[dict[str, Any]]:
    sender = self._run.tracks[cause.worker]
    common = {"name": cause.kind, "cat": "sync", "id": next(self._ids)}
    yield {"ph": "s", **common, **self._at(sender, cause.sent_ps)}
    end = self._at(track, interval.end_ps)
    yield {"ph": "f", "bp": "e", **common, **end}

  def _copy(self, track, copy: intervals.Copy) -> Iterator[dict[str, Any]]:
    args = {"from": copy.src, "to": copy.dst, "bytes": copy.num_bytes}
    if copy.link is not None:
      args["link"] = f"device {copy.link[0]} to device {copy.link[1]}"
    args["what"] = copy.what
    yield from perfetto.copy(
      self._at(track, copy.start_ps),
      self._at(track, copy.end_ps),
      name=f"{copy.spaces[0]} to {copy.spaces[1]}",
      number=next(self._ids),
      args=args,
    )


def _with_issue(intervals) -> Iterator[tuple[Any, Any]]:
  """Each interval, a wait together with the instruction that ends it.

  So a wait that need not wait is there too, for an arrow to lead to.
  """
  rest = iter(intervals)
  for interval in rest:
    issue = None
    if interval.kind == "wait" and interval.ends:
      issue = next(rest, None)
    yield interval, issue
