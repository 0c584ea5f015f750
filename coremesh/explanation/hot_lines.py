"""Which lines of the program an operation spends its time on."""

from collections import Counter, defaultdict
from collections.abc import Sequence
import dataclasses
import linecache

import numpy as np

from coremesh.profile import units
from coremesh.profile.activity import CoreActivity
from coremesh.profile.bundles import Bundle, Program

NO_LINE = ""
_MOST_LINES = 8
_MOST_BUNDLES = 6
_MOST_RANGES = 4
_LEAST_SHARE = 0.0005


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HotBundle:
  """One bundle.

  Attributes:
    index: which.
    executions: how often it is issued.
    waiting_cycles: spent in it beyond its own cycle.
    opcodes: of its instructions.
  """

  index: int
  executions: int
  waiting_cycles: float
  opcodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HotLine:
  """A line of the program on the slowest core of an operation.

  A bundle with instructions of several lines counts for each of them in part.

  Attributes:
    source: "file:line"; "" for what the compiler names no line of, such as the
      waits of a pipeline and empty bundles.
    code: the line itself; "" if its file is not here.
    cycles: issued and waited.
    waiting_cycles: of them, waiting for copies.
    share: of the cycles of the core.
    limit: what most of its cycles keep busy.
    ranges: of its bundles, first and last, those with most cycles first.
    bundles: those with most cycles.
  """

  source: str
  code: str
  cycles: float
  waiting_cycles: float
  share: float
  limit: str
  ranges: tuple[tuple[int, int], ...]
  bundles: tuple[HotBundle, ...]


def of_core(program: Program, activity: CoreActivity) -> tuple[HotLine, ...]:
  """The lines a core spends most cycles on, at most eight.

  Args:
    program: the machine code of the operation.
    activity: of its slowest core.
  """
  executions = activity.trace.executions(len(program.bundles))
  waiting = _waiting(activity, len(program.bundles))
  cycles = executions + waiting
  parts: dict[str, Counter[int]] = defaultdict(Counter)
  for bundle in program.bundles:
    if cycles[bundle.index]:
      lines = _lines(bundle)
      for line in lines:
        parts[line][bundle.index] += cycles[bundle.index] / len(lines)
  found = []
  for source, by_bundle in parts.items():
    indices = np.array(sorted(by_bundle))
    amount = float(sum(by_bundle.values()))
    weight = np.array([by_bundle[i] for i in indices]) / cycles[indices]
    hottest = sorted(by_bundle, key=lambda i: (-by_bundle[i], i))
    waited = float(waiting[indices] @ weight)
    found.append(
      HotLine(
        source=source,
        code=_code(source),
        cycles=amount,
        waiting_cycles=waited,
        share=amount / max(1.0, activity.cycles),
        limit=_limit(
          activity.busy, indices, executions[indices] * weight, waited
        ),
        ranges=_ranges(indices, by_bundle),
        bundles=tuple(
          HotBundle(
            index=int(i),
            executions=int(executions[i]),
            waiting_cycles=float(waiting[i]),
            opcodes=tuple(s.opcode for s in program.bundles[i].slots),
          )
          for i in hottest[:_MOST_BUNDLES]
        ),
      )
    )
  found = [line for line in found if line.share >= _LEAST_SHARE]
  return tuple(sorted(found, key=lambda h: -h.cycles)[:_MOST_LINES])


def _waiting(activity: CoreActivity, num_bundles: int) -> np.ndarray:
  waits = activity.spans("wait", "delay")
  waited = waits.end_cycles - waits.start_cycles
  return np.bincount(waits.bundles, waited, minlength=num_bundles)


def _lines(bundle: Bundle) -> list[str]:
  found = dict.fromkeys(s.source for s in bundle.slots if s.source)
  return list(found) or [NO_LINE]


def _limit(
  busy: units.Busy, indices: np.ndarray, times: np.ndarray, waited: float
) -> str:
  held = {u: float(a[indices] @ times) for u, a in busy.by_unit.items()}
  held["waiting"] = waited
  return max(held, key=lambda unit: held[unit])


def _ranges(
  indices: Sequence[int] | np.ndarray, cycles: Counter[int]
) -> tuple[tuple[int, int], ...]:
  """First and last of bundles that follow each other, the hottest first."""
  split = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
  split.sort(key=lambda part: -sum(cycles[i] for i in part))
  return tuple((int(p[0]), int(p[-1])) for p in split[:_MOST_RANGES])


def _code(source: str) -> str:
  file, _, line = source.rpartition(":")
  return linecache.getline(file, int(line)).strip() if file else ""
