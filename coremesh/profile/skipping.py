"""Rounds of a loop that need not be run, because they are proven alike."""

from coremesh.profile import affine
from coremesh.profile.events import Event, Repeat, Rounds
from coremesh.profile.machine import FIRST_TRY, Machine
from coremesh.profile.state import State

# Rounds are skipped together: buffers that alternate take turns by 2 or by 3.
_ROUNDS = (6, 2)
_LEAST_SKIPPED = 64


class Skipper:
  """Skips rounds of a machine.

  Attributes:
    cycles: so many were not run one by one.
  """

  def __init__(self, machine: Machine):
    self.cycles = 0
    self._machine = machine
    self._tries: dict[int, int] = {}

  def try_here(self) -> None:
    """Runs a few rounds of a loop and skips those that are proven alike."""
    machine = self._machine
    header = machine.pc
    visits = machine.visits[header]
    tries = self._tries[header] = self._tries.get(header, 0) + 1
    rounds = _ROUNDS[tries % len(_ROUNDS)]
    before = machine.snapshot()
    if not machine.advance(header, rounds):
      return
    skipped = self._skip(header, rounds, before)
    pays = skipped * rounds >= _LEAST_SKIPPED
    machine.next_try[header] = visits + FIRST_TRY if pays else 2 * visits

  def _skip(self, header: int, times: int, before: State) -> int:
    """Skips what is proven to repeat the way from `before` to here.

    Returns:
      How often that way was skipped.
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
    return rounds.count - 1

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
