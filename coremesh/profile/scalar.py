"""Runs the scalar slots of machine code: what is issued, when, how often.

Time here is that of bundles alone; waiting for DMAs comes later, because what
is issued does not depend on it.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import re
from typing import Any, Literal, NamedTuple

import numpy as np

from coremesh import errors
from coremesh.profile import affine, translate, values
from coremesh.profile.bundles import Address, Program
from coremesh.profile.values import Unknown, Word

GRANULE_BYTES = 32  # of DMA sizes, on all chips (offline-compiler.md)
_WORDS_PER_GRANULE = GRANULE_BYTES // 4
_VMEM_UNIT_BYTES = 512
# Allocations have names, not addresses. Pointers to VMEM are shifted left by 4
# bits; nothing may overlap, nor reach the sign bit.
_ALLOCATION_STEP = 0x40000
_ALLOCATIONS_START = 0x40000
_SPILLS_START = 0x30000000
_MOST_POINTER = 1 << 31

_POINTERS = ("scalar_lea.", "int_to_ptr.", "inlined_call_operand.")
# What a copy that signals nobody but its receiver names as its other semaphore.
_NO_FLAG = 131072

# A loop whose end depends on data that is not given runs so often.
ASSUMED_TRIPS = 4
_MOST_ROUNDS = 5_000_000

# Rounds are skipped together: buffers that alternate take turns by 2 or by 3.
_ROUNDS = (6, 2)
_FIRST_TRY = 24
_LEAST_SKIPPED = 64

type EventKind = Literal[
  "read", "write", "local", "wait", "add", "set", "delay"
]


class Event(NamedTuple):
  """Something that takes time or makes another wait.

  Attributes:
    cycle: bundles issued before it.
    kind: "read" and "write" are DMAs from and to HBM, "local" is one that
      stays in the core.
    bundle: where.
    flag: the semaphore; -1 if it is not known.
    amount: granules of a DMA, what to wait for, add or set; cycles of a delay.
  """

  cycle: int
  kind: EventKind
  bundle: int
  flag: int
  amount: int


class Repeat(NamedTuple):
  """Events that come again and again; their cycles count from each time.

  Attributes:
    cycle: bundles issued before the first time.
    events: of one time.
    times: how often.
    period: bundles from one time to the next.
  """

  cycle: int
  events: tuple[Event, ...]
  times: int
  period: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
  """Bundles that were issued one after the other, and how often."""

  start: int
  end: int
  count: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
  """What one core issues.

  Attributes:
    core: its number.
    cycles: bundles issued.
    runs: which, how often.
    events: in order.
    assumed: what was taken for granted, in words.
    skipped: cycles that were not run one by one, because the rounds of a loop
      were proven to take the same way; see `affine`.
  """

  core: int
  cycles: int
  runs: tuple[Run, ...]
  events: tuple[Event | Repeat, ...]
  assumed: tuple[str, ...]
  skipped: int

  def each_event(self) -> Iterator[Event]:
    """The events one by one, repetitions written out."""
    for found in self.events:
      if isinstance(found, Event):
        yield found
        continue
      for i in range(found.times):
        start = found.cycle + i * found.period
        for event in found.events:
          yield event._replace(cycle=start + event.cycle)

  def executions(self, num_bundles: int) -> np.ndarray:
    """How often each bundle was issued."""
    change = np.zeros(num_bundles + 1, np.int64)
    for run in self.runs:
      change[run.start] += run.count
      change[run.end] -= run.count
    return np.cumsum(change)[:-1]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
  """Registers, which values they hold, and memory."""

  registers: list[Any]
  ids: list[int]
  smem: dict[Any, Any]
  tokens: dict[str, Any]

  def slopes_to(self, other: "_State") -> "_State":
    """What is added to each word on the way to another state."""
    if (
      self.ids != other.ids
      or self.smem.keys() != other.smem.keys()
      or self.tokens.keys() != other.tokens.keys()
    ):
      raise affine._NotAffineError
    return self._zip(other, _slope)

  def moving(self, slopes: "_State", rounds: affine.Rounds) -> "_State":
    """The same with words that change by their slopes each round."""
    return self._zip(
      slopes, lambda word, s: affine.Affine(word, s, rounds) if s else word
    )

  def after(self, slopes: "_State", count: int) -> "_State":
    """What it is after so many rounds."""
    return self._zip(
      slopes,
      lambda word, s: (word + count * s) & values.MASK if s else word,
    )

  def leads_to(self, other: "_State") -> bool:
    """Whether the other state is this one a round later."""
    if (
      self.ids != other.ids
      or self.smem.keys() != other.smem.keys()
      or self.tokens.keys() != other.tokens.keys()
    ):
      return False
    pairs = [
      *zip(self.registers, other.registers, strict=True),
      *((word, other.smem[k]) for k, word in self.smem.items()),
      *((word, other.tokens[k]) for k, word in self.tokens.items()),
    ]
    return all(_is_next(a, b) for a, b in pairs)

  def _zip(self, other: "_State", fn: Any) -> "_State":
    return _State(
      registers=list(map(fn, self.registers, other.registers)),
      ids=self.ids,
      smem={k: fn(w, other.smem[k]) for k, w in self.smem.items()},
      tokens={k: fn(w, other.tokens[k]) for k, w in self.tokens.items()},
    )


def _slope(a: Any, b: Any) -> int:
  if isinstance(a, Unknown) and isinstance(b, Unknown):
    return 0
  if type(a) is not type(b) or (isinstance(a, bool) and a is not b):
    raise affine._NotAffineError
  return values.signed((b - a) & values.MASK)


def _is_next(a: Any, b: Any) -> bool:
  """Whether a word that changes by a slope is, a round later, the other."""
  if isinstance(a, Unknown) or isinstance(a, bool):
    return a is b or (isinstance(a, Unknown) and isinstance(b, Unknown))
  if not isinstance(a, affine.Affine):
    return type(a) is type(b) and a == b
  if not isinstance(b, affine.Affine):
    return False
  same_slope = (a.slope - b.slope) & values.MASK == 0
  return same_slope and (a.value + a.slope - b.value) & values.MASK == 0


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
    self._bases = _bases(program)
    self._spaces = _spaces(program)
    self._places = _places(program, hbm_unit_bytes)
    self._leaders = {s.target for s in program.slots if s.target is not None}
    self._events: list[Event | Repeat] = []
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
    )

  def _advance(self, header: int | None, times: int) -> bool:
    """Runs until a bundle was come to so often, or to the end.

    Without a header it also stops at the start of a loop that has run so often
    that it may pay to skip rounds of it.
    """
    pc, cycle, end = self._pc, self._cycle, len(self._bundles)
    table, visits, next_try = self._table, self._visits, self._next_try
    while pc < end:
      entry = table.get(pc)
      if entry is None:
        entry = table[pc] = self._enter(pc)
      run, length, after, target, branch, _ = entry
      taken = run(cycle)
      entry[5] += 1
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

  def _snapshot(self) -> _State:
    return _State(
      registers=list(self._registers),
      ids=list(self._ids),
      smem=dict(self._smem),
      tokens=dict(self._tokens),
    )

  def _restore(self, state: _State) -> None:
    # Generated code holds on to these objects.
    self._registers[:] = state.registers
    self._ids[:] = state.ids
    for held, kept in (
      (self._smem, state.smem),
      (self._tokens, state.tokens),
    ):
      held.clear()
      held.update(kept)

  def _skip(self, header: int, times: int, before: _State) -> int:
    """Skips what is proven to repeat the way from `before` to here.

    Returns:
      How often that way was skipped.
    """
    state = self._snapshot()
    counts = {pc: entry[5] for pc, entry in self._table.items()}
    cycle, num_events = self._cycle, len(self._events)
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
  """Where an operand is taken to be."""

  space: str
  shape: str
  pointer: int
  units: int
  unit_bytes: int

  def offset_words(self, source: str, address: int) -> int | None:
    """Words from the start of the operand to an address, None if not in it."""
    if source != self.space:
      return None
    # A DMA takes pointers to VMEM in granules.
    shift = 4 if source == "vmem" else 0
    offset = address - (self.pointer << shift)
    if not 0 <= offset < self.units << shift:
      return None
    return offset * (self.unit_bytes >> shift) // 4


def _bases(program: Program) -> dict[str, int]:
  """An address for each allocation a program names."""
  bases: dict[str, int] = {}
  spills = 0
  for name in _allocations(program):
    if name in bases:
      continue
    if name.endswith("_spill"):
      bases[name] = _SPILLS_START + spills
      spills += 1
    else:
      step = len(bases) - spills
      bases[name] = _ALLOCATIONS_START + step * _ALLOCATION_STEP
  return bases


def _spaces(program: Program) -> dict[int, str]:
  """The memory each value that is a pointer points to."""
  spaces = {}
  for slot in program.slots:
    if slot.result is not None and slot.opcode.startswith(_POINTERS):
      spaces[slot.result.value] = slot.opcode.rpartition(".")[2]
  return spaces


def _allocations(program: Program) -> Iterator[str]:
  for slot in program.slots:
    for operand in slot.operands:
      if isinstance(operand, Address):
        yield from (t for t in operand.terms if isinstance(t, str))


def _places(program: Program, hbm_unit_bytes: int) -> dict[int, _Place]:
  """Where the operands of a program are."""
  units = {"hbm": hbm_unit_bytes, "vmem": _VMEM_UNIT_BYTES, "smem": 4}
  found: dict[int, tuple[str, str, int, int]] = {}
  for slot in program.slots:
    if slot.opcode.startswith("inlined_call_operand."):
      space = slot.opcode.removeprefix("inlined_call_operand.")
      index, shape = slot.operands
      unit = units.get(space, 4)
      if isinstance(index, int):
        size = -(-_padded_bytes(str(shape)) // unit)
        found[index] = (space, str(shape), unit, size)
  places, pointers = {}, {}
  for index, (space, shape, unit, size) in sorted(found.items()):
    # VMEM operands come after all allocations, at addresses of their own.
    pointer = pointers.get(space, 0x4000000 if space == "vmem" else 0x1000)
    pointers[space] = pointer + size + 1
    places[index] = _Place(
      space=space, shape=shape, pointer=pointer, units=size, unit_bytes=unit
    )
  if pointers.get("hbm", 0) >= _MOST_POINTER:
    raise errors.UnsupportedError(
      "The operands in HBM take more than 64 GB, which is not modelled."
    )
  return places


def _padded_bytes(shape: str) -> int:
  """Bytes of an operand such as "bf16[8,300]", padded to tiles."""
  match = re.fullmatch(r"([a-z]+)(\d*)\w*\[([\d,]*)\]", shape)
  if match is None:
    return 1 << 20
  bits = int(match[2] or 8)
  *leading, rows, columns = (1, 1, *(int(n) for n in match[3].split(",") if n))
  packing = max(1, 32 // bits)
  rows = -(-rows // (8 * packing)) * 8 * packing
  columns = -(-columns // 128) * 128
  return max(1, math.prod(leading) * rows * columns * bits // 8)
