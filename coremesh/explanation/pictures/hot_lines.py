"""The lines a kernel spends its time on, with their bundles."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from coremesh.explanation import page, words
from coremesh.explanation.hot_lines import HotBundle, HotLine
from coremesh.explanation.pictures import style

_LINE_INCHES = 0.19
_MOST_BUNDLES = 4
_MOST_CHARACTERS = 92


def draw(name: str, lines: Sequence[HotLine]) -> Figure:
  """A block for each line: its share of the time, and its hottest bundles.

  Args:
    name: of the operation.
    lines: of its slowest core, the hottest first.
  """
  inches = [
    _LINE_INCHES * (3 + min(len(line.bundles), _MOST_BUNDLES)) for line in lines
  ]
  height = style.HEAD_INCHES + sum(inches) + 0.1
  figure = style.figure(
    height,
    f"{name}: hottest lines, on its slowest core",
    "Part of the core's cycles, predicted, orange: waiting; a bundle of several"
    " lines counts in part for each. Bundle, times issued, instructions",
  )
  longest = max(line.share for line in lines) or 1.0
  top = height - style.HEAD_INCHES
  for line, block in zip(lines, inches, strict=True):
    _bar(figure, line, longest, (top, height))
    _text(figure, line, (top, height))
    top -= block
  return figure


def _bar(
  figure: Figure, line: HotLine, longest: float, place: tuple[float, float]
) -> None:
  top, height = place
  tall = 2.2 * _LINE_INCHES
  waiting = line.share * line.waiting_cycles / max(1.0, line.cycles)
  for share, colour in ((line.share, style.WORKING), (waiting, style.WAITING)):
    figure.add_artist(
      Rectangle(
        (0.012, (top - tall) / height),
        0.2 * share / longest,
        tall / height,
        facecolor=colour,
      )
    )
  details = [f"{line.share:.1%} of cycles"]
  if line.limit != "waiting":
    details.append(line.limit)
  if waiting:
    details.append(f"{waiting:.1%} waiting")
  figure.text(
    0.012,
    (top - tall - 0.13) / height,
    ", ".join(details),
    fontsize=8.5,
    color=style.DARK,
    va="center",
  )


def _text(figure: Figure, line: HotLine, place: tuple[float, float]) -> None:
  top, height = place
  y = top - 0.12
  title = page.where(line.source)
  figure.text(
    0.225, y / height, title, fontsize=9.5, weight="bold", va="center"
  )
  y -= _LINE_INCHES
  if line.code:
    code = style.clipped(line.code, _MOST_CHARACTERS)
    _mono(figure, y / height, code, style.BLUE)
    y -= _LINE_INCHES
  for bundle in line.bundles[:_MOST_BUNDLES]:
    text = style.clipped(_instructions(bundle), _MOST_CHARACTERS - 18)
    row = f"{bundle.index:#7x} {bundle.executions:>8,}x  {text}"
    _mono(figure, y / height, row, style.DARK)
    y -= _LINE_INCHES


def _mono(figure: Figure, y: float, text: str, colour: str) -> None:
  figure.text(
    0.225,
    y,
    text,
    fontsize=8.5,
    family="monospace",
    color=colour,
    va="center",
    parse_math=False,
  )


def _instructions(bundle: HotBundle) -> str:
  waits = f" (waits {bundle.waiting_cycles:,.0f} cycles)"
  text = words.counted(bundle.opcodes)
  return text + (waits if bundle.waiting_cycles else "")
