"""The plot of benchmarks.kernels: each contender's time beside coremesh's."""

from collections.abc import Mapping, Sequence
import itertools
import pathlib
import textwrap
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

import coremesh as cm

type Row = Mapping[str, Any]
"""A contender's work on a chip: its "microseconds", or its "failure"."""

_OURS = "coremesh"
_LINE = 140  # characters that fit below the plot


def save(chip: cm.Chip, rows: Sequence[Row], path: pathlib.Path) -> None:
  """Draws a line for each work, and names below what has no point on it."""
  ours = _times_of_ours(rows)
  timed = [r for r in rows if "microseconds" in r and r["work"] in ours]
  names = list(ours)
  below = [
    line for text in left_out(rows) for line in textwrap.wrap(text, _LINE)
  ]
  figure, axes = plt.subplots(
    figsize=(10, 1.5 + 0.28 * len(names) + 0.2 * len(below)),
    layout="constrained",
  )
  markers = itertools.cycle("|osD^v<>PX*hd")
  for contender in dict.fromkeys(r["contender"] for r in timed):
    own = [r for r in timed if r["contender"] == contender]
    axes.plot(
      [r["microseconds"] / ours[r["work"]] for r in own],
      [names.index(r["work"]) for r in own],
      next(markers),
      label=contender,
      markersize=10 if contender == _OURS else 6,
      alpha=0.8,
    )
  axes.set_yticks(range(len(names)), [f"{n}  {ours[n]:,.1f} µs" for n in names])
  axes.margins(y=1 / (1 + len(names)))
  axes.invert_yaxis()
  axes.grid(axis="y", alpha=0.3)
  axes.set_xscale("log")
  axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.xaxis.set_major_formatter("{x:g}")
  axes.xaxis.set_minor_locator(NullLocator())
  axes.set_xlabel("predicted time / that of coremesh (right: slower)")
  axes.set_title(f"Kernels on {chip.name}: predicted from machine code")
  if timed:
    axes.legend()
  figure.supxlabel("\n".join(below), fontsize="small", x=0.01, ha="left")
  figure.savefig(path, dpi=80)
  plt.close(figure)


def left_out(rows: Sequence[Row]) -> list[str]:
  """What the plot has no point for, in words; [] if it shows all.

  Args:
    rows: of one chip.
  """
  ours = _times_of_ours(rows)
  works = dict.fromkeys(r["work"] for r in rows if r["work"] not in ours)
  said = []
  if works:
    said.append(f"Left out, as {_OURS} has no time: {'; '.join(works)}.")
  refused: dict[str, list[str]] = {}
  for row in rows:
    if "failure" in row and row["work"] in ours:
      refused.setdefault(row["contender"], []).append(row["work"])
  for contender, missing in refused.items():
    said.append(f"{contender} has no time for {'; '.join(missing)}.")
  return said


def _times_of_ours(rows: Sequence[Row]) -> dict[str, float]:
  return {
    r["work"]: r["microseconds"]
    for r in rows
    if r["contender"] == _OURS and "microseconds" in r
  }
