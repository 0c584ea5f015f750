"""Trace events, the JSON that Perfetto and Chrome read.

Format: "Trace Event Format" of the Chromium project. Times are microseconds. A
process is a group of lanes, a thread a lane.
"""

from collections.abc import Iterable, Iterator, Mapping
import json
import pathlib
from typing import Any

type Event = dict[str, Any]


def process_name(process: int, name: str) -> Event:
  """Names a process."""
  args = {"name": name}
  return {"ph": "M", "name": "process_name", "pid": process, "args": args}


def thread_names(process: int, thread: int, name: str) -> Iterator[Event]:
  """Names a thread of a process; threads are shown in the order of numbers."""
  common = {"ph": "M", "pid": process, "tid": thread}
  yield {**common, "name": "thread_name", "args": {"name": name}}
  order = {"sort_index": thread}
  yield {**common, "name": "thread_sort_index", "args": order}


def interval(
  place: Event, *, name: str, kind: str, duration_us: float, args: Event
) -> Event:
  """What a thread does; intervals of one thread nest or follow each other.

  Args:
    place: "pid", "tid" and "ts", when it starts.
    name: what.
    kind: the category.
    duration_us: how long.
    args: what is shown of it when it is clicked.
  """
  return {
    "ph": "X",
    "name": name,
    "cat": kind,
    **place,
    "dur": duration_us,
    "args": args,
  }


def copy(
  start: Event, end: Event, *, name: str, number: int, args: Event
) -> Iterator[Event]:
  """A copy in flight; those of one thread may overlap.

  Args:
    start: "pid", "tid" and "ts".
    end: the same, when it is done.
    name: copies of one name are shown together.
    number: another for each copy.
    args: what is shown of it when it is clicked.
  """
  common = {"name": name, "cat": "copy", "id": number}
  yield {"ph": "b", **common, **start, "args": args}
  yield {"ph": "e", **common, **end}


def counter(place: Event, *, name: str, value: float) -> Event:
  """A number that is drawn as a curve; it holds until the next.

  Args:
    place: "pid" and "ts".
    name: of the curve.
    value: from then on.
  """
  return {"ph": "C", "name": name, **place, "args": {name: value}}


def document(events: Iterable[Event], about: Mapping[str, Any]) -> Event:
  """The whole file.

  Args:
    events: in any order.
    about: what is known of all of it.
  """
  return {
    "traceEvents": list(events),
    "displayTimeUnit": "ns",
    "otherData": dict(about),
  }


def save(made: Event, path: pathlib.Path) -> pathlib.Path:
  """Writes a document."""
  path.write_text(json.dumps(made))
  return path
