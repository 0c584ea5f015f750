"""What libtpu says that it holds in VMEM for an operation, and what for."""

from collections import Counter
from collections.abc import Mapping, Sequence
import dataclasses
import json
import re
from typing import Any

_DATA = re.compile(r"const DATA = *(?=\{)")
_SPILLED = "SPILL"
# The rest is what the kernel asks for: scratch, blocks and scopes.
_OWN = re.compile(r"internal scratch|temp for .*")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
  """What one operation holds of VMEM.

  Attributes:
    total_bytes: all of it.
    spilled_bytes: for vectors that found no register. They share room where
      they are not needed at the same time, on v4 with libtpu's own, too.
    own_bytes: what libtpu takes for itself besides, by its own words for it,
      such as "temp for sublane replication".
  """

  total_bytes: int
  spilled_bytes: int
  own_bytes: Mapping[str, int]


def of_page(page: str) -> dict[str, Holding]:
  """What the operations of a program hold, by name; {} if it does not say.

  Args:
    page: HTML, of the stage "vmem-report".
  """
  start = _DATA.search(page)
  if start is None:
    return {}
  try:
    data, _ = json.JSONDecoder().raw_decode(page, start.end())
    found = data["hlo_breakdowns"] or {}  # null if nothing holds any.
    return {name: _holding(one["blocks"]) for name, one in found.items()}
  except (AttributeError, KeyError, TypeError, ValueError):
    return {}  # It is of another form.


def _holding(blocks: Sequence[dict[str, Any]]) -> Holding:
  by_tag: Counter[str] = Counter()
  for block in blocks:
    for one in block["allocations"]:
      by_tag[one["tag"]] += int(one["size"])
  return Holding(
    total_bytes=sum(by_tag.values()),
    spilled_bytes=by_tag.pop(_SPILLED, 0),
    own_bytes={
      tag: size for tag, size in by_tag.items() if _OWN.fullmatch(tag)
    },
  )
