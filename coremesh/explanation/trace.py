"""The predicted life of a program as a trace for Perfetto."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools

from coremesh import perfetto
from coremesh.explanation import alike, life, page
from coremesh.explanation.findings import Findings
from coremesh.profile.activity import CoreActivity, Spans
from coremesh.profile.events import EventKind
from coremesh.profile.prediction import OperationPrediction

_NUM_STRETCHES = 240
_OPERATIONS = 0  # the thread they have to themselves
_DEVICE = 0  # all devices do the same
_COPIES: Mapping[EventKind, str] = {
  "read": "from HBM",
  "write": "to HBM",
  "send": "to another core or device",
  "local": "inside",
}
# A file of more events takes long to open. The rest goes on alike.
_MOST_SPANS = 20_000
_MOST_CURVES = 3  # cores


def as_dict(found: Findings) -> perfetto.Event:
  """The operations one after the other, with cores, copies and busy units.

  Args:
    found: an explanation.
  """
  events: list[perfetto.Event] = [
    perfetto.process_name(_DEVICE, f"{found.name} on {found.chip} (predicted)"),
    *perfetto.thread_names(_DEVICE, _OPERATIONS, "operations"),
  ]
  groups = {n: alike.groups(a) for n, a in found.activities.items()}
  named = {g[0].core: alike.name(g) for gs in groups.values() for g in gs}
  for core, name in sorted(named.items()):
    events += perfetto.thread_names(_DEVICE, core + 1, f"core {name}")
  left_out: list[str] = []
  numbers = itertools.count(1)
  start_us = 0.0
  for operation in found.prediction.operations:
    drawn = _Operation(operation, start_us, numbers, left_out)
    alone = [g[0] for g in groups.get(operation.name, ())]
    events += drawn.events(alone)
    start_us += operation.microseconds.central * operation.times
  return perfetto.document(
    events,
    {
      "time": "predicted from compiled bundles, not measured",
      "assumptions": list(found.prediction.assumed),
      "left_out": [*found.prediction.left_out, *left_out],
    },
  )


@dataclasses.dataclass(slots=True)
class _Operation:
  """One operation, from when it starts on."""

  operation: OperationPrediction
  start_us: float
  numbers: Iterator[int]
  left_out: list[str]

  @property
  def _cycle_us(self) -> float:
    return page.cycle_us(self.operation)

  def _at(self, thread: int, cycle: float) -> perfetto.Event:
    time_us = self.start_us + cycle * self._cycle_us
    return {"pid": _DEVICE, "tid": thread, "ts": time_us}

  def events(
    self, activities: Sequence[CoreActivity]
  ) -> Iterator[perfetto.Event]:
    operation = self.operation
    yield perfetto.interval(
      self._at(_OPERATIONS, 0),
      name=operation.label,
      kind="kernel" if operation.kernel else "XLA",
      duration_us=operation.microseconds.central * operation.times,
      args={
        "limit": operation.limit,
        "times": operation.times,
        "low_us": operation.microseconds.low,
        "high_us": operation.microseconds.high,
        "assumed": list(operation.assumed),
      },
    )
    for activity in activities:
      yield from self._core(activity)
    # Curves of many cores that differ little would make the file large.
    alone = [(activity,) for activity in activities]
    if few := [g[0] for g in alike.shown(alone, _MOST_CURVES)]:
      yield from self._units(few)

  def _core(self, activity: CoreActivity) -> Iterator[perfetto.Event]:
    thread = activity.core + 1
    yield perfetto.interval(
      self._at(thread, 0),
      name=self.operation.label,
      kind="operation",
      duration_us=activity.cycles * self._cycle_us,
      args={"issued_cycles": activity.trace.cycles},
    )
    waits = activity.spans("wait", "delay")
    for start, end, _, bundle in self._rows(waits, activity.core, "waits"):
      yield perfetto.interval(
        self._at(thread, start),
        name=f"wait at {page.span(bundle, bundle)}",
        kind="wait",
        duration_us=(end - start) * self._cycle_us,
        args={"cycles": end - start},
      )
    for kind, where in _COPIES.items():
      copies = activity.spans(kind)
      rows = self._rows(copies, activity.core, f"copies {where}")
      for start, end, num_bytes, bundle in rows:
        yield from perfetto.copy(
          self._at(thread, start),
          self._at(thread, end),
          name=f"core {activity.core} {where}",
          number=next(self.numbers),
          args={"bytes": num_bytes, "bundle": page.span(bundle, bundle)},
        )

  def _rows(
    self, spans: Spans, core: int, what: str
  ) -> Iterator[tuple[float, float, int, int]]:
    if len(spans) > _MOST_SPANS or not spans.is_whole:
      self.left_out.append(
        f"{self.operation.label}, core {core}: {what} after the first"
        f" {_MOST_SPANS:,} are not in the trace"
      )
    columns = (
      spans.start_cycles,
      spans.end_cycles,
      spans.num_bytes,
      spans.bundles,
    )
    return zip(*(c[:_MOST_SPANS].tolist() for c in columns), strict=True)

  def _units(
    self, activities: Sequence[CoreActivity]
  ) -> Iterator[perfetto.Event]:
    edges = life.edges(activities, _NUM_STRETCHES)
    for activity in activities:
      for name, share in life.shares(activity, edges).items():
        if not share.any():
          continue
        curve = f"core {activity.core} {name}, busy share"
        for edge, value in zip(edges, [*share.tolist(), 0.0], strict=True):
          place = self._at(activity.core + 1, edge)
          del place["tid"]
          yield perfetto.counter(place, name=curve, value=round(value, 4))
