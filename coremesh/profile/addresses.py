"""Which core of which device an instruction means, and which one runs it.

The forms are those libtpu 0.0.50 writes for programs of one mesh, read off the
machine code of signals and copies whose receiver is known:

    signal    chip << 17 | 1 << 15 | core << 14 | semaphore
    copy      overrides: 1 << 27 | core << 26 | 1 << 14 | chip
    semaphore of a copy's receiver: the low 13 bits
    semaphores of a copy into the VMEM of both cores, which one starts:
              3 << 29 | semaphore of the other << 16 | semaphore
"""

from collections.abc import Mapping, Sequence, Set
import dataclasses
import math

from coremesh import chips, errors
from coremesh.profile.bundles import Address, Operand, Program, Register, Slot
from coremesh.profile.events import Target

_SIGNAL_CHIP = 17
_SIGNAL_CORE = 14
_COPY_CORE = 26
_COPY_IS_REMOTE = 14
_CHIP_MASK = (1 << 14) - 1
FLAG_MASK = (1 << 13) - 1
_FLAG_OF_OTHER = 16
_IS_FOR_BOTH = 3 << 29
# A slice of so many chips along an axis closes to a ring, as the documentation
# of Cloud TPU says: cubes of 4 x 4 x 4, and 16 x 16 where there are two axes.
_RING = {"v4": 4, "v5p": 4, "tpu7x": 4, "v5e": 16, "v6e": 16}


def of_signal(word: int) -> Target:
  """The receiver of a signal, its device still that of the hardware."""
  return Target(
    device=word >> _SIGNAL_CHIP & _CHIP_MASK,
    core=word >> _SIGNAL_CORE & 1,
    flag=word & FLAG_MASK,
  )


def is_remote(overrides: int) -> bool:
  """Whether a copy goes to another core or device."""
  return bool(overrides >> _COPY_IS_REMOTE & 1)


def of_copy(overrides: int, flag: int, source: str, place: str) -> Target:
  """The receiver of a copy, its device still that of the hardware."""
  return Target(
    device=overrides & _CHIP_MASK,
    core=overrides >> _COPY_CORE & 1,
    flag=flag & FLAG_MASK,
    source=source,
    place=place,
  )


def of_copy_to_both(flag: int, *, core: int, device: int) -> Target | None:
  """The other core that gets a copy from HBM too; None if none does.

  Args:
    flag: the semaphores of the copy.
    core: the one that starts it.
    device: what the hardware calls its device.
  """
  if flag & _IS_FOR_BOTH != _IS_FOR_BOTH:
    return None
  return Target(
    device=device,
    core=1 - core,
    flag=flag >> _FLAG_OF_OTHER & FLAG_MASK,
    source="hbm",
    place="vmem",
  )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
  """How a program finds out where it runs.

  Attributes:
    device_words: allocations that hold the number of its device.
    zero_words: allocations that hold the number of its replica, or of the only
      chip, which is 0.
    table: what the hardware calls each device of the program, in their order;
      () if the program does not say.
    barrier: the semaphore that is the kernel's by its collective_id; None if
      that is not certain.
  """

  device_words: frozenset[str]
  zero_words: frozenset[str]
  table: tuple[int, ...]
  barrier: str | None


def identity(program: Program, num_devices: int) -> Identity:
  """Reads from the machine code how it finds out where it runs.

  The number of a device is a word that nothing in the program stores, plus
  the number of the replica times the devices of each. A program of one device
  adds half the number of its core to that of its chip.
  """
  made = {s.result.value: s for s in program.slots if s.result is not None}
  stored = {_name(s.operands[0]) for s in program.slots if s.opcode == "sst"}
  cores = {
    _name(s.operands[0])
    for s in program.slots
    if s.opcode == "sld" and any("core id" in note for note in s.notes)
  }
  devices, replicas = set(), set()
  for slot in program.slots:
    if slot.opcode != "sadd.s32":
      continue
    for one, other in (slot.operands, slot.operands[::-1]):
      device = _loaded(made, one)
      if num_devices == 1 and _is_half(made, other, cores):
        replicas.update({device} - stored - {None})
      replica = _loaded(made, _unscaled(made, other, num_devices))
      if device and replica and not {device, replica} & stored:
        devices.add(device)
        replicas.add(replica)
  return Identity(
    device_words=frozenset(devices),
    zero_words=frozenset(replicas - devices),
    table=_table(program, made, num_devices),
    barrier=_barrier(program),
  )


def _barrier(program: Program) -> str | None:
  """The only semaphore that is waited for and not checked at the end."""
  waited, checked = set(), set()
  for slot in program.slots:
    if slot.opcode.startswith("vwait"):
      waited.add(_name(slot.operands[0]))
    elif slot.opcode == "vsyncmov":
      checked.add(_name(slot.operands[0]))
  found = waited - checked - {None}
  return found.pop() if len(found) == 1 else None


def _made_by(made: Mapping[int, Slot], operand: Operand | None) -> Slot | None:
  is_register = isinstance(operand, Register)
  return made.get(operand.value) if is_register else None


