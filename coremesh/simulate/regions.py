"""Parts of a memory as a user writes them: an index such as [1, 0:8, 0:128]."""

from collections.abc import Sequence

import numpy as np

from coremesh.simulate import views

# The first element along each axis, and the one after the last.
type Box = tuple[tuple[int, int], ...]


def box_of(mask: np.ndarray) -> Box | None:
  """The smallest box that holds all elements that are marked, None of none."""
  places = np.nonzero(mask)
  if not mask.any():
    return None
  return tuple((int(p.min()), int(p.max()) + 1) for p in places)


def box_of_part(data: np.ndarray, steps: Sequence[views.Step]) -> Box | None:
  """The smallest box of a memory that holds all elements steps lead to."""
  mask = np.zeros(data.shape, bool)
  part, key = views.part_of(mask, steps, data)
  part[... if key is None else key] = True
  return box_of(mask)


def index(box: Box | None, shape: Sequence[int]) -> str:
  """A box as an index of a memory of this shape, "" for all or unknown."""
  if box is None:
    return ""
  # Padding is beyond the shape, the words of a PRNG key behind its axes.
  inside = [
    (start, min(stop, size) if start < size else stop)
    for (start, stop), size in zip(box, shape, strict=False)
  ]
  if inside == [(0, size) for size in shape]:
    return ""
  return f"[{', '.join(map(_along, inside))}]"


def _along(span: tuple[int, int]) -> str:
  start, stop = span
  return str(start) if stop == start + 1 else f"{start}:{stop}"
