"""Words that change by a fixed amount from one round of a loop to the next.

A word v with slope d stands for v + m * d in round m. Arithmetic keeps that
form or refuses. A comparison gives its outcome in round 0, and notes how many
rounds have the same outcome. If a round that starts from words with slopes
ends with those words one slope further, then all those rounds take the same
way, by induction; they need not be run.
"""

import dataclasses
from typing import Any

from coremesh.profile import values

_SIZE = 1 << 32
MANY = 1 << 62


class _NotAffineError(Exception):
  """A word that does not keep the form; the rounds must be run."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Rounds:
  """How many rounds are known to take the same way.

  Attributes:
    count: rounds 0 to count - 1 do.
  """

  count: int = MANY

  def while_between(self, value: int, slope: int, low: int, high: int) -> None:
    """Notes the rounds in which low <= value + m * slope < high."""
    if not low <= value < high:
      raise _NotAffineError
    if slope > 0:
      self.count = min(self.count, -((value - high) // slope))
    elif slope < 0:
      self.count = min(self.count, (value - low) // -slope + 1)


def _slope_of(other: Any) -> tuple[int, int]:
  if isinstance(other, Affine):
    return other.value, other.slope
  if isinstance(other, int):
    return int(other), 0
  raise _NotAffineError


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Affine:
  """A word that changes by a fixed amount from round to round.

  Attributes:
    value: in round 0; reduced to 32 bits only where the program does so.
    slope: the amount, not zero.
    rounds: where to note for how long a decision holds.
  """

  value: int
  slope: int
  rounds: Rounds

  def _make(self, value: int, slope: int) -> "Affine | int":
    return Affine(value, slope, self.rounds) if slope else value

  def __add__(self, other: Any) -> Any:
    if isinstance(other, values.Unknown):
      return other
    value, slope = _slope_of(other)
    return self._make(self.value + value, self.slope + slope)

  def __sub__(self, other: Any) -> Any:
    if isinstance(other, values.Unknown):
      return other
    value, slope = _slope_of(other)
    return self._make(self.value - value, self.slope - slope)

  def __rsub__(self, other: int) -> Any:
    return self._make(other - self.value, -self.slope)

  def __mul__(self, other: Any) -> Any:
    if isinstance(other, values.Unknown):
      return other
    value, slope = _slope_of(other)
    if slope:
      raise _NotAffineError
    return self._make(self.value * value, self.slope * value)

  __radd__ = __add__
  __rmul__ = __mul__

  def __lshift__(self, bits: int) -> Any:
    return self._make(self.value << bits, self.slope << bits)

  def __rshift__(self, bits: int) -> Any:
    """No bits that change may be lost."""
    if self.slope % (1 << bits):
      raise _NotAffineError
    self.rounds.while_between(self.value, self.slope, 0, _SIZE)
    return self._make(self.value >> bits, self.slope >> bits)

  def __and__(self, other: Any) -> Any:
    if isinstance(other, values.Unknown):
      return other
    mask, slope = _slope_of(other)
    if slope:
      raise _NotAffineError
    if mask == values.MASK:
      reduced = values.signed(self.slope & values.MASK)
      return self._make(self.value & values.MASK, reduced)
    if self.slope % (1 << mask.bit_length()):
      raise _NotAffineError
    return self.value & mask

  def __or__(self, other: Any) -> Any:
    if isinstance(other, values.Unknown):
      return other
    bits, slope = _slope_of(other)
    if slope or self.slope % (1 << bits.bit_length()):
      raise _NotAffineError
    return self._make(self.value | bits, self.slope)

  def __xor__(self, other: Any) -> Any:
    if isinstance(other, Affine) or other != values.SIGN:
      raise _NotAffineError
    # It turns signed order into unsigned order, and is an addition.
    return self._make((self.value + values.SIGN) % _SIZE, self.slope)

  __rand__ = __and__
  __ror__ = __or__
  __rxor__ = __xor__

  def _order(self, other: Any) -> Any:
    """The difference to another word; neither may wrap round."""
    if isinstance(other, values.Unknown):
      return other
    value, slope = _slope_of(other)
    self.rounds.while_between(self.value, self.slope, 0, _SIZE)
    self.rounds.while_between(value, slope, 0, _SIZE)
    difference, change = self.value - value, self.slope - slope
    if difference < 0:
      self.rounds.while_between(difference, change, -_SIZE, 0)
    elif difference > 0:
      self.rounds.while_between(difference, change, 1, _SIZE + 1)
    elif change:
      self.rounds.count = min(self.rounds.count, 1)
    return difference

  def __lt__(self, other: Any) -> Any:
    found = self._order(other)
    return found if isinstance(found, values.Unknown) else found < 0

  def __le__(self, other: Any) -> Any:
    found = self._order(other)
    return found if isinstance(found, values.Unknown) else found <= 0

  def __gt__(self, other: Any) -> Any:
    found = self._order(other)
    return found if isinstance(found, values.Unknown) else found > 0

  def __ge__(self, other: Any) -> Any:
    found = self._order(other)
    return found if isinstance(found, values.Unknown) else found >= 0

  def __eq__(self, other: Any) -> Any:
    found = self._order(other)
    return found if isinstance(found, values.Unknown) else found == 0

  def __ne__(self, other: Any) -> Any:
    found = self._order(other)
    return found if isinstance(found, values.Unknown) else found != 0

  def __hash__(self) -> int:
    raise _NotAffineError  # an address that changes

  def __index__(self) -> int:
    raise _NotAffineError

  def __floordiv__(self, _) -> Any:
    raise _NotAffineError

  __rfloordiv__ = __mod__ = __rmod__ = __rlshift__ = __rrshift__ = __floordiv__

  def __bool__(self) -> bool:
    raise _NotAffineError
