"""What instructions of a SparseCore's subcores do beside those of all cores."""

from collections.abc import Mapping
from typing import Any

from coremesh import chips
from coremesh.profile import affine, sparse_addresses, translate, values
from coremesh.profile.effects import Effects, Place
from coremesh.profile.events import GRANULE_BYTES, Event, EventKind
from coremesh.profile.sparse_addresses import Semaphore
from coremesh.profile.values import Unknown, Word

_STREAM_UNIT_BYTES = 4
# Semaphores that no instruction names: what starts a vector subcore, and what
# a copy of code to the subcores gives.
_STARTED = 1 << 20
_CODE = 1 << 21
# What tells the scalar subcore that its operands are there, by chip.
_GIVEN = {"v5p": 0x1B81, "v6e": 0x1B8B, "tpu7x": 0x1B8B}
# Words handed to vector subcores, and words fetched from the scalar subcore.
ARGUMENTS = 1 << 24
_FETCHED = 1 << 25
# A task: so many words, of which the first two are where it starts and all
# ones, in either order; both are all ones if it stops them. Of one that loads
# code the second argument is its size.
_TASK_SIZE = 16
_NUM_HEADING = 2
_ALL_ONES = 0xFFFFFFFF
_LOADS_CODE = 0
_CODE_SIZE = 1
# Where the scalar subcore keeps the numbers of its chip and its device.
_CHIP, _DEVICE = 0, 0x3FCE
_SMEM_MASK = (1 << 20) - 1


