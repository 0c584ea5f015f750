"""What came of it, as tables and as a picture."""

from collections import Counter
from collections.abc import Mapping, Sequence
import importlib
import pathlib
import statistics
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks.published import entries, score
from benchmarks.published.record import Record
from benchmarks.published.score import Constants, Score

_COLORS = {
  "flash attention": "#4269d0",
  "ragged dot v1": "#efb118",
  "ragged dot v2": "#ff725c",
  "cross entropy": "#3ca951",
}
_MARKERS = {"v5p": "o", "tpu7x": "^", "v6e": "s", "v5e": "D"}


def scores(rows: Mapping[tuple[str, str, str], Score]) -> Table:
  """Scores by chip, family and half."""
  table = _table(
    "How near: predicted against published",
    *("chip", "family", "half", "entries", "median error"),
    *("within 4 %", "largest", "bias", "Spearman"),
  )
  last = ""
  for (chip, family, half), one in rows.items():
    if not one.entries:
      continue
    if last and last != chip + family:
      table.add_section()
    last = chip + family
    _add(
      table,
      *(chip, family, half, str(one.entries), f"{one.median:.2%}"),
      *(f"{one.within:.0%}", f"{one.largest:.1%}", f"{one.bias:+.2%}"),
      f"{one.spearman:.4f}",
    )
  return table


def outliers(records: Sequence[Record], ratios: Mapping[str, float]) -> Table:
  """Those further off than `score.WITHIN`, the furthest first."""
  table = _table(
    f"Further off than {score.WITHIN:.0%}",
    *("chip", "family", "operands", "published µs", "ratio", "what is known"),
  )
  far = [r for r in records if abs(ratios[r.name] - 1) > score.WITHIN]
  for one in sorted(far, key=lambda r: -abs(ratios[r.name] - 1)):
    _add(
      table,
      *(one.chip, one.family, one.operands, f"{one.measured_us:,.0f}"),
      *(f"{ratios[one.name]:.3f}", "; ".join(facts(one))),
    )
  return table


def facts(one: Record) -> list[str]:
  """What the program and its record say that may make it differ."""
  whole = max(one.central_us, 1e-9)
  found = [f"limit {one.limit}, cores at work {one.cores}"]
  if one.copies_us > 0.02 * whole:
    found.append(f"{one.copies_us / whole:.0%} copies of XLA's")
  rest = one.central_us - one.kernel_us - one.copies_us
  if rest > 0.02 * whole:
    found.append(f"{rest / whole:.0%} other operations of XLA's")
  if one.left_out:
    found.append(f"{one.left_out} operations left out")
  if abs(one.peak_ratio - 1) > 0.001:
    found.append(f"takes {one.peak_ratio:.3f} of the published memory")
  if one.spread > 0.005:
    found.append(f"its published runs differ by {one.spread:.1%}")
  if "null" in one.config:
    found.append("its tile sizes are not published")
  return found


def failures(records: Sequence[Record]) -> Table:
  """Those without a prediction, and why."""
  table = _table("Not predicted", "chip", "family", "operands", "why")
  for one in records:
    if one.error:
      _add(table, one.chip, one.family, one.operands, one.error)
  return table


def unusable(found: Sequence[entries.Entry]) -> Table:
  """How many entries are not tried, and why."""
  table = _table("Not tried", "chip", "family", "entries", "why")
  counts = Counter((e.chip, e.family, e.unusable) for e in found if e.unusable)
  for (chip, family, why), count in counts.items():
    _add(table, chip, family, str(count), why)
  return table


def constants(rows: Mapping[str, Mapping[str, Constants]]) -> Table:
  """Constants of each chip, by where they come from."""
  table = _table(
    "Constants",
    *("chip", "from", "HBM TB/s", "latency ns", "clock GHz"),
  )
  for chip, of_chip in rows.items():
    for source, one in of_chip.items():
      _add(
        table,
        *(chip, source, f"{one.bytes_per_second / 1e12:.2f}"),
        *(f"{one.latency_seconds * 1e9:.0f}", f"{one.clock_hz / 1e9:.3f}"),
      )
  return table


