"""Operations under the roofs of their device."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
import numpy as np

from coremesh.explanation import words
from coremesh.explanation.pictures import style
from coremesh.explanation.roofline import Roofline

_COLOURS = (
  *(style.VERMILION, style.BLUE, style.GREEN, style.PURPLE, style.ORANGE),
  *(style.SKY, style.DARK, style.GREY),
)
_MOST = len(_COLOURS)


def draw(rooflines: Mapping[str, Roofline], chip: str) -> Figure:
  """Work for each byte against work for each second.

  A circle is the work of the MXUs, a square that of the VPUs; the bar through
  it is the range of the predicted time.

  Args:
    rooflines: of operations by name; those that take longest are shown.
    chip: its name.
  """
  ordered = sorted(rooflines.values(), key=lambda r: -r.microseconds.central)
  shown = [r for r in ordered if r.hbm_bytes][:_MOST]
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
  _legend(figure, shown)
  axes.set_xlabel("work for each byte of HBM: FLOP or vector op / byte")
  axes.set_ylabel("work for each second: FLOP/s or vector op/s")
  axes.grid(which="major", color=style.LIGHT, linewidth=0.7)
  axes.set_axisbelow(True)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  return figure


def _points(one: Roofline) -> list[tuple[float, float, str]]:
  """Work for each byte, work, and marker, for what there is."""
  found = [(one.matmul_flops, "o"), (one.vector_ops, "s")]
  return [(w / one.hbm_bytes, w, m) for w, m in found if w]


def _roofs(axes: Any, one: Roofline, shown: Sequence[Roofline]) -> None:
  points = [(r, x, work) for r in shown for x, work, _ in _points(r)]
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
    )
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.set_xlim(lowest, highest)
  axes.set_ylim(min([hbm * lowest, *slowest]) / 2, 4 * peaks[0][0])
  # Above the slope, where no operation can be.
  x = np.sqrt(peaks[0][0] * peaks[1][0]) / hbm
  axes.annotate(
    f"HBM: {words.rate(hbm, 'B/s')}",
    (x, hbm * x),
    xytext=(-8, 2),
    textcoords="offset points",
    ha="right",
    fontsize=9,
    color=style.DARK,
  )


def _point(
  axes: Any, one: Roofline, x: float, work: float, *, marker: str, colour: str
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
    markersize=7,
    capsize=5,
    elinewidth=1.4,
    zorder=5,
  )


def _legend(figure: Figure, shown: Sequence[Roofline]) -> None:
  """Each operation in words, from top to bottom."""
  y = 0.83
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
      f" {one.share_of_roof:.0%} of its roof ({one.roof})",
      f"{_work(one)} for {words.num_bytes(one.hbm_bytes)}",
    ):
      y -= 0.032
      figure.text(0.72, y, line, fontsize=8.5, color="#555555", va="center")
    y -= 0.042


def _work(one: Roofline) -> str:
  parts = (
    ("●", words.rate(one.matmul_flops, "FLOP"), one.matmul_flops),
    ("■", words.rate(one.vector_ops, "op"), one.vector_ops),
  )
  found = [f"{mark} {text}" for mark, text, work in parts if work]
  return " ".join(found) or "copies only,"
