"""An operation's life cut into equal stretches: what is busy in each."""

from collections.abc import Mapping, Sequence

import numpy as np

from coremesh.profile import units
from coremesh.profile.activity import CoreActivity
from coremesh.profile.events import EventKind

COPIES: Mapping[str, EventKind] = {
  "DMA read": "read",
  "DMA write": "write",
  "DMA send": "send",
}
# What fills a core's time; the rest of its bundles wait for each other.
NAMES = (*(u for u in units.UNITS if u != "idle"), "waiting", *COPIES)


def edges(activities: Sequence[CoreActivity], count: int) -> np.ndarray:
  """Cycles at which stretches begin and end.

  Args:
    activities: of all cores of the operation.
    count: of stretches.

  Returns:
    [count + 1] float64, from 0 to the end of the core that takes longest.
  """
  return np.linspace(0, max(1.0, *(a.cycles for a in activities)), count + 1)


def shares(
  activity: CoreActivity, between: np.ndarray
) -> Mapping[str, np.ndarray]:
  """The busy share of each of `NAMES` in each stretch.

  A "DMA" is busy while at least one of the core's copies is in flight; "send"
  is to another core or device.

  Args:
    activity: of one core.
    between: [n + 1] from `edges`.

  Returns:
    [n] float64 for each name, from 0 to 1. An instruction counts when it is
    issued, so that a short stretch may hold more than a unit works off in it;
    that is cut.
  """
  found = activity.shares(between)
  copies = {
    name: activity.spans(kind).share(between) for name, kind in COPIES.items()
  }
  return {n: np.clip({**found, **copies}[n], 0, 1) for n in NAMES}