class SparseEffects(Effects):
  """What a subcore has done so far; generated code calls the methods.

  Attributes:
    arguments: words by address that a scalar subcore has handed to its vector
      subcores; None before it starts them.
  """

  def __init__(self, code: translate.Code, place: Place, *, number: int = 0):
    """Makes one that has done nothing.

    Args:
      code: its program.
      place: where it runs, on the first device.
      number: of the device, as it reads it.
    """
    super().__init__(code, place, {}, GRANULE_BYTES)
    self._device_number = number
    self.arguments: dict[int, Word] | None = None
    self._handed: dict[int, Word] = {}
    self._num_vector_subcores = 0

  def begin_scalar(self, chip: chips.Chip) -> None:
    """Makes it a scalar subcore of the first chip whose operands are there."""
    self._num_vector_subcores = chip.vector_subcores_per_sparse_core
    self.smem |= {_CHIP: 0, _DEVICE: self._device_number}
    given = _GIVEN[chip.generation]
    self.events.append(Event(0, "add", 0, given, 1))

  def begin_vector(self, arguments: Mapping[int, Word]) -> None:
    """Makes it a vector subcore that its scalar subcore starts."""
    self.smem.update(arguments)
    self.events.append(Event(0, "wait", 0, _STARTED, 1))
    self.events.append(Event(0, "add", 0, _STARTED, -1))

  def stream(
    self,
    cycle: int,
    bundle: int,
    kind: EventKind,
    flag: Word,
    words: Word,
    count: Word,
  ) -> None:
    """A copy of a subcore, of so many words for each of some indices."""
    self._event(
      cycle, kind, bundle, flag, words * count, unit_bytes=_STREAM_UNIT_BYTES
    )

  def copy_shared(
    self,
    cycle: int,
    bundle: int,
    source: str,
    place: str,
    flag: Word,
    size: Word,
  ) -> None:
    """A copy that goes not through the subcore: of shared memory, or HBM."""
    _check_alike(flag)
    if not isinstance(flag, Unknown):
      named = sparse_addresses.semaphore(flag)
      if named.member != self.member:
        self.refuse(bundle, "dma.local", ("it signals another subcore",))
      flag = named.flag
    if place == "code":
      self._event(cycle, "code", bundle, flag, size)
    else:
      self._copy(cycle, bundle, source, place, flag, size)

  def copy_to_subcore(
    self,
    cycle: int,
    bundle: int,
    source: str,
    place: str,
    flag: Word,
    own: Word,
    size: Word,
    dest: Word,
  ) -> None:
    """A copy to another subcore, whose sender has a semaphore too."""
    _check_alike(flag, own, dest)
    for word in (flag, own, size, dest):
      if isinstance(word, Unknown):
        self.assume(
          f"the copy at bundle {bundle:#x}{self.line(bundle)} to another"
          f" subcore depends on {word.cause}; left out"
        )
        return
    to = sparse_addresses.of_copy(dest, flag, source, place)  # pyright: ignore
    sent = sparse_addresses.semaphore(own).flag  # pyright: ignore
    self._event(cycle, "send", bundle, sent, size, to)

  def signal_subcore(
    self, cycle: int, bundle: int, to: Word, amount: Word
  ) -> None:
    """`ssyncadd.remote`; what a TensorCore gets is the end of the program."""
    _check_alike(to)
    if isinstance(to, Unknown):
      self._leave_out_signal(bundle, to)
    elif not sparse_addresses.is_of_tensor_core(to):
      target = sparse_addresses.of_signal(to)
      self._event(cycle, "signal", bundle, -1, amount, target)

  def signal_scalar(
    self, cycle: int, bundle: int, flag: Word, amount: Word
  ) -> None:
    """`ssyncadd.tile`: tells the scalar subcore that all are through."""
    _check_alike(flag)
    if isinstance(flag, Unknown):
      self._leave_out_signal(bundle, flag)
      return
    named = sparse_addresses.semaphore(flag)
    to = sparse_addresses.of_own(self.group, named)
    self._event(cycle, "signal", bundle, -1, amount, to)

  def _leave_out_signal(self, bundle: int, unknown: Unknown) -> None:
    self.assume(
      f"whom the signal at bundle {bundle:#x}{self.line(bundle)} is for"
      f" depends on {unknown.cause}; left out"
    )

  def task(self, cycle: int, bundle: int, form: Word) -> None:
    """Loads code into the vector subcores, or words into their memory."""
    entry, words = self._task(bundle, form)
    if entry == _LOADS_CODE:
      size = words[_CODE_SIZE] if len(words) > _CODE_SIZE else 0
      size = size if isinstance(size, int) else 0
      self._event(cycle, "code", bundle, _CODE, size)
      self._event(cycle, "wait", bundle, _CODE, size)
      self._event(cycle, "add", bundle, _CODE, -size & values.MASK)
    elif words and not isinstance(words[0], Unknown):
      for address, word in enumerate(words[1:], start=words[0]):
        self._handed[address] = word

  def start(self, cycle: int, bundle: int, form: Word) -> None:
    """Starts the vector subcores, or stops them."""
    entry, words = self._task(bundle, form)
    if entry == _ALL_ONES:
      return
    if self.arguments is not None:
      self.refuse(bundle, "task", ("it starts its vector subcores again",))
    handed = {ARGUMENTS + n: word for n, word in enumerate(words)}
    self.arguments = self._handed | handed
    for member in range(self._num_vector_subcores):
      to = sparse_addresses.of_own(self.group, Semaphore(member, _STARTED))
      self._event(cycle, "signal", bundle, -1, 1, to)

  def _task(self, bundle: int, form: Word) -> tuple[Word, list[Word]]:
    """Where a task starts, and its arguments."""
    if isinstance(form, Unknown):
      self.refuse(bundle, "task", ("how many words it has is not known",))
    unknown = Unknown(f"a word that the task at bundle {bundle:#x} has not")
    size = form >> _TASK_SIZE  # pyright: ignore
    words = [self.smem.get(ARGUMENTS + n, unknown) for n in range(size)]
    _check_alike(*words)
    heading = words[:_NUM_HEADING]
    entry = next((w for w in heading if w != _ALL_ONES), _ALL_ONES)
    if isinstance(entry, Unknown):
      self.refuse(bundle, "task", ("where it starts is not known",))
    return entry, words[_NUM_HEADING:]

  def fetch(self, bundle: int, address: Word, flag: Word) -> None:
    """`smem.add` of nothing: reads the scalar subcore's memory."""
    _check_alike(address, flag)
    is_device = (
      not isinstance(address, Unknown) and address & _SMEM_MASK == _DEVICE
    )
    where = f"a word of the scalar subcore's SMEM (bundle {bundle:#x})"
    word: Any = self._device_number if is_device else Unknown(where)
    if not isinstance(flag, Unknown):
      self.smem[_FETCHED + flag] = word

  def fetched(self, flag: Word, otherwise: Unknown) -> Word:
    """`ssyncread`: what was fetched with a semaphore."""
    return self.smem.get(_FETCHED + flag, otherwise)  # pyright: ignore

  def fence(self, cycle: int, bundle: int) -> None:
    """Waits for all that the core has copied to HBM."""
    self._note_line(bundle)
    self._event(cycle, "fence", bundle, 0, 0)

  def meet(self, cycle: int, bundle: int, barrier: Word) -> None:
    """A barrier of all subcores of a SparseCore."""
    self._note_line(bundle)
    self._event(cycle, "meet", bundle, barrier, 0)


def _check_alike(*words: Word) -> None:
  """Refuses words that change from round to round, in a proof."""
  if any(isinstance(word, affine.Affine) for word in words):
    raise affine._NotAffineError
