"""Who runs next, and what it means when nobody can."""

from collections.abc import Callable, Sequence
import math

from coremesh.simulate import findings, machine, memory

_MAX_LISTED = 12
_MAX_POLLS = 16


def run(
  mach: machine.Machine,
  *,
  signallers: Callable[[str], Sequence[str]] = lambda name: (),
) -> None:
  """Runs all workers to their end, and the DMAs that nobody waited for.

  Args:
    mach: the machine, its workers ready.
    signallers: the lines of the kernel that signal a semaphore of that name.

  Raises:
    DeadlockError: workers wait and nothing can wake them.
    SimulationError: a fault after which nothing is right any more.
  """
  rng, ready = mach.rng, mach.ready
  most = math.inf if mach.max_turns is None else mach.max_turns
  num_polls = 0  # Turns in a row in which a worker polled.
  while True:
    if mach.dma == "random" and mach.pending and rng.random() < 0.3:
      _deliver_any(mach)
    elif ready:
      last = len(ready) - 1
      chosen = rng.randrange(last + 1) if last else 0
      worker = ready[chosen]
      ready[chosen] = ready[last]
      ready.pop()
      mach.turns += 1
      if mach.turns > most:
        _give_up(mach)
      polls = mach.polls
      try:
        next(worker.program)
      except StopIteration:
        continue
      if worker.blocked_on is None:
        ready.append(worker)
      num_polls = num_polls + 1 if mach.polls > polls else 0
      if num_polls > 2 * len(ready) + _MAX_POLLS:
        # Nobody else has anything to do: what they poll for is under way.
        num_polls = 0
        if not _deliver_due(mach) and mach.pending:
          _deliver_any(mach)
    elif not _deliver_due(mach):
      break
  waiting = [w for w in mach.workers if w.blocked_on is not None]
  if waiting:
    mach.report("deadlock", _wait_for_graph(mach, waiting, signallers))
    raise findings.DeadlockError(mach.findings)
  for transfer in list(mach.pending):
    mach.deliver(transfer)


def _give_up(mach: machine.Machine) -> None:
  mach.stop(
    "endless",
    f"its workers have taken {mach.turns} turns and still run. Look for a"
    " worker that polls for a signal that never comes.",
  )


def _deliver_any(mach: machine.Machine) -> None:
  pending = list(mach.pending)
  transfer = pending[mach.rng.randrange(len(pending))]
  if transfer.data is None:
    mach.fetch(transfer)
  else:
    mach.deliver(transfer)


def _deliver_due(mach: machine.Machine) -> bool:
  """Finishes one DMA that a worker waits for; False if there is none."""
  due, rng = mach.due, mach.rng
  while due:
    chosen = rng.randrange(len(due))
    semaphore = due[chosen]
    if semaphore.waiter is None or not semaphore.arrivals:
      due[chosen] = due[-1]
      due.pop()
      continue
    arrivals = semaphore.arrivals
    transfer = arrivals[rng.randrange(len(arrivals))]
    if semaphore is transfer.src_sem and transfer.data is None:
      mach.fetch(transfer)
    else:
      mach.deliver(transfer)
    return True
  return False


def _wait_for_graph(mach, waiting, signallers) -> str:
  lines = [f"{len(waiting)} of {len(mach.workers)} workers wait for ever:"]
  for worker in waiting[:_MAX_LISTED]:
    on = worker.blocked_on
    if isinstance(on, memory.Semaphore):
      has = f"{on}, which has {on.count} of {worker.need}"
    else:
      has = str(on)
    lines.append(f"  {worker} waits for {has} ({worker.blocked_at})")
    lines += [f"    {line}" for line in _who_could(on, waiting, signallers)]
  if len(waiting) > _MAX_LISTED:
    lines.append(f"  ... and {len(waiting) - _MAX_LISTED} more")
  lines.append(
    "  Nothing under way can wake them. Look for a signal or a copy that is"
    " missing, that goes to another core, or that an earlier wait has taken."
  )
  return "\n".join(lines)


def _who_could(on, waiting, signallers) -> list[str]:
  if isinstance(on, memory.Semaphore):
    places = signallers(on.bank.family.name)
    if not places:
      return ["no line of the kernel signals it"]
    return [f"signalled by {place}" for place in places[:4]]
  blocked = set(map(id, waiting))
  absent = [w for w in waiting if w.blocked_on is not on and id(w) in blocked]
  return [f"{w} is at {w.blocked_at}" for w in absent[:2]]
