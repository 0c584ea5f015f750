"""What instructions do: the words they store and the events they make."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from coremesh import errors
from coremesh.profile import (
  addresses,
  affine,
  translate,
  values,
  writer,
)
from coremesh.profile.events import (
  GRANULE_BYTES,
  Event,
  EventKind,
  Repeat,
  Result,
  Target,
)
from coremesh.profile.values import Unknown, Word

_WORDS_PER_GRANULE = GRANULE_BYTES // 4
# What a copy that signals nobody but its receiver names as its other semaphore.
_NO_FLAG = 131072
NUMBERED = (
  "devices are assumed to have the numbers that the hardware gives them"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
  """Where a program runs.

  Attributes:
    core: its number in the device.
    device: its number in the program.
    group: which SparseCore it is part of.
    member: its number in the group.
  """

  core: int
  device: int = 0
  group: int = 0
  member: int = 0


class Effects:
  """What a core has done so far; generated code calls the methods.

  Attributes:
    smem: words by address.
    events: in order.
    assumed: what was taken for granted, in words.
    lines: the lines of the program that wait, by bundle.
    sends: whether it sends to other cores.
    results: what it copied from SMEM to operands in HBM.
  """

  def __init__(
    self,
    code: translate.Code,
    place: Place,
    operands: Mapping[int, np.ndarray],
    hbm_unit_bytes: int,
  ):
    self.core, self.device = place.core, place.device
    self.group, self.member = place.group, place.member
    self.smem: dict[Any, Word] = {}
    self.events: list[Event | Repeat] = []
    self.assumed: dict[str, None] = {}
    self.lines: dict[int, str] = {}
    self.sends = False
    self.results: list[Result] = []
    # What the hardware calls the device.
    numbers = code.identity.table or range(code.num_devices)
    self._number = numbers[self.device]
    self._bundles = code.program.bundles
    self._delay_slots = code.delay_slots
    self._data = operands
    # A program of many devices copies a table of them, in whole granules.
    size = -(-code.num_devices // _WORDS_PER_GRANULE) * _WORDS_PER_GRANULE
    has_own = code.identity.table or code.num_devices == 1
    self._table = None if has_own else np.arange(size)
    self._places = code.places(hbm_unit_bytes)

  def line(self, bundle: int) -> str:
    """The line of the program a bundle comes from, in brackets, if known."""
    found = [s.source for s in self._bundles[bundle].slots if s.source]
    return f" ({found[0]})" if found else ""

  def assume(self, text: str) -> None:
    """Notes what is taken for granted."""
    self.assumed.setdefault(text)

  def mismatch(self, bundle: int, register: str, held: int) -> None:
    """Refuses a read that finds another value than the compiler meant."""
    what = "no value" if held == writer.NEVER else f"value {held}"
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
    """Refuses an instruction that decides what happens when."""
    note = f" ({notes[0]})" if notes else ""
    what = "a call"
    if opcode.startswith(("dma", "stream")):
      what = "a copy of a form that is not known"
    elif opcode.startswith(("v", "s")):
      what = "a signal or wait of a form that is not known"
    raise errors.UnsupportedError(
      f"Bundle {bundle:#x}{self.line(bundle)} holds {opcode}{note}: {what},"
      " which cm.predict does not model."
    )

  def unknown(self, bundle: int, opcode: str) -> None:
    """Notes an instruction that is not known."""
    self.assume(
      f"the instruction {opcode} at bundle {bundle:#x}{self.line(bundle)} is"
      " not known; assumed to change nothing that takes time"
    )

  def assume_runs(self, bundle: int, opcode: str, unknown: Unknown) -> None:
    """Notes that something is taken to run though data decide it."""
    self.assume(
      f"{opcode} at bundle {bundle:#x}{self.line(bundle)} runs if"
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
      self.assume(
        f"sst at bundle {bundle:#x} writes where {address.cause} says; assumed"
        " to change nothing that is read again"
      )
    else:
      self.smem[address] = word

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
      self.assume(
        f"the size of the copy at bundle {bundle:#x} is {size.cause}; assumed"
        " none"
      )
      size = 0
    if place == "smem":
      self._fill(source, start, end, size * _WORDS_PER_GRANULE)
    if (source, place) == ("smem", "hbm"):
      self._keep(bundle, start, end, size * _WORDS_PER_GRANULE)
    if isinstance(flag, int) and (source, place) == ("hbm", "vmem"):
      other = addresses.of_copy_to_both(
        flag, core=self.core, device=self._number
      )
      if other is not None:
        own = flag & addresses.FLAG_MASK
        self._event(cycle, "send", bundle, own, size, other)
        return
    self._copy(cycle, bundle, source, place, flag, size)

  def general(
    self,
    cycle: int,
    bundle: int,
    source: str,
    place: str,
    flag: Word,
    size: Word,
    other_flag: Word,
    overrides: Word | None,
  ) -> None:
    """A copy by a table of strides, which are not modelled.

    Its overrides say whether it goes to another core or device.
    """
    words = (flag, other_flag, overrides)
    if any(isinstance(word, affine.Affine) for word in words):
      raise affine._NotAffineError
    is_remote = isinstance(overrides, Unknown) or (
      overrides is not None and addresses.is_remote(overrides)
    )
    if not is_remote:
      # Without overrides one that signals two, or stays in VMEM, may be.
      is_other = isinstance(other_flag, Unknown) or other_flag != _NO_FLAG
      if overrides is None and (source == place or is_other):
        self.refuse(bundle, "dma.general", ())
      self.dma(cycle, bundle, source, place, flag, size, 0, 0)
      return
    for word in (*words, size):
      if isinstance(word, Unknown):
        self.assume(
          f"the copy at bundle {bundle:#x}{self.line(bundle)} to another core"
          f" or device depends on {word.cause}; left out"
        )
        return
    to = addresses.of_copy(overrides, flag, source, place)  # pyright: ignore
    own = other_flag & addresses.FLAG_MASK
    self._event(cycle, "send", bundle, own, size, to)

  def signal(self, cycle: int, bundle: int, to: Word, amount: Word) -> None:
    """`vsyncadd.remote`."""
    if isinstance(to, affine.Affine):
      raise affine._NotAffineError
    if isinstance(to, Unknown):
      self.assume(
        f"whom the signal at bundle {bundle:#x}{self.line(bundle)} is for"
        f" depends on {to.cause}; left out"
      )
      return
    target = addresses.of_signal(to)
    self._event(cycle, "signal", bundle, -1, amount, target)

  def wait(self, cycle: int, bundle: int, flag: Word, amount: Word) -> None:
    """`dma.done.wait` and `vwait`."""
    self._note_line(bundle)
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

  def _copy(
    self,
    cycle: int,
    bundle: int,
    source: str,
    place: str,
    flag: Word,
    size: Word,
  ) -> None:
    """A copy by the memories it is between; inside HBM it reads and writes."""
    if source == place == "hbm":
      self._event(cycle, "read", bundle, -1, size)
    kind = "write" if place == "hbm" else "read" if source == "hbm" else "local"
    self._event(cycle, kind, bundle, flag, size)

  def _note_line(self, bundle: int) -> None:
    if bundle not in self.lines:
      self.lines[bundle] = self.line(bundle)

  def _event(
    self,
    cycle: int,
    kind: EventKind,
    bundle: int,
    flag: Word,
    amount: Word,
    to: Target | None = None,
    unit_bytes: int = GRANULE_BYTES,
  ) -> None:
    for word, what in ((flag, "semaphore"), (amount, "amount")):
      if isinstance(word, Unknown):
        self.assume(
          f"the {what} of the {kind} at bundle {bundle:#x} is {word.cause};"
          " left out"
        )
    if isinstance(flag, affine.Affine):
      raise affine._NotAffineError
    if isinstance(amount, Unknown):
      flag, amount = -1, 0
    self.sends |= to is not None
    known = -1 if isinstance(flag, Unknown) else flag
    self.events.append(
      Event(cycle, kind, bundle, known, values.signed(amount), to, unit_bytes)
    )

  def _fill(self, source: str, start: Word, end: Word, count: int) -> None:
    """Copies words that are known into SMEM, or marks them unknown."""
    if isinstance(end, Unknown):
      self.assume(f"a copy to SMEM goes where {end.cause} says; left out")
      return
    words, cause = self._words(source, start, count)
    found: list[Word] = [] if words is None else [int(w) for w in words[:count]]
    found += [Unknown(cause)] * (count - len(found))
    self.smem.update((end + i, word) for i, word in enumerate(found))

  def _keep(self, bundle: int, start: Word, end: Word, count: Word) -> None:
    """Notes what is copied from SMEM to an operand in HBM."""
    if not all(isinstance(word, int) for word in (start, end, count)):
      return
    never = Unknown("SMEM that nothing has written")
    words = tuple(self.smem.get(start + i, never) for i in range(count))  # pyright: ignore
    for index, place in self._places.items():
      offset = place.offset_words("hbm", end)  # pyright: ignore
      if offset is not None:
        self.results.append(Result(bundle, index, offset, words))

  def _words(
    self, source: str, start: Word, count: int
  ) -> tuple[np.ndarray | None, str]:
    """What is stored from an address on, and why it is not known."""
    if isinstance(start, Unknown):
      if self._table is not None and count == len(self._table):
        self.assume(NUMBERED)
        return self._table, ""
      return None, f"SMEM copied from where {start.cause} says"
    for index, place in self._places.items():
      offset = place.offset_words(source, start)
      if offset is None:
        continue
      what = f"operand {index} ({place.shape}), whose values are not given"
      data = self._data.get(index)
      return (None if data is None else data[offset:]), what
    return None, f"SMEM copied from {source}, which the kernel has written"
