"""Cores that do the same at the same times, shown as one: subcores mostly."""

from collections.abc import Iterable, Sequence
import dataclasses
from typing import Any

from coremesh.profile.activity import CoreActivity
from coremesh.profile.log import Again, Span
from coremesh.profile.prediction import CorePrediction


def groups(
  activities: Iterable[CoreActivity],
) -> list[tuple[CoreActivity, ...]]:
  """Activities that differ in nothing but the core, in order."""
  found: dict[Any, list[CoreActivity]] = {}
  for activity in activities:
    items = tuple(map(_without_core, activity.log.items))
    key = (activity.cycles, activity.trace.path, items)
    found.setdefault(key, []).append(activity)
  return [tuple(group) for group in found.values()]


def _without_core(item: Span | Again) -> Any:
  if isinstance(item, Span):
    return item[1:]
  return tuple(span[1:] for span in item.spans), item.times, item.period


def predictions(
  cores: Iterable[CorePrediction],
) -> list[tuple[CorePrediction, ...]]:
  """Predictions that differ in nothing but the core, in order."""
  found: list[list[CorePrediction]] = []
  for core in cores:
    same = [
      g for g in found if dataclasses.replace(g[0], core=core.core) == core
    ]
    if same:
      same[0].append(core)
    else:
      found.append([core])
  return [tuple(group) for group in found]


def name(cores: Sequence[CoreActivity | CorePrediction]) -> str:
  """The cores of a group; see `numbered`."""
  return numbered([one.core for one in cores])


def numbered(numbers: Iterable[int]) -> str:
  """Numbers in words, "0..31" where they follow each other."""
  parts: list[list[int]] = []
  for number in numbers:
    if parts and parts[-1][-1] == number - 1:
      parts[-1].append(number)
    else:
      parts.append([number])
  return ", ".join(
    str(p[0]) if len(p) == 1 else f"{p[0]}..{p[-1]}" for p in parts
  )


def shown(
  found: Sequence[tuple[CoreActivity, ...]], most: int
) -> list[tuple[CoreActivity, ...]]:
  """All groups; if there are too many, from the fastest to the slowest.

  Args:
    found: from `groups`.
    most: how many to show, at least 2.
  """
  if len(found) <= most:
    return list(found)
  ordered = sorted(found, key=lambda group: group[0].cycles)
  last = len(ordered) - 1
  return [ordered[i * last // (most - 1)] for i in range(most)]
