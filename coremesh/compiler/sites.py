"""Where in the user's files the operations of a traced program come from."""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import pathlib
import re

import jax
import jax.extend.core as jex_core
import jaxlib

from coremesh import _compat
from coremesh._compat import aot

_NOT_THE_USERS = tuple(
  f"{folder}/"
  for folder in (
    pathlib.Path(jax.__file__).parent,
    pathlib.Path(jaxlib.__file__).parent,
    pathlib.Path(__file__).parent.parent,
    pathlib.Path(contextlib.__file__).parent,
  )
)
# How the compilers name a kernel and an operation in it.
_KERNEL = re.compile(
  r"MLIR module name `(?P<module>[^`]+)`|HLO name `(?P<hlo>[^`]+)`"
  r"|:: (?P<llo>[\w.\-]+)$|(?:for|on stack for) %(?P<stack>[\w.\-]+) ="
)
_OPERATION = re.compile(
  r'loc\("(?P<loc>\w+):|error: "(?P<error>\w+):'
  r"|lowering for \w+: (?P<jax>\w+)\."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
  """One operation of a traced program.

  Attributes:
    operation: its name in JAX.
    kernels: the names of the kernel it is in, or that it is.
    line: the user's line, "file:line (function)"; None if JAX has lost it.
    has_empty: whether an operand or result of it has no elements.
  """

  operation: str
  kernels: frozenset[str]
  line: str | None
  has_empty: bool

  @property
  def is_kernel(self) -> bool:
    """Whether it launches a kernel."""
    return self.operation in aot.KERNEL_PRIMITIVES


def of_program(jaxpr: jex_core.Jaxpr) -> list[Site]:
  """Every operation of a program and of what is in it, in order."""
  return list(_visit(jaxpr, frozenset(), None))


def _visit(
  jaxpr: jex_core.Jaxpr, kernels: frozenset[str], outer: str | None
) -> Iterator[Site]:
  for eqn in jaxpr.eqns:
    # Inside a scope JAX keeps the lines of the scope's own program only.
    line = users_line(aot.frames_of(eqn)) or outer
    name = eqn.primitive.name
    inside = kernels
    if name in aot.KERNEL_PRIMITIVES:
      inside = aot.kernel_names(eqn)
      line = line or users_line(aot.definition_of(eqn))
    has_empty = any(
      0 in getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)
    )
    yield Site(operation=name, kernels=inside, line=line, has_empty=has_empty)
    for inner in _compat.inner_jaxprs(eqn):
      yield from _visit(inner, inside, line)


def users_line(frames: Sequence[tuple[str, str, int]]) -> str | None:
  """The first frame that is neither JAX's nor coremesh's, in words."""
  for name, file, line in frames:
    if not file.startswith(_NOT_THE_USERS) and not file.startswith("<frozen"):
      return f"{file}:{line} ({name.rpartition('.')[2]})"
  return None


def line_of(text: str, found: Sequence[Site]) -> str | None:
  """The line a message is about, from the kernel and operation it names.

  Args:
    text: what a compiler said.
    found: the operations of the program.

  Returns:
    The line; several if the message fits several; None if it names nothing.
  """
  named = _names(_KERNEL, text)
  stems = named | {re.sub(r"\.\d+$", "", n) for n in named}
  kernels = [s for s in found if s.kernels & stems] if stems else []
  kernels = kernels or _of_the_only_kernel(found)
  operations = _names(_OPERATION, text)
  for candidates in (
    [s for s in kernels if s.operation in operations],
    [s for s in found if s.operation in operations],
    [s for s in kernels if s.is_kernel],
  ):
    lines = list(dict.fromkeys(s.line for s in candidates if s.line))
    if lines:
      return " or ".join(lines[:3])
  return None


def _names(pattern: re.Pattern[str], text: str) -> set[str]:
  matches = pattern.finditer(text.replace("\n", " \n"))
  return {n for m in matches for n in m.groups() if n}


def _of_the_only_kernel(found: Sequence[Site]) -> list[Site]:
  launched = [s for s in found if s.is_kernel]
  if len(launched) != 1:
    return []
  return [s for s in found if s.kernels == launched[0].kernels]
