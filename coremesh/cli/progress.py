"""How far a command has come, on a terminal and nowhere else."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import track


def shown[T](items: Sequence[T], what: str) -> Iterable[T]:
  """The items, with a bar on standard error that goes away at the end."""
  console = Console(stderr=True)
  return track(
    items,
    what,
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
