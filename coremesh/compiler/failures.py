"""What the compiler's messages mean: the rule broken, and what to change."""

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
import re
import signal

import jax
import jaxlib

from coremesh import errors
from coremesh.compiler import workers

_NOT_THE_USERS = tuple(
  f"{folder}/"
  for folder in (
    pathlib.Path(jax.__file__).parent,
    pathlib.Path(jaxlib.__file__).parent,
    pathlib.Path(__file__).parent.parent,
    pathlib.Path(contextlib.__file__).parent,
  )
)
_ADVICE_AFTER_CRASH = (
  "That is a fault of libtpu's. Take the program apart until it compiles; an"
  " operand of no elements and a dynamic size are known to do this. The next"
  " compilation has a new process."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
  """A compiler's message in plain words.

  Attributes:
    rule: what must hold and does not.
    advice: what to change.
    is_known: whether the message is one of those in the table.
  """

  rule: str
  advice: str
  is_known: bool = True


_TABLE: tuple[tuple[str, str, str], ...] = ()


def explain(text: str) -> Explanation:
  """The rule a message of the compiler is about."""
  for pattern, rule, advice in _TABLE:
    if match := re.search(pattern, text, re.DOTALL):
      groups = {k: v or "" for k, v in match.groupdict().items()}
      return Explanation(
        rule=rule.format(**groups), advice=advice.format(**groups)
      )
  return Explanation(
    rule="The TPU compiler does not accept this program.",
    advice="coremesh has no explanation of this message; it follows.",
    is_known=False,
  )


def of_message(
  text: str, frames: Sequence[tuple[str, str, int]]
) -> errors.CompileError:
  """The error for what libtpu or JAX said.

  Args:
    text: its words.
    frames: function, file and line of each frame, innermost first.
  """
  found = explain(text)
  return errors.CompileError(
    rule=found.rule,
    advice=found.advice,
    source=_users_line(frames),
    original=text,
  )


def of_silence(
  silence: workers.Silence, seconds: float, flags: Sequence[str]
) -> errors.CompileError:
  """The error for a worker that gave no answer."""
  unknown = re.search(r"Unknown command line flag '(\w+)'", silence.output)
  if silence.is_late:
    rule = f"The compiler must end within timeout_seconds={seconds:g}."
    advice = (
      "It was ended. Give it more, or make the program smaller: long unrolled"
      " loops and large vectors outside a grid take it longest."
    )
  elif unknown:
    rule = f"libtpu has no flag {unknown[1]!r}."
    advice = f"Leave it out; flags were {' '.join(flags) or 'none'}."
  else:
    rule = f"libtpu must not end the process that holds it; {_end(silence)}."
    advice = _ADVICE_AFTER_CRASH
  return errors.CompileError(
    rule=rule, advice=advice, source=None, original=silence.output.strip()
  )


def of_reading(text: str) -> errors.CompileError:
  """The error for a program that was compiled but could not be reported."""
  return errors.CompileError(
    rule="What libtpu writes must be of the form coremesh reads; it was not.",
    advice="This is a fault of coremesh's, or a libtpu it does not know.",
    source=None,
    original=text,
  )


def _end(silence: workers.Silence) -> str:
  if silence.status is None:
    return "it closed its connection"
  if silence.status < 0:
    name = signal.Signals(-silence.status).name
    return f"the process died of {name}"
  return f"the process exited with status {silence.status}"


def _users_line(frames: Sequence[tuple[str, str, int]]) -> str | None:
  """The innermost frame that is neither JAX's nor coremesh's."""
  for name, file, line in frames:
    if not file.startswith(_NOT_THE_USERS) and not file.startswith("<"):
      return f"{file}:{line} ({name})"
  return None
