"""Reads the machine code of a SparseCore as the instructions of a TensorCore.

The text is what libtpu writes with xla_sc_dump_bundles_to: a section for the
scalar subcore, "scs", and one for the vector subcores, "tec". Scalar
instructions get the names they have on a TensorCore, so that the same machine
runs them; a bundle that delays is followed by so many empty ones.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import re

from coremesh import errors
from coremesh.profile.bundles import (
  UNNUMBERED,
  Address,
  Bundle,
  Operand,
  Program,
  Register,
  Slot,
)

_SECTION = re.compile(r"^(scs|tec)$", re.MULTILINE)
_BUNDLE = re.compile(
  r"^(0x[0-9a-f]+): \{(.*?)\}[ ]*$", re.MULTILINE | re.DOTALL
)
_LABEL = re.compile(r"^([.\w]+):[ ]*$", re.MULTILINE)
_LINES = re.compile(f"{_BUNDLE.pattern}|{_LABEL.pattern}", re.M | re.S)
_SLOT = re.compile(
  r"(?P<to>.*?)\s*=\s*(?P<opcode>[a-z]\w*(?:\.\w+)*)\s*(?P<rest>.*)", re.S
)
_PREDICATE = re.compile(r"@(!?)p(\d+)\s*")
_REGISTER = re.compile(r"(!?)([sp])(\d+)")
_MEMORY = re.compile(r"\[(\w+):([^\]]*)\]")
_COMPARE = re.compile(r"s(eq|ne|lt|le|gt|ge)\.([su]32)")
_TARGET = re.compile(r"(\.\w+)-\.\w+(?:, \$(\d+))?")
_SIZE = re.compile(r"\$_size_(\w+)")
_TABLE = re.compile(r"length:(\$?\w+)|ici_dest:(\w+)")
# The memories of copies; others are near the subcores.
_FAR, _NEAR = "hbm", "vmem"
_OF_CODE = ("timem", "simem")
# Bundles after a branch that are issued before it is taken, where the text does
# not say so: in loops whose counters are updated there, read off the code of
# v5p and v6e. That of a scalar subcore on tpu7x says 3 itself.
_DELAY_SLOTS = 2
_SCALAR_DELAY_SLOTS = 3
# Words handed to a subcore are not in its memory.
_ARGUMENTS = 1 << 24
_SAME = frozenset(
  [
    *("sadd.s32", "ssub.s32", "smul.u32", "sand.u32", "sor.u32", "sxor.u32"),
    *(
      "sshll.u32",
      "sshllo.u32",
      "sshrl.u32",
      "sshra.s32",
      "smin.u32",
      "smax.u32",
    ),
    *("smin.s32", "smax.s32", "srdreg.scid", "stileid.u32", "spop"),
    *("por", "pand", "pxor", "pnor", "pnand"),
  ]
)
_RENAMED = {
  "simm.s32": "smov",
  "smov.u32": "smov",
  "swait.ge": "dma.done.wait",
  "swait.eq": "dma.done.wait",
  "ssyncadd.s32": "vsyncadd",
  "ssyncset.s32": "vsyncset",
  "ssyncpa.u1": "vsyncpa",
  "sbarrier.arrive": "meet",
  "sfence.stream.hbm": "fence",
  "sld": "sld",
  "rddreg": "sld",
  "sst": "sst",
  "wrdreg": "sst",
  "ssyncadd.remote.s32": "signal.subcore",
  "ssyncadd.tile.s32": "signal.scalar",
}
# They do not change what happens when, or only to the scalar subcore.
_DROPPED = frozenset(
  [
    *("strace", "snop", "ssettag", "ssettm", "sfence", "sfence.sel"),
    *("ssyncset.done", "swait.done", "sdelay"),
  ]
)


# The end of a program, which is that of its text.
_ENDS = frozenset(["shalt", "sbr.abs"])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Function:
  """A function of a section.

  Attributes:
    name: its label.
    program: its bundles, numbered from its start, delays as empty ones.
  """

  name: str
  program: Program


def functions(text: str) -> tuple[Function, ...]:
  """The functions of the vector subcores, their section "tec"; () without one.

  Raises:
    UnsupportedError: the text is of another form; says what was expected.
  """
  body = _section(text, "tec")
  if body is None:
    return ()
  found = []
  for piece in body.split(".Lfunc_end")[:-1] or [body]:
    labels = [m[1] for m in _LABEL.finditer(piece) if m[1][0] != "."]
    if labels:
      found.append(Function(name=labels[-1], program=_program(piece)))
  if not found:
    raise _unexpected("functions that end in '.Lfunc_end'", repr(text[:60]))
  return tuple(found)


def scalar_function(text: str) -> Function:
  """What the scalar subcore runs of the kernel itself: its last function.

  Before it stands what brings the code of a kernel, which is not the kernel's.

  Raises:
    UnsupportedError: as `functions`.
  """
  body = _section(text, "scs")
  if body is None:
    raise _unexpected("a section 'scs'", repr(text[:60]))
  sizes = _sizes(_section(text, "tec") or "")
  piece = body.split(".Lfunc_end")[-1]
  piece = _SIZE.sub(lambda m: f"${sizes.get(m[1], 0):#x}", piece)
  return Function(name="scalar", program=_program(piece, is_scalar=True))


def _sizes(body: str) -> Mapping[str, int]:
  """Bundles of each function of a section."""
  found: Counter[str] = Counter()
  name = ""
  for line in _LINES.finditer(body):
    if label := line[3]:
      name = name if label[0] == "." else label
    else:
      found[name] += 1
  return found


def _section(text: str, name: str) -> str | None:
  parts = _SECTION.split(text)
  return dict(zip(parts[1::2], parts[2::2], strict=True)).get(name)


def _unexpected(expected: str, found: str) -> errors.UnsupportedError:
  return errors.UnsupportedError(
    "The machine code of a SparseCore must be as libtpu 0.0.50 writes it."
    f" Expected {expected}; found {found}. Use"
    ' Operation.text("sparsecore"), or the libtpu that setup.cfg asks for.'
  )


def _program(piece: str, *, is_scalar: bool = False) -> Program:
  """The bundles of a function up to where it halts.

  What a scalar subcore runs ends where its text does, or idles.
  """
  texts: list[list[str]] = []
  starts: dict[str, int] = {}
  pending: list[str] = []
  for line in _LINES.finditer(piece):
    if line[3]:
      pending.append(line[3])
      continue
    starts.update(dict.fromkeys(pending, len(texts)))
    pending = []
    texts.append([w for w in re.split(r";\s*\n\s*", line[2].strip()) if w])
  halts = [i for i, slots in enumerate(texts) if _halts(slots)]
  if not halts and not is_scalar:
    raise _unexpected("a function that halts", repr(piece[:60]))
  texts = texts[: halts[0] + 1] if halts else texts
  lengths = [1 + _delay(slots) for slots in texts]
  places = [sum(lengths[:i]) for i in range(len(texts) + 1)]
  layout = _Layout(
    places=places,
    starts=starts,
    delay_slots=_SCALAR_DELAY_SLOTS if is_scalar else _DELAY_SLOTS,
  )
  bundles: list[Bundle] = []
  for i, slots in enumerate(texts):
    read = tuple(
      slot for text in slots if (slot := _slot(text, i, layout)) is not None
    )
    bundles.append(Bundle(index=places[i], label="", depth=0, slots=read))
    for index in range(places[i] + 1, places[i + 1]):
      bundles.append(Bundle(index=index, label="", depth=0, slots=()))
  return Program(bundles=tuple(bundles))


def _halts(slots: list[str]) -> bool:
  return any(re.search(r"=\s*shalt\s*$", slot) for slot in slots)


def _delay(slots: list[str]) -> int:
  """Cycles for which nothing is issued after a bundle."""
  found = [re.search(r"sdelay \$0x([0-9a-f]+)", slot) for slot in slots]
  return sum(int(match[1], 16) for match in found if match)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
  """Where the bundles of a text are in its program.

  Attributes:
    places: of each bundle of the text, by its number; the last is the end.
    starts: the bundle of the text that follows each label.
    delay_slots: bundles of the text after a branch, where it says nothing.
  """

  places: Sequence[int]
  starts: Mapping[str, int]
  delay_slots: int


def _slot(text: str, at: int, layout: _Layout) -> Slot | None:
  """A slot of a bundle of the text, None for what changes nothing."""
  match = _SLOT.match(text)
  if match is None:
    raise _unexpected("'result = opcode operands'", repr(text[:80]))
  opcode, rest, to = match["opcode"], match["rest"], match["to"].strip()
  predicate = None
  if found := _PREDICATE.search(rest):
    predicate = Register(
      bank="p",
      number=int(found[2]),
      value=UNNUMBERED,
      is_negated=bool(found[1]),
    )
    rest = rest[: found.start()] + rest[found.end() :]
  if opcode in _DROPPED or opcode in _ENDS:
    return None
  if opcode.startswith("sbr"):
    return _branch(rest, opcode, predicate, at=at, layout=layout)
  result = _register(to)
  operands = tuple(map(_operand, _split(rest)))
  if opcode[0] == "v":
    return Slot(opcode=opcode, result=result)
  if opcode == "dma.general":
    opcode, operands = _to_subcore(to, rest, operands)
  elif opcode.startswith(("stream.", "dma.")):
    opcode, operands = _stream(opcode, to, operands)
  elif opcode == "smem.add.s32" and operands[-1:] == (0,):
    opcode, operands = "fetch", _ends(to)
  elif compare := _COMPARE.fullmatch(opcode):
    opcode = f"scmp.{compare[1]}.{compare[2]}.totalorder"
  elif opcode in _RENAMED:
    if to.startswith("["):  # What is changed stands before the opcode.
      operands = (_operand(to), *operands)
    opcode = _RENAMED[opcode]
  elif opcode in _SAME and opcode[0] == "p":
    opcode, operands = _predicates(opcode, operands)
  return Slot(
    opcode=opcode,
    result=result,
    predicate=predicate,
    operands=operands,
    names=("",) * len(operands),
  )


def _branch(
  rest: str,
  opcode: str,
  predicate: Register | None,
  *,
  at: int,
  layout: _Layout,
) -> Slot:
  places, starts = layout.places, layout.starts
  target = _TARGET.match(rest.strip())
  if target is None or target[1] not in starts:
    raise _unexpected("branches to a label of their function", repr(rest[:80]))
  if starts[target[1]] >= len(places):
    raise _unexpected("branches to before the first halt", repr(rest[:80]))
  after = at + 1 + int(target[2] or layout.delay_slots)
  last = min(after, len(places) - 1)
  return Slot(
    opcode=opcode,
    predicate=predicate,
    target=places[starts[target[1]]],
    delay=places[last] - places[at] - 1,
  )


def _split(text: str) -> Iterator[str]:
  return (w.strip() for w in re.split(r",(?![^\[]*\])", text) if w.strip())


def _register(text: str) -> Register | None:
  match = _REGISTER.fullmatch(text)
  if match is None:
    return None
  return Register(
    bank=match[2],
    number=int(match[3]),
    value=UNNUMBERED,
    is_negated=bool(match[1]),
  )


def _operand(text: str) -> Operand:
  if (register := _register(text)) is not None:
    return register
  if match := _MEMORY.match(text):
    terms = [_operand(term) for term in match[2].split("+")]
    if match[1] in ("sflag", "bflag") and len(terms) == 1:
      return terms[0]
    if match[1] == "dreg":
      terms.append(_ARGUMENTS)
    kept = tuple(t for t in terms if isinstance(t, int | Register))
    return Address(space=match[1], terms=kept)
  try:
    return int(text.removeprefix("$"), 0) & 0xFFFFFFFF
  except ValueError:
    return text


def _predicates(
  opcode: str, operands: tuple[Operand, ...]
) -> tuple[str, tuple[Operand, ...]]:
  """An operation on predicates, without numbers among its operands."""
  numbers = [o for o in operands if isinstance(o, int)]
  if len(numbers) == 2 and opcode == "por":
    return "pmov", (int(any(numbers)),)
  if not numbers:
    return opcode, operands
  return f"{opcode} of numbers", ()


def _ends(to: str) -> tuple[Operand, ...]:
  """What stands before an opcode: where it writes, and the semaphore."""
  return tuple(_operand(f"[{m[0]}:{m[1]}]") for m in _MEMORY.findall(to))


def _memory(address: Operand) -> str:
  space = (isinstance(address, Address) and address.space) or ""
  if space in _OF_CODE:
    return "code"
  return _FAR if space.startswith("hbm") else _NEAR


def _to_subcore(
  to: str, rest: str, operands: tuple[Operand, ...]
) -> tuple[str, tuple[Operand, ...]]:
  """A copy to another subcore: semaphores of both, granules and receiver."""
  table = {m[0].partition(":")[0]: m[1] or m[2] for m in _TABLE.finditer(rest)}
  source, flags = operands[0], _ends(to)[1:]
  if table.keys() != {"length", "ici_dest"} or len(flags) != 1:
    return "dma.general", operands
  length, dest = _operand(table["length"]), _operand(table["ici_dest"])
  kind = f"{_memory(source)}.{_memory(_ends(to)[0])}"
  return f"subcore.{kind}", (*flags, operands[1], length, dest)


def _stream(
  opcode: str, to: str, operands: tuple[Operand, ...]
) -> tuple[str, tuple[Operand, ...]]:
  """A copy as its kind, its semaphore, its words and how often they come."""
  ends = [m for m in _MEMORY.findall(to) if m[0] != "sflag"]
  flags = [
    _operand(f"[sflag:{m[1]}]") for m in _MEMORY.findall(to) if m[0] == "sflag"
  ]
  words = [o for o in operands if not isinstance(o, Address)]
  source = next((o for o in operands if isinstance(o, Address)), None)
  _, form, direction = (*opcode.split("."), "", "")[:3]
  if direction == "scatter" and words:
    flags, words = words[:1], words[1:]
  known = form in ("linear", "strided", "indirect", "local")
  if not (known and ends and flags and words and source is not None):
    return opcode, operands
  first, place = _memory(source), _memory(_ends(to)[0])
  if opcode == "dma.local":  # It counts granules, not words.
    return f"shared.{first}.{place}", (flags[0], words[0])
  kind = "read" if first == _FAR else "write" if place == _FAR else "local"
  count: Operand = words[2] if form == "indirect" and len(words) > 2 else 1
  return f"stream.{kind}", (flags[0], words[0], count)
