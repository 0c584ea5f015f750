"""Operations under the roofs of their device."""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any

from matplotlib.figure import Figure
import numpy as np

from coremesh.explanation import words
from coremesh.explanation.pictures import style
from coremesh.explanation.roofline import Roofline
from coremesh.profile.sending import CORE_TO_CORE, Sending

_COLOURS = (
  *(style.VERMILION, style.BLUE, style.GREEN, style.PURPLE, style.ORANGE),
  *(style.SKY, style.DARK, style.GREY),
)
# Of the legend, as parts of the height of the picture.
_TOP, _HEAD, _LINE = 0.83, 0.042, 0.032


def draw(rooflines: Mapping[str, Roofline], chip: str) -> Figure:
  """Work for each byte against work for each second.

  A circle is the work of the MXUs, a square that of the VPUs; the bar through
  it is the range of the predicted time. What is sent to other devices has a
  slope of its own, and the hollow points are the same work for each of its
  bytes.

  Args:
    rooflines: of operations by name; those that take longest are shown.
    chip: its name.
  """
  ordered = sorted(rooflines.values(), key=lambda r: -r.microseconds.central)
  shown = _fitting([r for r in ordered if r.hbm_bytes or r.sendings])
  left_out = len(ordered) - len(shown)
  figure = style.figure(
    6.6,
    f"Roofline of one device of {chip}",
    "Work counted from the instructions issued; time predicted, not measured"
    + (f"; {left_out} operations not shown" if left_out else ""),
  )
  axes = figure.add_axes((0.075, 0.09, 0.6, 0.76))
  _roofs(axes, ordered[0], shown)
  for colour, one in zip(_COLOURS, shown, strict=False):
    for x, work, marker in _points(one):
      _point(axes, one, x, work, marker=marker, colour=colour)
    for x, work, marker in _sent_points(one):
      _point(axes, one, x, work, marker=marker, colour=colour, fill="white")
  _legend(figure, shown)
  sent = " (hollow: byte sent)" if any(map(_sent_points, shown)) else ""
  axes.set_xlabel(f"work for each byte of HBM{sent}: FLOP or vector op / byte")
  axes.set_ylabel("work for each second: FLOP/s or vector op/s")
  axes.grid(which="major", color=style.LIGHT, linewidth=0.7)
  axes.set_axisbelow(True)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  return figure


def _fitting(found: Sequence[Roofline]) -> list[Roofline]:
  """The first of them, as many as there are colours and lines for."""
  heights = (_HEAD + (2 + len(one.sendings)) * _LINE for one in found)
  ends = itertools.accumulate(heights)
  fitting = zip(_COLOURS, found, ends, strict=False)
  return [one for _, one, end in fitting if end < _TOP + _HEAD]


def _points(one: Roofline) -> list[tuple[float, float, str]]:
  """Work for each byte of HBM, work, and marker, for what there is."""
  return _at(one, one.hbm_bytes)


def _sent_points(one: Roofline) -> list[tuple[float, float, str]]:
  """The same for each byte sent to another device."""
  return [p for sent in _far(one) for p in _at(one, sent.busiest_bytes)]


def _at(one: Roofline, num_bytes: int) -> list[tuple[float, float, str]]:
  found = [(one.matmul_flops, "o"), (one.vector_ops, "s")]
  return [(w / num_bytes, w, m) for w, m in found if w and num_bytes]


def _far(one: Roofline) -> list[Sending]:
  """What leaves the device: the way between its cores is as HBM's."""
  return [sent for sent in one.sendings if sent.way != CORE_TO_CORE]


