"""How often the instructions of a compiled program are run.

XLA runs the body of a loop as often as its condition says. Where that is a
counter that starts at a constant, grows by a constant and ends at a constant,
it is known; where data decide, it is not.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import re

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r"[\])}] (?P<opcode>[a-z][\w\-]*)\(")
_CALLED = {
  "body": re.compile(r"\bbody=%?([\w.\-]+)"),
  "condition": re.compile(r"\bcondition=%?([\w.\-]+)"),
}
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NUMBER = re.compile(r"constant\((-?\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")
_SAME = ("copy", "bitcast")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Instruction:
  text: str
  opcode: str
  operands: tuple[str, ...]
  is_root: bool


type _Computation = dict[str, _Instruction]


def executions(text: str) -> dict[str, int | None]:
  """How often each instruction is run when the program runs once.

  Args:
    text: the HLO of a compiled program.

  Returns:
    By the name of the instruction, for those of the main computation and of
    the loops it runs; None if data decide it. Others are parts of a fusion, or
    in a branch.
  """
  computations, entry = _parse(text)
  found: dict[str, int | None] = {}
  queue: list[tuple[str, int | None]] = [(entry, 1)]
  while queue:
    name, times = queue.pop()
    computation = computations.get(name, {})
    for instruction_name, instruction in computation.items():
      found[instruction_name] = times
      if instruction.opcode == "while":
        trips = _trips(instruction, computation, computations)
        known = times is not None and trips is not None
        inner = times * trips if known else None  # pyright: ignore
        queue.append((_called(instruction, "body"), inner))
  return found


def _parse(text: str) -> tuple[Mapping[str, _Computation], str]:
  found: dict[str, _Computation] = {}
  entry = ""
  current: _Computation = {}
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      current = found[match["name"]] = {}
      entry = match["name"] if match["entry"] else entry
    elif match := _INSTRUCTION.match(line):
      current[match["name"]] = _instruction(line, bool(match["root"]))
  return found, entry


def _instruction(line: str, is_root: bool) -> _Instruction:
  match = _OPCODE.search(line)
  if match is None:
    return _Instruction(text=line, opcode="", operands=(), is_root=is_root)
  inner = line[match.end() : line.find(")", match.end())]
  names = re.findall(r"%([\w.\-]+)", re.sub(r"/\*.*?\*/", "", inner))
  return _Instruction(
    text=line,
    opcode=match["opcode"],
    operands=tuple(names),
    is_root=is_root,
  )


def _called(instruction: _Instruction, what: str) -> str:
  match = _CALLED[what].search(instruction.text)
  return match[1] if match else ""


def _trips(
  loop: _Instruction,
  around: _Computation,
  computations: Mapping[str, _Computation],
) -> int | None:
  """How often the body of a loop is run, None if that is not known."""
  if match := _TRIPS.search(loop.text):
    return int(match[1])
  condition = computations.get(_called(loop, "condition"), {})
  body = computations.get(_called(loop, "body"), {})
  compare = _root(condition)
  if compare is None or compare.opcode != "compare":
    return None
  if "direction=LT" not in compare.text or len(compare.operands) != 2:
    return None
  place = _index(compare.operands[0], condition)
  if place is None:
    return None
  end = _number(compare.operands[1], condition)
  start = _number(_element(loop.operands[0], place, around), around)
  step = _step(body, place)
  if start is None or end is None or step is None or step < 1:
    return None
  return max(0, -(-(end - start) // step))


def _index(name: str, computation: _Computation) -> int | None:
  """Which element of the state of a loop a value is, through copies of it."""
  for instruction in _sources(name, computation):
    if instruction.opcode == "get-tuple-element":
      match = _INDEX.search(instruction.text)
      return int(match[1]) if match else None
  return None


def _root(computation: _Computation) -> _Instruction | None:
  return next((i for i in computation.values() if i.is_root), None)


def _element(name: str, place: int, computation: _Computation) -> str:
  """The name of an element of a tuple."""
  made = computation.get(name)
  is_tuple = made is not None and made.opcode == "tuple"
  return made.operands[place] if is_tuple else ""  # pyright: ignore


def _number(name: str, computation: _Computation) -> int | None:
  """The value of a constant, through copies of it."""
  for instruction in _sources(name, computation):
    if instruction.opcode == "constant":
      match = _NUMBER.search(instruction.text)
      return int(match[1]) if match else None
  return None


def _sources(name: str, computation: _Computation) -> Iterator[_Instruction]:
  instruction = computation.get(name)
  while instruction is not None:
    yield instruction
    if instruction.opcode not in _SAME:
      return
    instruction = computation.get(instruction.operands[0])


def _step(body: _Computation, place: int) -> int | None:
  """By how much an element of the state grows in the body of a loop."""
  root = _root(body)
  if root is None or root.opcode != "tuple":
    return None
  for grown in _sources(root.operands[place], body):
    if grown.opcode != "add" or len(grown.operands) != 2:
      continue
    for before, step in (grown.operands, grown.operands[::-1]):
      if _index(before, body) == place:
        return _number(step, body)
  return None
