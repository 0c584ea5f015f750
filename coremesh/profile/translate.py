"""Turns stretches of machine code into Python that runs their scalar slots.

A stretch starts where a branch may go and ends after the delay slots of the
next branch. Slots of a bundle read what registers held before it. The compiler
numbers every value, so that each read is checked to find the value it means.
"""

from collections.abc import Mapping, Sequence, Set
import dataclasses
from typing import Any

from coremesh import errors
from coremesh.profile import values
from coremesh.profile.bundles import Address, Bundle, Operand, Register, Slot

BANKS = {"s": 0, "p": 64}
NUM_REGISTERS = 128
NEVER = -2  # no value yet

# A local variable says which value the register holds.
_DYNAMIC = -1

_WORDS = {
  "sadd.s32": "({} + {}) & M",
  "ssub.s32": "({} - {}) & M",
  "smul.u32": "({} * {}) & M",
  "sand.u32": "{} & {}",
  "sor.u32": "{} | {}",
  "sxor.u32": "{} ^ {}",
  "sshll.u32": "shift_left({}, {})",
  "sshrl.u32": "shift_right({}, {})",
  "sshra.s32": "shift_right_signed({}, {})",
  "smin.u32": "least({}, {})",
  "smax.u32": "greatest({}, {})",
  "smin.s32": "least_signed({}, {})",
  "smax.s32": "greatest_signed({}, {})",
  "por": "{} | {}",
  "pand": "{} & {}",
  "pxor": "{} ^ {}",
  "pnor": "({} | {}) ^ True",
  "pnand": "({} & {}) ^ True",
  "pneg": "{} ^ True",
}
_COMPARISONS = dict(eq="==", ne="!=", lt="<", le="<=", gt=">", ge=">=")
# They do not change what happens when.
_WITHOUT_EFFECT = frozenset(
  ["sfence", "compiler-scheduling-barrier", "spush.sccf", "sc.u32", "strace"]
)
_FUNCTIONS = {
  f.__name__: f
  for f in (
    *(values.shift_left, values.shift_right, values.shift_right_signed),
    *(values.least, values.greatest, values.least_signed),
    *(values.greatest_signed, values.quotient, values.remainder),
  )
}


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


def translate(
  bundles: Sequence[Bundle],
  start: int,
  *,
  leaders: Set[int],
  bases: Mapping[str, int],
  spaces: Mapping[int, str],
  delay: int,
) -> Stretch:
  """The stretch that starts at a bundle.

  Args:
    bundles: of the program.
    start: the first.
    leaders: where branches go to.
    bases: the address of each allocation.
    spaces: the memory that each value which is a pointer points to.
    delay: how many bundles after a branch are run before it is taken.
  """
  branch, end = None, len(bundles)
  for index in range(start, len(bundles)):
    if branch is None and index > start and index in leaders:
      end = index
      break
    slots = [s for s in bundles[index].slots if s.target is not None]
    if slots and branch is not None:
      raise errors.UnsupportedError(
        f"Bundle {index:#x} branches in the delay slots of another branch,"
        " which is not modelled."
      )
    if slots:
      branch, end = (index, slots[0]), min(index + 1 + delay, len(bundles))
    if branch is not None and index + 1 == end:
      break
  writer = _Writer(bases, spaces)
  for bundle in bundles[start:end]:
    writer.bundle(bundle, bundle.index - start)
  source = writer.source()
  return Stretch(
    start=start,
    end=end,
    target=branch[1].target if branch else None,
    branch=branch[0] if branch else None,
    code=compile(source, f"<bundles {start:#x} to {end:#x}>", "exec"),
    namespace={"M": values.MASK, "K": writer.causes, **_FUNCTIONS},
  )


def _key(register: Register) -> int:
  return BANKS[register.bank] + register.number


