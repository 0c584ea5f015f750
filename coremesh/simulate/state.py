"""What a simulated machine holds while a kernel runs, and what it has found."""

from collections import Counter
from collections.abc import Mapping, Sequence
import dataclasses
import random
import string
from typing import Any

import numpy as np

from coremesh.simulate import clocks, findings, memory
from coremesh.simulate.transfer import DmaMode
from coremesh.simulate.worker import Meeting, Site, Worker

_FORMATTER = string.Formatter()


class State:
  """All devices that run one kernel together.

  Args:
    kernel: the kernel's name.
    seed: decides every interleaving.
    dma: when a DMA moves its bytes.
    races: whether to look for data races.
    uninitialised: whether to look for reads of memory that nobody wrote.

  Attributes:
    polls: how often workers have looked at something without waiting for it.
    changes: how often anything has changed that they could look at.
    meets: of each barrier semaphore, which outlives the kernel, the last signal
      of each sender: what that knew, as of all before, and where.
    timeline: the `Recorder` of what workers do, None if nobody asked for it.
  """

  def __init__(
    self,
    kernel: str,
    *,
    seed: int,
    dma: DmaMode,
    races: bool,
    uninitialised: bool = True,
    device_sizes: Sequence[int] = (),
  ):
    self.kernel = kernel
    self.num_devices = int(np.prod(device_sizes, dtype=np.int64))
    self.dma = dma
    self.races = races
    self.uninitialised = uninitialised
    self.rng = random.Random(seed)
    self.threads = clocks.Threads()
    self.records = clocks.Records()
    self.workers: list[Worker] = []
    self.ready: list[Worker] = []
    self.due: list[memory.Semaphore] = []
    self.pending: dict[Any, None] = {}
    self.meetings: dict[Any, Meeting] = {}
    self.banks: list[memory.Bank] = []
    self.families: dict[Any, memory.Family] = {}
    self._entries: Counter[Any] = Counter()
    self._atomic_clocks: dict[tuple[memory.Buffer, Any], clocks.Clock] = {}
    self.findings: list[findings.Finding] = []
    self.bytes_moved: Counter[tuple[Any, ...]] = Counter()
    self.meets: dict[
      memory.Semaphore, dict[Worker, tuple[clocks.Clock, Site]]
    ] = {}
    # For each key of a finding its number, its text, and who did the same.
    self._told: dict[Any, tuple[int, str, set[Worker]]] = {}
    self._raced: set[Site] = set()
    self._unwritten_reads: dict[Any, tuple[Site, str]] = {}
    self._credit = 0
    self.turns = 0
    self.polls = 0
    self.changes = 0
    self.max_turns: int | None = None
    self.timeline: Any = None

  def report(
    self,
    kind: findings.Kind,
    text: str,
    key: Any = None,
    *,
    by: Worker | None = None,
    is_warning: bool = False,
  ) -> None:
    """Notes a fault, once for each `key`, and how many workers had it.

    Args:
      kind, text, is_warning: as of a `Finding`.
      key: what faults that are told once have in common; default the text.
      by: whose fault it is, None if it does not matter.
    """
    key = (kind, text if key is None else key)
    if key not in self._told:
      self._told[key] = len(self.findings), text, set()
      self.findings.append(
        findings.Finding(
          kind=kind, kernel=self.kernel, text=text, is_warning=is_warning
        )
      )
    number, text, workers = self._told[key]
    if by is None or by in workers:
      return
    workers.add(by)
    others = len(workers) - 1
    if others:
      text += f" The same on {others} other worker{'s' * (others > 1)}."
      self.findings[number] = dataclasses.replace(
        self.findings[number], text=text
      )

  def stop(self, kind: findings.Kind, text: str) -> Any:
    """Ends the simulation with a fault."""
    self.report(kind, text)
    raise findings.SimulationError(self.findings)

  def shuffled(self, order: Sequence[int]) -> list[int]:
    """Iterations in an order that the seed decides."""
    order = list(order)
    self.rng.shuffle(order)
    return order

  def switches(self) -> bool:
    """Whether the worker should let another run, as the seed has it."""
    self._credit -= 1
    if self._credit >= 0:
      return False
    self._credit = self.rng.randrange(12)
    return True

  def goes_round(
    self, worker: Worker, state: Sequence[Any], site: Site
  ) -> bool:
    """Whether a worker in a loop that loads should let another run.

    Such a loop may wait for what another worker writes. If nothing of its own
    changes from round to round it does; else if it goes on for long.

    Args:
      worker: the worker, at the end of a round.
      state: what the loop carries to the next.
      site: of its last load.
    """
    worker.rounds += 1
    if worker.rounds % _ROUNDS:
      return False
    now = (site, *(np.asarray(value).tobytes() for value in state))
    is_same, worker.round_state = now == worker.round_state, now
    if not is_same and worker.rounds % _MANY_ROUNDS:
      return False
    self.polls += 1
    worker.polled_at = site
    return True

  def print(
    self, worker: Worker, params: Mapping[str, Any], values: Sequence[Any]
  ) -> None:
    """`debug_print` of a worker."""
    text = str(params.get("fmt", ""))
    try:
      if any(field is not None for _, field, *_ in _FORMATTER.parse(text)):
        text = text.format(*values)
      else:
        text = " ".join([text, *map(str, values)])
    except (IndexError, KeyError, ValueError):
      text = f"{text} {list(values)}"
    print(f"[{worker}] {text}", flush=True)

  def fail_check(self, worker: Worker, message: str, site: Site) -> None:
    """Ends the simulation: what the kernel says or must keep does not hold."""
    self.stop("check", f"{worker}: {site} failed: {message}")

  def check_multiple(
    self, worker: Worker, value: Any, multiple: int, site: Site
  ) -> None:
    """Holds a kernel to a promise made by `pl.multiple_of`."""
    if np.any(value % multiple):
      self.fail_check(
        worker,
        f"{value} is no multiple of {multiple}, as it promises: on a TPU the"
        " behaviour is undefined. Promise what holds, or pad to it.",
        site,
      )


# Rounds of a loop that loads, between two looks at whether it waits; rounds
# after which it counts as one that waits though its state changes.
_ROUNDS = 16
_MANY_ROUNDS = 1024
