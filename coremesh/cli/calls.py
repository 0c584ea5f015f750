"""What arguments a function takes, and whether those that are given fit."""

from collections.abc import Callable, Sequence
import inspect
import re
from typing import Any

from coremesh import errors

_BY_PLACE = (
  inspect.Parameter.POSITIONAL_ONLY,
  inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def required(function: Any) -> list[str]:
  """The names of the parameters that have no default."""
  return [
    p.name
    for p in inspect.signature(function).parameters.values()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]


def in_words(function: Any) -> str:
  """The same as they are written: "(x, y)"."""
  return f"({', '.join(required(function))})"


def advice(function: Any) -> str:
  """How a function of arrays is called from the command line."""
  return (
    "A function of arrays is for `coremesh explain`, with one --arg such as"
    f" --arg f32[128,256] for each of {in_words(function)}."
  )


def check_given(function: Any, args: Sequence[Any], target: str) -> None:
  """Refuses arguments, each given by an --arg, that a function cannot take.

  Raises:
    UnsupportedError: there are too few, too many, or some must be named.
  """
  parameters = inspect.signature(function).parameters.values()
  by_place = [p for p in parameters if p.kind in _BY_PLACE]
  missing = [p.name for p in by_place[len(args) :] if p.default is p.empty]
  by_name = [
    p.name
    for p in parameters
    if p.kind is p.KEYWORD_ONLY and p.default is p.empty
  ]
  takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
  if by_name:
    what = (
      f"{', '.join(by_name)} must be named, which --arg cannot do. Write a"
      " function of the arrays alone that sets it"
    )
  elif missing:
    what = (
      f"it lacks {', '.join(missing)}. Give one --arg for each, in their order,"
      " such as --arg f32[128,256]"
    )
  elif len(args) > len(by_place) and not takes_any:
    what = f"it takes no more than {len(by_place)}"
  else:
    return
  raise errors.UnsupportedError(
    f"TARGET {target!r} takes {in_words(function)} and is given"
    f" {len(args)} --arg: {what}."
  )


def wants_arrays(function: Callable[..., Any], error: Exception) -> bool:
  """Whether a function failed because it was given a chip for an array."""
  is_of_type = isinstance(error, AttributeError | TypeError)
  names_chip = re.search(r"\bChip\b", str(error)) is not None
  return is_of_type and names_chip and required(function) != ["chip"]