class _Writer:
  """Writes the Python of one stretch."""

  def __init__(self, bases: Mapping[str, int], spaces: Mapping[int, str]):
    self._bases = bases
    self._spaces = spaces
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
    if held == _DYNAMIC:
      test = f"i{key} != {register.value}"
      if condition:
        test = f"{condition} and {test}"
      else:
        self._ids[key] = register.value
      self._lines.append(
        f"if {test}: H.mismatch({bundle}, {str(register)!r}, i{key})"
      )
    elif held != register.value:
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
          str(self._bases[term])
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

    It may be of a value that was not computed, and then is not used.
    """
    source = slot.operands[0]
    if not isinstance(source, Register) or slot.predicate is not None:
      raise errors.UnsupportedError(
        f"Bundle {bundle:#x} holds {slot.opcode} of {source}, which is not"
        " modelled."
      )
    key = _key(source)
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
    expression = self._expression(slot, bundle, condition)
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

  def _expression(self, slot: Slot, bundle: int, condition: str) -> str:
    opcode, where = slot.opcode, f"bundle {bundle:#x}"
    words = lambda: [self._value(o, bundle, condition) for o in slot.operands]
    if opcode in _WORDS:
      return _WORDS[opcode].format(*words())
    if opcode.startswith("scmp."):
      _, relation, kind, *_ = opcode.split(".")
      if kind in ("s32", "u32") and relation in _COMPARISONS:
        a, b = words()
        if kind == "s32" and relation not in ("eq", "ne"):
          a, b = f"({a} ^ {values.SIGN})", f"({b} ^ {values.SIGN})"
        return f"{a} {_COMPARISONS[relation]} {b}"
    if opcode in ("smov", "pmov"):
      [word] = words()
      return f"{word} != 0" if word.isdigit() and opcode == "pmov" else word
    if opcode == "scalar_select":
      p, a, b = words()
      return f"({a}) if {p} is True else (({b}) if {p} is False else {p})"
    if opcode.startswith("scalar_lea"):
      return f"({' + '.join(words())}) & M"
    if opcode == "sld":
      if any("core id" in note for note in slot.notes):
        return "H.core"
      cause = f"a word of SMEM that was not written before ({where})"
      return f"S.get({words()[0]}, {self._unknown(cause)})"
    if opcode.startswith("inlined_call_operand"):
      index, shape = slot.operands
      space = opcode.removeprefix("inlined_call_operand.")
      return f"H.operand({index}, {space!r}, {shape!r})"
    if opcode == "spop.drf":
      return f"D[{slot.operands[0]!r}]"
    if slot.is_vector or opcode == "spop":
      what = "the value of a semaphore" if "sfrf" in opcode else "vector data"
      return self._unknown(f"{what} ({opcode}, {where})")
    return self._unknown(f"the opcode {opcode} ({where})")

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
    if opcode in _WITHOUT_EFFECT:
      return
    condition = self._condition(slot, bundle)
    name = condition.split(" ")[0]
    call = self._call(slot, bundle, offset, condition)
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

  def _call(self, slot: Slot, bundle: int, offset: int, condition: str) -> str:
    """The statement that does what a slot does."""
    opcode, at = slot.opcode, f"t + {offset}, {bundle}"
    words = [self._value(o, bundle, condition) for o in slot.operands]
    named = dict(zip(slot.names, words, strict=True))
    match opcode:
      case "shalt.err":
        return f"H.halt({bundle}, {slot.notes[:1]!r})"
      case "sst":
        return f"H.store({bundle}, {words[0]}, {words[1]})"
      case "sdivrem.u32":
        function = "remainder" if "kRem" in slot.notes else "quotient"
        return f"D['%{slot.token}'] = {function}({words[0]}, {words[1]})"
      case "dma.done.wait":
        return f"H.wait({at}, {words[0]}, {words[1]})"
      case "vsyncadd":
        return f"H.add({at}, {words[0]}, {words[1]})"
      case "vsyncpa" | "vsyncset":
        return f"H.set({at}, {words[0]}, {words[1]})"
      case "vsyncmov":
        return "pass"
      case "vdelay":
        return f"H.delay({at}, {words[0]})"
    if opcode.startswith("dma.") and "_to_" in opcode:
      source, _, place = opcode.removeprefix("dma.").partition("_to_")
      if {source, place} <= {"hbm", "vmem", "smem"}:
        flag, size = named["dst_syncflagno"], named["size_in_granules"]
        ends = f"{named.get(source)}, {named.get(place)}"
        return f"H.dma({at}, {source!r}, {place!r}, {flag}, {size}, {ends})"
    if opcode == "dma.general":
      source, place = (self._space(slot.operand(n)) for n in ("src", "dst"))
      if {source, place} == {"hbm", "vmem"}:
        flag, size = named["dst_syncflagno"], named["size_in_granules"]
        other = named["src_syncflagno"]
        ends = f"{source!r}, {place!r}, {flag}, {size}, {other}"
        return f"H.general({at}, {ends})"
    return f"H.refuse({bundle}, {opcode!r}, {slot.notes[:1]!r})"

  def _space(self, operand: Operand | None) -> str | None:
    """The memory a pointer is to, if the slot that made it says so."""
    is_register = isinstance(operand, Register)
    return self._spaces.get(operand.value) if is_register else None
