"""Who owns what: splits of indices, rows, columns and blocks over workers."""

from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any, Literal, get_args

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from coremesh.errors import ShapeError

type Index = int | jax.Array
Uneven = Literal["spread", "refuse"]

_INT32_MAX = 2**31 - 1
_MAX_PLAN_LINES = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Split:
  """Contiguous shares of `total` items, one for each of `workers` workers.

  The items are cut into ceil(total / unit) units, of which the last may be
  ragged. With q, r = divmod(units, workers), worker w owns the q + (w < r)
  units from unit w * q + min(w, r) on. No item is dropped; a worker that finds
  no unit left owns zero items, from `total` on.

  Args:
    total: number of items to split, >= 0.
    workers: number of workers, >= 1; it may exceed the number of units.
    unit: items that stay together, >= 1; for example 8 sublanes or 128 lanes.
    uneven: what to do if `total` is no multiple of `workers * unit`: "spread"
      gives one unit more to each of the first r workers, "refuse" raises.

  Raises:
    ShapeError: if an argument is out of its range, if `total` rounded up to
      whole units does not fit in int32, or if uneven shares are refused.

  Example:
    >>> Split(total=10, workers=4).shares
    ((0, 3), (3, 3), (6, 2), (8, 2))
  """

  total: int
  workers: int
  unit: int = 1
  uneven: Uneven = "spread"

  def __post_init__(self):
    _check_ints(
      total=(self.total, 0), workers=(self.workers, 1), unit=(self.unit, 1)
    )
    if self.uneven not in get_args(Uneven):
      raise ShapeError(
        f"uneven must be one of {get_args(Uneven)}; got {self.uneven!r}."
      )
    _check_int32("total in whole units", self._num_units * self.unit)
    if self.uneven == "refuse" and not self.is_even:
      raise ShapeError(f"{self._unmet()}{self._fewer()} or uneven='spread'.")

  @property
  def is_even(self) -> bool:
    """Whether all workers own the same number of whole units."""
    return self.total % (self.workers * self.unit) == 0

  @property
  def max_size(self) -> int:
    """Items of the largest share: a buffer of this size fits every worker."""
    # The first worker has the most units, and a ragged one only if alone.
    return int(self.size(0))

  @property
  def imbalance(self) -> float:
    """Largest share / mean share, >= 1.0; 1.0 if there is nothing to split."""
    return self.max_size * self.workers / self.total if self.total else 1.0

  @property
  def shares(self) -> tuple[tuple[int, int], ...]:
    """(start, size) of every worker, in items."""
    workers = range(self.workers)
    return tuple((self.start(w), int(self.size(w))) for w in workers)

  def start[W: (int, jax.Array)](self, worker: W) -> W:
    """Returns the first item of `worker`.

    Args:
      worker: an int in [0, workers), or an integer scalar of JAX. The range of
        the latter is not checked: tracing does not know its value.

    Returns:
      An int for an int, an int32 scalar for a scalar of JAX.

    Raises:
      ShapeError: if `worker` is neither.
    """
    index = _checked_index("worker", worker, bound=self.workers)
    first = self._first_unit(index) * self.unit
    if self.workers <= self._num_units:
      # Not beyond total; and off a product, Mosaic can read the alignment.
      return first
    return _minimum(first, self.total)

  def size(self, worker: Index) -> Index:
    """Returns how many items `worker` owns; argument and errors as `start`.

    An int, whatever `worker` is, where all shares are alike: a loop or grid of
    that length stays static.
    """
    index = _checked_index("worker", worker, bound=self.workers)
    if self.is_even:
      return self.total // self.workers
    stop = _minimum(self._first_unit(index + 1) * self.unit, self.total)
    return stop - self.start(index)

  def slice(self, worker: Index) -> pl.Slice:
    """Returns the items of `worker` as `pl.ds(start, size)`, `size` an int.

    Raises:
      ShapeError: if the split is uneven and `worker` is no int: Pallas takes a
        slice of dynamic size in some DMAs only.
    """
    if not isinstance(worker, jax.Array):
      return pl.ds(self.start(worker), self.size(worker))
    if not self.is_even:
      raise ShapeError(
        f"slice(worker) of a traced worker has a static size: {self._unmet()}"
        " or start(worker) and size(worker) with the bounded blocks of"
        " cm.pipeline."
      )
    return pl.ds(self.start(worker), self.total // self.workers)

  def plan(self) -> str:
    """Returns the split as a text table, one line a worker.

    Beyond 16 workers, neighbours with shares of one size are put on one line.
    The last line has the imbalance and the workers without items.
    """
    is_long = self.workers > _MAX_PLAN_LINES
    each = " each" if is_long else ""
    rows: list[tuple] = [
      ("worker", "start", "stop", f"size{each}", f"share{each}")
    ]
    key = self.size if is_long else None
    for _, group in itertools.groupby(range(self.workers), key=key):
      run = tuple(group)
      size = self.size(run[0])
      start, stop = self.start(run[0]), self.start(run[-1]) + self.size(run[-1])
      share = f"{100 * size / self.total:.3g}%" if self.total else "-"
      rows.append((_span(run[0], run[-1]), start, stop, size, share))
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"{self.total} items, {self.workers} workers, unit {self.unit}"]
    for row in cells:
      lines.append("  ".join(map(str.rjust, row, widths)))
    idle = _span(self._num_units, self.workers - 1)
    imbalance = f"{self.imbalance:#.4g} (largest / mean share)"
    lines.append(f"imbalance {imbalance}, idle workers: {idle}")
    return "\n".join(lines)

  __str__ = plan

  @property
  def _num_units(self) -> int:
    return num_blocks(self.total, self.unit)

  def _first_unit(self, worker: Any) -> Any:
    quotient, remainder = divmod(self._num_units, self.workers)
    if not remainder:
      return worker * quotient
    return worker * quotient + _minimum(worker, remainder)

  def _unmet(self) -> str:
    return (
      "total must be a multiple of workers * unit; got"
      f" total={self.total}, workers={self.workers}, unit={self.unit}."
      f" Use total={padded(self.total, self.workers * self.unit)},"
    )

  def _fewer(self) -> str:
    if self.total % self.unit:
      return ""
    below = range(self.workers - 1, 0, -1)
    fewer = next(w for w in below if self._num_units % w == 0)
    return f" workers={fewer},"


