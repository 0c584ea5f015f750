"""The value that a scalar slot writes, as a Python expression."""

from collections.abc import Callable, Sequence

from coremesh.profile import values
from coremesh.profile.bundles import Address, Slot

_WORDS = {
  "sadd.s32": "({} + {}) & M",
  "ssub.s32": "({} - {}) & M",
  "smul.u32": "({} * {}) & M",
  "smulhi.u32": "product_high({}, {})",
  "sand.u32": "{} & {}",
  "sor.u32": "{} | {}",
  "sxor.u32": "{} ^ {}",
  "sshll.u32": "shift_left({}, {})",
  "sshllo.u32": "shift_left_ones({}, {})",
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
# What says where a SparseCore program runs.
_PLACES = {"srdreg.scid": "group", "stileid.u32": "member"}
_COMPARISONS = dict(eq="==", ne="!=", lt="<", le="<=", gt=">", ge=">=")
FUNCTIONS = {
  f.__name__: f
  for f in (
    *(values.shift_left, values.shift_left_ones, values.shift_right),
    *(values.shift_right_signed, values.least, values.greatest),
    *(values.least_signed, values.greatest_signed, values.quotient),
    *(values.remainder, values.product_high),
  )
}


def expression(
  slot: Slot,
  *,
  where: str,
  words: Callable[[], Sequence[str]],
  unknown: Callable[[str], str],
  own: Callable[[str], str | None],
) -> str:
  """The expression; it may use `FUNCTIONS`, `H`, `S`, `D` and the mask `M`.

  Args:
    slot: one that writes a scalar or predicate register.
    where: the bundle, in words.
    words: makes the expressions of its operands.
    unknown: makes that of a value that is not known, from why it is not.
    own: that of an allocation that says where the program runs, if it does.
  """
  opcode = slot.opcode
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
      # It may be read again by an address in a register.
      return f"S.setdefault({words()[0]}, H.core)"
    address = slot.operands[0]
    if isinstance(address, Address) and len(address.terms) == 1:
      [term] = address.terms
      if isinstance(term, str) and (word := own(term)):
        return word
    cause = f"a word of SMEM that was not written before ({where})"
    return f"S.get({words()[0]}, {unknown(cause)})"
  if opcode.startswith("inlined_call_operand"):
    index, shape = slot.operands
    space = opcode.removeprefix("inlined_call_operand.")
    return f"H.operand({index}, {space!r}, {shape!r})"
  if opcode == "spop.drf":
    return f"D[{slot.operands[0]!r}]"
  if opcode == "ssyncread":
    cause = f"a word that was not fetched before ({where})"
    return f"H.fetched({words()[0]}, {unknown(cause)})"
  if opcode in _PLACES:
    return f"H.{_PLACES[opcode]}"
  if slot.is_vector or opcode == "spop":
    what = "the value of a semaphore" if "sfrf" in opcode else "vector data"
    return unknown(f"{what} ({opcode}, {where})")
  return unknown(f"the opcode {opcode} ({where})")
