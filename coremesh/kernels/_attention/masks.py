"""Which scores of attention count, of single ones and of whole blocks.

A row is a query, a key is a key and its value. Which keys a row counts is a
band around a diagonal (causal, window), cut by how many keys there are, and
then by segments. Everything here works with keys on either axis of a block.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coremesh.kernels._attention.call import Problem


class Span(NamedTuple):
  """From `start` up to and without `stop`; empty if that is not after it.

  Either is an int, or an int32 scalar of the kernel.
  """

  start: Any
  stop: Any

  def cut(self, limit: "Span") -> "Span":
    """What is in both."""
    return Span(
      greater(self.start, limit.start), smaller(self.stop, limit.stop)
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Band:
  """Row r counts the keys from r + `first` to r + `last`, both included.

  None stands for no limit. The last row and the last key are aligned: without
  a window, a causal row r counts keys up to r + kv_len - q_len.

  Attributes:
    first, last: offsets from the row.
    num_rows, num_keys: of the arrays.
  """

  first: int | None
  last: int | None
  num_rows: int
  num_keys: int

  def some_keys(self, rows: Span) -> Span:
    """The keys that at least one of the rows counts, if there are rows."""
    return self._keys(rows.start, rows.stop - 1)

  def all_keys(self, rows: Span) -> Span:
    """The keys that every one of the rows counts."""
    return self._keys(rows.stop - 1, rows.start)

  def some_rows(self, keys: Span) -> Span:
    """The rows that count at least one of the keys, if there are keys."""
    return self._rows(keys.stop - 1, keys.start)

  def all_rows(self, keys: Span) -> Span:
    """The rows that count every one of the keys."""
    return self._rows(keys.start, keys.stop - 1)

  def counts(self, rows: jax.Array, keys: jax.Array) -> jax.Array | None:
    """Whether rows count keys, of indices that broadcast; None: all do."""
    conditions = []
    if self.first is not None:
      conditions.append(keys >= rows + self.first)
    if self.last is not None:
      conditions.append(keys <= rows + self.last)
    return functools.reduce(operator.and_, conditions) if conditions else None

  def _keys(self, row_of_first, row_of_last) -> Span:
    return Span(
      0 if self.first is None else row_of_first + self.first,
      self.num_keys if self.last is None else row_of_last + self.last + 1,
    ).cut(Span(0, self.num_keys))

  def _rows(self, key_of_first, key_of_last) -> Span:
    # r + first <= key <= r + last
    return Span(
      0 if self.last is None else key_of_last - self.last,
      self.num_rows if self.first is None else key_of_first - self.first + 1,
    ).cut(Span(0, self.num_rows))


def band(problem: Problem) -> Band:
  """The band of causal attention and of a window."""
  offset = problem.kv_len - problem.q_len
  left, right = problem.call.window or (None, None)
  if problem.call.is_causal:
    right = 0
  return Band(
    first=None if left is None else offset - left,
    last=None if right is None else offset + right,
    num_rows=problem.q_len,
    num_keys=problem.kv_len,
  )


def counted(
  problem: Problem,
  *,
  rows: jax.Array,
  keys: jax.Array,
  row_segments: jax.Array | None = None,
  key_segments: jax.Array | None = None,
  num_keys: Any = None,
) -> jax.Array:
  """Which scores count.

  Args:
    problem: the problem.
    rows: int32 indices of rows, such as [1, m].
    keys: int32 indices of keys, which broadcast with them, such as [n, 1].
    row_segments: int32, of the shape of `_rows.rows`.
    key_segments: int32, of the shape of `keys`.
    num_keys: how many keys are valid; default all that the arrays have.

  Returns:
    bool of a shape that broadcasts to that of rows and keys together. What is
    beyond the keys counts nowhere; what is beyond the rows may count.
  """
  # What is known of a key or of a row alone is settled there: a block of scores
  # has as many elements as both multiplied.
  num_keys = problem.kv_len if num_keys is None else num_keys
  limits = band(problem)
  conditions = []
  if row_segments is not None and key_segments is not None:
    is_valid = (key_segments >= 0) & (keys < num_keys)
    own = jnp.where(row_segments >= 0, row_segments, -1)
    conditions.append(jnp.where(is_valid, key_segments, -2) == own)
  if limits.last is not None:
    last = rows + limits.last
    conditions.append(keys <= jnp.minimum(last, num_keys - 1))
  elif not conditions:
    conditions.append(keys < num_keys)
  if limits.first is not None:
    conditions.append(keys >= rows + limits.first)
  return functools.reduce(operator.and_, conditions)


def counted_keys(
  problem: Problem,
  keys: jax.Array,
  *,
  key_segments: jax.Array | None = None,
  num_keys: Any = None,
) -> jax.Array:
  """Which keys any row might count: the rest may hold NaN, and be no number.

  Args: as for `counted`.
  """
  result = keys < (problem.kv_len if num_keys is None else num_keys)
  if key_segments is not None:
    result &= key_segments >= 0
  first = band(problem).first
  if first is not None and first > 0:
    result &= keys >= first
  return result


def smaller(a: Any, b: Any) -> Any:
  """The smaller of two ints or int32 scalars, as such."""
  if isinstance(a, int) and isinstance(b, int):
    return min(a, b)
  return jnp.minimum(jnp.int32(a), jnp.int32(b))


def greater(a: Any, b: Any) -> Any:
  """The greater of two ints or int32 scalars, as such."""
  if isinstance(a, int) and isinstance(b, int):
    return max(a, b)
  return jnp.maximum(jnp.int32(a), jnp.int32(b))
