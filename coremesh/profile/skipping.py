"""Rounds of a loop that need not be run, because they are proven alike."""

import dataclasses

from coremesh.profile import affine
from coremesh.profile.events import Event, Repeat, Rounds
from coremesh.profile.machine import FIRST_TRY, Machine
from coremesh.profile.state import State

# Rounds are skipped together: buffers that alternate take turns by 2 or by 3.
_ROUNDS = (6, 2)
_LEAST_SKIPPED = 24
# So many rounds after some were skipped, what ended that is over.
_AFTER_SKIPPED = 8
# A row of a grid may end where its like ends so many rows later.
_MOST_LAG = 6


@dataclasses.dataclass(kw_only=True)
class _Loop:
  """How a loop was run so far.

  Attributes:
    tries: how often rounds of it were to be skipped.
    gap: rounds to the next try, should this one fail.
    passed: rounds of it that were run in tries, or skipped.
    ends: after how many rounds in all some were skipped, of late.
    stretches: that a round of it takes.
    next_long: at which visit it may pay to skip many rounds together.
  """

  tries: int = 0
  gap: int = FIRST_TRY
  passed: int = 0
  ends: list[int] = dataclasses.field(default_factory=list)
  stretches: float = 1.0
  next_long: int = 0

  @property
  def period(self) -> int:
    """Rounds from one end of what can be skipped to its like; 0 if not known.

    Such are the rows of a grid whose axes libtpu makes one loop of.
    """
    ends = self.ends
    for lag in range(1, _MOST_LAG + 1):
      found = {a - b for a, b in zip(ends[lag:], ends, strict=False)}
      if len(ends) > 2 * lag and len(found) == 1:
        return found.pop()
    return 0


class Skipper:
  """Skips rounds of a machine.

  Attributes:
    cycles: so many were not run one by one.
  """

  def __init__(self, machine: Machine):
    self.cycles = 0
    self._machine = machine
    self._loops: dict[int, _Loop] = {}

  def try_here(self) -> None:
    """Runs a few rounds of a loop and skips those that are proven alike."""
    machine = self._machine
    header, start = machine.pc, len(machine.path)
    visits = machine.visits[header]
    loop = self._loops.setdefault(header, _Loop())
    loop.tries += 1
    # It must not cost more than what was run before.
    long = loop.period if visits >= loop.next_long else 0
    long = long if long * loop.stretches <= start else 0
    rounds = long or _ROUNDS[loop.tries % len(_ROUNDS)]
    before = machine.snapshot()
    if not machine.advance(header, rounds):
      return
    loop.stretches = (len(machine.path) - start) / rounds
    times = self._skip(header, rounds, before)
    loop.passed += rounds * (1 + times)
    pays = (times - 1) * rounds >= _LEAST_SKIPPED
    loop.gap = FIRST_TRY if pays else 2 * loop.gap
    machine.next_try[header] = visits + (_AFTER_SKIPPED if pays else loop.gap)
    if long:
      loop.ends.clear()
      loop.next_long = 0 if pays else 2 * visits
    elif pays:
      loop.ends = [*loop.ends[-2 * _MOST_LAG :], visits + loop.passed]

  def _skip(self, header: int, times: int, before: State) -> int:
    """Skips what is proven to repeat the way from `before` to here.

    Returns:
      How often that way was taken without running it each time; 0 if it is not
      proven to repeat.
    """
    machine = self._machine
    events, path = machine.effects.events, machine.path
    state = machine.snapshot()
    counts = {pc: entry[5] for pc, entry in machine.table.items()}
    cycle, num_events, num_starts = machine.cycle, len(events), len(path)
    rounds = affine.Rounds()
    try:
      slopes = before.slopes_to(state)
      machine.restore(state.moving(slopes, rounds))
      machine.is_proving = True
      is_there = machine.advance(header, times)
      if not is_there or not state.moving(slopes, rounds).leads_to(
        machine.snapshot()
      ):
        raise affine._NotAffineError
    except affine._NotAffineError:
      machine.restore(state)
      del events[num_events:]
      del path[num_starts:]
      for pc, entry in machine.table.items():
        entry[5] = counts.get(pc, 0)
      machine.pc, machine.cycle = header, cycle
      return 0
    finally:
      machine.is_proving = False
    if rounds.count == affine.MANY:
      raise machine.endless(header, "has no end")
    machine.restore(state.after(slopes, rounds.count))
    self._repeat(rounds.count, num_events, cycle, counts)
    starts = tuple(p for p in path[num_starts:] if isinstance(p, int))
    path[num_starts:] = [Rounds(starts, rounds.count)]
    return rounds.count

  def _repeat(
    self, times: int, num_events: int, cycle: int, counts: dict[int, int]
  ) -> None:
    """Counts what was run since then `times` times instead of once."""
    machine = self._machine
    period = machine.cycle - cycle
    events = machine.effects.events[num_events:]
    if events:
      relative = tuple(
        e._replace(cycle=e.cycle - cycle)
        for e in events
        if isinstance(e, Event)  # A proof starts no other, so that all are.
      )
      machine.effects.events[num_events:] = [
        Repeat(cycle, relative, times, period)
      ]
    for pc, entry in machine.table.items():
      entry[5] += (times - 1) * (entry[5] - counts.get(pc, 0))
    machine.cycle += (times - 1) * period
    self.cycles += (times - 1) * period
