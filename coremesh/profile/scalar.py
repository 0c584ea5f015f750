"""Runs the scalar slots of machine code: what is issued, when, how often.

Time here is that of bundles alone; waiting for DMAs comes later, because what
is issued does not depend on it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from coremesh import errors
from coremesh.profile import affine, layout, translate, values
from coremesh.profile.bundles import Program
from coremesh.profile.events import (
  GRANULE_BYTES,
  Event,
  EventKind,
  Repeat,
  Rounds,
  Run,
  Trace,
)
from coremesh.profile.state import State
from coremesh.profile.values import Unknown, Word

_WORDS_PER_GRANULE = GRANULE_BYTES // 4
# What a copy that signals nobody but its receiver names as its other semaphore.
_NO_FLAG = 131072

# A loop whose end depends on data that is not given runs so often.
ASSUMED_TRIPS = 4
_MOST_ROUNDS = 5_000_000

# Rounds are skipped together: buffers that alternate take turns by 2 or by 3.
_ROUNDS = (6, 2)
_FIRST_TRY = 24
_LEAST_SKIPPED = 64


def trace(
  program: Program,
  *,
  core: int,
  delay_slots: int,
  operands: Mapping[int, np.ndarray] | None = None,
  hbm_unit_bytes: int = 32,
) -> Trace:
  """Runs the scalar slots of a program on one core.

  Args:
    program: the machine code.
    core: its number, which the program may read.
    delay_slots: bundles after a branch that are issued before it is taken.
    operands: words of integer operands by their number, for those the program
      may read into SMEM.
    hbm_unit_bytes: what an HBM pointer counts.

  Raises:
    UnsupportedError: the program holds something that is not modelled, does
      not end, or is not as this reader takes it.
  """
  return _Core(
    program, core, delay_slots, dict(operands or {}), hbm_unit_bytes
  ).run()


class _Core:
  """The state of a core; generated code calls the methods without "_"."""

  def __init__(
    self,
    program: Program,
    core: int,
    delay_slots: int,
    operands: dict[int, np.ndarray],
    hbm_unit_bytes: int,
  ):
    self.core = core
    self._bundles = program.bundles
    self._delay_slots = delay_slots
    self._data = operands
    self._bases = layout.bases(program)
    self._spaces = layout.spaces(program)
    self._places = layout.places(program, hbm_unit_bytes)
    self._leaders = {s.target for s in program.slots if s.target is not None}
    self._events: list[Event | Repeat] = []
    self._path: list[int | Rounds] = []
    self._assumed: dict[str, None] = {}
    self._decided: dict[int, int] = {}
    never = Unknown("a register that nothing has written")
    self._registers: list[Word] = [never] * translate.NUM_REGISTERS
    self._ids = [translate.NEVER] * translate.NUM_REGISTERS
    self._smem: dict[Any, Word] = {}
    self._tokens: dict[str, Word] = {}
    self._table: dict[int, list[Any]] = {}
    self._pc = self._cycle = self._skipped = 0
    self._visits: dict[int, int] = {}
    self._next_try: dict[int, int] = {}
    self._tries: dict[int, int] = {}
    self._is_proving = False

  def run(self) -> Trace:
    """Runs to the end."""
    end = len(self._bundles)
    while self._pc < end:
      self._advance(None, 0)
      if self._pc < end:
        self._try_to_skip(self._pc)
    return Trace(
      core=self.core,
      cycles=self._cycle,
      runs=tuple(
        Run(start=start, end=start + entry[1], count=entry[5])
        for start, entry in sorted(self._table.items())
      ),
      events=tuple(self._events),
      assumed=tuple(self._assumed),
      skipped=self._skipped,
      path=tuple(self._path),
    )

  def _advance(self, header: int | None, times: int) -> bool:
    """Runs until a bundle was come to so often, or to the end.

    Without a header it also stops at the start of a loop that has run so often
    that it may pay to skip rounds of it.
    """
    pc, cycle, end = self._pc, self._cycle, len(self._bundles)
    table, visits, next_try = self._table, self._visits, self._next_try
    note_start = self._path.append
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
        if count >= next_try.get(pc, _FIRST_TRY):
          break
        if count > _MOST_ROUNDS:
          raise self._endless(pc, f"has run {_MOST_ROUNDS:,} times")
    self._pc, self._cycle = pc, cycle
    return pc < end

  def _endless(self, pc: int, how: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(
      f"The loop at bundle {pc:#x}{self._line(pc)} {how}. Loops that wait for"
      " another core or device are not modelled."
    )

  # --- rounds that need not be run ---

  def _try_to_skip(self, header: int) -> None:
    """Runs a few rounds of a loop and skips those that are proven alike."""
    visits = self._visits[header]
    tries = self._tries[header] = self._tries.get(header, 0) + 1
    rounds = _ROUNDS[tries % len(_ROUNDS)]
    before = self._snapshot()
    if not self._advance(header, rounds):
      return
    skipped = self._skip(header, rounds, before)
    pays = skipped * rounds >= _LEAST_SKIPPED
    self._next_try[header] = visits + _FIRST_TRY if pays else 2 * visits

  def _snapshot(self) -> State:
    return State(
      registers=list(self._registers),
      ids=list(self._ids),
      smem=dict(self._smem),
      tokens=dict(self._tokens),
    )

  def _restore(self, state: State) -> None:
    # Generated code holds on to these objects.
    self._registers[:] = state.registers
    self._ids[:] = state.ids
    for held, kept in (
      (self._smem, state.smem),
      (self._tokens, state.tokens),
    ):
      held.clear()
      held.update(kept)

  def _skip(self, header: int, times: int, before: State) -> int:
    """Skips what is proven to repeat the way from `before` to here.

    Returns:
      How often that way was skipped.
    """
    state = self._snapshot()
    counts = {pc: entry[5] for pc, entry in self._table.items()}
    cycle, num_events = self._cycle, len(self._events)
    num_starts = len(self._path)
    rounds = affine.Rounds()
    try:
      slopes = before.slopes_to(state)
      self._restore(state.moving(slopes, rounds))
      self._is_proving = True
      is_there = self._advance(header, times)
      if not is_there or not state.moving(slopes, rounds).leads_to(
        self._snapshot()
      ):
        raise affine._NotAffineError
    except affine._NotAffineError:
      self._restore(state)
      del self._events[num_events:]
      del self._path[num_starts:]
      for pc, entry in self._table.items():
        entry[5] = counts.get(pc, 0)
      self._pc, self._cycle = header, cycle
      return 0
    finally:
      self._is_proving = False
    if rounds.count == affine.MANY:
      raise self._endless(header, "has no end")
    self._restore(state.after(slopes, rounds.count))
    self._repeat(rounds.count, num_events, cycle, counts)
    starts = tuple(p for p in self._path[num_starts:] if isinstance(p, int))
    self._path[num_starts:] = [Rounds(starts, rounds.count)]
    return rounds.count - 1

  def _repeat(
    self, times: int, num_events: int, cycle: int, counts: dict[int, int]
  ) -> None:
    """Counts what was run since then `times` times instead of once."""
    period = self._cycle - cycle
    events = self._events[num_events:]
    if events:
      relative = tuple(
        e._replace(cycle=e.cycle - cycle)
        for e in events
        if isinstance(e, Event)  # A proof starts no other, so that all are.
      )
      self._events[num_events:] = [Repeat(cycle, relative, times, period)]
    for pc, entry in self._table.items():
      entry[5] += (times - 1) * (entry[5] - counts.get(pc, 0))
    self._cycle += (times - 1) * period
    self._skipped += (times - 1) * period

  def _enter(self, pc: int) -> list[Any]:
    stretch = translate.translate(
      self._bundles,
      pc,
      leaders=self._leaders,
      bases=self._bases,
      spaces=self._spaces,
      delay=self._delay_slots,
    )
    run = stretch.bind(
      R=self._registers, I=self._ids, S=self._smem, D=self._tokens, H=self
    )
    length = stretch.end - stretch.start
    return [run, length, stretch.end, stretch.target, stretch.branch, 0]

  def _decide(self, bundle: int, target: int, unknown: Unknown) -> bool:
    """Whether a branch that depends on data is taken: an assumption."""
    if self._is_proving:
      raise affine._NotAffineError
    seen = self._decided[bundle] = self._decided.get(bundle, 0) + 1
    is_back = target <= bundle
    way = "taken" if is_back else "not taken"
    self._assume(
      f"the branch at bundle {bundle:#x}{self._line(bundle)} depends on"
      f" {unknown.cause}; assumed {way} {ASSUMED_TRIPS - 1} times of"
      f" {ASSUMED_TRIPS}"
    )
    is_over = seen % ASSUMED_TRIPS == 0
    return not is_over if is_back else is_over

  def _line(self, bundle: int) -> str:
    found = [s.source for s in self._bundles[bundle].slots if s.source]
    return f" ({found[0]})" if found else ""

  def _assume(self, text: str) -> None:
    self._assumed.setdefault(text)

  # --- what generated code calls ---

  def mismatch(self, bundle: int, register: str, held: int) -> None:
    """Refuses a read that finds another value than the compiler meant."""
    what = "no value" if held == translate.NEVER else f"value {held}"
    raise errors.UnsupportedError(
      f"Bundle {bundle:#x} reads {register} and finds {what}: the machine code"
      f" is not run as it is meant to be ({self._delay_slots} delay slots)."
    )

  def halt(self, bundle: int, notes: tuple[str, ...]) -> None:
    """Refuses a program whose own check fails."""
    raise errors.UnsupportedError(
      f"The check at bundle {bundle:#x} ({' '.join(notes)}) fails and would"
      " halt the core: a copy is out of bounds, or scalar arguments are not"
      " those of the kernel."
    )

  def refuse(self, bundle: int, opcode: str, notes: tuple[str, ...]) -> None:
    """Refuses an instruction that may make cores wait for each other."""
    note = f" ({notes[0]})" if notes else ""
    what = "an instruction that is not modelled"
    if "remote" in opcode or opcode == "dma.general":
      what = (
        "a copy or signal to another core or device, or one of another form"
      )
    elif opcode.startswith("vwait"):
      what = "a wait for another core or device"
    raise errors.UnsupportedError(
      f"Bundle {bundle:#x}{self._line(bundle)} holds {opcode}{note}: {what},"
      " which cm.predict does not model."
    )

  def assume_runs(self, bundle: int, opcode: str, unknown: Unknown) -> None:
    """Notes that something is taken to run though data decide it."""
    self._assume(
      f"{opcode} at bundle {bundle:#x}{self._line(bundle)} runs if"
      f" {unknown.cause}; assumed to run"
    )

  def operand(self, index: int, space: str, shape: str) -> Word:
    """A pointer to an operand, or the operand itself."""
    if space != "<no memory space>":
      return self._places[index].pointer
    words = self._data.get(index)
    if words is not None and len(words):
      return int(words[0])
    return Unknown(f"operand {index} ({shape}), whose value is not given")

  def store(self, bundle: int, address: Word, word: Word) -> None:
    """`sst`."""
    if isinstance(address, Unknown):
      self._assume(
        f"sst at bundle {bundle:#x} writes where {address.cause} says; assumed"
        " to change nothing that is read again"
      )
    else:
      self._smem[address] = word

  def dma(
    self,
    cycle: int,
    bundle: int,
    source: str,
    place: str,
    flag: Word,
    size: Word,
    start: Word,
    end: Word,
  ) -> None:
    """Starts a copy between the core's memories and HBM."""
    if isinstance(size, Unknown):
      self._assume(
        f"the size of the copy at bundle {bundle:#x} is {size.cause}; assumed"
        " none"
      )
      size = 0
    if place == "smem":
      self._fill(source, start, end, size * _WORDS_PER_GRANULE)
    kind = "read" if source == "hbm" else "write" if place == "hbm" else "local"
    self._event(cycle, kind, bundle, flag, size)

  def general(
    self,
    cycle: int,
    bundle: int,
    source: str,
    place: str,
    flag: Word,
    size: Word,
    other_flag: Word,
  ) -> None:
    """A copy by a table of strides, which are not modelled."""
    if isinstance(other_flag, Unknown) or other_flag != _NO_FLAG:
      # One that also signals its sender goes to another core or device.
      self.refuse(bundle, "dma.general", ())
    self.dma(cycle, bundle, source, place, flag, size, 0, 0)

  def wait(self, cycle: int, bundle: int, flag: Word, amount: Word) -> None:
    """`dma.done.wait`."""
    self._event(cycle, "wait", bundle, flag, amount)

  def add(self, cycle: int, bundle: int, flag: Word, amount: Word) -> None:
    """`vsyncadd`."""
    self._event(cycle, "add", bundle, flag, amount)

  def set(self, cycle: int, bundle: int, flag: Word, amount: Word) -> None:
    """`vsyncpa` and `vsyncset`: they set a semaphore to zero."""
    self._event(cycle, "set", bundle, flag, amount)

  def delay(self, cycle: int, bundle: int, amount: Word) -> None:
    """`vdelay`."""
    self._event(cycle, "delay", bundle, 0, amount)

  def _event(
    self, cycle: int, kind: EventKind, bundle: int, flag: Word, amount: Word
  ) -> None:
    for word, what in ((flag, "semaphore"), (amount, "amount")):
      if isinstance(word, Unknown):
        self._assume(
          f"the {what} of the {kind} at bundle {bundle:#x} is {word.cause};"
          " left out"
        )
    if isinstance(flag, affine.Affine):
      raise affine._NotAffineError
    if isinstance(amount, Unknown):
      flag, amount = -1, 0
    known = -1 if isinstance(flag, Unknown) else flag
    self._events.append(
      Event(cycle, kind, bundle, known, values.signed(amount))
    )

  def _fill(self, source: str, start: Word, end: Word, count: int) -> None:
    """Copies words that are known into SMEM, or marks them unknown."""
    if isinstance(end, Unknown):
      self._assume(f"a copy to SMEM goes where {end.cause} says; left out")
      return
    words, cause = self._words(source, start)
    for i in range(count):
      is_given = words is not None and i < len(words)
      self._smem[end + i] = int(words[i]) if is_given else Unknown(cause)  # pyright: ignore

  def _words(self, source: str, start: Word) -> tuple[np.ndarray | None, str]:
    """What is stored from an address on, and why it is not known."""
    if isinstance(start, Unknown):
      return None, f"SMEM copied from where {start.cause} says"
    for index, place in self._places.items():
      offset = place.offset_words(source, start)
      if offset is None:
        continue
      what = f"operand {index} ({place.shape}), whose values are not given"
      data = self._data.get(index)
      return (None if data is None else data[offset:]), what
    return None, f"SMEM copied from {source}, which the kernel has written"
