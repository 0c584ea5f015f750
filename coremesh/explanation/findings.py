"""What is found out about a compiled function."""

from collections.abc import Mapping
import dataclasses

from coremesh.compiler.ledger import Ledger
from coremesh.explanation.hot_lines import HotLine
from coremesh.explanation.roofline import Roofline
from coremesh.profile.activity import CoreActivity
from coremesh.profile.prediction import Prediction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
  """What an explanation says, as values.

  Attributes: see `cm.Explanation`, which is one.
  """

  name: str
  chip: str
  versions: Mapping[str, str]
  arguments: str
  codes: Mapping[str, str]
  compile_seconds: float
  is_from_cache: bool
  memory_bytes_per_device: Mapping[str, int]
  ledgers: tuple[Ledger, ...]
  prediction: Prediction
  unpredicted: Mapping[str, str]
  dropped: tuple[str, ...]
  labels: Mapping[str, str]
  rooflines: Mapping[str, Roofline]
  hot_lines: Mapping[str, tuple[HotLine, ...]]
  activities: Mapping[str, tuple[CoreActivity, ...]] = dataclasses.field(
    repr=False
  )
