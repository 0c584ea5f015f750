"""In what order a pipeline visits the blocks of a ref, and what that forbids.

A pipeline walks its grid in row-major order, the last axis fastest, and keeps
a block in VMEM only while consecutive steps ask for the same one. What that
forbids follows, while the kernel is traced, from the index map: at once if it
only picks grid indices or adds run-time numbers to them, else by walking the
grid.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental import pallas as pl
import numpy as np

from coremesh import _compat, errors
from coremesh.pipelines.blocks import (
  Grid,
  Index,
  Operand,
  in_throwaway_trace,
  parts,
  tiles,
)

# Of a larger grid only steps near its corners are walked.
_MAX_STEPS = 4096
# How much of a grid axis is walked whose size is known at run time only.
_RUN_TIME_STEPS = 4

type Point = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Visits:
  """How a pipeline visits the blocks of one operand.

  Attributes:
    operand: the ref and its block.
    kept: the grid axes along which a block stays for more than one step.
    revisited: the outermost grid axis along which a block comes back after
      others, None if none does.
    example: where it does, for errors.
    is_known: whether the index map could be evaluated. Otherwise it depends
      on a table, or on which core this is; then a block is taken to change
      with every step along each axis that the index map uses.
    is_aligned: whether a block is sure to stay exactly while the kept axes go
      from their first step to their last.
  """

  operand: Operand
  kept: frozenset[int]
  revisited: int | None = None
  example: str = ""
  is_known: bool
  is_aligned: bool = False

  @property
  def shared(self) -> frozenset[int] | None:
    """Grid axes that must not be split over cores, None if that is not known.

    Sums in runs of equal table entries, for instance, must stay on one core.
    """
    if self.operand.accumulator and not self.is_known:
      return None
    return self.kept


def walk(operand: Operand, grid: Grid) -> Visits:
  """How an operand's index map visits its blocks over the grid.

  Raises:
    PipelineError: a block outside the array.
  """
  seen = None if operand.reads_tables else _read(operand, grid)
  return seen or in_throwaway_trace(lambda: _walk(operand, grid))


def _walk(operand: Operand, grid: Grid) -> Visits:
  if operand.reads_tables:
    return _assumed(operand, grid, _used_axes(operand, grid))
  points = list(_points(grid))
  counts = operand.num_indices
  indices: list[Index] = []
  for point in points:
    index = _known_index(operand, point)
    if index is None:
      return _assumed(operand, grid, _used_axes(operand, grid))
    if not _is_block(index, counts) and _is_surely_in(point, grid):
      _check_range(operand, point, index)
    indices.append(index)
  kept: set[int] = set()
  revisited, example = None, ""
  last_seen: dict[Index, Point] = {}
  previous = None
  for point, index in zip(points, map(parts, indices), strict=True):
    before = last_seen.get(index)
    if before is not None:
      changed = [a for a in range(len(grid)) if point[a] != before[a]]
      kept.update(changed)
      if index != previous and revisited is None:
        revisited = changed[0]
        example = _example(index, before, point)
    last_seen[index] = point
    previous = index
  is_whole = all(map(_is_static, grid)) and len(points) == math.prod(grid)
  return Visits(
    operand=operand,
    kept=frozenset(kept),
    revisited=revisited,
    example=example,
    is_known=True,
    is_aligned=is_whole and not kept & _used_axes(operand, grid),
  )


class _Symbol:
  """A grid index, or what arithmetic makes of some: it has no value.

  Attributes:
    axes: the grid axes it depends on.
    is_known: whether it depends on nothing else, no run-time number.
  """

  __slots__ = ("axes", "is_known")

  def __init__(self, axes: frozenset[int] = frozenset(), *, is_known: bool):
    self.axes = axes
    self.is_known = is_known

  def _with(self, other: Any) -> Any:
    symbol = _symbol(other)
    if symbol is None:
      return NotImplemented
    is_known = self.is_known and symbol.is_known
    return _Symbol(self.axes | symbol.axes, is_known=is_known)

  def _refuse(self, *_: Any) -> Any:
    raise TypeError("The index map asks for the value of a grid index.")

  # A JAX number that meets what it does not know leaves the result to that.
  __add__ = __sub__ = __mul__ = __floordiv__ = __mod__ = _with
  __radd__ = __rsub__ = __rmul__ = __rfloordiv__ = __rmod__ = _with
  __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __ne__ = _refuse
  __bool__ = __index__ = __int__ = __hash__ = _refuse


def _symbol(value: Any) -> _Symbol | None:
  if isinstance(value, int | Tracer):
    return _Symbol(is_known=isinstance(value, int))
  return value if isinstance(value, _Symbol) else None


def _read(operand: Operand, grid: Grid) -> Visits | None:
  """The visits of an index map, if neither a trace nor a walk is needed.

  That is one that only picks grid indices, or adds run-time numbers to them.
  """
  steps = [_Symbol(frozenset([a]), is_known=True) for a in range(len(grid))]
  try:
    with _compat.without_tracing():
      index = operand.index_at(steps)
  except Exception:  # It does more; if it is at fault, walking says how.
    return None
  symbols = [s for s in map(_symbol, index) if s is not None]
  if len(symbols) < len(index):
    return None
  axes = frozenset(a for s in symbols for a in s.axes)
  if not all(s.is_known for s in symbols):
    return _assumed(operand, grid, axes)
  is_picked = all(_is_int(i) or any(i is s for s in steps) for i in index)
  return _picking(operand, grid, axes) if is_picked else None


def _picking(operand: Operand, grid: Grid, picked: frozenset[int]) -> Visits:
  """What follows from the grid axes that an index map picks."""
  first = tuple(0 for _ in grid)
  last = tuple(n - 1 if _is_static(n) and n else 0 for n in grid)
  for point in (first, last):
    if _is_surely_in(point, grid):
      _check_range(operand, point, operand.index_at(point))
  axes = [a for a, n in enumerate(grid) if not (_is_static(n) and n == 1)]
  kept = [a for a in axes if a not in picked]
  left = [a for a in kept if any(b in picked for b in axes if b > a)]
  example = ""
  if left:
    again = tuple(int(a == left[0]) for a in range(len(grid)))
    example = _example(operand.index_at(first), first, again)
  return Visits(
    operand=operand,
    kept=frozenset(kept),
    revisited=min(left, default=None),
    example=example,
    is_known=True,
    is_aligned=True,
  )


def _example(index: Any, before: Point, after: Point) -> str:
  return f", such as block {tuple(index)} at grid points {before} and {after}"


def check_output(seen: Visits, parallel: Sequence[int]) -> None:
  """Checks that the steps of an output block follow one another on one core.

  Raises:
    PipelineError: an axis it is accumulated along is parallel, a block is left
      and revisited, or stays without having been declared an accumulator.
  """
  label = seen.operand.label
  split = sorted(seen.kept.intersection(parallel))
  if split:
    raise errors.PipelineError(
      f"{label} is accumulated along grid axis {split[0]}, which is parallel:"
      " two cores would write the same block. Leave the axis out of"
      f" parallel={tuple(parallel)}, or give each core an output of its own and"
      " add them afterwards."
    )
  if seen.revisited is not None:
    raise errors.PipelineError(
      f"{label} is left and revisited: steps along grid axis {seen.revisited}"
      f" ask again for a block that others have replaced{seen.example}. A block"
      " is kept only while consecutive steps use it, so what the first visit"
      " wrote is lost. Make the axis it is accumulated along the innermost"
      " (last) one of the grid, or give each visit a block of its own."
    )
  if seen.kept and seen.operand.accumulator is None:
    raise errors.PipelineError(
      f"{label} keeps its block along grid axis {min(seen.kept)}: each step"
      " would overwrite the one before. If it is summed over that axis,"
      " declare it: cm.accumulator(block_shape, index_map) in out_specs."
    )


def _points(grid: Grid) -> Iterator[Point]:
  """Points of the grid in the pipeline's order, those near corners if many.

  Leaving points out can hide a fault, but makes none of what is right.
  """
  sizes = [n if _is_static(n) and n else _RUN_TIME_STEPS for n in grid]
  most = max(sizes, default=1)
  if math.prod(sizes) > _MAX_STEPS:
    most = max(2, int(_MAX_STEPS ** (1 / len(sizes))))
  return itertools.product(
    *(
      range(n) if n <= most else [*range(most // 2), *range(n - most // 2, n)]
      for n in sizes
    )
  )


def _known_index(operand: Operand, point: Point) -> Index | None:
  """The block at a grid point as plain integers, None if it has no such."""
  index = operand.index_at(point)
  if all(map(_is_int, index)):
    return index
  try:
    with jax.ensure_compile_time_eval():
      index = operand.index_at(point)
  except NameError:  # jax.lax.axis_index: another number on each core.
    return None
  if any(isinstance(p, Tracer) or np.ndim(p) for p in parts(index)):
    return None
  return tuple(
    pl.ds(int(i.start), int(i.size)) if isinstance(i, pl.Slice) else int(i)
    for i in index
  )


def _is_int(value: Any) -> bool:
  return type(value) is int


def _is_block(index: Index, counts: Sequence[int]) -> bool:
  """Whether an index is in range, for sure: `_check_range` says if not."""
  for i, count in zip(index, counts, strict=True):
    if type(i) is not int or not 0 <= i < count:
      return False
  return True


def _assumed(operand: Operand, grid: Grid, used: frozenset[int]) -> Visits:
  """What follows from which grid indices the index map uses at all."""
  axes = [a for a, n in enumerate(grid) if not (_is_static(n) and n == 1)]
  kept = [a for a in axes if a not in used]
  left = [a for a in kept if any(b in used for b in axes if b > a)]
  return Visits(
    operand=operand,
    kept=frozenset(kept),
    revisited=min(left, default=None),
    is_known=False,
  )


def _used_axes(operand: Operand, grid: Grid) -> frozenset[int]:
  return _compat.used_arguments(
    lambda *point: parts(operand.index_at(point)), len(grid)
  )


def _check_range(operand: Operand, point: Point, index: Index) -> None:
  shape = tuple(operand.ref.shape)
  for axis, (i, count) in enumerate(
    zip(index, operand.num_indices, strict=True)
  ):
    size = operand.sizes[axis]
    if isinstance(i, pl.Slice):
      _check_slice(operand, point, axis, i)
    elif not 0 <= i < count:
      raise errors.PipelineError(
        f"The index map of {operand.label} returns {index} at grid point"
        f" {point}, but axis {axis} of shape {shape} has {count} blocks of"
        f" {size}. It must return block indices, here in [0, {count}), not"
        " elements: the k-th block, not its first element."
      )


def _check_slice(operand: Operand, point: Point, axis: int, i: Any) -> None:
  extent, most = operand.ref.shape[axis], operand.sizes[axis].block_size
  tile = tiles(operand.ref)[axis]
  stop = i.start + i.size
  if not (0 <= i.start <= extent and 0 <= i.size <= most):
    raise errors.PipelineError(
      f"The index map of {operand.label} returns pl.ds({i.start}, {i.size})"
      f" along axis {axis} at grid point {point}; it must start in [0,"
      f" {extent}] and be at most pl.BoundedSlice({most}) long."
    )
  if operand.is_output and (i.start % tile or i.size % tile and stop < extent):
    raise errors.PipelineError(
      f"The index map of {operand.label} returns pl.ds({i.start}, {i.size})"
      f" along axis {axis} at grid point {point}, but an output is written in"
      f" whole tiles of {tile} there, and overwrites what follows. Round both"
      " to tiles, or move the ragged axis before the last two."
    )


def _is_surely_in(point: Point, grid: Grid) -> bool:
  return all(
    p < n if _is_static(n) else p == 0 for p, n in zip(point, grid, strict=True)
  )


def _is_static(size: Any) -> bool:
  return isinstance(size, int)
