"""Whether a barrier semaphore can be used again by the next kernel.

A barrier semaphore outlives its kernel. A device that is done early may start
the next kernel and signal it once more, while its owner still waits in this
one for somebody else; the wait then counts that signal instead, and its owner
goes on without the other. That is harmless if the early device passes on all
that the other's signal would have told.
"""

from collections import defaultdict
from collections.abc import Mapping
import itertools
from typing import Any

import numpy as np

from coremesh.simulate import clocks, machine

_MAX_SENDERS = 64


def check(mach: machine.Machine) -> None:
  """Reports barriers that the next kernel, if it is the same, could confuse.

  Call it when all workers have ended and no semaphore is left raised. A kernel
  is taken to start on a device when all its cores have ended the last.
  """
  if not mach.meets:
    return
  ends = _ends(mach)
  acts = _acts(mach)
  for semaphore, last in mach.meets.items():
    if len(last) > _MAX_SENDERS:
      continue
    for early, late in itertools.permutations(last, 2):
      known = _known(ends[early.device], last, without=late)
      clock, site = last[late]
      if _tells_more(clock, known, acts):
        _report(mach, semaphore, early, f"{late}: {site}")
        break


def _ends(mach: machine.Machine) -> Mapping[int, clocks.Clock]:
  """What all cores of each device know at their ends."""
  ends: dict[int, clocks.Clock] = {}
  for worker in mach.workers:
    before = ends.get(worker.device, worker.clock)
    ends[worker.device] = clocks.joined(before, worker.clock)
  return ends


def _acts(mach: machine.Machine) -> Mapping[int, np.ndarray]:
  """Events of each thread that others may have to know of."""
  acts = defaultdict(lambda: {1})  # The first is its entry.
  for access in mach.records.accesses.values():
    acts[access.thread].add(access.event)
  for thread, events in mach.records.settled.items():
    acts[thread].update(events.tolist())
  for worker in mach.workers:
    acts[worker.thread].add(1)
  return {thread: np.array(sorted(events)) for thread, events in acts.items()}


def _known(
  end: clocks.Clock,
  last: Mapping[machine.Worker, tuple[clocks.Clock, Any]],
  *,
  without: machine.Worker,
) -> clocks.Clock:
  known = end
  for sender, (clock, _) in last.items():
    if sender is not without:
      known = clocks.joined(known, clock)
  return known


def _tells_more(
  told: clocks.Clock, known: clocks.Clock, acts: Mapping[int, np.ndarray]
) -> bool:
  """Whether `told` reaches an act that `known` does not."""
  known = clocks.widened(known, len(told))[: len(told)]
  for thread in np.flatnonzero(told > known):
    events = acts.get(int(thread), np.zeros(0))
    if ((events > known[thread]) & (events <= told[thread])).any():
      return True
  return False


def _report(mach, semaphore, early, late) -> None:
  mach.report(
    "barrier reuse",
    f"device {early.device} may end, and signal {semaphore} again in the next"
    f" kernel, before {late} of this one: the wait for that semaphore then"
    " takes the one for the other and goes on too early. Before the kernel"
    " ends, let all meet a second time on a semaphore of their own, as"
    " cm.barrier does, or give the next kernel another collective_id.",
    semaphore.bank.family.name,
    is_warning=True,  # If another kernel follows, it may be harmless.
  )
