"""When the cores of a device copy and wait: what a timing went through."""

from collections import defaultdict
import dataclasses
from typing import NamedTuple

from coremesh.profile.events import EventKind


class Span(NamedTuple):
  """A copy in flight, or a core that waits. Times are ticks of `dma`.

  Attributes:
    core: whose it is.
    kind: of a copy: "read" and "write" are from and to HBM, "local" stays in
      the core, "send" goes to another. "wait" is for a copy or another core,
      "delay" one the program asks for.
    start: when it starts.
    end: when it is done.
    bundle: where in the machine code.
    num_bytes: of a copy; 0 of what waits.
  """

  core: int
  kind: EventKind
  start: int
  end: int
  bundle: int
  num_bytes: int


class Again(NamedTuple):
  """Spans that come again and again.

  Attributes:
    spans: those of the first time.
    times: how often, the first included.
    period: ticks from one time to the next.
  """

  spans: tuple[Span, ...]
  times: int
  period: int


@dataclasses.dataclass(slots=True)
class Log:
  """What cores that are timed together go through.

  Attributes:
    items: spans in the order in which they were worked out, which for one
      kind of one core is that of time.
  """

  items: list[Span | Again] = dataclasses.field(default_factory=list)

  def repeat(self, first: int, count: int, period: int) -> None:
    """Says that all from an item on comes `count` times more.

    Args:
      first: index of the item; no repetition follows it.
      count: how often more.
      period: ticks.
    """
    spans = tuple(i for i in self.items[first:] if isinstance(i, Span))
    self.items[first:] = [Again(spans, count + 1, period)]

  def by_core(self) -> dict[int, "Log"]:
    """What each core goes through by itself."""
    found: dict[int, Log] = defaultdict(Log)
    for item in self.items:
      if isinstance(item, Span):
        found[item.core].items.append(item)
        continue
      for core in dict.fromkeys(span.core for span in item.spans):
        own = tuple(span for span in item.spans if span.core == core)
        found[core].items.append(item._replace(spans=own))
    return dict(found)
