"""Finds cores that together come back to a state they were in."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from coremesh.profile.core import Core
from coremesh.profile.log import Log
from coremesh.profile.servers import Servers

_MOST_SAMPLES = 500


class Samples:
  """States of cores and servers, and what led from one to its like.

  What follows a state does not depend on how it came about, so that all goes
  round in the same way until a core has no more repetitions. Times are whole
  numbers of ticks, so that equal states are equal.
  """

  def __init__(self, cores: Sequence[Core], servers: Servers, log: Log):
    self._cores = cores
    self._servers = servers
    self._log = log
    self._seen: dict[Any, tuple[int, int, list[int], list[Counter]]] = {}
    self._tries = 0

  def skip(self, now: int, which: int) -> bool:
    """Skips what is to come round again, if a core is about to start a copy."""
    if self._tries >= _MOST_SAMPLES or not self._cores[which].is_at_repetition:
      return False
    self._tries += 1
    states = tuple(core.state(now) for core in self._cores)
    free = tuple(max(0, s.free - now) for s in self._servers.all)
    key = (which, free, states)
    times = [core.times for core in self._cores]
    seen = self._seen.get(key)
    if seen is None:
      tallies = [core.tally.copy() for core in self._cores]
      self._seen[key] = (now, len(self._log.items), times, tallies)
      return False
    then, logged, before, tallies = seen
    moved = [a - b for a, b in zip(times, before, strict=True)]
    count = min(
      c.most_skips(m) for c, m in zip(self._cores, moved, strict=True)
    )
    if count < 1:
      return False
    for core, m, tally in zip(self._cores, moved, tallies, strict=True):
      core.skip(count, m, now - then, core.tally - tally)
    for server in self._servers.all:
      server.free += count * (now - then)
    self._log.repeat(logged, count, now - then)
    self._seen.clear()
    self._tries = 0
    return True
