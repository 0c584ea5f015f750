"""What becomes of a program on a chip: compiled, predicted, or refused."""

from collections.abc import Callable
import dataclasses
import re
from typing import Any

from coremesh import chips, errors
from coremesh.compiler import aot
from coremesh.compiler.compiled import Compiled
from coremesh.profile.predict import predict
from coremesh.profile.prediction import Prediction

_PLACE = re.compile(r" \([^()\s]*\.py:\d+\)")

type Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, as `cm.compile` takes them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
  """What became of a program.

  Attributes:
    args: its arguments; () if it was refused.
    compiled: what the compiler made of it, or None.
    refusal: why nothing, the kind of error first; None if it compiled.
    prediction: how long it takes, or None.
    unpredicted: why nobody knows; None if it is predicted or refused.
  """

  args: tuple[Any, ...] = ()
  compiled: Compiled | None = None
  refusal: str | None = None
  prediction: Prediction | None = None
  unpredicted: str | None = None


def outcome(make: Callable[[chips.Chip], Program], chip: chips.Chip) -> Outcome:
  """Makes a program for a chip, compiles it and predicts its time.

  Args:
    make: returns a function and its arguments; what it raises is a refusal.
    chip: what for.

  Raises:
    UnsupportedError: libtpu is not installed, so that nothing is refused.
  """
  aot.check_compiler()
  try:
    fn, args = make(chip)
    compiled = aot.compile(fn, *args, chip=chip)
  except Exception as error:  # A kernel may break in any way.
    return Outcome(refusal=reason(error))
  try:
    prediction = predict(compiled, *args)
  except errors.UnsupportedError as error:
    why = _line(str(error.__cause__ or error))  # The cause names no kernel.
    return Outcome(args=args, compiled=compiled, unpredicted=why)
  return Outcome(args=args, compiled=compiled, prediction=prediction)


def reason(error: Exception) -> str:
  """An error in a line, without what the compiler says of places and sizes."""
  if isinstance(error, errors.CompileError):
    return f"CompileError: {_line(f'{error.rule} {error.advice}')}"
  return f"{type(error).__name__}: {_line(str(error))}"


def _line(text: str) -> str:
  """A text as one line, without places in files, which move."""
  return " ".join(_PLACE.sub("", text).split())
