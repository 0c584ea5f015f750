"""Turns stretches of machine code into Python that runs their scalar slots.

A stretch starts where a branch may go and ends after the delay slots of the
next branch.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from coremesh import errors
from coremesh.profile import addresses, expressions, layout, values
from coremesh.profile.bundles import Program, Slot
from coremesh.profile.writer import Names, Writer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
  """Bundles that are run one after the other.

  Attributes:
    start: the first bundle.
    end: the bundle after the last.
    target: where its branch goes; None if it has none.
    branch: the bundle of the branch.
    code: makes, from the state of a core, a function that runs the stretch: it
      takes the cycle of the first bundle and returns whether the branch is
      taken.
    namespace: what the code refers to.
  """

  start: int
  end: int
  target: int | None
  branch: int | None
  code: Any
  namespace: dict[str, Any]

  def bind(self, **state: Any) -> Any:
    """The function for one core."""
    scope = dict(self.namespace)
    exec(self.code, scope)
    return scope["make"](**state)


class Code:
  """A program and what has been translated of it, which its cores share.

  Attributes:
    program: the machine code.
    delay_slots: bundles after a branch that are run before it is taken.
    num_devices: that the program is for.
    start: its first bundle; before it stands the code of other cores.
    end: the bundle after its last.
    bases: the address of each allocation.
    semaphores: numbers of those the program names, each the first of an array.
    identity: how the program finds out where it runs.
  """

  def __init__(
    self,
    program: Program,
    *,
    delay_slots: int,
    num_devices: int = 1,
    part: tuple[int, int] | None = None,
  ):
    self.program = program
    self.delay_slots = delay_slots
    self.num_devices = num_devices
    self.start, self.end = part or (0, len(program.bundles))
    self.bases = layout.bases(program)
    self.semaphores = layout.semaphores(program, self.bases)
    self.identity = addresses.identity(program, num_devices)
    moved = {
      s.result.value
      for s in program.slots
      if s.result is not None and s.opcode.startswith("int_to_ptr")
    }
    self._names = Names(
      bases=self.bases,
      spaces=layout.spaces(program),
      moved=moved,
      own_word=self.own_word,
    )
    targets = {s.target for s in program.slots if s.target is not None}
    self._leaders = {*targets, self.end}
    self._stretches: dict[int, Stretch] = {}
    self._places: dict[int, Mapping[int, layout.Place]] = {}

  def places(self, hbm_unit_bytes: int) -> Mapping[int, layout.Place]:
    """Where its operands are, by their numbers."""
    if hbm_unit_bytes not in self._places:
      found = layout.places(self.program, hbm_unit_bytes)
      self._places[hbm_unit_bytes] = found
    return self._places[hbm_unit_bytes]

  def own_word(self, allocation: str) -> str | None:
    """The expression of a word that says where the program runs."""
    if allocation in self.identity.device_words:
      return "H.device"
    return "0" if allocation in self.identity.zero_words else None

  def stretch(self, start: int) -> Stretch:
    """The stretch that starts at a bundle."""
    if start not in self._stretches:
      self._stretches[start] = self._translated(start)
    return self._stretches[start]

  def _translated(self, start: int) -> Stretch:
    branch, end = self._end(start)
    writer = Writer(self._names)
    for bundle in self.program.bundles[start:end]:
      writer.bundle(bundle, bundle.index - start)
    source = writer.source()
    namespace = {"M": values.MASK, "K": writer.causes, **expressions.FUNCTIONS}
    return Stretch(
      start=start,
      end=end,
      target=branch[1].target if branch else None,
      branch=branch[0] if branch else None,
      code=compile(source, f"<bundles {start:#x} to {end:#x}>", "exec"),
      namespace=namespace,
    )

  def _end(self, start: int) -> tuple[tuple[int, Slot] | None, int]:
    """The branch of a stretch, and the bundle after its last."""
    bundles = self.program.bundles
    branch, end = None, len(bundles)
    for index in range(start, len(bundles)):
      if branch is None and index > start and index in self._leaders:
        return None, index
      slots = [s for s in bundles[index].slots if s.target is not None]
      if slots and branch is not None:
        raise errors.UnsupportedError(
          f"Bundle {index:#x} branches in the delay slots of another branch,"
          " which is not modelled."
        )
      if slots:
        slot = slots[0]
        delay = self.delay_slots if slot.delay is None else slot.delay
        branch, end = (index, slot), min(index + 1 + delay, len(bundles))
      if branch is not None and index + 1 == end:
        break
    return branch, end
