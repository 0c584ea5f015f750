"""Which unit is busy when, over the life of a kernel."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
import numpy as np

from coremesh.explanation import alike, life, page
from coremesh.explanation.pictures import style
from coremesh.profile.activity import CoreActivity
from coremesh.profile.prediction import OperationPrediction

_NUM_STRETCHES = 360
_ROW_INCHES = 0.36
_FOOT_INCHES = 0.6
_LEAST = 0.0005


def draw(
  operation: OperationPrediction, activities: Sequence[CoreActivity]
) -> Figure:
  """A row for each unit of each core; its height is the share that is busy.

  Args:
    operation: a kernel.
    activities: of its cores.
  """
  edges = life.edges(activities, _NUM_STRETCHES)
  found = alike.groups(activities)
  groups = alike.shown(found, style.MOST_CORES)
  shares = [life.shares(group[0], edges) for group in groups]
  names = [n for n in life.NAMES if any(s[n].mean() > _LEAST for s in shares)]
  idle = [n for n in life.NAMES if n not in names]
  panel = _ROW_INCHES * max(1, len(names))
  height = style.HEAD_INCHES + len(shares) * (panel + 0.35) + _FOOT_INCHES
  never = f"; never busy: {', '.join(idle)}" if idle else ""
  figure = style.figure(
    height,
    f"{operation.label}: what is busy over its life",
    f"Predicted, {page.time(operation, edges[-1])}; full height is"
    f" busy all the time{never}{style.of_groups(groups, found)}",
  )
  scale = page.cycle_us(operation)
  top = height - style.HEAD_INCHES
  for group, share in zip(groups, shares, strict=True):
    top -= 0.3
    axes = figure.add_axes((0.1, (top - panel) / height, 0.82, panel / height))
    _panel(axes, edges * scale, [(n, share[n]) for n in names])
    axes.set_title(
      f"core {alike.name(group)}", loc="left", fontsize=10, weight="bold"
    )
    is_last = group is groups[-1]
    axes.tick_params(axis="x", labelbottom=is_last, labelsize=8.5)
    if is_last:
      axes.set_xlabel("predicted time, µs", fontsize=9)
    top -= panel + 0.05
  return figure


def _panel(axes: Any, edges: np.ndarray, rows: list) -> None:
  for y, (name, share) in enumerate(rows):
    base = len(rows) - 1 - y
    axes.axhline(base, color=style.LIGHT, linewidth=0.6, zorder=1)
    axes.stairs(
      base + 0.88 * _visible(share),
      edges,
      baseline=base,
      fill=True,
      color=style.UNITS[name],
      snap=False,  # Else rows of equal height differ by a pixel.
      zorder=2,
    )
    axes.text(
      1.008,
      (base + 0.4) / len(rows),
      f"{share.mean():.1%}",
      transform=axes.transAxes,
      fontsize=8.5,
      va="center",
      color=style.DARK,
    )
  axes.set_ylim(0, max(1, len(rows)))
  axes.set_xlim(edges[0], edges[-1])
  places = [len(rows) - 1 - y + 0.4 for y in range(len(rows))]
  axes.set_yticks(places, [name for name, _ in rows], fontsize=9)
  style.plain(axes)


def _visible(share: np.ndarray) -> np.ndarray:
  """The share, at least a hairline where it is not 0."""
  return np.where(share > _LEAST, np.maximum(share, 0.03), 0)
