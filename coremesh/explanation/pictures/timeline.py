"""When each core issues, waits and copies: over its life, and close by."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
import numpy as np

from coremesh.explanation import words
from coremesh.explanation.pictures import style
from coremesh.profile.activity import CoreActivity, Spans
from coremesh.profile.log import Again
from coremesh.profile.prediction import OperationPrediction

# More spans than this and shares are drawn instead, with some spans below.
_MOST_SPANS = 160
_CLOSE_SPANS = 24
_NUM_STRETCHES = 500
_CORE_INCHES = 1.05
_LANES = ("core", "DMA read", "DMA write", "DMA local")
_KINDS = {"DMA read": "read", "DMA write": "write", "DMA local": "local"}


def draw(
  operation: OperationPrediction, activities: Sequence[CoreActivity]
) -> Figure:
  """Lanes for each core and its copies from, to and inside of it.

  Args:
    operation: a kernel.
    activities: of its cores.
  """
  end = max(1.0, *(a.cycles for a in activities))
  spans = [_spans(a) for a in activities]
  most = max(len(s) for lanes in spans for s in lanes.values())
  windows = [(0.0, end)]
  if most > _MOST_SPANS:
    windows.append(_close(spans, end))
  lanes = [n for n in _LANES if n == "core" or any(len(s[n]) for s in spans)]
  inches = _CORE_INCHES * len(activities) * len(lanes) / 4 + 0.2
  height = style.HEAD_INCHES + len(windows) * (inches + 0.85)
  figure = style.figure(
    height,
    f"{operation.name}: each core and its copies",
    f"Predicted, {words.estimate(operation.microseconds)} µs; central values"
    f"{_rounds(activities)}",
  )
  scale = operation.microseconds.central / max(1.0, operation.cycles.central)
  top = height - style.HEAD_INCHES
  for number, window in enumerate(windows):
    top -= 0.3
    axes = figure.add_axes(
      (0.13, (top - inches) / height, 0.85, inches / height)
    )
    is_whole = number == 0 and len(windows) > 1
    _panel(axes, spans, lanes, window, scale, as_shares=is_whole)
    title = "the whole life"
    if is_whole:
      title += ": heights are parts of the time"
    if number:
      title = "close by"
    axes.set_title(title, loc="left", fontsize=9.5, color=style.DARK)
    top -= inches + 0.55
  _legend(figure, lanes, height)
  return figure


def _spans(activity: CoreActivity) -> dict[str, Spans]:
  copies = {n: activity.spans(k) for n, k in _KINDS.items()}  # pyright: ignore
  return {"core": activity.spans("wait", "delay"), **copies}


def _close(spans: Sequence[dict[str, Spans]], end: float) -> tuple:
  """A window in the middle that holds a few spans of the busiest lane."""
  busiest = max((s for lanes in spans for s in lanes.values()), key=len)
  middle = len(busiest) // 2
  part = busiest.start_cycles[middle : middle + _CLOSE_SPANS]
  return float(part[0]), max(float(part[-1]), float(part[0]) + end * 1e-4)


def _rounds(activities: Sequence[CoreActivity]) -> str:
  """How much of it was not worked out one by one."""
  repeats = any(
    a.trace.skipped or any(isinstance(item, Again) for item in a.log.items)
    for a in activities
  )
  return "; rounds proven to be alike are run once and repeated here" * repeats


def _panel(
  axes: Any,
  spans: Sequence[dict[str, Spans]],
  lanes: Sequence[str],
  window: tuple[float, float],
  scale: float,
  *,
  as_shares: bool,
) -> None:
  labels, places, y = [], [], 0.0
  for core, found in enumerate(spans):
    for lane in lanes:
      base = -(y + 0.86)
      if as_shares:
        _shares(axes, found[lane], base, window, scale, lane)
      else:
        _bars(axes, found[lane], base, window, scale, lane)
      labels.append(f"core {core}" if lane == "core" else lane)
      places.append(base + 0.36)
      y += 1
    y += 0.3
  axes.set_yticks(places, labels, fontsize=8.5)
  for label in axes.get_yticklabels():
    label.set_weight(
      "bold" if label.get_text().startswith("core") else "normal"
    )
  axes.set_ylim(-y + 0.2, 0)
  axes.set_xlim(window[0] * scale, window[1] * scale)
  axes.tick_params(axis="x", labelsize=8.5)
  axes.set_xlabel("predicted time, µs", fontsize=9, labelpad=2)
  style.plain(axes)


def _colour(lane: str) -> str:
  return style.WAITING if lane == "core" else style.UNITS.get(lane, style.GREY)


def _bars(axes, found: Spans, base, window, scale, lane) -> None:
  is_in = (found.end_cycles > window[0]) & (found.start_cycles < window[1])
  starts, ends = found.start_cycles[is_in], found.end_cycles[is_in]
  if lane == "core":
    whole = (window[0] * scale, (window[1] - window[0]) * scale)
    axes.broken_barh([whole], (base, 0.72), facecolors=style.WORKING, zorder=2)
    rows = np.zeros(len(starts), int)
    count = 1
  else:
    rows, count = _stacked(starts, ends)
  for row in range(count):
    mine = rows == row
    bars = np.stack([starts[mine], ends[mine] - starts[mine]], axis=1) * scale
    axes.broken_barh(
      bars,
      (base + 0.72 * row / count, 0.72 / count),
      facecolors=_colour(lane),
      edgecolor="none" if lane == "core" else "white",
      linewidth=0 if lane == "core" else 0.5,
      zorder=3,
    )


def _stacked(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, int]:
  """A row for each span, so that those at one time lie above each other."""
  free: list[float] = []
  rows = np.zeros(len(starts), int)
  for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
    row = next((r for r, at in enumerate(free) if at <= start), len(free))
    free[row : row + 1] = [end]
    rows[i] = row
  return rows, max(1, len(free))


def _shares(axes, found: Spans, base, window, scale, lane) -> None:
  edges = np.linspace(window[0], window[1], _NUM_STRETCHES + 1)
  share = found.share(edges) if len(found) else np.zeros(_NUM_STRETCHES)
  if lane == "core":
    whole = (window[0] * scale, (window[1] - window[0]) * scale)
    axes.broken_barh([whole], (base, 0.72), facecolors=style.WORKING, zorder=2)
  axes.stairs(
    base + 0.72 * share,
    edges * scale,
    baseline=base,
    fill=True,
    color=_colour(lane),
    zorder=3,
  )


def _legend(figure: Figure, lanes: Sequence[str], height: float) -> None:
  kinds = {
    "issues bundles": style.WORKING,
    "waits": style.WAITING,
    **{f"{n[4:]} in flight": _colour(n) for n in lanes if n != "core"},
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
