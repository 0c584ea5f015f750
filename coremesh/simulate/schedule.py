"""Who runs next, and what it means when nobody can."""

from collections.abc import Callable, Sequence
import math

from coremesh.simulate import findings, machine, memory

_MAX_LISTED = 12
_MAX_PLACES = 4
# Turns with polls until a DMA is done, if all are as late as can be; turns of
# each worker, without a change, after which those that poll do so for ever.
_MAX_POLLS = 64
_MAX_IDLE = 10_000


def run(
  mach: machine.Machine,
  *,
  changers: Callable[[str], Sequence[str]] = lambda name: (),
) -> None:
  """Runs all workers to their end, and the DMAs that nobody waited for.

  Args:
    mach: the machine, its workers ready.
    changers: the lines of the kernel that signal a semaphore of that name, or
      write to a memory of it.

  Raises:
    DeadlockError: workers wait and nothing can wake them.
    SimulationError: a fault after which nothing is right any more.
  """
  rng, ready = mach.rng, mach.ready
  most = math.inf if mach.max_turns is None else mach.max_turns
  num_polls = 0  # Turns with polls since a DMA was done for their sake.
  num_idle, changes = 0, 0  # Turns in a row in which nothing changed.
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
      if mach.records.is_full:
        mach.settle()
      polls = mach.polls
      try:
        next(worker.program)
      except StopIteration:
        num_idle = 0
        continue
      if worker.blocked_on is None:
        ready.append(worker)
      if mach.polls == polls:
        continue
      num_polls += 1
      num_idle = num_idle + 1 if mach.changes == changes else 0
      changes = mach.changes
      if num_idle > _MAX_IDLE * max(len(ready), 1):
        _stop_polling(mach, num_idle, changers)
      if num_polls > 2 * len(ready) + _MAX_POLLS:
        # Perhaps what they poll for is under way.
        num_polls = 0
        if not _deliver_due(mach) and mach.pending:
          _deliver_any(mach)
    elif not _deliver_due(mach):
      break
  waiting = [w for w in mach.workers if w.blocked_on is not None]
  if waiting:
    mach.report("deadlock", _wait_for_graph(mach, waiting, changers))
    raise findings.DeadlockError(mach.findings)
  for transfer in list(mach.pending):
    mach.deliver(transfer)


def _give_up(mach: machine.Machine) -> None:
  mach.stop(
    "endless",
    f"its workers have taken {mach.turns} turns and still run. Look for a"
    " worker that polls for a signal that never comes.",
  )


def _stop_polling(mach, num_turns, changers) -> None:
  polling = [w for w in mach.ready if w.polled_at is not None]
  lines = [f"{len(polling)} of {len(mach.workers)} workers only poll:"]
  for worker in polling[:_MAX_LISTED]:
    lines.append(f"  {worker} polls by {worker.polled_at}")
    places = changers(worker.polled_at.ref)[:_MAX_PLACES]
    lines += [f"    changed by {place}" for place in places]
    if not places:
      lines.append("    no line of the kernel changes it")
  if len(polling) > _MAX_LISTED:
    lines.append(f"  ... and {len(polling) - _MAX_LISTED} more")
  lines.append(
    f"  In their last {num_turns} turns nothing has changed in the machine: no"
    " semaphore, no memory, no copy under way, no worker that ended. Look for a"
    " signal or a copy that is missing."
  )
  mach.stop("endless", "\n".join(lines))


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


def _wait_for_graph(mach, waiting, changers) -> str:
  lines = [f"{len(waiting)} of {len(mach.workers)} workers wait for ever:"]
  for worker in waiting[:_MAX_LISTED]:
    on = worker.blocked_on
    if isinstance(on, memory.Semaphore):
      has = f"{on}, which has {on.count} of {worker.need}"
    else:
      has = str(on)
    lines.append(f"  {worker} waits for {has} ({worker.blocked_at})")
    lines += [f"    {line}" for line in _who_could(on, waiting, changers)]
  if len(waiting) > _MAX_LISTED:
    lines.append(f"  ... and {len(waiting) - _MAX_LISTED} more")
  lines.append(
    "  Nothing under way can wake them. Look for a signal or a copy that is"
    " missing, that goes to another core, or that an earlier wait has taken."
  )
  return "\n".join(lines)


def _who_could(on, waiting, changers) -> list[str]:
  if isinstance(on, memory.Semaphore):
    places = changers(on.bank.family.name)
    if not places:
      return ["no line of the kernel signals it"]
    return [f"signalled by {place}" for place in places[:_MAX_PLACES]]
  absent = [w for w in waiting if w.blocked_on is not on]
  return [f"{w} is at {w.blocked_at}" for w in absent[:2]]
