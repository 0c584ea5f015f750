"""Collective ids: which barrier semaphore a kernel has."""

from collections.abc import Sequence
from typing import Any
import zlib

import numpy as np

from coremesh import _compat, errors, mesh, scope

_MAX_ID = 2**31 - 1
# Automatic ids stay clear of the small ones people pick by hand.
_FIRST_AUTOMATIC_ID = 2**30


def automatic_id(
  meshes: Sequence[Any], patterns: Sequence[scope.Pattern | str | None]
) -> int:
  """The collective id of a kernel, from what makes sharing one safe.

  Two kernels with one id may meet on one semaphore when a fast device is
  already in the second. That is safe if both give the same signals, so the id
  is a checksum of them: the cores, the device axes and the barrier's pattern.
  The order in which kernels are traced, which may differ between processes,
  plays no part.
  """
  cores = [(type(m).__name__, tuple(m.shape.items())) for m in meshes]
  sizes = _compat.bound_axis_sizes()
  devices = [(n, sizes[n]) for n in sorted(mesh.device_axes())]
  text = repr((cores, devices, patterns))
  return _FIRST_AUTOMATIC_ID + zlib.crc32(text.encode()) % _FIRST_AUTOMATIC_ID


def check(value: Any) -> None:
  """Checks an id that a user chose; None for an automatic one.

  Raises:
    CollectiveError: it is no int, or out of range.
  """
  if value is None:
    return
  is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
  if not is_int or not 0 <= value <= _MAX_ID:
    raise errors.CollectiveError(
      f"collective_id must be an int in [0, {_MAX_ID}]; got"
      f" {value!r}. Leave it out to get one made from the barrier."
    )
