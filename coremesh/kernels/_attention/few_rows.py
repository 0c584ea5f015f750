"""Attention of few rows: when it is that, and how it is cut.

The rows of all heads of q that share keys are one block, and keys go by it:

    row          0 1 2 | 3 4 5     two heads of three queries each
    query        0 1 2 | 0 1 2

Rows are on sublanes and keys on lanes. The matrix units hold keys and values,
and the rows pass through them, so that a score costs only where there is a row.
Each key is read once, which is all the time it takes.
"""

import dataclasses
import math
from typing import Any

from jax.experimental import pallas as pl

from coremesh import chips
from coremesh.kernels import layouts
from coremesh.kernels._attention import masks
from coremesh.kernels._attention.call import Problem
from coremesh.kernels._attention.masks import Span
from coremesh.kernels._attention.scalars import both, quotient
from coremesh.kernels._attention.units import Units
from coremesh.kernels.blocks import copied_rows
from coremesh.tiles import LANES

_MOST_ROWS = 256
# More queries of one head fill the tiles of the other kernels.
_MOST_QUERIES = 208
# A step much shorter than the latency of a copy waits for it.
_STEP_SECONDS = 0.8e-6
# Of a block, in float32: 2 MiB.
_MOST_SCORES = 2**19

# Arrays with d on one of their last two axes, and keys or rows on the other.
OF_KEYS = "k", "v", "dk", "dv"
OF_ROWS = "q", "out", "d_out", "dq"


def are_few(problem: Problem) -> bool:
  """Whether the heads that share keys have few rows in all."""
  rows = problem.group * problem.q_len
  return rows <= _MOST_ROWS and problem.q_len <= _MOST_QUERIES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
  """How attention of few rows is computed.

  Attributes:
    problem: what is asked for.
    keys: of a block, a multiple of 128.
    num_cores: of a device.
  """

  problem: Problem
  keys: int
  num_cores: int

  @property
  def rows(self) -> int:
    """Of each head of keys."""
    return self.problem.group * self.problem.q_len

  def is_turned(self, name: str) -> bool:
    """Whether an array is seen with its last two axes exchanged.

    As XLA lays it out so: it need not be copied, nor padded to 128 dimensions.
    """
    problem = self.problem
    d = problem.d_qk if name in ("q", "dq", "k", "dk") else problem.d_v
    if name in OF_KEYS:
      return layouts.lies_transposed((problem.kv_len, d))
    if name in OF_ROWS and problem.group == 1:
      return layouts.lies_transposed((problem.q_len, d))
    return False

  def shape(self, name: str) -> tuple[int, ...]:
    """Of an output: batch, heads of keys, and the two axes as they are seen."""
    problem = self.problem
    if name not in OF_KEYS + OF_ROWS:
      return problem.batch, problem.kv_heads, 1, self.rows
    d = problem.d_qk if name in ("dq", "dk") else problem.d_v
    length = problem.kv_len if name in OF_KEYS else self.rows
    if self.is_turned(name):
      return problem.batch, problem.kv_heads, d, length
    if name in OF_KEYS:
      length = copied_rows(length, d)
    return problem.batch, problem.kv_heads, length, d

  @property
  def units(self) -> Units:
    """The heads of keys that each core goes through, with all their rows."""
    heads = dataclasses.replace(self.problem, heads=self.problem.kv_heads)
    return Units(problem=heads, blocks=1, num_cores=self.num_cores)

  @property
  def num_blocks(self) -> int:
    """Of keys, of each head."""
    return pl.cdiv(self.problem.kv_len, self.keys)

  def blocks_of(self, num_keys: Any) -> tuple[Any, Any]:
    """The first and the last block of which some key counts, or any block.

    Args:
      num_keys: how many keys are valid; None for all.
    """
    some = self._some_keys(num_keys)
    last = quotient(masks.greater(some.stop - 1, 0), self.keys)
    return masks.smaller(quotient(some.start, self.keys), last), last

  def some_count(self, block: Any, num_keys: Any) -> Any:
    """Whether some key of a block counts."""
    start, some = block * self.keys, self._some_keys(num_keys)
    return both(start < some.stop, some.start < start + self.keys)

  def all_count(self, block: Any, num_keys: Any) -> Any:
    """Whether all keys of a block count, for all rows."""
    if "row_segments" in self.problem.operands:
      return False
    every = masks.band(self.problem).all_keys(self._queries)
    every = self._valid(every, num_keys)
    start = block * self.keys
    starts = stops = True
    if every.start > 0:
      starts = start >= every.start
    if num_keys is not None or every.stop < self.num_blocks * self.keys:
      stops = start + self.keys <= every.stop
    return both(starts, stops)

  @property
  def _queries(self) -> Span:
    return Span(0, self.problem.q_len)

  def _some_keys(self, num_keys: Any) -> Span:
    some = masks.band(self.problem).some_keys(self._queries)
    return self._valid(some, num_keys)

  def _valid(self, keys: Span, num_keys: Any) -> Span:
    return keys if num_keys is None else keys.cut(Span(0, num_keys))


def planned(problem: Problem, chip: chips.Chip) -> Plan:
  """The plan for a problem on a chip."""
  num_cores = chip.tensor_cores_per_device
  rate = chip.hbm_bytes_per_second_per_device / num_cores
  key_bytes = (problem.d_qk + problem.d_v) * problem.dtype.itemsize
  keys = _STEP_SECONDS * rate / key_bytes
  keys = LANES * 2 ** math.ceil(math.log2(max(keys / LANES, 1)))
  if problem.call.blocks is not None:
    keys = min(keys, problem.call.blocks.keys)
  rows = 8 * pl.cdiv(problem.group * problem.q_len, 8)
  most = _MOST_SCORES // rows // LANES * LANES
  return Plan(
    problem=problem,
    keys=min(keys, most, pl.cdiv(problem.kv_len, LANES) * LANES),
    num_cores=num_cores,
  )
