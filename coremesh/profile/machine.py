"""One core that runs the scalar slots of its program."""

from typing import Any

from coremesh import errors
from coremesh.profile import affine, effects, translate, writer
from coremesh.profile.events import Rounds
from coremesh.profile.state import State
from coremesh.profile.values import Unknown, Word

# A loop whose end depends on data that is not given runs so often.
ASSUMED_TRIPS = 4
UNWRITTEN = "a register that nothing has written"
_MOST_ROUNDS = 5_000_000
# After so many rounds of a loop it may pay to skip some.
FIRST_TRY = 24


class Machine:
  """Registers, memory and the way of a core through its program.

  Attributes:
    effects: what it has done.
    pc: the bundle that comes next.
    cycle: bundles issued so far.
    table: of each stretch by its start: its function, its length, the bundle
      after it, where its branch goes, the bundle of that branch, and how often
      it was run.
    path: the stretches in the order in which they were run.
    visits: how often each loop was come back to.
    next_try: at which visit it may pay to skip rounds.
    is_proving: whether what is run must be the same whatever data say.
  """

  def __init__(self, code: translate.Code, done: effects.Effects):
    self.effects = done
    self.pc, self.cycle = code.start, 0
    self.table: dict[int, list[Any]] = {}
    self.path: list[int | Rounds] = []
    self.visits: dict[int, int] = {}
    self.next_try: dict[int, int] = {}
    self.is_proving = False
    self._code = code
    self._end = code.end
    self._decided: dict[int, int] = {}
    never = Unknown(UNWRITTEN)
    self._registers: list[Word] = [never] * writer.NUM_REGISTERS
    self._ids = [writer.NEVER] * writer.NUM_REGISTERS
    self._tokens: dict[str, Word] = {}

  @property
  def is_over(self) -> bool:
    """Whether the program has ended."""
    return self.pc >= self._end

  def advance(self, header: int | None = None, times: int = 0) -> bool:
    """Runs until a bundle was come to so often, or to the end.

    Without a header it also stops at the start of a loop that has run so often
    that it may pay to skip rounds of it.

    Returns:
      Whether the program goes on.
    """
    pc, cycle, end = self.pc, self.cycle, self._end
    table, visits, next_try = self.table, self.visits, self.next_try
    note_start = self.path.append
    while pc < end:
      entry = table.get(pc)
      if entry is None:
        entry = table[pc] = self._enter(pc)
      run, length, after, target, branch, _ = entry
      taken = run(cycle)
      entry[5] += 1
      note_start(pc)
      cycle += length
      start = pc
      if taken is False:
        pc = after
      elif taken is True:
        pc = target
      else:
        pc = target if self._decide(branch, target, taken) else after
      if header is not None:
        times -= pc == header
        if not times:
          break
      elif pc <= start:
        visits[pc] = count = visits.get(pc, 0) + 1
        if count >= next_try.get(pc, FIRST_TRY):
          break
        if count > _MOST_ROUNDS:
          raise self.endless(pc, f"has run {_MOST_ROUNDS:,} times")
    self.pc, self.cycle = pc, cycle
    return pc < end

  def endless(self, pc: int, how: str) -> errors.UnsupportedError:
    """The error of a loop without an end."""
    return errors.UnsupportedError(
      f"The loop at bundle {pc:#x}{self.effects.line(pc)} {how}. Loops that"
      " read semaphores until another core or device signals are not modelled."
    )

  def snapshot(self) -> State:
    """A copy of all that decides what is run."""
    return State(
      registers=list(self._registers),
      ids=list(self._ids),
      smem=dict(self.effects.smem),
      tokens=dict(self._tokens),
    )

  def restore(self, state: State) -> None:
    """Goes on from a state."""
    # Generated code holds on to these objects.
    self._registers[:] = state.registers
    self._ids[:] = state.ids
    for held, kept in (
      (self.effects.smem, state.smem),
      (self._tokens, state.tokens),
    ):
      held.clear()
      held.update(kept)

  def _enter(self, pc: int) -> list[Any]:
    stretch = self._code.stretch(pc)
    run = stretch.bind(
      R=self._registers,
      I=self._ids,
      S=self.effects.smem,
      D=self._tokens,
      H=self.effects,
    )
    length = stretch.end - stretch.start
    return [run, length, stretch.end, stretch.target, stretch.branch, 0]

  def _decide(self, bundle: int, target: int, unknown: Unknown) -> bool:
    """Whether a branch that depends on data is taken: an assumption."""
    if self.is_proving:
      raise affine._NotAffineError
    seen = self._decided[bundle] = self._decided.get(bundle, 0) + 1
    is_back = target <= bundle
    way = "taken" if is_back else "not taken"
    self.effects.assume(
      f"the branch at bundle {bundle:#x}{self.effects.line(bundle)} depends on"
      f" {unknown.cause}; assumed {way} {ASSUMED_TRIPS - 1} times of"
      f" {ASSUMED_TRIPS}"
    )
    is_over = seen % ASSUMED_TRIPS == 0
    return not is_over if is_back else is_over
