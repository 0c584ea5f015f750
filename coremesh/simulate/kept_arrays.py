"""Arrays in the memory of cores, which outlive a kernel.

Between kernels such an array is one array to XLA, though each core has its own.
If the cores' differ, the array holds a mark and a number under which the next
kernel finds them; no one value would be right for all cores.
"""

from collections import OrderedDict
from collections.abc import Mapping
import itertools
import threading
from typing import Any

import numpy as np

from coremesh import errors

_MARK = b"coremesh"
_MARK_BYTES = len(_MARK) + 8  # The number follows.
_MAX_KEPT = 4096  # Of kernels that never come, the oldest go.


class Store:
  """Values by number, safe for the threads of several devices."""

  def __init__(self):
    self._values: OrderedDict[int, Any] = OrderedDict()
    self._numbers = itertools.count(1)
    self._lock = threading.Lock()

  def add(self, value: Any) -> int:
    """Keeps a value; returns its number, from 1 on."""
    with self._lock:
      number = next(self._numbers)
      self._values[number] = value
      while len(self._values) > _MAX_KEPT:
        self._values.popitem(last=False)
    return number

  def find(self, number: int) -> Any:
    """The value of a number, None if there is none."""
    with self._lock:
      return self._values.get(number)


_ARRAYS = Store()


def kept(values: Mapping[tuple[int, ...], np.ndarray]) -> np.ndarray:
  """One array for those of the cores, each [shape] of one dtype.

  Raises:
    UnsupportedError: they differ and are too small to hold the mark.
  """
  first, *others = values.values()
  raw = bytearray(first.tobytes())
  if all(bytes(raw) == other.tobytes() for other in others):
    return first
  if len(raw) < _MARK_BYTES:
    raise errors.UnsupportedError(
      f"An array that outlives a kernel holds {len(raw)} bytes on each core,"
      f" which differ. The simulator keeps those of at least {_MARK_BYTES}"
      " bytes apart: make it larger, or write it to HBM."
    )
  raw[:_MARK_BYTES] = _MARK + _ARRAYS.add(dict(values)).to_bytes(8, "little")
  return np.frombuffer(bytes(raw), first.dtype).reshape(first.shape)


def find(given: np.ndarray) -> Mapping[tuple[int, ...], np.ndarray] | None:
  """The arrays of the cores that one array stands for, None for itself.

  Raises:
    UnsupportedError: they are not kept any more.
  """
  if given.nbytes < _MARK_BYTES:
    return None
  raw = np.ascontiguousarray(given).reshape(-1).view(np.uint8)[:_MARK_BYTES]
  mark, number = raw[:8].tobytes(), raw[8:].tobytes()
  if mark != _MARK:
    return None
  values = _ARRAYS.find(int.from_bytes(number, "little"))
  if values is None:
    raise errors.UnsupportedError(
      "An array that outlived a kernel is used after the simulator has let go"
      f" of it: it keeps the last {_MAX_KEPT}. Use it sooner."
    )
  return values
