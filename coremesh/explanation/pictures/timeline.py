"""When each core issues, waits and copies: over its life, and close by."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
import numpy as np

from coremesh.explanation import alike, page
from coremesh.explanation.pictures import style
from coremesh.profile.activity import CoreActivity, Spans
from coremesh.profile.events import EventKind
from coremesh.profile.log import Again
from coremesh.profile.prediction import OperationPrediction

# More spans than this and shares are drawn instead, with some spans below.
_MOST_SPANS = 160
_CLOSE_SPANS = 24
_NUM_STRETCHES = 500
_LANE_INCHES = 0.27
_TALL = 0.72  # of a lane
_CORE = "core"
_KINDS: Mapping[str, tuple[EventKind, ...]] = {
  _CORE: ("wait", "delay"),
  "DMA read": ("read",),
  "DMA write": ("write",),
  "DMA send": ("send",),
  "DMA local": ("local",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Core:
  """One core: its waits, under `_CORE`, and its copies, by lane."""

  name: str
  end_cycles: float
  lanes: Mapping[str, Spans]


def draw(
  operation: OperationPrediction, activities: Sequence[CoreActivity]
) -> Figure:
  """Lanes for each core and its copies from, to and inside of it.

  Args:
    operation: a kernel.
    activities: of its cores.
  """
  found = alike.groups(activities)
  groups = alike.shown(found, style.MOST_CORES)
  cores = [
    _Core(
      alike.name(group),
      group[0].cycles,
      {n: group[0].spans(*k) for n, k in _KINDS.items()},
    )
    for group in groups
  ]
  lanes = [
    n for n in _KINDS if n == _CORE or any(len(c.lanes[n]) for c in cores)
  ]
  end = max(1.0, *(core.end_cycles for core in cores))
  windows = [("the whole life", 0.0, end)]
  if max(len(s) for c in cores for s in c.lanes.values()) > _MOST_SPANS:
    windows = [
      ("the whole life: heights are parts of the time", 0.0, end),
      ("close by", *_close(cores, end)),
    ]
  inches = _LANE_INCHES * len(cores) * (len(lanes) + 0.3)
  height = style.HEAD_INCHES + len(windows) * (inches + 0.85)
  figure = style.figure(
    height,
    f"{operation.label}: each core and its copies",
    f"Predicted, {page.time(operation, end)}; central values"
    f"{style.of_groups(groups, found)}{_rounds(activities)}",
  )
  top = height - style.HEAD_INCHES
  for number, (title, first, last) in enumerate(windows):
    top -= 0.3
    axes = figure.add_axes(
      (0.13, (top - inches) / height, 0.85, inches / height)
    )
    axes.set_title(title, loc="left", fontsize=9.5, color=style.DARK)
    _View(
      axes=axes,
      first=first,
      last=last,
      cycle_us=page.cycle_us(operation),
      as_shares=number < len(windows) - 1,
    ).draw(cores, lanes)
    top -= inches + 0.55
  _legend(figure, lanes, height)
  return figure


def _close(cores: Sequence[_Core], end: float) -> tuple[float, float]:
  """A window in the middle that holds a few spans of the busiest lane."""
  busiest = max((s for c in cores for s in c.lanes.values()), key=len)
  middle = len(busiest) // 2
  part = busiest.start_cycles[middle : middle + _CLOSE_SPANS]
  return float(part[0]), max(float(part[-1]), float(part[0]) + end * 1e-4)


def _rounds(activities: Sequence[CoreActivity]) -> str:
  """Whether some of it was not worked out one by one."""
  repeats = any(
    a.trace.skipped or any(isinstance(item, Again) for item in a.log.items)
    for a in activities
  )
  return "; rounds proven to be alike are run once and repeated here" * repeats


def _colour(lane: str) -> str:
  return style.WAITING if lane == _CORE else style.UNITS.get(lane, style.GREY)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _View:
  """A stretch of time, in cycles, on axes in microseconds."""

  axes: Any
  first: float
  last: float
  cycle_us: float
  as_shares: bool

  def draw(self, cores: Sequence[_Core], lanes: Sequence[str]) -> None:
    """A row for each lane of each core, from top to bottom."""
    labels, places, y = [], [], 0.0
    for core in cores:
      for lane in lanes:
        base = -(y + 0.86)
        if lane == _CORE:
          self._working(core.end_cycles, base)
        drawn = self._shares if self.as_shares else self._bars
        drawn(core.lanes[lane], base, lane)
        labels.append(f"core {core.name}" if lane == _CORE else lane)
        places.append(base + _TALL / 2)
        y += 1
      y += 0.3
    self.axes.set_yticks(places, labels, fontsize=8.5)
    for label in self.axes.get_yticklabels():
      if label.get_text() not in _KINDS:
        label.set_weight("bold")
    self.axes.set_ylim(-y + 0.2, 0)
    self.axes.set_xlim(self.first * self.cycle_us, self.last * self.cycle_us)
    self.axes.tick_params(axis="x", labelsize=8.5)
    self.axes.set_xlabel("predicted time, µs", fontsize=9, labelpad=2)
    style.plain(self.axes)

  def _working(self, end_cycles: float, base: float) -> None:
    """The time of a core, over which its waits are drawn."""
    length = max(0.0, min(self.last, end_cycles) - self.first)
    self.axes.broken_barh(
      [(self.first * self.cycle_us, length * self.cycle_us)],
      (base, _TALL),
      facecolors=style.WORKING,
      zorder=2,
    )

  def _bars(self, found: Spans, base: float, lane: str) -> None:
    is_in = found.end_cycles > self.first
    is_in &= found.start_cycles < self.last
    starts, ends = found.start_cycles[is_in], found.end_cycles[is_in]
    is_core = lane == _CORE
    rows = np.zeros(len(starts), int) if is_core else _stacked(starts, ends)
    count = int(rows.max(initial=0)) + 1
    for row in range(count):
      mine = rows == row
      bars = np.stack([starts[mine], ends[mine] - starts[mine]], axis=1)
      self.axes.broken_barh(
        bars * self.cycle_us,
        (base + _TALL * row / count, _TALL / count),
        facecolors=_colour(lane),
        edgecolor="none" if is_core else "white",
        linewidth=0 if is_core else 0.5,
        zorder=3,
      )

  def _shares(self, found: Spans, base: float, lane: str) -> None:
    edges = np.linspace(self.first, self.last, _NUM_STRETCHES + 1)
    self.axes.stairs(
      base + _TALL * found.share(edges),
      edges * self.cycle_us,
      baseline=base,
      fill=True,
      color=_colour(lane),
      zorder=3,
    )


def _stacked(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
  """A row for each span, so that those at one time lie above each other."""
  free: list[float] = []
  rows = np.zeros(len(starts), int)
  for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
    row = next((r for r, at in enumerate(free) if at <= start), len(free))
    free[row : row + 1] = [end]
    rows[i] = row
  return rows


def _legend(figure: Figure, lanes: Sequence[str], height: float) -> None:
  kinds = {
    "issues bundles": style.WORKING,
    "waits": style.WAITING,
    **{f"{n[4:]} in flight": _colour(n) for n in lanes if n != _CORE},
  }
  figure.legend(
    handles=[Patch(facecolor=c, label=n) for n, c in kinds.items()],
    loc="upper right",
    bbox_to_anchor=(0.985, 1 - 0.62 / height),
    ncols=len(kinds),
    frameon=False,
    fontsize=8.5,
    borderaxespad=0,
  )
