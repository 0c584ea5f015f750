"""Semaphores that outlive a kernel, by the number that stands for them.

Between kernels a semaphore is an array to XLA. It holds 0 if all counts are 0,
else a number under which the next kernel finds the counts.
"""

import itertools
from typing import Any

import numpy as np

from coremesh.simulate import kept_arrays, memory

_COUNTS = kept_arrays.Store()


def keep(family: memory.Family, device: int) -> int:
  """Keeps the counts of a device; returns the number that stands for them."""
  counts = {
    place[1:]: [s.count for s in bank.semaphores]
    for place, bank in family.members.items()
    if place[0] == device
  }
  if not any(itertools.chain.from_iterable(counts.values())):
    return 0
  return _COUNTS.add(counts)


def take(
  given: np.ndarray | None, family: memory.Family, device: int
) -> dict[Any, memory.Bank]:
  """The semaphores that an array stands for, by place."""
  number = int(given.flat[0]) if given is not None and given.size else 0
  banks = {}
  for coords, counts in (_COUNTS.find(number) or {}).items():
    bank = banks[(device, *coords)] = memory.Bank(family, (device, *coords))
    for semaphore, count in zip(bank.semaphores, counts, strict=True):
      semaphore.count = count
  return banks