def _name(operand: Operand) -> str | None:
  """The allocation of an address that is nothing else."""
  if isinstance(operand, Address) and len(operand.terms) == 1:
    [term] = operand.terms
    return term if isinstance(term, str) else None
  return None


def _loaded(made: Mapping[int, Slot], operand: Operand | None) -> str | None:
  slot = _made_by(made, operand)
  return _name(slot.operands[0]) if slot and slot.opcode == "sld" else None


def _is_half(
  made: Mapping[int, Slot], operand: Operand, words: Set[str | None]
) -> bool:
  """Whether an operand is half of one of some words of SMEM."""
  half = _made_by(made, operand)
  if half is None or half.opcode != "sshrl.u32" or half.operands[1] != 1:
    return False
  load = _made_by(made, half.operands[0])
  if load is None or load.opcode != "sld":
    return False
  address = load.operands[0]
  if isinstance(address, Address) and len(address.terms) == 1:
    # Under a predicate: where that does not hold, some other word is loaded.
    [term] = address.terms
    select = _made_by(made, term if isinstance(term, Register) else None)
    if select is not None and select.opcode == "scalar_select":
      address = select.operands[1]
  return _name(address) in words - {None}


def _unscaled(
  made: Mapping[int, Slot], operand: Operand, num_devices: int
) -> Operand | None:
  """What is multiplied by the number of devices."""
  slot = _made_by(made, operand)
  if slot is None or len(slot.operands) != 2:
    return None
  word, by = slot.operands
  if slot.opcode == "sshll.u32" and isinstance(by, int):
    return word if 1 << by == num_devices else None
  if slot.opcode == "smul.u32":
    return by if word == num_devices else word if by == num_devices else None
  return None


def _table(
  program: Program, made: Mapping[int, Slot], num_devices: int
) -> tuple[int, ...]:
  """The numbers a program stores, one for each device, before all else."""
  found: dict[str, dict[int, int]] = {}
  for slot in program.slots:
    if slot.opcode != "sst" or slot.predicate is not None:
      continue
    address, word = slot.operands
    if not isinstance(address, Address) or not 1 <= len(address.terms) <= 2:
      continue
    name, index = (*address.terms, 0)[:2]
    source = _made_by(made, word)
    if source is not None and source.opcode == "smov":
      [word] = source.operands
    if isinstance(name, str) and isinstance(index, int) and type(word) is int:
      found.setdefault(name, {})[index] = word
  for words in found.values():
    if sorted(words) == list(range(num_devices)):
      if len({*words.values()}) == num_devices > 1:
        return tuple(words[i] for i in range(num_devices))
  return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """The devices of a program, where each is and how far apart they are.

  Attributes:
    chip: the slice; of another number of devices than the program, only the
      generation is known, and each way is taken to be one link.
    table: what the hardware calls each device of the program.
  """

  chip: chips.Chip
  table: Sequence[int]

  def __post_init__(self):
    if len({*self.table}) != len(self.table):
      raise errors.UnsupportedError(
        f"The devices of a program must differ; got {self.table}."
      )

  @property
  def is_known(self) -> bool:
    """Whether it is known where the devices are."""
    return self.chip.num_devices == len(self.table)

  def receiver(self, target: Target, sender: int) -> Target:
    """A receiver by the numbers of the program.

    Args:
      target: by those of the hardware.
      sender: the device that sends, by its number in the program.

    Raises:
      UnsupportedError: it is no device of the program.
    """
    count, device, core = self.chip.devices_per_chip, target.device, target.core
    if count > 1:  # The core of a chip is what the program calls a device.
      device, core = device * count + core, 0
    if device not in self.table:
      raise errors.UnsupportedError(
        f"The receiver of a copy or signal must be a device of the program,"
        f" one of {list(self.table)[:16]}; got {device}."
      )
    number = list(self.table).index(device)
    hops = self.hops(sender, number)
    way = "link" if hops else "core" if number == sender else "die"
    return target._replace(device=number, core=core, way=way, hops=hops)

  def hops(self, one: int, other: int) -> int:
    """Links on the way from one device of the program to another."""
    count = self.chip.devices_per_chip
    if not self.is_known:
      return int(self.table[one] // count != self.table[other] // count)
    here, there = self._place(one), self._place(other)
    ring, total = _RING[self.chip.generation], 0
    for a, b, size in zip(here, there, self.chip.topology, strict=True):
      apart = abs(a - b)
      total += min(apart, size - apart) if size % ring == 0 else apart
    return total

  def _place(self, number: int) -> tuple[int, ...]:
    """Coordinates of the chip of a device; the first axis runs fastest."""
    index = self.table[number] // self.chip.devices_per_chip
    if index >= math.prod(self.chip.topology):
      raise errors.UnsupportedError(
        f"A device of {self.chip.name} must be on one of its"
        f" {self.chip.num_chips} chips; got chip {index}."
      )
    place = []
    for size in self.chip.topology:
      index, at = divmod(index, size)
      place.append(at)
    return tuple(place)