def _roofs(axes: Any, one: Roofline, shown: Sequence[Roofline]) -> None:
  points = [
    (r, x, work)
    for r in shown
    for x, work, _ in (*_points(r), *_sent_points(r))
  ]
  intensities = [x for _, x, _ in points]
  slowest = [work / (r.microseconds.high * 1e-6) for r, _, work in points]
  peaks = (
    (one.peak_matmul_flops_per_second, "MXU, bf16", "FLOP/s", style.BLUE),
    (one.peak_vector_ops_per_second, "VPU, 32 bit", "op/s", style.GREEN),
  )
  hbm = one.peak_hbm_bytes_per_second
  lowest = min([0.3, *intensities]) / 3
  highest = max([3 * peaks[0][0] / hbm, *intensities]) * 2
  xs = np.geomspace(lowest, highest, 400)
  for peak, name, unit, colour in peaks:
    axes.plot(xs, np.minimum(peak, hbm * xs), color=colour, linewidth=1.8)
    axes.annotate(
      f"{name}: {words.rate(peak, unit)}",
      (highest, peak),
      xytext=(-2, 4),
      textcoords="offset points",
      ha="right",
      fontsize=9,
      color=colour,
      bbox=dict(facecolor="white", edgecolor="none", pad=0.5),
    )
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.set_xlim(lowest, highest)
  bottom = min([hbm * lowest, *slowest]) / 2
  axes.set_ylim(bottom, 4 * peaks[0][0])
  # Above the slope, where no operation can be.
  x = np.sqrt(peaks[0][0] * peaks[1][0]) / hbm
  _name_slope(axes, "HBM", hbm, x, ha="right", colour=style.DARK)
  ways = {s.way: s.assumed_bytes_per_second for r in shown for s in _far(r)}
  for way, slope in ways.items():
    work = np.minimum(peaks[0][0], slope * xs)
    colour = style.UNITS["DMA send"]
    axes.plot(xs, work, color=colour, linewidth=1.6, linestyle="--")
    # Below it, as other slopes are above, and away from the level roofs.
    x = max(2 * lowest, np.sqrt(bottom * peaks[1][0]) / slope)
    _name_slope(axes, f"{way}, assumed", slope, x, ha="left", colour=colour)


def _name_slope(
  axes: Any, name: str, slope: float, x: float, *, ha: str, colour: str
) -> None:
  axes.annotate(
    f"{name}: {words.rate(slope, 'B/s')}",
    (x, slope * x),
    xytext=(-8, 2) if ha == "right" else (8, -8),
    textcoords="offset points",
    ha=ha,
    fontsize=9,
    color=colour,
  )


def _point(
  axes: Any,
  one: Roofline,
  x: float,
  work: float,
  *,
  marker: str,
  colour: str,
  fill: str | None = None,
) -> None:
  time = one.microseconds
  low, central, high = (
    work / (us * 1e-6) for us in (time.high, time.central, time.low)
  )
  axes.errorbar(
    x,
    central,
    yerr=[[central - low], [high - central]],
    fmt=marker,
    color=colour,
    markerfacecolor=fill or colour,
    markersize=7,
    capsize=5,
    elinewidth=1.4,
    zorder=5,
  )


def _legend(figure: Figure, shown: Sequence[Roofline]) -> None:
  """Each operation in words, from top to bottom."""
  y = _TOP
  for colour, one in zip(_COLOURS, shown, strict=False):
    figure.text(0.7, y, "●", fontsize=12, color=colour, va="center")
    figure.text(
      0.72,
      y,
      style.clipped(one.operation, 36),
      fontsize=10,
      weight="bold",
      va="center",
    )
    for line in (
      f"{words.estimate(one.microseconds)} µs,"
      f" {words.share(one.share_of_roof)} of its roof ({one.roof})",
      f"{_work(one)}, {words.num_bytes(one.hbm_bytes)} of HBM",
      *(
        f"{sent.way}: {words.num_bytes(sent.sent_bytes)} sent,"
        f" {words.share(one.share_of_way(sent))} of its assumed rate"
        for sent in one.sendings
      ),
    ):
      y -= _LINE
      figure.text(0.72, y, line, fontsize=8.5, color="#555555", va="center")
    y -= _HEAD


def _work(one: Roofline) -> str:
  parts = (
    ("●", words.rate(one.matmul_flops, "FLOP"), one.matmul_flops),
    ("■", words.rate(one.vector_ops, "op"), one.vector_ops),
  )
  found = [f"{mark} {text}" for mark, text, work in parts if work]
  return " ".join(found) or "no arithmetic"
