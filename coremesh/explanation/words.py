"""Numbers as people read them."""

from collections import Counter
from collections.abc import Iterable, Sequence
import re

from coremesh.profile.prediction import Estimate

_BLOCKS = " ▁▂▃▄▅▆▇█"
DROPPED = (
  "Not in the compiled program, as no result needs it or another call is the"
  " same"
)
_PREFIXES = ("", "k", "M", "G", "T", "P")


def short(number: float) -> str:
  """Four digits, more only before the point."""
  return f"{number:,.0f}" if abs(number) >= 10000 else f"{number:.4g}"


def estimate(found: Estimate) -> str:
  """The central value and the range, "2.5 (1.6..4.1)"."""
  return f"{short(found.central)} ({short(found.low)}..{short(found.high)})"


def num_bytes(number: float) -> str:
  """Bytes in the largest unit of which there is one, "1.5 MiB"."""
  units = ("B", "KiB", "MiB", "GiB", "TiB")
  for unit in units:
    if abs(number) < 1024 or unit == units[-1]:
      return f"{number:.4g} {unit}"
    number /= 1024
  raise AssertionError


def rate(number: float, unit: str) -> str:
  """A rate with a prefix of 1000, "229.5 TFLOP/s"."""
  for prefix in _PREFIXES:
    if abs(number) < 1000 or prefix == _PREFIXES[-1]:
      return f"{number:.3g} {prefix}{unit}"
    number /= 1000
  raise AssertionError


def share(part: float) -> str:
  """A part of 1 in percent, with two digits where it is small: "0.76%"."""
  return f"{part:.0%}" if part >= 0.1 else f"{100 * part:.2g}%"


def blocks(shares: Sequence[float]) -> str:
  """A line of bars, one for each share from 0 to 1; all that is not 0 shows."""
  steps = len(_BLOCKS) - 1
  heights = [min(steps, max(round(s * steps), int(s > 0.005))) for s in shares]
  return "".join(_BLOCKS[height] for height in heights)


def counted(opcodes: Iterable[str]) -> str:
  """Instructions of a bundle, equal ones as one: "2x vld; vst"."""
  count = Counter(opcodes)
  parts = [f"{n}x {op}" if n > 1 else op for op, n in count.items()]
  return "; ".join(parts) or "empty"


def buffer_name(name: str) -> str:
  """The name of a kernel's argument, "mine" for "kwargs['mine']"."""
  return re.sub(r"^kwargs\['(\w+)'\]", r"\1", name)
