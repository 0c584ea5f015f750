"""What the compiled program says around its kernels: who is given what."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re

import numpy as np

from coremesh.compiler.operands import MOST_BYTES

_NAME = r"%?(?P<name>[\w.\-<>]+)"
_INSTRUCTION = re.compile(rf"^\s+(?:ROOT )?{_NAME} = (?P<rest>.*)$")
_COMPUTATION = re.compile(rf"^(?P<entry>ENTRY )?{_NAME} .*\{{$")
_SHAPE = re.compile(
  r"(?P<type>\w+)\[(?P<sizes>[\d,]*)\]"
  r"(?:\{(?P<order>[\d,]*)(?::T(?P<tiles>(?:\([\d,]+\))+))?[^}]*\})?"
)
_PLACE = re.compile(r"^get-tuple-element\(.*\), index=(\d+)")
# Types of which values are known: what steers a kernel, and float32 in SMEM.
_DTYPES = {
  name: np.dtype(dtype)
  for name, dtype in (
    ("s8", np.int8),
    ("u8", np.uint8),
    ("s16", np.int16),
    ("u16", np.uint16),
    ("s32", np.int32),
    ("u32", np.uint32),
    ("f32", np.float32),
  )
}
# The result is the operand, as it is.
_SAME = ("copy", "bitcast", "copy-start", "copy-done", "optimization-barrier")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
  """One instruction of a compiled program.

  Attributes:
    name: its name.
    shape: type and layout of its result, as text.
    opcode: what it does.
    operands: names of instructions; the text of a constant or parameter.
    is_entry: whether it is run once, in the main computation.
    place: of a result among several, for "get-tuple-element".
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  is_entry: bool
  place: int = 0


def parse(text: str) -> dict[str, Instruction]:
  """The instructions of a compiled program by name."""
  found: dict[str, Instruction] = {}
  is_entry = False
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      is_entry = bool(match["entry"])
    elif match := _INSTRUCTION.match(line):
      shape, rest = _shape_and_rest(match["rest"])
      opcode, _, inner = rest.partition("(")
      found[match["name"]] = Instruction(
        name=match["name"],
        shape=shape,
        opcode=opcode.strip(),
        operands=tuple(_operands(inner)),
        is_entry=is_entry,
        place=int(found_at[1]) if (found_at := _PLACE.search(rest)) else 0,
      )
  return found


def _shape_and_rest(text: str) -> tuple[str, str]:
  """Splits "type opcode(…)"; the type may be a tuple."""
  if not text.startswith("("):
    shape, _, rest = text.partition(" ")
    return shape, rest
  end = _closing(text, 1)
  return text[: end + 1], text[end + 1 :].lstrip()


def _closing(text: str, start: int) -> int:
  depth = 1
  for i in range(start, len(text)):
    depth += (text[i] in "({") - (text[i] in ")}")
    if depth == 0:
      return i
  return len(text)


def _operands(inner: str) -> list[str]:
  # Comments number the operands from the sixth on.
  text = re.sub(r"/\*.*?\*/", "", inner[: _closing(inner, 0)])
  if "{" in text:  # a constant
    return [text]
  return [w.split(" ")[-1].lstrip("%") for w in text.split(", ") if w]


def operand_words(
  program: dict[str, Instruction],
  name: str,
  leaves: Sequence[object],
  produced: Mapping[str, Mapping[int, np.ndarray]],
) -> dict[int, np.ndarray]:
  """The words of the operands of an instruction that are known.

  Args:
    program: from `parse`.
    name: the instruction.
    leaves: the arguments of the program, in order; only arrays have values.
    produced: words that operations have written, by the operation and the
      number of the result.

  Returns:
    By the number of the operand, as it lies in memory. Operands that are
    computed, of other types or larger than SMEM are not in it.
  """
  if name not in program:
    return {}
  count = sum(i.opcode == "parameter" and i.is_entry for i in program.values())
  given = list(leaves) if count == len(leaves) else []
  found = {}
  for index, operand in enumerate(program[name].operands):
    instruction = program.get(operand)
    if instruction is None:
      continue
    value = _value(program, operand, given)
    words = None if value is None else _laid_out(value, instruction.shape)
    if words is None:
      words = _written(program, instruction, produced)
    if words is not None:
      found[index] = words
  return found


def _written(
  program: dict[str, Instruction],
  instruction: Instruction,
  produced: Mapping[str, Mapping[int, np.ndarray]],
) -> np.ndarray | None:
  """The words of a result that an operation has written, all of them."""
  source = instruction
  if source.opcode == "get-tuple-element":
    source = program[source.operands[0]]
  words = produced.get(source.name, {}).get(instruction.place)
  count = first_bytes(instruction.shape) // 4
  return None if words is None or len(words) < count else words


