"""What is known, while a body is traced, of the kernel it belongs to.

`launch` opens a scope around each body; the helpers a body calls read it. In
a body launched by plain `pl.kernel` there is no scope, and a helper that needs
a semaphore must be given one.
"""

from collections.abc import Iterator
import contextlib
import contextvars
import dataclasses
from typing import Any

from coremesh import errors

type Pattern = tuple[Any, ...]


@dataclasses.dataclass(kw_only=True, slots=True)
class KernelScope:
  """One body being traced.

  Attributes:
    name: the kernel's name, for errors.
    core_axes: the axis names of the kernel's own meshes.
    copy_sem: the DMA semaphore of copies that are waited for where they start,
      which can share it; None where the kernel has several meshes.
    links: (send, receive) pairs of DMA semaphores, for copies that were given
      none.
    num_taken: how many of the pairs copies have taken.
    barrier_pattern: who signals whom on the kernel's barrier semaphore.
  """

  name: str
  core_axes: tuple[str, ...]
  copy_sem: Any = None
  links: tuple[tuple[Any, Any], ...] = ()
  num_taken: int = 0
  barrier_pattern: Pattern | None = None

  def take_link(self) -> tuple[Any, Any]:
    """A (send, receive) pair of DMA semaphores that no other copy uses."""
    if self.num_taken == len(self.links):
      raise errors.CollectiveError(
        f"Kernel {self.name!r} makes more than num_links={len(self.links)}"
        " copies without naming their semaphores. Pass"
        f" cm.kernel(..., num_links={len(self.links) + 1}) or more, or give"
        " the copy send_sem= and recv_sem=."
      )
    self.num_taken += 1
    return self.links[self.num_taken - 1]

  @property
  def own_semaphores(self) -> list[Any]:
    """The semaphores that are there for helpers, used or not."""
    if self.copy_sem is None:
      return []
    return [self.copy_sem, *(sem for pair in self.links for sem in pair)]

  def claim_barrier_semaphore(self, pattern: Pattern) -> None:
    """Records who signals whom; two patterns on one semaphore can be confused.

    A fast worker that has left the first barrier signals the second; a slow
    worker still in the first counts that signal as one it was waiting for.
    """
    if self.barrier_pattern not in (None, pattern):
      raise errors.CollectiveError(
        f"Kernel {self.name!r} uses its one barrier semaphore for"
        f" {describe(self.barrier_pattern)} and for {describe(pattern)}. A"
        " fast worker's signal for the second would be counted in the first."
        " Open the kernel with the wider one, and give the other a semaphore"
        " of its own: sem=, a pltpu.SemaphoreType.REGULAR scratch."
      )
    self.barrier_pattern = pattern


def describe(pattern: Pattern | None) -> str:
  """A pattern in words, for errors."""
  if pattern is None:
    return "nothing"
  kind, axes, *rest = pattern
  names = ", ".join(repr(a) for a in axes)
  detail = f", {rest[0]}" if rest else ""
  return f"{kind} over ({names}{detail})"


_SCOPE: contextvars.ContextVar[KernelScope | None] = contextvars.ContextVar(
  "coremesh_kernel_scope", default=None
)


def current() -> KernelScope | None:
  """The scope of the body being traced, None outside `cm.kernel`."""
  return _SCOPE.get()


@contextlib.contextmanager
def entered(scope: KernelScope) -> Iterator[KernelScope]:
  """Makes `scope` the current one."""
  token = _SCOPE.set(scope)
  try:
    yield scope
  finally:
    _SCOPE.reset(token)
