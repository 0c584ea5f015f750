"""Which elements of a memory nobody has written yet.

Copies hand it on element by element: what they read and nobody has written
counts as not written where they write it. A core's load is at fault if nobody
has written any element of it; of a load of which a part is written, as of a
block that reaches over the end of an array, the rest may go unused.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coremesh.simulate import views


class Unwritten:
  """Marks of the elements of a buffer that nobody has written.

  Attributes:
    marks: for each element of the buffer's data; padding has none.
    count: how many there are.
  """

  __slots__ = ("count", "marks")

  def __init__(self, marks: np.ndarray):
    self.marks = marks
    self.count = int(np.count_nonzero(marks))


def forget(buffer: Any) -> None:
  """Nobody has written any element of a buffer."""
  marks = np.zeros(buffer.data.shape, bool)
  marks[tuple(slice(0, n) for n in buffer.shape)] = True
  _mark(buffer, marks)


def _mark(buffer: Any, marks: np.ndarray) -> None:
  unwritten = Unwritten(marks)
  buffer.unwritten = unwritten if unwritten.count else None


def wrote(buffer: Any, steps: Sequence[views.Step]) -> None:
  """Somebody has written a part of a buffer that has marks."""
  unwritten = buffer.unwritten
  part, key = views.part_of(unwritten.marks, steps, buffer.data)
  if key is not None:
    part[key] = False
    unwritten.count = int(np.count_nonzero(unwritten.marks))
  elif part.size == unwritten.marks.size:
    unwritten.count = 0
  else:
    unwritten.count -= int(np.count_nonzero(part))
    part[...] = False
  if not unwritten.count:
    buffer.unwritten = None


def is_unwritten(buffer: Any, steps: Sequence[views.Step]) -> bool:
  """Whether a part has elements, and nobody has written any of them."""
  marks = _marks(buffer, steps)
  return marks is not None and marks.size > 0 and bool(marks.all())


def of_part(buffer: Any, steps: Sequence[views.Step]) -> np.ndarray | None:
  """A copy of the marks of a part, None if there are none."""
  marks = _marks(buffer, steps)
  return marks.copy() if marks is not None and marks.any() else None


def _marks(buffer: Any, steps: Sequence[views.Step]) -> np.ndarray | None:
  if buffer.unwritten is None:
    return None
  part, key = views.part_of(buffer.unwritten.marks, steps, buffer.data)
  return part if key is None else part[key]


def copied(
  marks: np.ndarray | None, buffer: Any, steps: Sequence[views.Step]
) -> None:
  """A copy has written a part of a buffer.

  Args:
    marks: those of what it has read, from `of_part`.
    buffer: where it has written.
    steps: to the part.
  """
  if marks is None or buffer.family.is_block:
    # A pipeline fills no more of a block than is inside the array.
    if buffer.unwritten is not None:
      wrote(buffer, () if buffer.family.is_block else steps)
    return
  old = buffer.unwritten
  new = np.zeros(buffer.data.shape, bool) if old is None else old.marks
  part, key = views.part_of(new, steps, buffer.data)
  index = ... if key is None else key
  if part[index].size == marks.size:
    part[index] = marks.reshape(part[index].shape)
  else:  # Words of another size: a part is written if any of it is.
    part[index] = marks.all()
  _mark(buffer, new)
