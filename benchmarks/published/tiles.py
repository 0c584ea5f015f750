"""Which way round tokamax took the tiles of a published configuration.

A ragged dot v1 whose right side is transposed sums over one dimension and has
columns along another. tokamax once tiled the first by `tile_k` and the second
by `tile_n` (openxla/tokamax at 099096d), and now does so the other way round.
An entry does not name the version that timed it, but tokamax tries only some
tiles of each dimension. If a chip has a configuration that today's version does
not try, the older one made its file. No time is looked at.
"""

from collections.abc import Iterable
import json
import re

_UNIT = 128
_SHAPE = re.compile(r"\[([\d,]+)\]")


def are_older(configs: Iterable[tuple[str, str]]) -> bool:
  """Whether the older version made the configurations of a chip.

  Args:
    configs: operands, rows x summed and then groups x columns x summed, and
      configuration, as tokamax writes it, of each entry that is transposed.
  """
  return not all(_is_tried(*one) for one in configs)


def _is_tried(operands: str, config: str) -> bool:
  left, right, *_ = (
    [int(size) for size in shape.split(",")]
    for shape in _SHAPE.findall(operands)
  )
  summed, columns = left[1], right[1]
  tiles = json.loads(config)
  return tiles["tile_k"] in _tried(columns) and tiles["tile_n"] in _tried(
    summed
  )


def _tried(size: int) -> set[int]:
  """The tiles of a dimension that tokamax tries."""
  whole = -(-size // _UNIT) * _UNIT
  doubled = {_UNIT << i for i in range(8) if _UNIT << i <= whole}
  halved = {whole >> i for i in range(6)}
  return doubled | halved | {size}


def turned(config: str) -> str:
  """A configuration of the older version as today's takes it."""
  fields = json.loads(config)
  other = {"tile_k": fields["tile_n"], "tile_n": fields["tile_k"]}
  return json.dumps(fields | other, separators=(",", ":"))