def words_of(
  program: dict[str, Instruction],
  name: str,
  values: Mapping[int, np.ndarray],
) -> dict[int, np.ndarray]:
  """Values of operands of an instruction, as words, as they lie in memory.

  Args:
    program: from `parse`.
    name: the instruction.
    values: by the number of the operand.

  Returns:
    By the number of the operand; without those of another type or size.
  """
  found = {}
  operands = program[name].operands if name in program else ()
  for index, value in values.items():
    made = program.get(operands[index]) if index < len(operands) else None
    shape = None if made is None else _SHAPE.match(made.shape)
    if made is None or shape is None or shape["type"] not in _DTYPES:
      continue
    sizes = tuple(int(n) for n in shape["sizes"].split(",") if n)
    dtype = _DTYPES[shape["type"]]
    if value.size != math.prod(sizes) or value.dtype.itemsize != dtype.itemsize:
      continue
    words = _laid_out(value.view(dtype).reshape(sizes), made.shape)
    if words is not None:
      found[index] = words
  return found


def _value(
  program: dict[str, Instruction], name: str, leaves: Sequence[object]
) -> np.ndarray | None:
  instruction = program[name]
  while instruction.opcode in _SAME and instruction.operands[0] in program:
    instruction = program[instruction.operands[0]]
  shape = _SHAPE.match(instruction.shape)
  if shape is None or shape["type"] not in _DTYPES:
    return None
  sizes = tuple(int(n) for n in shape["sizes"].split(",") if n)
  if instruction.opcode == "parameter" and instruction.is_entry and leaves:
    leaf = leaves[int(instruction.operands[0])]
    if not isinstance(leaf, np.ndarray) or leaf.shape != sizes:
      return None
    return leaf if leaf.dtype == _DTYPES[shape["type"]] else None
  if instruction.opcode == "broadcast":
    # Of one number: group sizes that are all alike, say.
    inner = _value(program, instruction.operands[0], leaves)
    if inner is None or inner.size != 1:
      return None
    return np.full(sizes, inner.ravel()[0])
  if instruction.opcode == "constant":
    text = ",".join(instruction.operands)
    words = re.findall(r"-?[\d.]+(?:e[+-]?\d+)?", text)
    value = np.array(words).astype(_DTYPES[shape["type"]])
    return value.reshape(sizes) if value.size == math.prod(sizes) else None
  return None


def _laid_out(value: np.ndarray, shape: str) -> np.ndarray | None:
  """The 32-bit words of an array in the order of its tiles.

  Each tile after the first cuts up the tile before it, as in T(8,128)(4,1),
  where four rows of bytes make one row of words.
  """
  match = _SHAPE.match(shape)
  if match is None or value.nbytes > MOST_BYTES:
    return None
  order = [int(n) for n in (match["order"] or "").split(",") if n]
  if order != list(range(value.ndim))[::-1]:
    return None
  laid = np.atleast_1d(value)
  for text in re.findall(r"\(([\d,]+)\)", match["tiles"] or ""):
    tile = [int(n) for n in text.split(",")]
    if len(tile) > laid.ndim:
      return None
    laid = _tiled(laid, tile)
  flat = np.ascontiguousarray(laid).ravel().view(np.uint8)
  return np.pad(flat, (0, -flat.size % 4)).view(np.uint32)


def _tiled(array: np.ndarray, tile: Sequence[int]) -> np.ndarray:
  """The last axes cut into tiles, which become the last axes; 0 fills them."""
  first = array.ndim - len(tile)
  sizes = array.shape[first:]
  pad = [(0, -size % t) for size, t in zip(sizes, tile, strict=True)]
  array = np.pad(array, [(0, 0)] * first + pad)
  cut = [
    n
    for size, t in zip(array.shape[first:], tile, strict=True)
    for n in (size // t, t)
  ]
  split = array.reshape(*array.shape[:first], *cut)
  outer = range(first, split.ndim, 2)
  inner = range(first + 1, split.ndim, 2)
  return split.transpose(*range(first), *outer, *inner)


def twin(
  program: dict[str, Instruction], name: str, names: Sequence[str]
) -> str | None:
  """An instruction among `names` that does the same to the same types."""
  wanted = _signature(program, name)
  for other in names:
    if other in program and _signature(program, other) == wanted:
      return other
  return None


def _signature(program: dict[str, Instruction], name: str) -> tuple[str, ...]:
  instruction = program[name]
  operands = [program[o].shape for o in instruction.operands if o in program]
  return instruction.opcode, instruction.shape, *operands


def first_bytes(shape: str) -> int:
  """Bytes of a shape, or of the first in a tuple, without padding."""
  match = _SHAPE.match(shape.lstrip("("))
  if match is None:
    return 0
  bits = int(
    re.sub(r"\D.*", "", match["type"].lstrip("abcdefghijklmnopqrstuvwxyz")) or 8
  )
  sizes = [int(n) for n in match["sizes"].split(",") if n]
  return -(-math.prod(sizes) * bits // 8)
