"""Tests for coremesh.profile.affine: words against what they are each round."""

import operator

from hypothesis import given
from hypothesis import strategies as st
import pytest

from coremesh.profile import affine, values

_WORD = st.integers(0, values.MASK) | st.integers(0, 40)
_SLOPE = st.integers(-70, 70) | st.sampled_from([1 << 20, -(1 << 31), 1 << 31])
_OPERATIONS = {
  "add": lambda a, b: (a + b) & values.MASK,
  "subtract": lambda a, b: (a - b) & values.MASK,
  "multiply": lambda a, b: (a * b) & values.MASK,
  "and": operator.and_,
  "or": operator.or_,
  "shift left": lambda a, b: (a << 3) & values.MASK,
  "shift right": lambda a, b: a >> 3,
  "less": operator.lt,
  "not more": operator.le,
  "more": operator.gt,
  "not less": operator.ge,
  "equal": operator.eq,
  "different": operator.ne,
  "less, signed": lambda a, b: (a ^ values.SIGN) < (b ^ values.SIGN),
}
_ROUNDS = 40


@pytest.mark.parametrize("name", _OPERATIONS)
@given(a=_WORD, b=_WORD, slopes=st.tuples(_SLOPE, _SLOPE), const=st.booleans())
def test_an_operation_is_that_of_each_round(name, a, b, slopes, const):
  fn = _OPERATIONS[name]
  da, db = slopes
  da, db = da or 1, 0 if const else db
  rounds = affine.Rounds()
  word = affine.Affine(a, da, rounds)
  other = affine.Affine(b, db, rounds) if db else b
  try:
    found = fn(word, other)
  except affine._NotAffineError:
    return
  for m in range(min(rounds.count, _ROUNDS)):
    expected = fn((a + m * da) & values.MASK, (b + m * db) & values.MASK)
    if isinstance(found, affine.Affine):
      held = (found.value + m * found.slope) & values.MASK
    else:
      held = found & values.MASK if type(found) is int else found
    assert held == expected, (m, rounds.count)


@pytest.mark.parametrize(
  ("value", "slope", "mask", "expected"),
  [(5, 2, 1, 1), (5, 16, 15, 5), (5, 2, 3, None), (5, 1, 1, None)],
)
def test_low_bits_are_kept_only_if_they_stay(value, slope, mask, expected):
  word = affine.Affine(value, slope, affine.Rounds())
  if expected is None:
    with pytest.raises(affine._NotAffineError):
      word & mask
  else:
    assert word & mask == expected


@given(st.integers(0, 1000), st.integers(1, 50), st.integers(1, 10**6))
def test_a_loop_ends_in_the_round_in_which_it_ends(start, step, limit):
  rounds = affine.Rounds()
  goes_on = affine.Affine(start, step, rounds) < limit
  alike = 0
  while ((start + alike * step) < limit) == goes_on and alike < 1000:
    alike += 1
  if goes_on:
    assert min(rounds.count, 1000) == alike
  else:
    assert rounds.count >= 1


def test_what_cannot_be_followed_is_refused():
  word = affine.Affine(1, 2, affine.Rounds())
  for fn in (
    lambda: word * word,
    lambda: word ^ 5,
    lambda: word // 2,
    lambda: 7 % word,
    lambda: {}.get(word),
    lambda: range(word),  # pyright: ignore
    lambda: bool(word),
  ):
    with pytest.raises(affine._NotAffineError):
      fn()


def test_what_is_not_known_stays_so():
  unknown = values.Unknown("data")
  word = affine.Affine(1, 2, affine.Rounds())
  for name, fn in _OPERATIONS.items():
    if "shift" in name:
      continue  # by a constant
    assert fn(word, unknown) is unknown
    assert fn(unknown, word) is unknown
