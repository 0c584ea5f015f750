"""How far a command has come, on a terminal and nowhere else."""

from collections.abc import Iterable, Sequence

from rich.progress import track

from coremesh import terminal


def shown[T](items: Sequence[T], what: str) -> Iterable[T]:
  """The items, with a bar on standard error that goes away at the end."""
  console = terminal.for_progress(None)
  if console is None:
    return items
  return track(items, what, console=console, transient=True)
