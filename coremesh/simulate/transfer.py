"""DMAs: what they copy, and how the elements get there."""

from collections.abc import Sequence
import dataclasses
from typing import Any, Literal, get_args

import numpy as np

from coremesh.simulate import clocks, views
from coremesh.simulate.worker import Site, Worker

# When a DMA moves its bytes: as late as the waits allow, at once, or at random.
type DmaMode = Literal["late", "early", "random"]
DMA_MODES: tuple[DmaMode, ...] = get_args(DmaMode.__value__)


@dataclasses.dataclass(eq=False, slots=True)
class Transfer:
  """A DMA: it reads, is on its way, and writes.

  Attributes:
    starter: the worker that started it.
    src, dst: buffers, with the steps to the parts copied.
    src_sem, dst_sem: raised when the read (of a remote copy) and the write are
      done; None for none.
    data: what was read, None before.
    unwritten: marks of what of it nobody has written, None for none.
    is_done: whether it has written.
  """

  starter: Worker
  src: Any
  src_steps: Sequence[views.Step]
  dst: Any
  dst_steps: Sequence[views.Step]
  src_sem: Any
  dst_sem: Any
  add: bool
  site: Site
  num_bytes: int
  thread: int = 0
  event: int = 0
  clock: clocks.Clock = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int64)
  )
  data: Any = None
  unwritten: Any = None
  is_done: bool = False

  def __str__(self) -> str:
    return f"a DMA of {self.starter}"

  def release(self) -> None:
    """Lets go of memory, once done: its accesses keep the DMA itself."""
    self.data, self.src, self.dst = True, None, None
    self.src_steps = self.dst_steps = ()


def write(transfer: Transfer) -> None:
  """Writes what a DMA has read."""
  steps, data = list(transfer.dst_steps), transfer.data
  kept = next(
    (s for s in transfer.src_steps if isinstance(s, views.Rows)), None
  )
  if kept is not None and kept.kept is not None:
    # Rows that the source's indices ignore are left as they were.
    old = views.read(transfer.dst.data, steps)
    shape = [1] * np.ndim(data)
    shape[kept.axis] = -1
    data = np.where(np.reshape(kept.kept, shape), data, old)
  if not transfer.add:
    views.write(transfer.dst.data, steps, data)
  elif any(isinstance(s, views.Rows) for s in steps):
    _add_rows(transfer.dst.data, steps, data)
  else:
    old = views.read(transfer.dst.data, steps)
    views.write(transfer.dst.data, steps, (old + data).astype(old.dtype))


def _add_rows(base: np.ndarray, steps: list[Any], data: Any) -> None:
  *outer, last = steps
  for step in outer:
    base = base[step] if isinstance(step, tuple) else step.forward(base)
  key, data = views.kept_rows(last, data)
  np.add.at(base, key, data)  # An index may be there twice.
