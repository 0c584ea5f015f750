"""Registers and memory of a core, and how they change from round to round."""

import dataclasses
from typing import Any

from coremesh.profile import affine, values
from coremesh.profile.values import Unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
  """Registers, which values they hold, and memory."""

  registers: list[Any]
  ids: list[int]
  smem: dict[Any, Any]
  tokens: dict[str, Any]

  def slopes_to(self, other: "State") -> "State":
    """What is added to each word on the way to another state."""
    if (
      self.ids != other.ids
      or self.smem.keys() != other.smem.keys()
      or self.tokens.keys() != other.tokens.keys()
    ):
      raise affine._NotAffineError
    return self._zip(other, _slope)

  def moving(self, slopes: "State", rounds: affine.Rounds) -> "State":
    """The same with words that change by their slopes each round."""
    return self._zip(
      slopes, lambda word, s: affine.Affine(word, s, rounds) if s else word
    )

  def after(self, slopes: "State", count: int) -> "State":
    """What it is after so many rounds."""
    return self._zip(
      slopes,
      lambda word, s: (word + count * s) & values.MASK if s else word,
    )

  def leads_to(self, other: "State") -> bool:
    """Whether the other state is this one a round later."""
    if (
      self.ids != other.ids
      or self.smem.keys() != other.smem.keys()
      or self.tokens.keys() != other.tokens.keys()
    ):
      return False
    pairs = [
      *zip(self.registers, other.registers, strict=True),
      *((word, other.smem[k]) for k, word in self.smem.items()),
      *((word, other.tokens[k]) for k, word in self.tokens.items()),
    ]
    return all(_is_next(a, b) for a, b in pairs)

  def _zip(self, other: "State", fn: Any) -> "State":
    return State(
      registers=list(map(fn, self.registers, other.registers)),
      ids=self.ids,
      smem={k: fn(w, other.smem[k]) for k, w in self.smem.items()},
      tokens={k: fn(w, other.tokens[k]) for k, w in self.tokens.items()},
    )


def _slope(a: Any, b: Any) -> int:
  if isinstance(a, Unknown) and isinstance(b, Unknown):
    return 0
  if type(a) is not type(b) or (isinstance(a, bool) and a is not b):
    raise affine._NotAffineError
  return values.signed((b - a) & values.MASK)


def _is_next(a: Any, b: Any) -> bool:
  """Whether a word that changes by a slope is, a round later, the other."""
  if isinstance(a, Unknown) or isinstance(a, bool):
    return a is b or (isinstance(a, Unknown) and isinstance(b, Unknown))
  if not isinstance(a, affine.Affine):
    return type(a) is type(b) and a == b
  if not isinstance(b, affine.Affine):
    return False
  same_slope = (a.slope - b.slope) & values.MASK == 0
  return same_slope and (a.value + a.slope - b.value) & values.MASK == 0
