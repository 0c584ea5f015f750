"""What a prediction was made from, for who wants to show more than its sums."""

from collections.abc import Callable
import dataclasses

from coremesh.profile.activity import CoreActivity
from coremesh.profile.bundles import Program


def _nothing(_: str) -> None:
  pass


@dataclasses.dataclass(kw_only=True, slots=True)
class Details:
  """Filled in by `predict.of_compiled`; by the name of the operation.

  Attributes:
    programs: machine code.
    activities: what each core does when.
    refused: kernels that cannot be predicted, and why.
    starts: called with the name of each operation before it is predicted.
  """

  programs: dict[str, Program] = dataclasses.field(default_factory=dict)
  activities: dict[str, tuple[CoreActivity, ...]] = dataclasses.field(
    default_factory=dict
  )
  refused: dict[str, str] = dataclasses.field(default_factory=dict)
  starts: Callable[[str], None] = _nothing
