"""What is going on, on a terminal, while it takes a while."""

from collections.abc import Callable, Iterator
import contextlib

from rich.console import Console

from coremesh import errors


@contextlib.contextmanager
def on_terminal(shown: bool | None) -> Iterator[Callable[[str], None]]:
  """A line on standard error that says what the last call of it was told.

  Args:
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
    yield lambda stage: None
    return
  with console.status("") as status:
    yield lambda stage: status.update(f"{stage} ...")
