"""A timeline as a picture. Only this module needs matplotlib."""

from collections.abc import Iterator, Sequence
import dataclasses
import pathlib
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from coremesh.simulate import kernel_timeline, report

_FOLD_ABOVE = 24
_MAX_ROWS = 64
_WIDTH_INCHES = 13.0
_DPI = 110

# Told apart by who sees no red or green, and by brightness in print.
_COLOURS = {
  "compute": "#0b5cad",
  "own": "#f7dc9a",
  "wait": "#e8912d",
  "copy": "#4caf8e",
  "link": "#8e4585",
}
_LABELS = {
  "compute": "computing",
  "own": "waiting for its own copy",
  "wait": "waiting for another worker",
  "copy": "copy in flight, on one device",
  "link": "copy in flight, to another device",
}
# Parts of a row: what the worker does above, its copies below.
_WORK_TOP, _WORK_HEIGHT = 0.08, 0.46
_COPY_TOP, _COPY_HEIGHT = 0.58, 0.34


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
  """Workers that do the same at the same times, over all kernels."""

  label: str
  parts: tuple[tuple[int, kernel_timeline.Track], ...]


def save(
  runs: kernel_timeline.Runs, path: pathlib.Path
) -> tuple[pathlib.Path, ...]:
  """Draws a timeline; see `Timeline.save_png`."""
  rows = _rows(runs)
  starts = range(0, max(1, len(rows)), _MAX_ROWS)
  pages = []
  for number, start in enumerate(starts, start=1):
    page = path
    if number > 1:
      page = path.with_name(f"{path.stem}-{number}{path.suffix}")
    of = f", page {number} of {len(starts)}" if len(starts) > 1 else ""
    figure = _figure(runs, rows[start : start + _MAX_ROWS], of)
    FigureCanvasAgg(figure).print_png(page)
    pages.append(page)
  return tuple(pages)


def _rows(runs: kernel_timeline.Runs) -> list[_Row]:
  tracks: dict[tuple[Any, ...], list[tuple[int, kernel_timeline.Track]]] = {}
  for start, run in runs:
    for track in run.tracks:
      tracks.setdefault(track.place, []).append((start, track))
  order = sorted(tracks, key=lambda place: (place[0], place[1], place[2]))
  if len(order) <= _FOLD_ABOVE:
    return [_Row(tracks[p][0][1].name, tuple(tracks[p])) for p in order]
  alike: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
  for place in order:
    key = (place[1], *(_shape(s, track) for s, track in tracks[place]))
    alike.setdefault(key, []).append(place)
  return [
    _Row(_label([tracks[p][0][1] for p in places]), tuple(tracks[places[0]]))
    for places in alike.values()
  ]


def _shape(start: int, track: kernel_timeline.Track) -> tuple[Any, ...]:
  """What is drawn of a track."""
  return (
    start,
    tuple(_merged(track)),
    tuple((c.link is None, c.start_ps, c.end_ps) for c in track.copies),
  )


def _label(tracks: Sequence[kernel_timeline.Track]) -> str:
  text = report.described(tracks)
  return text.split(": ")[-1] + (
    f"  (x{len(tracks)})" if len(tracks) > 1 else ""
  )


def _figure(runs, rows: Sequence[_Row], page: str) -> Figure:
  total = kernel_timeline.seconds(runs)
  unit, scale = ("us", 1e6) if total < 1e-3 else ("ms", 1e12 / 1e9)
  per_row = 0.42 if len(rows) <= 16 else 0.3 if len(rows) <= 32 else 0.22
  notes = _notes(runs)
  height = per_row * max(1, len(rows)) + 1.5 + 0.16 * len(notes)
  figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI)
  axes = figure.add_subplot()
  per_ps = scale * 1e-12
  for number, row in enumerate(rows):
    _draw(axes, number, row, per_ps)
  axes.set_ylim(max(1, len(rows)), 0)
  axes.set_xlim(0, max(total * scale, 1e-9))
  axes.set_yticks([n + 0.5 for n in range(len(rows))])
  size = 9 if len(rows) <= 32 else 7.5
  axes.set_yticklabels([row.label for row in rows], fontsize=size)
  axes.tick_params(axis="y", length=0)
  for number in range(1, len(rows)):
    axes.axhline(number, color="#d9d9d9", linewidth=0.5, zorder=0)
  _mark_kernels(axes, runs, per_ps)
  axes.grid(axis="x", color="#e6e6e6", linewidth=0.5, zorder=0)
  axes.set_axisbelow(True)
  for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
  axes.set_xlabel(f"modelled time, {unit}")
  below = 0.62 + 0.16 * len(notes)
  figure.subplots_adjust(
    left=0.2,
    right=0.985,
    top=1 - 0.74 / height,
    bottom=below / height,
  )
  _head(figure, runs, page, height)
  for line, text in enumerate(notes):
    y = (0.06 + 0.16 * (len(notes) - 1 - line)) / height
    figure.text(0.012, y, text, fontsize=7, color="#555555")
  return figure


def _draw(axes: Any, number: int, row: _Row, per_ps: float) -> None:
  bars: dict[str, list[tuple[float, float]]] = {k: [] for k in _COLOURS}
  for start, track in row.parts:
    for kind, begin, end in _merged(track):
      bars[kind].append(((start + begin) * per_ps, (end - begin) * per_ps))
    for copy in track.copies:
      kind = "copy" if copy.link is None else "link"
      span = (start + copy.start_ps) * per_ps
      bars[kind].append((span, (copy.end_ps - copy.start_ps) * per_ps))
  for kind, spans in bars.items():
    is_copy = kind in ("copy", "link")
    top = _COPY_TOP if is_copy else _WORK_TOP
    height = _COPY_HEIGHT if is_copy else _WORK_HEIGHT
    axes.broken_barh(
      spans,
      (number + top, height),
      facecolors=_COLOURS[kind],
      # Copies overlap: where several are in flight it is darker.
      alpha=0.55 if is_copy else 1.0,
      linewidth=0,
      zorder=3 if kind == "compute" else 2,
    )


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


def _mark_kernels(axes: Any, runs: kernel_timeline.Runs, per_ps: float) -> None:
  """Where one kernel ends and the next begins, if there are several."""
  starts = sorted({start for start, _ in runs})
  for start in starts[1:]:
    axes.axvline(start * per_ps, color="#333333", linewidth=0.8, zorder=4)


def _head(figure: Figure, runs, page: str, height: float) -> None:
  kernels = ", ".join(dict.fromkeys(run.kernel for _, run in runs))
  if len(kernels) > 80:
    kernels = kernels[:77] + "..."
  chips = {run.chip_rates.chip.generation for _, run in runs}
  figure.text(
    0.012,
    1 - 0.3 / height,
    f"{kernels} on {', '.join(sorted(chips))}: modelled time, not"
    f" measured{page}",
    fontsize=13,
    weight="bold",
  )
  figure.legend(
    handles=[
      Patch(facecolor=colour, label=_LABELS[kind])
      for kind, colour in _COLOURS.items()
    ],
    loc="upper left",
    bbox_to_anchor=(0.006, 1 - 0.38 / height),
    ncols=len(_COLOURS),
    frameon=False,
    fontsize=9,
    borderaxespad=0.2,
  )


def _notes(runs: kernel_timeline.Runs) -> list[str]:
  lines: list[str] = []
  for text in kernel_timeline.assumptions(runs):
    if lines and len(lines[-1]) + len(text) < 190:
      lines[-1] += " " + text
    else:
      lines.append(text)
  return lines