def split(
  total: int, workers: int, *, unit: int = 1, uneven: Uneven = "spread"
) -> Split:
  """Splits `total` items over `workers` workers; see `Split`."""
  return Split(total=total, workers=workers, unit=unit, uneven=uneven)


def num_blocks(size: int, block: int) -> int:
  """Returns ceil(`size` / `block`), the blocks that cover `size` items.

  Raises:
    ShapeError: if not size >= 0 and block >= 1, both ints.
  """
  _check_ints(size=(size, 0), block=(block, 1))
  return -(-size // block)


def padded(size: int, multiple: int) -> int:
  """Returns `size` rounded up to a multiple of `multiple`.

  Raises:
    ShapeError: if not size >= 0 and multiple >= 1, both ints.
  """
  _check_ints(size=(size, 0), multiple=(multiple, 1))
  return num_blocks(size, multiple) * multiple


def tail(size: int, block: int) -> int:
  """Returns the items of the last block: in [1, block], or 0 for no items.

  Raises:
    ShapeError: if not size >= 0 and block >= 1, both ints.
  """
  return size - max(num_blocks(size, block) - 1, 0) * block


def flat_worker(indices: Sequence[Index], sizes: Sequence[int]) -> Index:
  """Returns the row-major number of one worker in a grid of workers.

  For (core, subcore) that is core * num_subcores + subcore. Split the items
  over prod(sizes) workers to split them over the whole grid.

  Args:
    indices: one index an axis: an int in [0, size), or an integer scalar of
      JAX, whose range is not checked.
    sizes: number of workers along each axis, >= 1.

  Returns:
    An int in [0, prod(sizes)) if all indices are ints, else an int32 scalar.

  Raises:
    ShapeError: if the lengths differ or are 0, an entry is out of its range,
      or prod(sizes) does not fit in int32.

  Example:
    >>> flat_worker((1, 3), (2, 16))
    19
  """
  if not sizes or len(indices) != len(sizes):
    raise ShapeError(
      "indices and sizes must have one entry for each axis, and at least one;"
      f" got {len(indices)} indices and {len(sizes)} sizes."
    )
  _check_ints(**{f"sizes[{axis}]": (n, 1) for axis, n in enumerate(sizes)})
  _check_int32("prod(sizes)", math.prod(sizes))
  flat = 0
  for axis, (index, size) in enumerate(zip(indices, sizes, strict=True)):
    index = _checked_index(f"indices[{axis}]", index, bound=size)
    flat = flat * size + index
  return flat


def _check_ints(**values_and_minimums: tuple[object, int]) -> None:
  # Not even a NumPy integer: it would promote a traced int32 index to int64.
  problems = [
    f"{name} must be an int >= {minimum}; got {value!r}."
    for name, (value, minimum) in values_and_minimums.items()
    if type(value) is not int or value < minimum
  ]
  if problems:
    raise ShapeError(" ".join(problems) + " Pass int(...) of a NumPy integer.")


def _check_int32(name: str, value: int) -> None:
  if value > _INT32_MAX:
    raise ShapeError(
      f"{name} must fit in the int32 of a kernel's indices, at most"
      f" {_INT32_MAX}; got {value}. Split rows or blocks, not elements."
    )


def _checked_index(name: str, index: Any, *, bound: int) -> Any:
  if isinstance(index, jax.Array):
    if not index.shape and jnp.issubdtype(index.dtype, jnp.integer):
      return lax.convert_element_type(index, jnp.int32)
  elif type(index) is int and 0 <= index < bound:
    return index
  given = jax.typeof(index) if isinstance(index, jax.Array) else repr(index)
  raise ShapeError(
    f"{name} must be an int in [0, {bound}) or an integer scalar of JAX; got"
    f" {given}. Index or cast it first."
  )


def _as(index: int | jax.Array, value: int) -> Any:
  return jnp.int32(value) if isinstance(index, jax.Array) else value


def _minimum(index: Any, limit: int) -> Any:
  least = lax.min if isinstance(index, jax.Array) else min
  return least(index, _as(index, limit))


def _span(first: int, last: int) -> str:
  if first > last:
    return "none"
  return f"{first}..{last}" if first < last else str(first)