def costs(records: Sequence[Record]) -> Table:
  """CPU seconds that a prediction takes after compilation."""
  table = _table(
    "What a prediction costs, CPU seconds after compilation",
    *("chip", "family", "entries", "median", "largest"),
  )
  groups: dict[tuple[str, str], list[float]] = {}
  for one in records:
    for key in ((one.chip, one.family), ("all", "")):
      groups.setdefault(key, []).append(one.predict_seconds)
  for (chip, family), seconds in sorted(groups.items()):
    _add(
      table,
      *(chip, family, str(len(seconds))),
      *(f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"),
    )
  return table


def _add(table: Table, *cells: str) -> None:
  # As they are: brackets are shapes here, not styles.
  table.add_row(*(Text(cell) for cell in cells))


def _table(title: str, *columns: str) -> Table:
  made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
  texts = {"chip", "family", "half", "operands", "why", "from", "what is known"}
  for column in columns:
    made.add_column(column, justify="left" if column in texts else "right")
  return made


def plot(
  records: Sequence[Record],
  ratios: Mapping[str, float],
  path: pathlib.Path,
  *,
  dpi: int = 150,
) -> None:
  """Predicted against published times, and their ratio.

  Args:
    records: those with a prediction.
    ratios: predicted over published, by name.
    path: the PNG to write.
    dpi: pixels an inch; the picture is 7 by 6 inches.
  """
  pyplot: Any = importlib.import_module("matplotlib.pyplot")
  figure, (above, below) = pyplot.subplots(
    2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1.4)
  )
  measured = [r.measured_us / 1e3 for r in records]
  ends = [0.8 * min(measured), 1.25 * max(measured)]
  band = score.WITHIN
  above.plot(ends, ends, color="0.4", linewidth=0.8, zorder=0)
  above.fill_between(
    ends,
    [e * (1 - band) for e in ends],
    [e * (1 + band) for e in ends],
    color="0.85",
    zorder=0,
  )
  below.axhspan(1 - band, 1 + band, color="0.88", zorder=0)
  below.axhline(1, color="0.4", linewidth=0.8, zorder=0)
  for chip, family in dict.fromkeys((r.chip, r.family) for r in records):
    mine = [r for r in records if (r.chip, r.family) == (chip, family)]
    x = [r.measured_us / 1e3 for r in mine]
    ratio = [ratios[r.name] for r in mine]
    style: dict[str, Any] = {
      "s": 14,
      "marker": _MARKERS[chip],
      "facecolor": _COLORS[family] if chip == "v5p" else "none",
      "edgecolor": _COLORS[family],
      "linewidth": 0.7,
      "alpha": 0.85,
    }
    above.scatter(x, [a * b for a, b in zip(x, ratio, strict=True)], **style)
    below.scatter(x, ratio, **style)
  _legends(above, records)
  above.set(xscale="log", yscale="log", ylabel="predicted, ms", ylim=ends)
  below.set(xlim=ends, xlabel="published, ms", ylabel="predicted / published")
  for axis in (above.yaxis, below.xaxis):
    axis.set_major_formatter("{x:g}")
  below.set_ylim(0.85, 1.15)
  _mark_beyond(below, records, ratios)
  for axes in (above, below):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.93", linewidth=0.6, zorder=-1)
    axes.set_axisbelow(True)
  above.set_title(
    f"cm.predict against times tokamax publishes; grey: ±{band:.0%}",
    fontsize=10,
    loc="left",
  )
  figure.tight_layout()
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=dpi)
  pyplot.close(figure)


def _legends(axes: Any, records: Sequence[Record]) -> None:
  """A colour for each family and a marker for each chip."""
  lines: Any = importlib.import_module("matplotlib.lines")
  handles = [
    lines.Line2D(*([], []), marker="o", linestyle="", color=_COLORS[f], label=f)
    for f in _COLORS
    if any(r.family == f for r in records)
  ]
  for chip, marker in _MARKERS.items():
    mine = [r for r in records if r.chip == chip]
    if mine:
      handles.append(
        lines.Line2D(
          *([], []),
          marker=marker,
          linestyle="",
          color="0.3",
          markerfacecolor="0.3" if chip == "v5p" else "none",
          label=f"{chip}, {len(mine)} entries",
        )
      )
  axes.legend(handles=handles, fontsize=8, frameon=False, loc="upper left")


def _mark_beyond(
  axes: Any, records: Sequence[Record], ratios: Mapping[str, float]
) -> None:
  """Arrows at the edge for what lies outside the picture."""
  low, high = axes.get_ylim()
  for one in records:
    ratio = ratios[one.name]
    if low <= ratio <= high:
      continue
    is_low = ratio < low
    axes.annotate(
      f"{ratio:.2f}",
      xy=(one.measured_us / 1e3, low if is_low else high),
      xytext=(0, 8 if is_low else -8),
      textcoords="offset points",
      ha="center",
      va="bottom" if is_low else "top",
      rotation=90,
      fontsize=6,
      color=_COLORS[one.family],
      arrowprops={"arrowstyle": "->", "color": _COLORS[one.family]},
    )
