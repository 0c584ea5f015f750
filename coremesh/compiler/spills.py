"""Vectors that found no register, and the VMEM in which libtpu keeps them.

A vector that is spilled has room of its own while the loop or branch runs that
is the innermost to hold all its stores and loads. Loops and branches of which
one is over before the other begins share room.
"""

from collections import Counter
from collections.abc import Sequence
import dataclasses
import re

_REGISTER_BYTES = 8 * 128 * 4
_BUNDLE = re.compile(
  r"^ *(?P<index>0x[0-9a-f]+|\d+) +(?P<label>[A-Z]{2})? *:"
  r" (?P<depth>[> ]*)\{(?P<slots>.*)$",
  re.MULTILINE,
)
_SPILL = re.compile(r"vmem:\[#allocation(\d+)_spill")
_BRANCH = re.compile(r"\bsbr\.rel\b[^;]*? target bundleno = (\d+)")
# The most bundles, over all chips, that are issued before a branch is taken.
_MOST_DELAY_SLOTS = 6

# The first and the last bundle of a loop or of what a branch skips.
type _Part = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spills:
  """Vectors of a kernel without a register.

  Attributes:
    vectors: how many are stored and loaded again.
    room_bytes: of VMEM that they take, the most at once.
  """

  vectors: int
  room_bytes: int

  @property
  def vector_bytes(self) -> int:
    """What they would take without sharing."""
    return self.vectors * _REGISTER_BYTES


def of_bundles(text: str) -> Spills:
  """Reads them off the machine code of a TensorCore."""
  bundles = list(_BUNDLE.finditer(text))
  uses: dict[str, list[int]] = {}
  for at, bundle in enumerate(bundles):
    for name in _SPILL.findall(bundle["slots"]):
      uses.setdefault(name, []).append(at)
  parts = _parts(bundles)
  held = Counter(_innermost(parts, at[0], at[-1]) for at in uses.values())
  most = max((_at_once(held, first) for first, _ in held), default=0)
  return Spills(vectors=len(uses), room_bytes=most * _REGISTER_BYTES)


def _parts(bundles: Sequence[re.Match[str]]) -> list[_Part]:
  """The loops and branches of a program, and the program."""
  parts = [(0, len(bundles))]
  for at, bundle in enumerate(bundles):
    for target in map(int, _BRANCH.findall(bundle["slots"])):
      back = target <= at
      parts.append(
        (target, _end(bundles, at)) if back else (at + 1, target - 1)
      )
  return parts


def _end(bundles: Sequence[re.Match[str]], branch: int) -> int:
  """The last bundle of a loop: one of those its branch leaves time for."""
  depth = bundles[branch]["depth"].count(">")
  end = branch
  for after in bundles[branch + 1 : branch + 1 + _MOST_DELAY_SLOTS]:
    if after["label"] or after["depth"].count(">") < depth:
      break
    end += 1
  return end


def _innermost(parts: Sequence[_Part], first: int, last: int) -> _Part:
  around = (p for p in parts if p[0] <= first and last <= p[1])
  return min(around, key=lambda part: part[1] - part[0])


def _at_once(held: Counter[_Part], at: int) -> int:
  """How many vectors have room at a bundle."""
  return sum(n for part, n in held.items() if part[0] <= at <= part[1])
