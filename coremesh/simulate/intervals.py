"""What workers do in model time: intervals, copies, and what ends a wait."""

import dataclasses


@dataclasses.dataclass(eq=False, slots=True)
class Cause:
  """What a wait may be waiting for: a signal, a copy, or a late worker.

  Attributes:
    kind: "signal", "copy" or "arrival" (of the last worker at a barrier).
    worker: the index of who sent or started it.
    what: what it did, with the user's line.
    sent_ps: when.
    arrives_ps: when the waiting worker can know.
  """

  kind: str
  worker: int
  what: str
  sent_ps: int
  arrives_ps: int


@dataclasses.dataclass(eq=False, slots=True)
class Interval:
  """What a worker does for a while.

  Attributes:
    kind: "compute", "issue" (of a signal, a copy, or a wait that is over) or
      "wait".
    start_ps, end_ps: when.
    what: what it does, with the user's line; "" for compute.
    on: the semaphore (or barrier) waited for, "" otherwise.
    causes: what ended the wait; none if it never ended, or needed none.
    ends: whether a wait ended.
  """

  kind: str
  start_ps: int
  end_ps: int
  what: str = ""
  on: str = ""
  causes: tuple[Cause, ...] = ()
  ends: bool = True


@dataclasses.dataclass(eq=False, slots=True)
class Copy:
  """A DMA in flight, or a block that a grid copies.

  Attributes:
    worker: the index of who started it.
    start_ps, end_ps: when.
    src, dst: the memories, in words.
    spaces: their kinds, such as ("hbm", "vmem").
    link: (from device, to device), None within one.
    num_bytes: how much.
    what: the operation, with the user's line.
  """

  worker: int
  start_ps: int
  end_ps: int
  src: str
  dst: str
  spaces: tuple[str, str]
  link: tuple[int, int] | None
  num_bytes: int
  what: str
