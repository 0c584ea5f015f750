"""What became of the cores of an operation, before it is summed up."""

from collections.abc import Mapping
import dataclasses

import numpy as np

from coremesh.profile.bundles import Program
from coremesh.profile.core import CoreTiming
from coremesh.profile.events import Trace
from coremesh.profile.log import Log
from coremesh.profile.rates import Rates
from coremesh.profile.servers import Links


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
  """The cores of one device, the one that takes longest.

  Attributes:
    program: the machine code.
    rates: what its cores do in a cycle.
    traces: what each core issues; last those that start others.
    num_starters: how many of the traces those are.
    timings: when, by the model: one of `estimates.MODELS`.
    log: copies and waits of the central model.
    links: what lies between the cores, of the central model; None if they
      send each other nothing.
    assumed: what was taken for granted beside what the traces say.
    results: words that are known of operands it writes, by their number, if
      they are the same on all devices.
  """

  program: Program
  rates: Rates
  traces: tuple[Trace, ...]
  timings: Mapping[str, tuple[CoreTiming, ...]]
  log: Log
  links: Links | None = None
  num_starters: int = 0
  assumed: tuple[str, ...] = ()
  results: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
