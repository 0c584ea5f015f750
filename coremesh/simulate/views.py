"""Views of memories: the steps that lead from a ref to a part of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coremesh.simulate import packing


class Reshape:
  """A ref seen in another shape."""

  def __init__(self, shape: tuple[int, ...]):
    self.shape = shape

  def forward(self, array: np.ndarray) -> np.ndarray:
    return array.reshape(self.shape)

  def inverse(self, array: np.ndarray, base: np.ndarray) -> np.ndarray:
    return array.reshape(base.shape)

  def forward_records(self, numbers: np.ndarray) -> np.ndarray:
    """What is known of each element, [..., several], in the new shape."""
    return numbers.reshape(*self.shape, numbers.shape[-1])


class Transpose:
  """A ref with its axes permuted."""

  def __init__(self, permutation: tuple[int, ...]):
    self.permutation = permutation
    self._inverse = tuple(np.argsort(permutation))

  def forward(self, array: np.ndarray) -> np.ndarray:
    return array.transpose(self.permutation)

  def inverse(self, array: np.ndarray, base: np.ndarray) -> np.ndarray:
    del base
    return array.transpose(self._inverse)

  def forward_records(self, numbers: np.ndarray) -> np.ndarray:
    """What is known of each element, [..., several], in the new order."""
    return numbers.transpose(*self.permutation, len(self.permutation))


class Bitcast:
  """A ref whose words are read as another dtype.

  A TPU packs narrow elements along the second last axis (along the only one of
  a vector): word [i, j] holds elements [r * i + k, j], the first lowest.
  """

  def __init__(self, dtype: Any, old: Any = None):
    self.dtype = np.dtype(dtype)
    self._old = self.dtype if old is None else np.dtype(old)

  def forward(self, array: np.ndarray) -> np.ndarray:
    return packing.bitcast(array, self.dtype, max(0, array.ndim - 2))

  def inverse(self, array: np.ndarray, base: np.ndarray) -> np.ndarray:
    return Bitcast(base.dtype).forward(array).reshape(base.shape)

  def forward_records(self, numbers: np.ndarray) -> np.ndarray:
    """What is known of each word's part, or of a word by its parts."""
    old, new = packing.bits_of(self._old), packing.bits_of(self.dtype)
    axis = max(0, numbers.ndim - 3)
    if old >= new:
      return np.repeat(numbers, old // new, axis)
    *outer, lanes, known = numbers.shape
    ratio = new // old
    if numbers.ndim == 2:
      return numbers.reshape(lanes // ratio, ratio * known)
    *outer, rows = outer
    parts = numbers.reshape(*outer, rows // ratio, ratio, lanes, known)
    parts = np.moveaxis(parts, -3, -2)
    return parts.reshape(*outer, rows // ratio, lanes, ratio * known)


class Rows:
  """A ref indexed by an array, some of whose entries may be ignored.

  Attributes:
    key: the index, ignored entries replaced by 0.
    kept: which entries are meant, None for all.
    axis: the axis of the result that the array stands for.
    listed: buffers with the steps to where the index was read from.
  """

  __slots__ = ("axis", "kept", "key", "listed")

  def __init__(
    self, key: tuple[Any, ...], kept: Any, axis: int, listed: Any = ()
  ):
    self.key = key
    self.kept = kept
    self.axis = axis
    self.listed = listed


type Step = tuple[Any, ...] | Reshape | Transpose | Bitcast | Rows


def read(data: np.ndarray, steps: Sequence[Step]) -> Any:
  """A copy of a part of a buffer's elements, a numpy scalar if of rank 0."""
  for step in steps:
    if isinstance(step, tuple):
      data = data[step]
    elif isinstance(step, Rows):
      data = data[step.key]
    else:
      data = step.forward(data)
  return data.copy()


def write(data: np.ndarray, steps: Sequence[Step], value: Any) -> None:
  """Sets a part of a buffer's elements."""
  if not steps:
    data[...] = value
    return
  step, *rest = steps
  if isinstance(step, tuple):
    if rest:
      write(data[step], rest, value)
    else:
      data[step] = value
  elif isinstance(step, Rows):
    _write_rows(data, step, value)
  else:
    seen = step.forward(data)
    write(seen, rest, value)
    if not np.may_share_memory(seen, data):
      data[...] = step.inverse(seen, data)


def _write_rows(data: np.ndarray, step: Rows, value: np.ndarray) -> None:
  if step.kept is None:
    data[step.key] = value
    return
  key, value = kept_rows(step, value)
  data[key] = value


def kept_rows(step: Rows, value: Any) -> tuple[tuple[Any, ...], Any]:
  """The index and values of a `Rows` without the ignored entries."""
  if step.kept is None:
    return step.key, value
  chosen = np.flatnonzero(step.kept)
  return kept_key(step), np.take(value, chosen, axis=step.axis)


def changed(data: np.ndarray, steps: Sequence[Step], value: Any) -> np.ndarray:
  """Of which elements of a buffer writing a value would change any bit."""
  result = np.zeros(data.shape, bool)
  part, rest = result, list(steps)
  while rest and isinstance(step := rest[0], tuple):
    data, part = data[(*step, ...)], part[(*step, ...)]
    rest.pop(0)
  new = data.copy()
  write(new, rest, value)
  part[...] = packing.raw(new) != packing.raw(data)
  return result


def kept_key(step: Rows) -> tuple[Any, ...]:
  """The index of a `Rows` without the ignored entries."""
  if step.kept is None:
    return step.key
  chosen = np.flatnonzero(step.kept)
  return tuple(
    k.reshape(-1)[chosen] if isinstance(k, np.ndarray) else k for k in step.key
  )


def part_of(
  array: np.ndarray, steps: Sequence[Step], data: np.ndarray
) -> tuple[np.ndarray, Any]:
  """The elements that steps lead to of what is noted for each one of `data`.

  Returns:
    A view, and the index of the elements in it, None for all.
  """
  part = array
  for i, step in enumerate(steps):
    if isinstance(step, tuple):
      outer, part = part, part[step]
      if part.__class__ is not np.ndarray:  # One element: keep it a view.
        part = outer[(*step, ...)]
    elif isinstance(step, Rows) and i == len(steps) - 1:
      return part, kept_key(step)
    else:
      return array.reshape(-1), (_flat_index(data, steps),)
  return part, None


def _flat_index(data: np.ndarray, steps: Sequence[Step]) -> np.ndarray:
  """Which elements of a memory steps lead to, counted in one row."""
  flat = np.arange(data.size).reshape(*data.shape, 1)
  for step in steps:
    if isinstance(step, tuple):
      flat = flat[step]
    elif isinstance(step, Rows):
      flat = flat[kept_key(step)]
    else:
      flat = step.forward_records(flat)
  return np.unique(flat)
