"""Where to show what is going on while it takes a while."""

from rich.console import Console

from coremesh import errors


def for_progress(shown: bool | None) -> Console | None:
  """Standard error, to show progress on, or None not to show it.

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
  return console if shown or (shown is None and console.is_terminal) else None
