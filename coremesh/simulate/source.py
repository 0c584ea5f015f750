"""The text of a program: lines, blocks, names, and functions for deep nests.

Python compiles at most 20 loops inside one another and 99 levels of
indentation. What is nested more deeply is written as a generator function
beside the others, which the block it belongs to runs. All variables are those
of the program, whichever function sets them.
"""

import ast
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
from typing import Any

# A nest goes on in another function from here on. A little room is left for the
# blocks of a few lines that operations write inside.
_MAX_LOOPS = 17
_MAX_BLOCKS = 80


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
  """A variable of the written source. (A `str` would pass for a sequence.)"""

  text: str

  def __str__(self) -> str:
    return self.text


class Source:
  """Writes the source of one program.

  Attributes:
    lines: those of the function that is written now.
  """

  def __init__(self):
    self.lines: list[str] = []
    self._functions: list[list[str]] = []
    self._indent = 1
    self._num_loops = 0
    self._count = 0
    self._once: list[dict[Any, tuple[Name, int, str]]] = [{}]

  def line(self, text: str) -> None:
    self.lines.append("  " * self._indent + text)

  @contextlib.contextmanager
  def block(self, head: str) -> Iterator[None]:
    """Lines inside `head`, such as "while True:"."""
    self.end_stretch()
    self.line(head)
    is_loop = head.startswith(("for ", "while "))
    self._num_loops += is_loop
    self._indent += 1
    before = len(self.lines)
    self._once.append({})
    yield
    self.end_stretch()
    self._once.pop()
    if len(self.lines) == before:
      self.line("pass")
    self._indent -= 1
    self._num_loops -= is_loop

  @contextlib.contextmanager
  def nest(self) -> Iterator[None]:
    """Room for one more loop, or one more branch with its alternatives."""
    if self._num_loops < _MAX_LOOPS and self._indent < _MAX_BLOCKS:
      yield
      return
    self.end_stretch()
    outside = self.lines, self._indent, self._num_loops
    self.lines, self._indent, self._num_loops = [], 2, 0
    self._once.append({})
    yield
    self.end_stretch()
    self._once.pop()
    self._functions.append(self.lines)
    self.lines, self._indent, self._num_loops = outside
    self.line(f"yield from nest{len(self._functions)}()")

  def end_stretch(self) -> None:
    """A stretch of lines without branches ends here."""

  def name(self, prefix: str = "v") -> Name:
    """A new name."""
    self._count += 1
    return Name(f"{prefix}{self._count}")

  def let(self, expression: str, prefix: str = "v") -> Name:
    """A new name for what an expression gives."""
    name = self.name(prefix)
    self.line(f"{name} = {expression}")
    return name

  def once(self, expression: str, key: Any, prefix: str = "p") -> Name:
    """A name for what an expression gives, written once where it is known.

    Args:
      expression: its source; of names that keep their values in this block.
      key: equal for expressions that give the same.
      prefix: of the name.
    """
    for known in reversed(self._once):
      name, place, line = known.get(key, (None, 0, ""))
      # A mutant may have taken the line away.
      if name is not None and self.lines[place : place + 1] == [line]:
        return name
    name = self.let(expression, prefix)
    self._once[-1][key] = name, len(self.lines) - 1, self.lines[-1]
    return name

  def unpack(self, expression: str, count: int) -> list[Name]:
    """New names for the results that an expression gives."""
    names = [self.name() for _ in range(count)]
    targets = "".join(f"{name}, " for name in names)
    self.line(f"{targets}= {expression}" if names else expression)
    return names

  def source(self, arguments: Sequence[str]) -> str:
    """The source of the generator function `program(m, w, *arguments)`."""
    self.end_stretch()
    text = [f"def program(m, w{''.join(', ' + a for a in arguments)}):"]
    for number, lines in enumerate(self._functions, start=1):
      text += _function(f"nest{number}", lines)
    # A worker's program is a generator even if it never waits.
    return "\n".join([*text, *self.lines, "  return", "  yield"])


def _function(name: str, lines: Sequence[str]) -> list[str]:
  """A generator inside the program that sets the program's variables."""
  head = f"  def {name}():"
  tree = ast.parse("\n".join([head.lstrip(), *lines]))
  names = sorted(
    {
      node.id
      for node in ast.walk(tree)
      if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
  )
  found = [head]
  if names:
    # It needs a value, from which on the program has the variable.
    found = [f"  {n} = None" for n in names] + found
    found.append(f"    nonlocal {', '.join(names)}")
  return [*found, *lines, "    return", "    yield"]
