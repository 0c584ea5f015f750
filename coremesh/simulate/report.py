"""What a simulation ran, moved and found, as text and as a dict."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import io
import math
import re
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coremesh.simulate import kernel_timeline, rates
from coremesh.simulate.kernel_run import KernelRun

_WIDTH = 100
_MAX_LINKS = 16
_MAX_WORKERS = 16
_MAX_WAITS = 8
_MAX_OUTPUTS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
  """The report of a simulation: `print(run.report)`.

  Attributes:
    runs: those it is about.
  """

  runs: tuple[KernelRun, ...]

  def __str__(self) -> str:
    console = Console(
      width=_WIDTH, file=io.StringIO(), force_terminal=False, color_system=None
    )
    for part in self._parts():
      console.print(part)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)

  def as_dict(self) -> dict[str, Any]:
    """The same as values that JSON can hold."""
    return {"runs": [_run_as_dict(run) for run in self.runs]}

  def _parts(self) -> Iterator[Any]:
    if not self.runs:
      yield Text("No kernel ran in coremesh's simulator.")
      return
    yield _runs_table(self.runs)
    yield from _moved_tables(self.runs)
    yield from _findings(self.runs)
    yield from _unwritten(self.runs)
    timed = [run for run in self.runs if run.timeline is not None]
    if timed:
      yield Text()
      yield _workers_table(timed)
      yield _waits_table(timed)
      yield from map(Text, _assumptions(timed))


# --- text --------------------------------------------------------------------


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
  table = Table(title=title, title_justify="left", title_style="")
  for column in columns:
    table.add_column(
      column,
      justify="right" if column in right else "left",
      overflow="fold",
    )
  return table


def _runs_table(runs) -> Table:
  right = ("workers", "seed", "simulated in")
  columns = ["kernel", "devices", "workers", "seed", "DMAs", "simulated in"]
  is_timed = any(run.timeline is not None for run in runs)
  if is_timed:
    columns.append("modelled time")
  table = _table("Kernels", *columns, right=(*right, "modelled time"))
  for run in runs:
    row = [
      run.kernel,
      _numbers(run.devices),
      str(run.num_workers),
      str(run.seed),
      run.dma,
      _duration(run.seconds),
    ]
    if is_timed:
      found = run.timeline
      row.append("-" if found is None else _duration(found.seconds))
    table.add_row(*map(_cell, row))
  return table


def _moved_tables(runs) -> Iterator[Any]:
  within: Counter[tuple[str, str, str]] = Counter()
  links: Counter[tuple[str, int, int]] = Counter()
  for run in runs:
    for (src, a, dst, b), count in run.bytes_moved.items():
      way = "on one device" if a == b else "to another device"
      within[(run.kernel, f"{_space(src)} to {_space(dst)}", way)] += count
      if a != b:
        links[(run.kernel, a, b)] += count
  table = _table(
    "Bytes moved by copies", "kernel", "memories", "", "bytes", right=("bytes",)
  )
  for (kernel, memories, way), count in sorted(within.items()):
    table.add_row(*map(_cell, (kernel, memories, way, _bytes(count))))
  yield table if within else Text("No copy moved any bytes.")
  if links:
    table = _table(
      "Bytes moved between devices", "kernel", "link", "bytes", right=("bytes",)
    )
    shown = sorted(links.items())[:_MAX_LINKS]
    for (kernel, a, b), count in shown:
      link = f"device {a} -> device {b}"
      table.add_row(*map(_cell, (kernel, link, _bytes(count))))
    more = len(links) - len(shown)
    if more:
      rest = sum(links.values()) - sum(count for _, count in shown)
      table.add_row("", f"{more} more links", _bytes(rest))
    yield table


def _findings(runs) -> Iterator[Any]:
  found = [finding for run in runs for finding in run.findings]
  faults = [f for f in found if not f.is_warning]
  warnings = [f for f in found if f.is_warning]
  yield Text(
    f"Findings: {_count(len(faults), 'error')},"
    f" {_count(len(warnings), 'warning')}."
  )
  for finding in (*faults, *warnings):
    kind = "warning" if finding.is_warning else "error"
    yield Text(f"  {kind}: {finding}")


def _unwritten(runs) -> Iterator[Any]:
  outputs = [(run.kernel, o) for run in runs for o in run.unwritten_outputs]
  if outputs:
    yield Text("Outputs that hold what nobody has written, if they are read:")
  for kernel, output in outputs[:_MAX_OUTPUTS]:
    yield Text(f"  kernel {kernel!r}: {output}")
  if len(outputs) > _MAX_OUTPUTS:
    yield Text(f"  ... and {len(outputs) - _MAX_OUTPUTS} more")


def _workers_table(runs) -> Table:
  table = _table(
    "Where the modelled time goes",
    *("kernel", "workers", "compute", "waiting", "copies in flight"),
    right=("compute", "waiting", "copies in flight"),
  )
  rows: dict[tuple[str, ...], list[kernel_timeline.Track]] = {}
  for run in runs:
    for track in run.timeline.tracks:
      shares = [f"{s:.0%}" for s in run.timeline.shares(track).values()]
      rows.setdefault((run.kernel, track.kind, *shares), []).append(track)
  if len(rows) > _MAX_WORKERS:
    rows = _by_device(runs)
  for (kernel, _, *shares), tracks in list(rows.items())[:_MAX_WORKERS]:
    table.add_row(*map(_cell, (kernel, described(tracks), *shares)))
  more = list(rows.values())[_MAX_WORKERS:]
  if more:
    table.add_row("", _count(sum(map(len, more)), "more worker"))
  return table


def _by_device(runs) -> dict[tuple[str, ...], list[kernel_timeline.Track]]:
  """A row for each kernel and kind of worker: the range of their shares."""
  groups: dict[tuple[str, str], list[tuple[Any, kernel_timeline.Track]]] = {}
  for run in runs:
    for track in run.timeline.tracks:
      groups.setdefault((run.kernel, track.kind), []).append((run, track))
  rows = {}
  for (kernel, kind), members in groups.items():
    columns = zip(
      *(run.timeline.shares(track).values() for run, track in members),
      strict=True,
    )
    shares = [_range(min(column), max(column)) for column in columns]
    rows[(kernel, kind, *shares)] = [track for _, track in members]
  return rows


def _range(low: float, high: float) -> str:
  low_text, high_text = f"{low:.0%}", f"{high:.0%}"
  return low_text if low_text == high_text else f"{low_text} to {high_text}"


def _waits_table(runs) -> Table:
  table = _table(
    "The longest waits, one of each kind",
    *("worker", "waited", "at", "until", "workers alike"),
    right=("waited", "workers alike"),
  )
  table.columns[1].no_wrap = True
  kinds: dict[tuple[str, str, str], list[kernel_timeline.Waiting]] = {}
  for run in runs:
    for wait in run.timeline.waits:
      kinds.setdefault((run.kernel, wait.what, wait.by_what), []).append(wait)
  longest = sorted(kinds.values(), key=lambda waits: -waits[0].seconds)
  for first, *others in longest[:_MAX_WAITS]:
    often = f" in {first.count}" if first.count > 1 else ""
    who = "its own" if first.by == first.worker else f"{first.by}:"
    until = f"{who} {first.by_what}" if first.by_what else "for ever"
    alike = len({wait.worker for wait in others} - {first.worker})
    table.add_row(
      *map(_cell, (first.worker, _duration(first.seconds) + often)),
      *map(_cell, map(_brief, (first.what, until))),
      str(alike) if alike else "",
    )
  if not longest:
    table.add_row("nobody", "", "", "", "")
  return table


def _assumptions(runs) -> list[str]:
  texts = [t for run in runs for t in run.timeline.chip_rates.assumptions()]
  names = {run.timeline.chip_rates.chip.generation for run in runs}
  first = f"The model of {' and '.join(sorted(names))}:"
  return [first, *(f"* {text}" for text in dict.fromkeys(texts))]


def described(tracks: Sequence[kernel_timeline.Track]) -> str:
  """Workers in words: "device 0, core 1", or "4 TensorCores: device 0-3, ..."

  Of several, each axis says which of it they have: "4 TensorCores of device
  0-3, ..." if they are not all that have these.
  """
  if len(tracks) == 1:
    return tracks[0].name
  axes = [str(axis) for axis, _ in tracks[0].coords]
  columns = [[track.device for track in tracks]]
  columns += [[t.coords[i][1] for t in tracks] for i in range(len(axes))]
  parts = [
    f"{axis} {_numbers(column)}"
    for axis, column in zip(["device", *axes], columns, strict=True)
  ]
  is_all = math.prod(len(set(c)) for c in columns) == len(tracks)
  between = ": " if is_all else " of "
  return f"{_count(len(tracks), tracks[0].kind)}{between}{', '.join(parts)}"


def _numbers(values: Sequence[int]) -> str:
  """Numbers in few characters: "0-3, 6"."""
  runs: list[list[int]] = []
  for value in sorted(set(values)):
    if runs and value == runs[-1][1] + 1:
      runs[-1][1] = value
    else:
      runs.append([value, value])
  return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _count(number: int, what: str) -> str:
  return f"{number} {what}" + ("" if number == 1 else "s")


def _cell(text: str) -> Text:
  return Text(text)  # Brackets in it are no markup.


def _brief(text: str) -> str:
  """Without the names of functions: their lines are there."""
  return re.sub(r"(:\d+) \([^()]*\)", r"\1", text)


def _space(name: str) -> str:
  return {"semaphore_mem": "semaphore"}.get(name, name.upper())


def _bytes(count: int) -> str:
  return f"{count:,}"


def _duration(seconds: float) -> str:
  for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
    if seconds >= scale:
      return f"{seconds / scale:.3g} {unit}"
  return f"{seconds / 1e-9:.3g} ns"


# --- values ------------------------------------------------------------------


def _run_as_dict(run: KernelRun) -> dict[str, Any]:
  return {
    "kernel": run.kernel,
    "devices": list(run.devices),
    "num_workers": run.num_workers,
    "seed": run.seed,
    "dma": run.dma,
    "seconds": run.seconds,
    "turns": run.turns,
    "bytes_moved": [
      {
        "from": src,
        "from_device": int(a),
        "to": dst,
        "to_device": int(b),
        "bytes": int(count),
      }
      for (src, a, dst, b), count in sorted(run.bytes_moved.items())
    ],
    "findings": [dataclasses.asdict(f) for f in run.findings],
    "unwritten_outputs": list(run.unwritten_outputs),
    "timeline": None if run.timeline is None else _timed(run.timeline),
  }


def _timed(found: kernel_timeline.KernelTimeline) -> Mapping[str, Any]:
  return {
    "is_modelled": True,
    "chip": found.chip_rates.chip.generation,
    "assumptions": list(found.chip_rates.assumptions()),
    "modelled_seconds": found.seconds,
    "workers": [
      {
        "name": track.name,
        "kind": track.kind,
        "compute_seconds": track.compute_ps() / rates.PS_PER_SECOND,
        "waiting_seconds": track.waiting_ps() / rates.PS_PER_SECOND,
        "copying_seconds": track.copying_ps() / rates.PS_PER_SECOND,
      }
      for track in found.tracks
    ],
    "waits": [dataclasses.asdict(wait) for wait in found.waits],
  }
