"""What is known, while a body is traced, of the kernel it belongs to.

`launch` opens a scope around each body; the helpers a body calls read it. In
a body launched by plain `pl.kernel` there is no scope, and a helper that needs
a semaphore must be given one.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
from typing import Any

from coremesh import errors

type Pattern = tuple[Any, ...]
type Link = tuple[Any, Any]


@dataclasses.dataclass(kw_only=True, slots=True)
class KernelScope:
  """One body being traced.

  Its values are replaced, never changed in place: a copy made by
  `dataclasses.replace` goes its own way.

  Attributes:
    name: the kernel's name, for errors.
    core_axes: the axis names of the kernel's own meshes.
    copy_sem: the DMA semaphore of copies that are waited for where they start,
      which can share it; None where the kernel has several meshes.
    links: (send, receive) pairs of DMA semaphores that no copy has taken yet,
      for copies that were given none.
    num_links: how many pairs there were.
    neighbour_sem: a REGULAR scratch semaphore that only `neighbour_barrier`
      uses, or None.
    barrier_pattern: who signals whom on the kernel's barrier semaphore.
    claims: the same for each semaphore the user gave.
    shared_links: the link of each pattern whose copies take turns.
    num_barriers: how often a helper has asked for the barrier semaphore.
    met_axes: the axes along which the workers are known to be in the kernel.
    too_early: the first helper that reaches along another axis.
    copies: what `cm.put` and `cm.start_copy` have started.
  """

  name: str
  core_axes: tuple[str, ...]
  copy_sem: Any = None
  links: Sequence[Link] = ()
  num_links: int = 0
  neighbour_sem: Any = None
  barrier_pattern: Pattern | None = None
  claims: tuple[tuple[Any, Pattern], ...] = ()
  shared_links: Mapping[Pattern, Link] = dataclasses.field(default_factory=dict)
  num_barriers: int = 0
  met_axes: frozenset[str] = frozenset()
  too_early: str | None = None
  copies: tuple[Any, ...] = ()

  @property
  def semaphores(self) -> list[Any]:
    """Those of the kernel's own that no helper has taken for good."""
    free = [sem for pair in self.links for sem in pair]
    return [
      s for s in (self.copy_sem, self.neighbour_sem, *free) if s is not None
    ]

  def take_link(self, pattern: Pattern | None = None) -> Link:
    """A (send, receive) pair of DMA semaphores that no other copy uses.

    Args:
      pattern: of a copy that has landed here before its sender may send the
        next one of the same pattern, so that all of them can share one link.
    """
    if pattern is not None and pattern in self.shared_links:
      return self.shared_links[pattern]
    if not self.links:
      raise errors.CollectiveError(
        f"Kernel {self.name!r} makes more than num_links={self.num_links}"
        " copies without naming their semaphores. Pass"
        f" cm.kernel(..., num_links={self.num_links + 1}) or more, or give"
        " the copy send_sem= and recv_sem=."
      )
    link, *rest = self.links
    self.links = tuple(rest)
    if pattern is not None:
      self.shared_links = {**self.shared_links, pattern: link}
    return link

  def claim_barrier_semaphore(self, pattern: Pattern) -> None:
    """Records who signals whom; two patterns on one semaphore can be confused.

    A fast worker that has left the first barrier signals the second; a slow
    worker still in the first counts that signal as one it was waiting for.
    """
    if self.barrier_pattern not in (None, pattern):
      raise errors.CollectiveError(
        f"Kernel {self.name!r} uses its one barrier semaphore for"
        f" {describe(self.barrier_pattern)} and for {describe(pattern)}."
        f" {_CONFUSED} Open the kernel with the wider one, and give the other"
        f" a semaphore of its own: {_OWN}."
      )
    self.barrier_pattern = pattern

  def claim_semaphore(self, sem: Any, pattern: Pattern) -> None:
    """The same for a semaphore the user gave, told by being the same object.

    Two parts of one array, `sems.at[i]`, are told apart only by the user.
    """
    for other, claimed in self.claims:
      if other is sem and claimed != pattern:
        raise errors.CollectiveError(
          f"Kernel {self.name!r} uses one semaphore for {describe(claimed)}"
          f" and for {describe(pattern)}. {_CONFUSED} Give each a semaphore of"
          f" its own: {_OWN}."
        )
    self.claims = (*self.claims, (sem, pattern))

  def meet(self, axes: Sequence[str]) -> None:
    """Records that the workers along `axes` have entered the kernel."""
    self.met_axes |= frozenset(axes)

  def reach(self, helper: str, axes: Sequence[str]) -> None:
    """Records that a helper signals or writes workers along `axes`."""
    unmet = [a for a in axes if a not in self.met_axes]
    if unmet and self.too_early is None:
      self.too_early = f"{helper} along {unmet}"

  def check_end(self, *, has_own_barriers: bool) -> None:
    """Checks a body that has been traced to its end.

    Args:
      has_own_barriers: whether it signals by the barrier semaphore by itself,
        and nobody can say whom it has met.

    Raises:
      CollectiveError: it writes or signals workers that may not have entered
        the kernel, or leaves a copy that it has not waited for.
    """
    if self.too_early and not has_own_barriers:
      raise errors.CollectiveError(
        f"Kernel {self.name!r} reaches other workers by {self.too_early}"
        " without knowing that they have entered the kernel: their scratch may"
        " still be another kernel's. Call a barrier over those axes first, on"
        " the default semaphore: cm.core_barrier(), cm.device_barrier(),"
        " cm.global_barrier()."
      )
    unread = [c.made_by for c in self.copies if not c.source_is_free]
    if unread:
      raise errors.CollectiveError(
        f"Kernel {self.name!r} ends without waiting for a copy that"
        f" {unread[0]} started: its semaphore would be left counting, and the"
        " bytes may not have moved. Call .wait(), or .wait_send() where the"
        " receiver waits with cm.wait_arrival."
      )


_CONFUSED = (
  "A fast worker's signal for the second would be counted in the first."
)
_OWN = "sem=, a pltpu.SemaphoreType.REGULAR scratch"


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
