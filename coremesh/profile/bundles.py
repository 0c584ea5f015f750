"""Reads the machine code that libtpu writes: one bundle for each cycle.

The text is the dump "packed-bundles-post-ra", where stalls are bundles of
their own, so that bundles are cycles. What is not of that form is an error.
"""

from collections.abc import Iterator
import dataclasses
import functools
import re

from coremesh import errors

_HEADER = "= control target key start"
_LABELS = ("LH", "LB", "LE", "PB", "PF", "CT")
_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
# A name of an operand; inside a comment it would end the comment.
_NAMED = re.compile(r"/\*([A-Za-z_]\w*)=\*/")
_SOURCE = re.compile(r'"([^"]+)":(\d+):\d+')
_LINE = re.compile(
  r"^[ ]*(?P<index>0x[0-9a-f]+|0)[ ]+(?P<label>[A-Z]{2})?[ ]*:"
  r"(?P<depth>[ >]*)\{(?P<slots>.*?)\}[ ]*$",
  re.MULTILINE | re.DOTALL,
)
_STARTS = re.compile(r"^[ ]*(?:0x[0-9a-f]+|0)[ ]+(?:[A-Z]{2})?[ ]*:", re.M)
_SLOT = re.compile(r"(?:%(?P<result>\w+) = )?(?P<opcode>[a-z][\w.\-\[\]]*)")
_REGISTER = re.compile(r"(!?)%([a-z]+)(\d+)_([a-z]+)(\d+)$")
_PREDICATE = re.compile(r"(?:^|(?<=\s)|(?<=\]))\((!?%p[^)]*)\)")
_NEVER = re.compile(r"(?:^|(?<=\s)|(?<=\]))\(!1\)")
_TARGET = re.compile(r"target bundleno = (\d+)")
_TAG = re.compile(r"\[(?:thread|resolvable):\$\w+\]")
_KEYWORD = re.compile(r"([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_MARK = re.compile(r'\s*@"([^"]*)"')

# The value of registers where the compiler numbers no values.
UNNUMBERED = -3

# Vector slots whose operands matter to what happens when.
_CONTROL = ("vsync", "vwait", "vdelay")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Register:
  """A register as an instruction names it.

  Attributes:
    bank: "s" for scalars, "p" for predicates, "v" and "vm" for vectors.
    number: which register.
    value: the compiler's number of the value it holds there, or `UNNUMBERED`.
    is_negated: whether a predicate is read the other way round.
  """

  bank: str
  number: int
  value: int
  is_negated: bool = False

  def __str__(self) -> str:
    sign = "!" if self.is_negated else ""
    return f"{sign}%{self.bank}{self.value}_{self.bank}{self.number}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Address:
  """A sum of allocations ("#allocation5"), registers and numbers.

  Attributes:
    space: "smem", "vmem", … where the text says so.
    terms: what is added.
  """

  space: str | None
  terms: tuple["str | int | Register", ...]


type Operand = Register | Address | int | str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
  """One instruction of a bundle.

  Attributes:
    opcode: its name, such as "sadd.s32".
    result: the scalar or predicate register it writes, if it does.
    token: the number of what it hands on without a register.
    predicate: it takes effect if this register says so.
    otherwise: what the result is if not; None: what it was.
    operands: in order; () for vector instructions, which are not read.
    names: of the operands, "" for one without.
    target: the bundle a branch goes to.
    delay: bundles after the branch that are issued before it is taken; None:
      as many as for all branches of the chip.
    source: the line of the program, "file:line", if the compiler wrote it.
    notes: the compiler's comments.
  """

  opcode: str
  result: Register | None = None
  token: int | None = None
  predicate: Register | None = None
  otherwise: Register | None = None
  operands: tuple[Operand, ...] = ()
  names: tuple[str, ...] = ()
  target: int | None = None
  delay: int | None = None
  source: str | None = None
  notes: tuple[str, ...] = ()

  @property
  def is_vector(self) -> bool:
    """Whether it is for a vector unit, whose values are not followed."""
    return self.opcode[0] == "v" and not self.opcode.startswith(_CONTROL)

  def operand(self, name: str) -> Operand | None:
    """The operand of a name, None if there is none."""
    for found, operand in zip(self.names, self.operands, strict=True):
      if found == name:
        return operand
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
  """What a core issues in one cycle.

  Attributes:
    index: its place in the program.
    label: "LB" for the start of a loop and so on; "" for none.
    depth: how many loops it is in.
    slots: its instructions.
  """

  index: int
  label: str
  depth: int
  slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
  """The machine code of one operation.

  Attributes:
    bundles: `bundles[i].index == i`.
  """

  bundles: tuple[Bundle, ...]

  def __post_init__(self):
    for i, bundle in enumerate(self.bundles):
      if bundle.index != i:
        raise _unexpected(
          f"bundle {i:#x} to come after bundle {i - 1:#x}",
          f"bundle {bundle.index:#x}",
        )
      for slot in bundle.slots:
        if slot.target is not None and not 0 <= slot.target <= len(
          self.bundles
        ):
          raise _unexpected(
            f"branches to one of {len(self.bundles)} bundles",
            f"one to {slot.target} in bundle {i:#x}",
          )

  @property
  def slots(self) -> Iterator[Slot]:
    """All instructions in order."""
    for bundle in self.bundles:
      yield from bundle.slots


# One program is parsed to be checked, timed and counted.
@functools.lru_cache(maxsize=8)
def parse(text: str) -> Program:
  """Reads a dump of libtpu.

  Args:
    text: of "packed-bundles-post-ra", `Operation.text("bundles")`.

  Raises:
    UnsupportedError: it is of another form; says what was expected.
  """
  if _HEADER not in text[:2000]:
    raise _unexpected(f"a line {_HEADER!r} at the start", repr(text[:60]))
  plain = _COMMENT.sub(_comment, _NAMED.sub(r"\1=", text))
  bundles = []
  cache: dict[str, Register] = {}
  for match in _LINE.finditer(plain):
    label = match["label"] or ""
    if label and label not in _LABELS:
      raise _unexpected(f"a label of {', '.join(_LABELS)}", repr(label))
    parts = (part.strip() for part in match["slots"].split(";;"))
    parts = (part for part in parts if part and not _NEVER.search(part))
    bundles.append(
      Bundle(
        index=int(match["index"], 16),
        label=label,
        depth=match["depth"].count(">"),
        slots=tuple(_slot(part, cache) for part in parts),
      )
    )
  if len(bundles) != len(_STARTS.findall(plain)) or not bundles:
    raise _unexpected(
      "lines such as '0x1f LB: > { slot ;; slot }'",
      f"{len(_STARTS.findall(plain))} that begin so and {len(bundles)} that"
      " also end so",
    )
  return Program(bundles=tuple(bundles))


def _unexpected(expected: str, found: str) -> errors.UnsupportedError:
  return errors.UnsupportedError(
    "The machine code must be a dump 'packed-bundles-post-ra' as libtpu 0.0.50"
    f" writes it. Expected {expected}; found {found}. Use"
    ' Compiled.text("bundles"), or the libtpu that setup.cfg asks for.'
  )


def _comment(match: re.Match[str]) -> str:
  """A comment as a mark that the reader of a slot takes; "" if no use."""
  text = match[1].strip()
  if text.startswith(("Start", "End")):
    return ""
  marks = []
  if source := _SOURCE.search(text):
    marks.append(f' @"loc {source[1]}:{source[2]}"')
    # A note of the compiler's may stand in the same comment.
    text = " :: ".join(p for p in text.split(" :: ") if "loc(" not in p)
  text = text.split("\n")[0].replace('"', "'").replace(";;", ",")
  return "".join([*marks, f' @"{text[:120]}"' if text else ""])


def _slot(text: str, cache: dict[str, Register]) -> Slot:
  match = _SLOT.match(text)
  if match is None:
    raise _unexpected("'%result = opcode operands'", repr(text[:80]))
  opcode, rest = match["opcode"], text[match.end() :]
  notes: tuple[str, ...] = ()
  source = None
  if "@" in rest:
    found = _MARK.findall(rest)
    rest = _MARK.sub("", rest)
    source = next((n[4:] for n in found if n.startswith("loc ")), None)
    notes = tuple(n for n in found if not n.startswith("loc "))
  result, token = None, None
  if (name := match["result"]) and name[0] != "v":
    result = _register(f"%{name}", cache)
    if result is None and name.isdigit():
      token = int(name)
  if opcode[0] == "v" and not opcode.startswith(_CONTROL):
    return Slot(
      opcode=opcode, result=result, token=token, source=source, notes=notes
    )
  return _control_slot(
    rest, cache, opcode, result=result, token=token, source=source, notes=notes
  )


def _control_slot(
  rest: str, cache: dict[str, Register], opcode: str, **fields
) -> Slot:
  """A slot whose operands are read."""
  rest = _TAG.sub("", rest)
  if predicate := _PREDICATE.search(rest):
    words = [w.strip() for w in predicate[1].split(",")]
    fields["predicate"] = _register(words[0], cache)
    if len(words) > 1:
      fields["otherwise"] = _register(words[1], cache)
    rest = rest[: predicate.start()] + rest[predicate.end() :]
  if opcode.startswith("sbr"):
    target = _TARGET.search(rest)
    if target is None:
      raise _unexpected("branches with 'target bundleno = N'", repr(rest[:80]))
    return Slot(opcode=opcode, target=int(target[1]), **fields)
  names, operands = [], []
  for word in _split(rest.strip().lstrip(",")):
    keyword = _KEYWORD.match(word)
    names.append(keyword[1] if keyword else "")
    operands.append(_operand(keyword[2].strip() if keyword else word, cache))
  if opcode.startswith("inlined_call_operand"):
    opcode += rest.split("[")[0].strip() if opcode.endswith(".") else ""
    index = re.search(r"shape: (\w+\[[\d,]*\]).*index: (\d+)", rest)
    if index is None:
      raise _unexpected("an operand with its shape and index", repr(rest[:80]))
    names, operands = ["index", "shape"], [int(index[2]), index[1]]
  return Slot(
    opcode=opcode, operands=tuple(operands), names=tuple(names), **fields
  )


def _split(text: str) -> Iterator[str]:
  """The parts between commas outside brackets."""
  depth, start = 0, 0
  for i, char in enumerate(text):
    if char in "[(":
      depth += 1
    elif char in "])":
      depth -= 1
      # A store writes no comma after its address.
      if depth == 0 and char == "]" and text[start:].startswith("[smem:"):
        yield text[start : i + 1].strip()
        start = i + 1
    elif char == "," and depth == 0:
      if word := text[start:i].strip():
        yield word
      start = i + 1
  if word := text[start:].strip():
    yield word


def _register(text: str, cache: dict[str, Register]) -> Register | None:
  found = cache.get(text)
  if found is None:
    match = _REGISTER.match(text)
    if match is None:
      return None
    found = cache[text] = Register(
      bank=match[4],
      number=int(match[5]),
      value=int(match[3]),
      is_negated=bool(match[1]),
    )
  return found


def _operand(text: str, cache: dict[str, Register]) -> Operand:
  if (register := _register(text, cache)) is not None:
    return register
  text = re.sub(r"(?<=\w) \[#[^\]]*\]$", "", text)  # the bounds of a pointer
  if text.startswith("["):
    return _address(text, cache)
  number = _number(text)
  return text if number is None else number


def _address(text: str, cache: dict[str, Register]) -> Operand:
  match = re.fullmatch(r"\[(?:(\w+):)?\[?([^\[\]]*)\]?(?: [^\[\]]*)?\]", text)
  if match is None:
    return text
  terms: list[str | int | Register] = []
  for word in match[2].split("+"):
    word = word.strip()
    if word.startswith("#"):
      terms.append(word)
    elif (register := _register(word, cache)) is not None:
      terms.append(register)
    elif (number := _number(word.removeprefix("$"))) is not None:
      terms.append(number)
    else:
      return text
  return Address(space=match[1], terms=tuple(terms))


def _number(text: str) -> int | None:
  try:
    return int(text, 0) & 0xFFFFFFFF
  except ValueError:
    return {"true": 1, "false": 0}.get(text)
