"""How far a long search is, on a terminal."""

from collections.abc import Callable, Iterator
import contextlib

from rich.console import Console
from rich.progress import Progress

from coremesh import errors


@contextlib.contextmanager
def progress_bar(
  what: str, total: int, shown: bool | None
) -> Iterator[Callable[[], None]]:
  """A bar on standard error that moves with each call of what it yields.

  Args:
    what: is going on: "exploring swap".
    total: how many calls there will be.
    shown: whether to show it; None on a terminal only.

  Raises:
    UnsupportedError: `shown` is something else.
  """
  if shown not in (None, True, False):
    raise errors.UnsupportedError(
      f"progress must be True, False or None; got {shown!r}."
    )
  console = Console(stderr=True, force_terminal=shown or None)
  if not (console.is_terminal if shown is None else shown):
    yield lambda: None
    return
  with Progress(console=console, transient=True) as bar:
    task = bar.add_task(what, total=total)
    yield lambda: bar.advance(task)
