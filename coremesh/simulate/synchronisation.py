"""The operations of a kernel that synchronise, and changes to one of them."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

from coremesh.simulate import machine

type Kind = Literal[
  "delete", "duplicate", "own target", "next target", "delete line"
]

# A copy is no synchronisation, but it may go to the wrong worker.
_PRIMITIVES = {
  "pallas.semaphore_signal": "signal",
  "pallas.semaphore_wait": "wait",
  "tpu.dma_wait": "wait",
  "sc.barrier": "barrier",
  "tpu.dma_start": "copy",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
  """One place of a kernel that synchronises.

  Attributes:
    primitive: "signal", "wait", "barrier" or "copy".
    what: what it does to what: "signal of 'ready'".
    line: where, in the user's code: "kernel.py:12 (body)".
    num_targets: how many workers it could go to along the first axis that its
      device_id names; 0 if it names none.
  """

  primitive: str
  what: str
  line: str
  num_targets: int

  @property
  def kinds(self) -> tuple[Kind, ...]:
    """How it can be changed by itself."""
    changed: tuple[Kind, ...] = ("delete", "duplicate")
    moved: tuple[Kind, ...] = ("own target", "next target")
    if self.primitive == "copy":
      changed = ()
    if self.primitive == "barrier":
      changed = ("delete",)  # To meet twice is to meet.
    # Along an axis of one worker the next is the same.
    return changed + moved[: min(self.num_targets, 2)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
  """A change to one operation, or to all of one line.

  Attributes:
    index: which operation, in the order in which they are written.
    kind: "delete", "duplicate"; "own target", the worker itself in place of
      another; "next target", the one after it along the first axis of its
      device_id; "delete line", all of its line but copies.
  """

  index: int
  kind: Kind


class Operations:
  """Notes the operations of a kernel as its programs are written.

  Args:
    mutation: how to change one of them, None for no change.
    of: the operations of the kernel without the change.

  Attributes:
    found: those written so far.
    passed: the indices of those that a worker has come to, while the unchanged
      programs run.
  """

  def __init__(
    self,
    mutation: Mutation | None = None,
    of: tuple[Operation, ...] = (),
  ):
    self.found: list[Operation] = []
    self.passed: set[int] = set()
    self._mutation = mutation
    self._line = None
    if mutation is not None and mutation.kind == "delete line":
      self._line = of[mutation.index].line

  def write(
    self,
    em: Any,
    eqn: Any,
    rule: Callable[[Any, Any], None],
    name: str,
    line: str,
  ) -> None:
    """Writes an equation by its rule, changed if it is the one to change."""
    primitive = _PRIMITIVES.get(name)
    if primitive is None:
      rule(em, eqn)
      return
    mutation = self._mutation
    is_meant = mutation is not None and mutation.index == len(self.found)
    kind = mutation.kind if mutation is not None and is_meant else None
    if mutation is None:
      passed = em.constant(self.passed)
      em.line(f"{passed}.add({len(self.found)})")
    num_lines, num_constants = len(em.lines), len(em.constants)
    em.num_targets = 0
    em.retarget = kind if kind in ("own target", "next target") else None
    rule(em, eqn)
    em.retarget = None
    if len(em.lines) == num_lines:  # It waits for nothing.
      del em.lines[num_lines - (mutation is None) :]
      return
    sites = list(em.constants.values())[num_constants:]
    self.found.append(
      Operation(
        primitive=primitive,
        what=next(
          (s.what for s in sites if isinstance(s, machine.Site)), primitive
        ),
        line=line,
        num_targets=em.num_targets,
      )
    )
    if kind == "delete" or (line == self._line and primitive != "copy"):
      del em.lines[num_lines:]
    elif kind == "duplicate":
      rule(em, eqn)
