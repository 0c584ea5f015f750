"""Sums up when the cores of an operation do what: times, shares, hot spots."""

from collections.abc import Mapping

import numpy as np

from coremesh import chips
from coremesh.compiler.compiled import Operation
from coremesh.profile import bundles, estimates, sending, units
from coremesh.profile.core import CoreTiming
from coremesh.profile.events import Trace
from coremesh.profile.prediction import (
  CorePrediction,
  HotRange,
  OperationPrediction,
)
from coremesh.profile.timed import Timed

_MOST_HOT = 10


def of_operation(
  operation: Operation, timed: Timed, chip: chips.Chip
) -> OperationPrediction:
  """Sums up what the cores of an operation do."""
  program, rate = timed.program, timed.rates
  traces, timings = timed.traces, timed.timings
  central = timings["central"]
  read = sum(t.read_bytes for t in central)
  written = sum(t.written_bytes for t in central)
  total = estimates.bounded_by_bytes(
    {which: max(t.cycles for t in found) for which, found in timings.items()},
    read + written,
    rate,
  )
  hbm = rate.hbm("central")
  moved = {
    "DMA read": read / hbm.bytes_per_cycle / max(1.0, total.central),
    "DMA write": written / hbm.bytes_per_cycle / max(1.0, total.central),
  }
  if timed.links is not None:
    seconds = max(1.0, total.central) / rate.clock_hz.central
    for sent in sending.of_traces(traces, chip=chip, rates=rate):
      moved[sent.way] = sent.floor_seconds / seconds
  busy = units.busy(program, rate)
  cores = []
  for i, trace in enumerate(traces):
    executions = trace.executions(len(program.bundles))
    cycles = estimates.of_models(
      {w: timings[w][i].cycles for w in estimates.MODELS}
    )
    whole = max(1.0, cycles.central)
    shares = {u: n / whole for u, n in busy.of(executions).items()}
    shares["waiting"] = central[i].waiting_cycles / whole
    cores.append(
      CorePrediction(
        core=trace.core,
        cycles=cycles,
        issued_cycles=trace.cycles,
        waiting_cycles=central[i].waiting_cycles,
        shares=shares,
        read_bytes=central[i].read_bytes,
        written_bytes=central[i].written_bytes,
        sent_bytes=central[i].sent_bytes,
      )
    )
  workers = range(len(cores) - timed.num_starters)
  slowest = max(workers, key=lambda i: cores[i].cycles.central)
  shares = {**cores[slowest].shares, **moved}
  peak = chip.hbm_bytes_per_second_per_device
  return OperationPrediction(
    name=operation.name,
    kernel=operation.kernel,
    cycles=total,
    microseconds=estimates.microseconds(total, rate),
    floor_microseconds=(read + written) / peak * 1e6,
    limit=_limit(shares),
    shares=shares,
    cores=tuple(cores),
    hottest=_hottest(program, traces[slowest], central[slowest], busy),
    assumed=_assumed(timed),
  )


def _assumed(timed: Timed) -> tuple[str, ...]:
  own = (a for trace in timed.traces for a in trace.assumed)
  return tuple(dict.fromkeys((*own, *timed.assumed)))


def _limit(shares: Mapping[str, float]) -> str:
  """What is busy for the largest share of the time.

  A core that mostly waits is bound by HBM or a way out if that is busy at least
  half the time, else by the latency of its copies and signals.
  """
  moved = {
    "DMA": shares.get("DMA read", 0.0) + shares.get("DMA write", 0.0),
    **{n: s for n, s in shares.items() if n in sending.WAYS},
  }
  rest = {n: s for n, s in shares.items() if n not in moved and "DMA" not in n}
  name = max(rest, key=lambda n: rest[n])
  over = max(moved, key=lambda n: moved[n])
  if moved[over] >= rest[name] or (name == "waiting" and moved[over] >= 0.5):
    return over
  return name


def _hottest(
  program: bundles.Program,
  trace: Trace,
  timing: CoreTiming,
  busy: units.Busy,
) -> tuple[HotRange, ...]:
  """The ranges of bundles, issued equally often, that take longest."""
  executions = trace.executions(len(program.bundles))
  edges = [0, *(np.flatnonzero(np.diff(executions)) + 1), len(executions)]
  found = []
  for start, end in zip(edges, edges[1:], strict=False):
    start, end = int(start), int(end)
    times = int(executions[start]) if start < end else 0
    if not times:
      continue
    waited = sum(
      c for b, c in timing.waiting_by_bundle.items() if start <= b < end
    )
    cycles = times * (end - start) + waited
    held = {u: float(a[start:end].sum()) for u, a in busy.by_unit.items()}
    shares = {u: n * times / cycles for u, n in held.items()}
    found.append(
      HotRange(
        start=start,
        end=end,
        executions=times,
        cycles=cycles,
        share=cycles / max(1.0, timing.cycles),
        limit=_limit({**shares, "waiting": waited / cycles}),
        sources=units.sources(program, start, end),
      )
    )
  return tuple(sorted(found, key=lambda h: -h.cycles)[:_MOST_HOT])
