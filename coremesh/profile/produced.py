"""What an operation hands to the next: integers that its scalar unit made.

XLA's own kernels come in pairs, of which the first writes the tables that steer
the second.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from coremesh.profile.events import Trace


def words(traces: Sequence[Trace], num_bundles: int) -> dict[int, np.ndarray]:
  """The operands into which cores of one device copied words that are known.

  Args:
    traces: of all cores of the device.
    num_bundles: of the program.

  Returns:
    By the number of the operand, from its first word on. What is copied more
    than once, or by several cores, is not in it.
  """
  found: dict[int, dict[int, int]] = {}
  lost = set()
  for trace in traces:
    counts = trace.executions(num_bundles)
    for copy in trace.results:
      own = {copy.first + i: word for i, word in enumerate(copy.words)}
      known = {at: w for at, w in own.items() if isinstance(w, int)}
      held = found.setdefault(copy.operand, {})
      if counts[copy.bundle] != 1 or held.keys() & own.keys():
        lost.add(copy.operand)
      held.update(known)
  return {
    operand: _from_the_first(held)
    for operand, held in found.items()
    if operand not in lost and 0 in held
  }


def _from_the_first(held: Mapping[int, int]) -> np.ndarray:
  count = next(i for i in range(len(held) + 1) if i not in held)
  return np.array([held[i] for i in range(count)], np.uint32)
