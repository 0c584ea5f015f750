"""Writes the Python that runs the scalar slots of a stretch of machine code.

Slots of a bundle read what registers held before it. The compiler numbers every
value, so that each read is checked to find the value it means; on a SparseCore
it does not, and what nothing has written is not known.
"""

from collections.abc import Callable, Mapping, Set
import dataclasses

from coremesh import errors
from coremesh.profile import expressions, statements, values
from coremesh.profile.bundles import (
  UNNUMBERED,
  Address,
  Bundle,
  Operand,
  Register,
  Slot,
)

BANKS = {"s": 0, "p": 64}
NUM_REGISTERS = 128
NEVER = -2  # no value yet

# A local variable says which value the register holds.
_DYNAMIC = -1


def _key(register: Register) -> int:
  return BANKS[register.bank] + register.number


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Names:
  """What the names in a program stand for.

  Attributes:
    bases: the address of each allocation.
    spaces: the memory that each value which is a pointer points to.
    moved: the values that are another value as a pointer.
    own_word: the expression of an allocation that says where the program runs,
      None for others.
  """

  bases: Mapping[str, int]
  spaces: Mapping[int, str]
  moved: Set[int]
  own_word: Callable[[str], str | None]


class Writer:
  """Writes the Python of one stretch."""

  def __init__(self, names: Names):
    self._names = names
    self.causes: list[values.Unknown] = []
    self._lines: list[str] = []
    self._loaded: set[int] = set()
    self._ids: dict[int, int] = {}
    self._written: set[int] = set()
    self._has_branch = False
    self._pending: dict[int, int] = {}

  def source(self) -> str:
    """The text of a module that defines `make`."""
    body = [f"r{k} = R[{k}]; i{k} = I[{k}]" for k in sorted(self._loaded)]
    body += self._lines
    for key in sorted(self._written):
      held = self._ids[key]
      value = f"i{key}" if held == _DYNAMIC else str(held)
      body.append(f"R[{key}] = r{key}; I[{key}] = {value}")
    body.append("return taken" if self._has_branch else "return False")
    inner = "\n".join(f"    {line}" for line in body)
    return f"def make(R, I, S, D, H):\n  def run(t):\n{inner}\n  return run\n"

  # --- registers ---

  def _read(self, register: Register, bundle: int, condition: str = "") -> str:
    """An expression for what a register holds before the bundle."""
    key = _key(register)
    held = self._held(key)
    if held == _DYNAMIC and register.value in self._names.moved:
      never = self._unknown(f"a pointer not computed (bundle {bundle:#x})")
      return f"(r{key} if i{key} == {register.value} else {never})"
    if held == _DYNAMIC and register.value != UNNUMBERED:
      test = f"i{key} != {register.value}"
      if condition:
        test = f"{condition} and {test}"
      else:
        self._ids[key] = register.value
      self._lines.append(
        f"if {test}: H.mismatch({bundle}, {str(register)!r}, i{key})"
      )
    elif held not in (_DYNAMIC, register.value):
      raise errors.UnsupportedError(
        f"Bundle {bundle:#x} reads {register}, but that register holds value"
        f" {held} there: the machine code is not as this reader takes it."
      )
    return f"(r{key} ^ True)" if register.is_negated else f"r{key}"

  def _held(self, key: int) -> int:
    """The number of the value a register holds, or `_DYNAMIC`."""
    if key not in self._ids:
      self._ids[key] = _DYNAMIC
      self._loaded.add(key)
    return self._ids[key]

  def _unknown(self, cause: str) -> str:
    self.causes.append(values.Unknown(cause))
    return f"K[{len(self.causes) - 1}]"

  def _value(self, operand: Operand, bundle: int, condition: str = "") -> str:
    match operand:
      case int():
        return str(operand)
      case Register():
        if operand.bank not in BANKS:
          return self._unknown(f"a vector register (bundle {bundle:#x})")
        return self._read(operand, bundle, condition)
      case Address(terms=terms):
        words = [
          str(self._names.bases[term])
          if isinstance(term, str)
          else self._value(term, bundle, condition)
          for term in terms
        ]
        return words[0] if len(words) == 1 else f"({' + '.join(words)})"
    return self._unknown(f"the operand {operand!r} (bundle {bundle:#x})")

  # --- bundles ---

  def bundle(self, bundle: Bundle, offset: int) -> None:
    """Adds a bundle: first all reads, then all writes."""
    stores: list[str] = []
    writes: list[Slot] = []
    moves: list[Slot] = []
    self._pending.clear()
    for slot in bundle.slots:
      if slot.opcode in ("sphi", "pphi"):
        self._phi(slot, bundle.index)
    for slot in bundle.slots:
      if slot.opcode in ("sphi", "pphi"):
        continue
      if slot.opcode.startswith("int_to_ptr"):
        moves.append(slot)
      elif slot.target is not None:
        self._branch(slot, bundle.index)
      elif slot.result is not None and slot.result.bank in BANKS:
        count = len(writes)
        self._lines.append(f"w{count} = {self._result(slot, bundle.index)}")
        if slot.predicate is not None and slot.otherwise is None:
          self._lines.append(f"n{count} = {self._number(slot)}")
        self._pending[_key(slot.result)] = count
        writes.append(slot)
      elif not slot.is_vector:
        self._effect(slot, bundle.index, offset, stores)
    self._lines += stores
    for i, slot in enumerate(writes):
      self._write(slot, f"w{i}", f"n{i}")
    for slot in moves:
      self._move(slot, bundle.index)

  def _phi(self, slot: Slot, bundle: int) -> None:
    """A new number for what a register holds, whichever way it came."""
    assert slot.result is not None
    key = _key(slot.result)
    ids = {o.value for o in slot.operands if isinstance(o, Register)}
    if any(isinstance(o, Register) and _key(o) != key for o in slot.operands):
      raise errors.UnsupportedError(
        f"Bundle {bundle:#x} has a phi of several registers, which is not"
        " modelled."
      )
    if self._held(key) == _DYNAMIC:
      wanted = (*sorted(ids), slot.result.value)
      self._lines.append(
        f"if i{key} not in {wanted}: "
        f"H.mismatch({bundle}, {str(slot.result)!r}, i{key})"
      )
    self._ids[key] = slot.result.value
    self._written.add(key)

  def _number(self, slot: Slot) -> str:
    """Which value the result holds after a slot that may have no effect."""
    assert slot.predicate is not None and slot.result is not None
    key = _key(slot.result)
    if key in self._pending:
      before = f"n{self._pending[key]}"
    else:
      held = self._held(key)
      before = f"i{key}" if held == _DYNAMIC else str(held)
    off = "True" if slot.predicate.is_negated else "False"
    name = f"r{_key(slot.predicate)}"
    return f"{before} if {name} is {off} else {slot.result.value}"

  def _write(self, slot: Slot, expression: str, number: str) -> None:
    register = slot.result
    assert register is not None
    key = _key(register)
    is_sure = slot.predicate is None or slot.otherwise is not None
    self._ids[key] = register.value if is_sure else _DYNAMIC
    self._written.add(key)
    self._lines.append(f"r{key} = {expression}")
    if not is_sure:
      self._lines.append(f"i{key} = {number}")

  def _move(self, slot: Slot, bundle: int) -> None:
    """A pointer as another kind of pointer, once its bundle has written it.

    It may be of a value that was not computed. Then the register holds what it
    did, which may be read, and the pointer is not used.
    """
    source = slot.operands[0]
    if not isinstance(source, Register) or slot.predicate is not None:
      raise errors.UnsupportedError(
        f"Bundle {bundle:#x} holds {slot.opcode} of {source}, which is not"
        " modelled."
      )
    assert slot.result is not None
    key = _key(source)
    if self._held(key) == _DYNAMIC and _key(slot.result) == key:
      self._written.add(key)
      self._lines.append(
        f"if i{key} == {source.value}: i{key} = {slot.result.value}"
      )
      return
    if self._held(key) == _DYNAMIC:
      never = self._unknown(f"a pointer not computed (bundle {bundle:#x})")
      word = f"r{key} if i{key} == {source.value} else {never}"
    else:
      word = self._read(source, bundle)
    self._write(slot, word, "")

  def _condition(self, slot: Slot, bundle: int) -> str:
    """The test that a slot takes effect for certain; "" if it always does."""
    if slot.predicate is None:
      return ""
    positive = dataclasses.replace(slot.predicate, is_negated=False)
    name = self._read(positive, bundle)
    return f"{name} is {not slot.predicate.is_negated}"

  def _result(self, slot: Slot, bundle: int) -> str:
    """The expression of the value a slot writes."""
    condition = self._condition(slot, bundle)
    expression = expressions.expression(
      slot,
      where=f"bundle {bundle:#x}",
      words=lambda: [self._value(o, bundle, condition) for o in slot.operands],
      unknown=self._unknown,
      own=self._names.own_word,
    )
    if not condition:
      return expression
    assert slot.result is not None
    key = _key(slot.result)
    off = condition.replace(" is True", " is F").replace(" is False", " is T")
    off = off.replace(" is F", " is False").replace(" is T", " is True")
    if slot.otherwise is not None:
      old = self._read(slot.otherwise, bundle, off)
    else:
      self._held(key)
      pending = self._pending.get(key)
      old = f"r{key}" if pending is None else f"w{pending}"
    name = condition.split(" ")[0]
    return f"({expression}) if {condition} else ({old} if {off} else {name})"

  # --- what has no result ---

  def _branch(self, slot: Slot, bundle: int) -> None:
    self._has_branch = True
    predicate = slot.predicate
    taken = "True" if predicate is None else self._read(predicate, bundle)
    self._lines.append(f"taken = {taken}")

  def _effect(
    self, slot: Slot, bundle: int, offset: int, stores: list[str]
  ) -> None:
    opcode = slot.opcode
    if opcode in statements.WITHOUT_EFFECT:
      return
    condition = self._condition(slot, bundle)
    name = condition.split(" ")[0]
    call = statements.statement(
      slot,
      f"t + {offset}, {bundle}",
      bundle,
      words=[self._value(o, bundle, condition) for o in slot.operands],
      spaces=self._names.spaces,
    )
    if opcode == "shalt.err":
      # A check that depends on data is taken to pass.
      stores.append(f"if {condition or 'True'}: {call}")
      return
    if not condition:
      stores.append(call)
      return
    stores.append(f"if {condition}: {call}")
    off = "True" if "False" in condition else "False"
    if opcode == "sst":  # The word may be the old or the new one.
      address = self._value(slot.operands[0], bundle, condition)
      stores.append(
        f"elif {name} is not {off}: H.store({bundle}, {address}, {name})"
      )
      return
    stores.append(
      f"elif {name} is not {off}:"
      f" H.assume_runs({bundle}, {opcode!r}, {name}); {call}"
    )
