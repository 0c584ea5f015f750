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
from coremesh.profile import translate, values
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

# A loop whose end depends on data that is not given runs so often.
ASSUMED_TRIPS = 4
_MOST_STRETCHES = 20_000_000

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
    skipped: iterations that were not run one by one, because the loop was
      proven to count only.
  """

  core: int
  cycles: int
  runs: tuple[Run, ...]
  events: tuple[Event, ...]
  assumed: tuple[str, ...]
  skipped: int

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
    self._places = _places(program, hbm_unit_bytes)
    self._leaders = {s.target for s in program.slots if s.target is not None}
    self._events: list[Event] = []
    self._assumed: dict[str, None] = {}
    self._decided: dict[int, int] = {}
    never = Unknown("a register that nothing has written")
    self._registers: list[Word] = [never] * translate.NUM_REGISTERS
    self._ids = [translate.NEVER] * translate.NUM_REGISTERS
    self._smem: dict[Any, Word] = {}
    self._tokens: dict[str, Word] = {}
    self._table: dict[int, list[Any]] = {}

  def run(self) -> Trace:
    """Runs to the end."""
    pc = cycle = steps = 0
    end = len(self._bundles)
    table = self._table
    while pc < end:
      entry = table.get(pc)
      if entry is None:
        entry = table[pc] = self._enter(pc)
      run, length, after, target, branch, _ = entry
      taken = run(cycle)
      entry[5] += 1
      cycle += length
      steps += 1
      if steps > _MOST_STRETCHES:
        raise errors.UnsupportedError(
          f"The program does not end within {_MOST_STRETCHES:,} branches; it is"
          f" at bundle {pc:#x}. A loop that waits for another core or device"
          " is not modelled."
        )
      if taken is False:
        pc = after
      elif taken is True:
        pc = target
      else:
        pc = target if self._decide(branch, target, taken) else after
    return Trace(
      core=self.core,
      cycles=cycle,
      runs=tuple(
        Run(start=start, end=start + entry[1], count=entry[5])
        for start, entry in sorted(table.items())
      ),
      events=tuple(self._events),
      assumed=tuple(self._assumed),
      skipped=0,
    )

  def _enter(self, pc: int) -> list[Any]:
    stretch = translate.translate(
      self._bundles,
      pc,
      leaders=self._leaders,
      bases=self._bases,
      delay=self._delay_slots,
    )
    run = stretch.bind(
      R=self._registers, I=self._ids, S=self._smem, D=self._tokens, H=self
    )
    length = stretch.end - stretch.start
    return [run, length, stretch.end, stretch.target, stretch.branch, 0]

  def _decide(self, bundle: int, target: int, unknown: Unknown) -> bool:
    """Whether a branch that depends on data is taken: an assumption."""
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
