"""What each buffer takes, against what libtpu used and what a core has."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from coremesh.compiler.ledger import Entry, Ledger
from coremesh.explanation import memory, words
from coremesh.explanation.pictures import style

_ROW_INCHES = 0.27
_BETWEEN_INCHES = 0.75
_LABEL_INCHES = 3.6
_MOST_BUFFERS = 16
_MEMORIES = ("VMEM", "SMEM")
_COLOURS = {"VMEM": style.SKY, "SMEM": style.PURPLE}
# A limit further away than so many times the largest bar is told, not drawn.
_FAR = 1.6


def draw(ledgers: Sequence[Ledger]) -> Figure:
  """A panel for each kernel.

  Args:
    ledgers: of the kernels, at least one.
  """
  rows = [_rows(ledger) for ledger in ledgers]
  inches = [len(r) * _ROW_INCHES for r in rows]
  height = style.HEAD_INCHES + sum(inches) + _BETWEEN_INCHES * len(rows)
  figure = style.figure(
    height,
    "Memory of each core",
    "Predicted for each buffer, with padding and copies, and what libtpu used",
  )
  top = height - style.HEAD_INCHES
  for ledger, found, panel in zip(ledgers, rows, inches, strict=True):
    top -= 0.3
    axes = figure.add_axes(
      (
        _LABEL_INCHES / style.WIDTH_INCHES,
        (top - panel) / height,
        1 - (_LABEL_INCHES + 1.3) / style.WIDTH_INCHES,
        panel / height,
      )
    )
    _panel(axes, ledger, found)
    top -= panel + _BETWEEN_INCHES - 0.3
  return figure


def _rows(ledger: Ledger) -> list[tuple[str, int, str, str]]:
  """Label, bytes, colour and a note for each bar, from top to bottom."""
  found = [
    (
      _label(e),
      e.amount_per_core,
      style.LIGHT if memory.fate(e, ledger) else _COLOURS[e.memory],
      memory.fate(e, ledger),
    )
    for e in ledger.entries
    if e.memory in _MEMORIES
  ]
  if len(found) > _MOST_BUFFERS:
    found.sort(key=lambda row: -row[1])
    rest = found[_MOST_BUFFERS - 1 :]
    amount = sum(row[1] for row in rest)
    found = found[: _MOST_BUFFERS - 1]
    found.append((f"{len(rest)} smaller ones", amount, style.GREY, ""))
  for name in _MEMORIES:
    predicted, used = ledger.predicted(name), ledger.used(name)
    if name == "SMEM" and not predicted and not used:
      continue
    found.append((f"{name}, predicted in all", predicted, style.BLUE, ""))
    if used is not None:
      spilled = ledger.spilled_bytes if name == "VMEM" else 0
      note = f"{words.num_bytes(spilled)} spilled" if spilled else ""
      found.append((f"{name}, libtpu used", used, style.VERMILION, note))
  return found


def _label(entry: Entry) -> str:
  kind = f"{entry.dtype}{list(entry.shape)}" if entry.dtype else ""
  text = style.clipped(f"{words.buffer_name(entry.name)} {kind}", 42)
  return f"{text} x{entry.copies}" if entry.copies > 1 else text


def _panel(axes: Any, ledger: Ledger, rows: list) -> None:
  largest = max([1, *(amount for _, amount, _, _ in rows)])
  unit, scale = _unit(largest)
  limit = ledger.limit("VMEM")
  near = limit if limit is not None and limit <= _FAR * largest else None
  for y, (_, amount, colour, note) in enumerate(rows):
    axes.barh(y, amount / scale, height=0.72, color=colour, zorder=2)
    text = words.num_bytes(amount) + (f", {note}" if note else "")
    axes.annotate(
      text,
      (amount / scale, y),
      xytext=(5, 0),
      textcoords="offset points",
      va="center",
      fontsize=8.5,
      color=style.DARK,
      bbox=dict(facecolor="white", edgecolor="none", pad=0.8, alpha=0.8),
    )
  if near is not None:
    axes.axvline(near / scale, color=style.DARK, linewidth=1.5, zorder=3)
  axes.set_xlim(0, 1.12 * max(largest, near or 0) / scale)
  axes.set_ylim(len(rows) - 0.4, -0.6)
  axes.set_yticks(range(len(rows)), [r[0] for r in rows], fontsize=8.5)
  axes.set_title(
    f"{ledger.kernel}, each"
    f" {'vector subcore' if ledger.is_sparse else 'TensorCore'}"
    f" · {_limit(ledger, is_drawn=near is not None)}",
    loc="left",
    fontsize=10,
    weight="bold",
    x=-(_LABEL_INCHES - 0.15) / (style.WIDTH_INCHES - _LABEL_INCHES - 1.3),
  )
  axes.tick_params(axis="x", labelsize=8)
  axes.set_xlabel(unit, fontsize=8, loc="right", labelpad=1)
  style.plain(axes)


def _limit(ledger: Ledger, *, is_drawn: bool) -> str:
  limit = ledger.limit("VMEM")
  if limit is None:
    return "its limit of VMEM is not known"
  amount = memory.held(ledger, "VMEM")
  line = ", the black line" if is_drawn else ""
  return (
    f"{100 * amount / limit:.2g} % of the {words.num_bytes(limit)} of VMEM it"
    f" may use{line}"
  )


def _unit(largest: int) -> tuple[str, int]:
  for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
    if largest >= scale:
      return unit, scale
  return "bytes", 1
