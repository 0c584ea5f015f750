"""Sizes of the blocks of attention: given, or chosen."""

import dataclasses

from coremesh import errors


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
  """How the scores are cut into blocks.

  Attributes:
    rows: of queries at once, a multiple of 128, or all.
    keys: held in VMEM at once, a multiple of `part`.
    part: keys whose scores are computed at once, a multiple of 128.
  """

  rows: int = 1024
  keys: int = 4096
  part: int = 512

  def __post_init__(self):
    for name in ("rows", "keys", "part"):
      size = getattr(self, name)
      if not isinstance(size, int) or size < 1 or size % 128:
        raise errors.ShapeError(
          f"{name} of Blocks must be a positive multiple of 128; got {size!r}."
        )
    if self.keys % self.part:
      raise errors.ShapeError(
        f"keys of Blocks must be a multiple of part, {self.part}; got"
        f" {self.keys}."
      )
