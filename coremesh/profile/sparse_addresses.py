"""Which subcore of which SparseCore an instruction means.

The forms are those libtpu 0.0.50 writes, read off the machine code of signals
and copies whose receiver is known, on v5p, v6e and tpu7x:

    signal    chip << 17 | kind << 14 | semaphore
    copy      ici_dest: kind << 26 | 1 << 14 | chip
    kind      1 << 2 | SparseCore of the chip; 1 << 1 | TensorCore of the chip
    semaphore of a vector subcore, where others name it:
              7 << 10 | subcore << 6 | semaphore
"""

from typing import NamedTuple

from coremesh import chips
from coremesh.profile import addresses
from coremesh.profile.addresses import FLAG_MASK
from coremesh.profile.events import Target

# The number of the scalar subcore among those of its SparseCore.
SCALAR = 16
_SIGNAL_CHIP = 17
_SIGNAL_KIND = 14
_COPY_KIND = 26
_KIND_MASK = 7
_IS_SPARSE = 4
_CHIP_MASK = (1 << 14) - 1
_OF_VECTOR = 7
_FORM = 10
_MEMBER = 6
_MEMBER_MASK = 15
_MEMBER_FLAG_MASK = 63
# Until it is known which cores run, a target's core is kind << 5 | member.
_MEMBER_BITS = 5


class Semaphore(NamedTuple):
  """A semaphore of a SparseCore: whose, and its number there."""

  member: int
  flag: int


def semaphore(word: int) -> Semaphore:
  """The semaphore a word names."""
  word &= FLAG_MASK
  if word >> _FORM == _OF_VECTOR:
    member = word >> _MEMBER & _MEMBER_MASK
    return Semaphore(member, word & _MEMBER_FLAG_MASK)
  return Semaphore(SCALAR, word)


def is_of_tensor_core(word: int) -> bool:
  """Whether a signal is for a TensorCore."""
  return not word >> _SIGNAL_KIND & _IS_SPARSE


def of_signal(word: int) -> Target:
  """The receiver of a signal, by the numbers of the hardware."""
  kind = word >> _SIGNAL_KIND & _KIND_MASK
  return _target(word >> _SIGNAL_CHIP & _CHIP_MASK, kind, semaphore(word))


def of_copy(dest: int, flag: int, source: str, place: str) -> Target:
  """The receiver of a copy, by the numbers of the hardware."""
  kind = dest >> _COPY_KIND & _KIND_MASK
  target = _target(dest & _CHIP_MASK, kind, semaphore(flag))
  return target._replace(source=source, place=place)


def of_own(group: int, to: Semaphore) -> Target:
  """A subcore of the same SparseCore and device as the sender.

  Its device is -1 until `receiver` is asked.
  """
  return _target(-1, _IS_SPARSE | group, to)


def _target(chip: int, kind: int, to: Semaphore) -> Target:
  return Target(
    device=chip, core=kind << _MEMBER_BITS | to.member, flag=to.flag
  )


def core_number(group: int, member: int, chip: chips.Chip) -> int:
  """The number of a subcore in its device: vector subcores come first."""
  count = chip.vector_subcores_per_sparse_core
  if member == SCALAR:
    return chip.sparse_cores_per_device * count + group
  return group * count + member


def receiver(target: Target, place: addresses.Slice, sender: int) -> Target:
  """A receiver by the numbers of the program.

  Args:
    target: by those of the hardware.
    place: the devices of the program.
    sender: the device that sends, by its number in the program.

  Raises:
    UnsupportedError: it is on no device of the program.
  """
  chip = place.chip
  kind, member = divmod(target.core, 1 << _MEMBER_BITS)
  group = kind % chip.sparse_cores_per_device
  core = core_number(group, member, chip)
  if target.device < 0:
    return target._replace(device=sender, core=core)
  # Where a chip is several devices, they count its SparseCores one by one.
  own = (kind & ~_IS_SPARSE) // chip.sparse_cores_per_device
  found = place.receiver(target._replace(core=own), sender)
  return found._replace(core=core)
