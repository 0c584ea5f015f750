"""How far a long search is, on a terminal."""

from collections.abc import Callable, Iterator
import contextlib

from rich.progress import Progress

from coremesh import terminal


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
  console = terminal.for_progress(shown)
  if console is None:
    yield lambda: None
    return
  with Progress(console=console, transient=True) as bar:
    task = bar.add_task(what, total=total)
    yield lambda: bar.advance(task)
