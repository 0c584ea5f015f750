"""What the pictures of an explanation have in common."""

from collections.abc import Sized
import io
import textwrap
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WIDTH_INCHES = 12.0
DPI = 120
HEAD_INCHES = 0.75

# Of Okabe and Ito: told apart by who sees no red or green.
BLUE, SKY, GREEN = "#0072b2", "#56b4e9", "#009e73"
ORANGE, VERMILION, PURPLE = "#e69f00", "#d55e00", "#cc79a7"
DARK, GREY, LIGHT = "#333333", "#8c8c8c", "#e6e6e6"

UNITS = {
  "MXU": BLUE,
  "VPU": GREEN,
  "XLU": PURPLE,
  "EUP": VERMILION,
  "load": SKY,
  "store": "#3d6f8f",
  "scalar": GREY,
  "waiting": ORANGE,
  "DMA read": "#5f8a3c",
  "DMA write": "#8a5f9e",
  "DMA send": "#a6761d",
}
WORKING, WAITING = BLUE, ORANGE

# Cores that do the same are drawn once, and no more than these that differ.
MOST_CORES = 3


def figure(height_inches: float, title: str, below: str = "") -> Figure:
  """An empty picture with a title; `HEAD_INCHES` of its height are taken.

  Args:
    height_inches: of the whole.
    title: one line.
    below: what is smaller, one line.
  """
  made = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DPI)
  top = 1 - 0.3 / height_inches
  made.text(0.012, top, title, fontsize=13, weight="bold", color=DARK)
  made.text(
    0.012, 1 - 0.54 / height_inches, below, fontsize=9.5, color="#555555"
  )
  return made


def png(made: Figure) -> bytes:
  """The picture as a file."""
  out = io.BytesIO()
  FigureCanvasAgg(made).print_png(out)
  return out.getvalue()


def plain(axes: Any, *, grid: str = "x") -> None:
  """Only what is needed of the frame."""
  for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
  axes.grid(axis=grid, color=LIGHT, linewidth=0.6, zorder=0)
  axes.set_axisbelow(True)
  axes.tick_params(axis="y", length=0)


def clipped(text: str, most: int) -> str:
  """The text, its end left out if it is longer."""
  return textwrap.shorten(text, most, placeholder="…") if text else ""


def of_groups(drawn: Sized, groups: Sized) -> str:
  """What is said where not all cores that differ are drawn."""
  if len(drawn) == len(groups):
    return ""
  return f"; {len(drawn)} of {len(groups)} cores that differ are drawn"
