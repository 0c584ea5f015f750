"""The rows of a timeline's picture: workers that do the same share one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from coremesh.simulate import kernel_timeline, rates, report

# Workers share a row if all they do begins and ends within this part of the
# whole time: some pixels of the picture.
TOLERANCE = 0.005

# In picoseconds.
type Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
  """Workers that do the same at the same times, over all kernels.

  Attributes:
    label: who they are.
    bars: what the first of them does, by kind: "compute", "own" (it waits for
      its own copy), "wait" (for another worker), "copy" (in flight on one
      device), "copies" (several of these), "link" (to another device), "links".
  """

  label: str
  bars: Mapping[str, Sequence[Span]]


def rows(runs: kernel_timeline.Runs) -> list[Row]:
  """The rows of a timeline, in the order of the first of their workers."""
  tracks: dict[tuple[Any, ...], list[tuple[int, kernel_timeline.Track]]] = {}
  for start, run in runs:
    for track in run.tracks:
      tracks.setdefault(track.place, []).append((start, track))
  most_ps = tolerance_seconds(runs) * rates.PS_PER_SECOND
  groups: list[_Group] = []
  alike: dict[Any, list[_Group]] = {}
  for place in sorted(tracks, key=lambda place: (place[0], place[1], place[2])):
    spans = _spans(tracks[place])
    kinds = (place[1], *(len(found) for found in spans.values()))
    edges = np.array([e for found in spans.values() for s in found for e in s])
    same = [
      group
      for group in alike.setdefault(kinds, [])
      if (np.abs(group.edges - edges) <= most_ps).all()
    ]
    if same:
      same[0].tracks.append(tracks[place][0][1])
      continue
    group = _Group(spans, edges, [tracks[place][0][1]])
    alike[kinds].append(group)
    groups.append(group)
  return [Row(_label(group.tracks), _bars(group.spans)) for group in groups]


def tolerance_seconds(runs: kernel_timeline.Runs) -> float:
  """By how much what workers of one row do may differ, at each end."""
  return TOLERANCE * kernel_timeline.seconds(runs)


@dataclasses.dataclass(slots=True)
class _Group:
  spans: Mapping[str, Sequence[Span]]
  edges: np.ndarray
  tracks: list[kernel_timeline.Track]


def _label(tracks: Sequence[kernel_timeline.Track]) -> str:
  text = report.described(tracks)
  if len(tracks) == 1:
    return text
  if ": " in text:
    return f"{text.split(': ')[-1]}  (x{len(tracks)})"
  return f"{len(tracks)} of {text.split(' of ')[-1]}"


def _spans(
  parts: Iterable[tuple[int, kernel_timeline.Track]],
) -> dict[str, list[Span]]:
  """What a worker does, by kind; copies may overlap."""
  found: dict[str, list[Span]] = {
    kind: [] for kind in ("compute", "own", "wait", "copy", "link")
  }
  for start, track in parts:
    for kind, begin, end in _merged(track):
      found[kind].append((start + begin, start + end))
    for copy in track.copies:
      if copy.end_ps > copy.start_ps:
        kind = "copy" if copy.link is None else "link"
        found[kind].append((start + copy.start_ps, start + copy.end_ps))
  return found


def _merged(track: kernel_timeline.Track) -> Iterator[tuple[str, int, int]]:
  """Intervals of computing and waiting, neighbours of a kind as one."""
  last: tuple[str, int, int] | None = None
  for interval in track.intervals:
    if interval.end_ps == interval.start_ps:
      continue
    kind = "compute"
    if interval.kind == "wait":
      kind = "own" if track.waits_for_itself(interval) else "wait"
    if last is not None and last[0] == kind and last[2] == interval.start_ps:
      last = (kind, last[1], interval.end_ps)
      continue
    if last is not None:
      yield last
    last = (kind, interval.start_ps, interval.end_ps)
  if last is not None:
    yield last


def _bars(spans: Mapping[str, Sequence[Span]]) -> dict[str, Sequence[Span]]:
  bars = {kind: spans[kind] for kind in ("compute", "own", "wait")}
  for one, several in (("copy", "copies"), ("link", "links")):
    bars[one], bars[several] = _depths(spans[one])
  return bars


def _depths(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
  """When one of the spans goes on, and when several do."""
  changes = sorted(
    [(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]
  )
  one: list[Span] = []
  several: list[Span] = []
  depth, last = 0, 0
  for at, change in changes:
    if depth and at > last:
      (one if depth == 1 else several).append((last, at))
    depth, last = depth + change, at
  return one, several
