"""A timeline as a picture. Only this module needs matplotlib."""

from collections.abc import Sequence
import pathlib
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from coremesh.simulate import kernel_timeline, picture_rows

_MAX_ROWS = 64
_WIDTH_INCHES = 13.0
_DPI = 110

# Told apart by who sees no red or green, and by brightness in print.
_COLOURS = {
  "compute": "#0b5cad",
  "own": "#f7dc9a",
  "wait": "#e8912d",
  "copy": "#9ed9c5",
  "copies": "#2c8468",
  "link": "#d0a9cd",
  "links": "#7a3578",
}
_LABELS = {
  "compute": "computing",
  "own": "waiting for its own copy",
  "wait": "waiting for another worker",
  "copy": "a copy in flight on one device",
  "copies": "several on one device",
  "link": "a copy in flight to another device",
  "links": "several to another device",
}
# What a row shows from top to bottom: work, and copies where there are any.
_LANES = (("compute", "own", "wait"), ("copy", "copies"), ("link", "links"))
_WORK_HEIGHT, _COPY_HEIGHT, _GAP = 0.46, 0.28, 0.05


def save(
  runs: kernel_timeline.Runs, path: pathlib.Path
) -> tuple[pathlib.Path, ...]:
  """Draws a timeline; see `Timeline.save_png`."""
  rows = picture_rows.rows(runs)
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


def _figure(runs, rows: Sequence[picture_rows.Row], page: str) -> Figure:
  total = kernel_timeline.seconds(runs)
  unit, scale = _unit(total)
  kinds = [k for k in _COLOURS if any(row.bars[k] for row in rows)]
  lanes = [lane for lane in _LANES if set(lane) & set(kinds)]
  tall = 2 * _GAP + sum(map(_height, lanes)) + _GAP * len(lanes)
  per_unit = 0.46 if len(rows) <= 16 else 0.32 if len(rows) <= 32 else 0.24
  notes = _notes(runs, rows)
  height = per_unit * tall * max(1, len(rows)) + 1.5 + 0.16 * len(notes)
  figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI)
  axes = figure.add_subplot()
  per_ps = scale * 1e-12
  for number, row in enumerate(rows):
    _draw(axes, number * tall, row, lanes, per_ps)
  axes.set_ylim(max(1, len(rows)) * tall, 0)
  axes.set_xlim(0, max(total * scale, 1e-9))
  axes.set_yticks([(n + 0.5) * tall for n in range(len(rows))])
  size = 9 if len(rows) <= 32 else 7.5
  axes.set_yticklabels([row.label for row in rows], fontsize=size)
  axes.tick_params(axis="y", length=0)
  for number in range(1, len(rows)):
    axes.axhline(number * tall, color="#d9d9d9", linewidth=0.5, zorder=0)
  _mark_kernels(axes, runs, per_ps)
  axes.grid(axis="x", color="#e6e6e6", linewidth=0.5, zorder=0)
  axes.set_axisbelow(True)
  for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
  axes.set_xlabel(f"modelled time, {unit}")
  below = 0.62 + 0.16 * len(notes)
  longest = max((len(row.label) for row in rows), default=0)
  figure.subplots_adjust(
    left=(0.3 + 0.0073 * size * longest) / _WIDTH_INCHES,
    right=0.985,
    top=1 - 0.74 / height,
    bottom=below / height,
  )
  _head(figure, runs, kinds, page, height)
  for line, text in enumerate(notes):
    y = (0.06 + 0.16 * (len(notes) - 1 - line)) / height
    figure.text(0.012, y, text, fontsize=7, color="#555555")
  return figure


def _unit(seconds: float) -> tuple[str, float]:
  """A unit of time, and how many of it a second has."""
  return ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3)


def _height(lane: Sequence[str]) -> float:
  return _WORK_HEIGHT if "compute" in lane else _COPY_HEIGHT


def _draw(
  axes: Any,
  top: float,
  row: picture_rows.Row,
  lanes: Sequence[Sequence[str]],
  per_ps: float,
) -> None:
  top += _GAP
  for lane in lanes:
    for kind in lane:
      axes.broken_barh(
        [(a * per_ps, (b - a) * per_ps) for a, b in row.bars[kind]],
        (top + _GAP, _height(lane)),
        facecolors=_COLOURS[kind],
        linewidth=0,
        zorder=3 if kind == "compute" else 2,
      )
    top += _height(lane) + _GAP


def _mark_kernels(axes: Any, runs: kernel_timeline.Runs, per_ps: float) -> None:
  """Where one kernel ends and the next begins, if there are several."""
  starts = sorted({start for start, _ in runs})
  for start in starts[1:]:
    axes.axvline(start * per_ps, color="#333333", linewidth=0.8, zorder=4)


def _head(
  figure: Figure, runs, kinds: Sequence[str], page: str, height: float
) -> None:
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
      Patch(facecolor=_COLOURS[kind], label=_LABELS[kind]) for kind in kinds
    ],
    loc="upper left",
    bbox_to_anchor=(0.006, 1 - 0.38 / height),
    ncols=max(1, len(kinds)),
    frameon=False,
    fontsize=9,
    borderaxespad=0.2,
  )


def _notes(
  runs: kernel_timeline.Runs, rows: Sequence[picture_rows.Row]
) -> list[str]:
  texts = list(kernel_timeline.assumptions(runs))
  if len(rows) < len({t.place for _, run in runs for t in run.tracks}):
    unit, scale = _unit(kernel_timeline.seconds(runs))
    within = picture_rows.tolerance_seconds(runs) * scale
    texts.insert(
      0,
      "Workers that do the same share a row, which shows the first of them: no"
      f" two times differ by more than {picture_rows.TOLERANCE:.1%} of the"
      f" whole, {within:.2g} {unit}.",
    )
  lines: list[str] = []
  for text in texts:
    if lines and len(lines[-1]) + len(text) < 190:
      lines[-1] += " " + text
    else:
      lines.append(text)
  return lines
