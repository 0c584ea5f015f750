"""What is going on, on a terminal, while it takes a while."""

from collections.abc import Callable, Iterator
import contextlib

from coremesh import terminal


@contextlib.contextmanager
def on_terminal(shown: bool | None) -> Iterator[Callable[[str], None]]:
  """A line on standard error that says what the last call of it was told.

  Args:
    shown: whether to show it; None on a terminal only.

  Raises:
    UnsupportedError: `shown` is something else.
  """
  console = terminal.for_progress(shown)
  if console is None:
    yield lambda stage: None
    return
  with console.status("") as status:
    yield lambda stage: status.update(f"{stage} ...")
