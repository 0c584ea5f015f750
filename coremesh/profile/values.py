"""What is not known: it spreads through arithmetic and keeps its reason."""

from collections.abc import Callable
import dataclasses
import functools

MASK = 0xFFFFFFFF
SIGN = 0x80000000


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Unknown:
  """A word or predicate that the machine code takes from data.

  Attributes:
    cause: where it comes from, in words.
  """

  cause: str

  def _spread(self, _) -> "Unknown":
    return self

  __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _spread
  __xor__ = __rxor__ = __lt__ = __le__ = __gt__ = __ge__ = _spread
  __eq__ = __ne__ = _spread  # pyright: ignore
  __hash__ = object.__hash__

  def __and__(self, other):
    """Zero or False whatever this is, if the other is."""
    return other if isinstance(other, int) and not other else self

  def __or__(self, other):
    """True whatever this is, if the other is."""
    return True if other is True else self

  __rand__ = __and__
  __ror__ = __or__

  def __bool__(self) -> bool:
    raise TypeError(f"a value that is not known decides: {self.cause}")


type Word = int | Unknown


def signed(a: int) -> int:
  """A word as a signed number."""
  return a - (1 << 32) if a & SIGN else a


def _of_words(fn: Callable[[int, int], Word]) -> Callable[[Word, Word], Word]:
  """The operation on words of which one may be unknown."""

  @functools.wraps(fn)
  def on_words(a: Word, b: Word) -> Word:
    if isinstance(a, Unknown):
      return a
    return b if isinstance(b, Unknown) else fn(a, b)

  return on_words


@_of_words
def product_high(a: int, b: int) -> Word:
  """`smulhi.u32`: the upper half of a product, which divides by a constant."""
  return (a * b) >> 32


@_of_words
def shift_left(a: int, b: int) -> Word:
  """`sshll.u32`."""
  return (a << b) & MASK if b < 32 else 0


@_of_words
def shift_left_ones(a: int, b: int) -> Word:
  """`sshllo.u32`: ones come in, so that 3 becomes 31 by 3 bits."""
  return ((a << b) | ((1 << b) - 1)) & MASK if b < 32 else MASK


@_of_words
def shift_right(a: int, b: int) -> Word:
  """`sshrl.u32`."""
  return a >> b if b < 32 else 0


@_of_words
def shift_right_signed(a: int, b: int) -> Word:
  """`sshra.s32`."""
  return (signed(a) >> min(b, 31)) & MASK


@_of_words
def least(a: int, b: int) -> Word:
  """`smin.u32`."""
  return min(a, b)


@_of_words
def greatest(a: int, b: int) -> Word:
  """`smax.u32`."""
  return max(a, b)


@_of_words
def least_signed(a: int, b: int) -> Word:
  """`smin.s32`."""
  return min(a, b, key=signed)


@_of_words
def greatest_signed(a: int, b: int) -> Word:
  """`smax.s32`."""
  return max(a, b, key=signed)


@_of_words
def quotient(a: int, b: int) -> Word:
  """`sdivrem.u32`, the quotient."""
  return a // b if b else Unknown("a division by zero")


@_of_words
def remainder(a: int, b: int) -> Word:
  """`sdivrem.u32`, the remainder."""
  return a % b if b else Unknown("a division by zero")
