"""Blocks of a pipeline, and the static checks of how they are visited.

A pipeline walks its grid in row-major order, the last axis fastest, and keeps
a block in VMEM only while consecutive steps ask for the same one. What that
forbids is found here, by walking the first few steps of each grid axis.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any

import jax
from jax.experimental import pallas as pl
import numpy as np

from coremesh import _compat, errors

# Enough steps along each axis to see a block change, stay or come back.
_PROBED_STEPS = 4

type Grid = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Accumulator:
  """An output that several steps add to; make it with `cm.accumulator`."""

  spec: pl.BlockSpec
  init: Any = 0
  dtype: Any = None


def block(
  block_shape: Sequence[Any],
  index_map: Callable[..., Any],
  *,
  buffers: int = 2,
  lookahead: bool = False,
  memory_space: Any = None,
) -> pl.BlockSpec:
  """A `pl.BlockSpec`, with the buffering as plain arguments.

  Args:
    block_shape: elements along each axis; None drops an axis of size 1 from
      what the body sees; `pl.BoundedSlice(n)` is a run-time size up to n.
    index_map: from grid indices (and prefetched refs) to *block* indices: the
      k-th block starts at element k * size. For a `pl.BoundedSlice` axis it
      returns `pl.ds(start, size)` in elements.
    buffers: copies of the block in VMEM, at least 1; 2 overlaps copies with
      compute.
    lookahead: fetch a later block as soon as a buffer is free; inputs only.
    memory_space: where the body sees the block; default VMEM.

  Raises:
    PipelineError: fewer than one buffer, or lookahead with fewer than two.
  """
  if isinstance(buffers, bool) or not isinstance(buffers, int) or buffers < 1:
    raise errors.PipelineError(
      f"buffers must be an int of at least 1; got {buffers!r}."
    )
  if lookahead and buffers < 2:
    raise errors.PipelineError(
      f"lookahead needs at least 2 buffers; got buffers={buffers}."
    )
  mode = None
  if buffers != 2 or lookahead:
    mode = pl.Buffered(buffers, use_lookahead=lookahead)
  return pl.BlockSpec(
    tuple(block_shape),
    index_map,
    memory_space=memory_space,
    pipeline_mode=mode,
  )


def accumulator(
  block_shape: Sequence[Any],
  index_map: Callable[..., Any],
  *,
  init: Any = 0,
  dtype: Any = None,
) -> Accumulator:
  """An output block that stays while the inner grid axes go by.

  The body may read and add to it: at the first visit it holds `init`. It is
  written back when the grid moves on to the next block.

  Args:
    block_shape: as for `cm.block`, ints and None only.
    index_map: as for `cm.block`. It must ignore the innermost grid axes, over
      which the output is accumulated.
    init: what a block holds at its first visit, a scalar.
    dtype: dtype to accumulate in, for instance float32 for a bfloat16 output;
      converted once, after the last step. Default that of the output.
  """
  spec = pl.BlockSpec(tuple(block_shape), index_map)
  return Accumulator(spec=spec, init=init, dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Visits:
  """How a pipeline visits the blocks of one ref.

  Attributes:
    label: the ref, for errors, such as "output 0".
    axes: the grid axes the block depends on.
    is_known: whether the index map could be evaluated on plain integers.
  """

  label: str
  axes: frozenset[int]
  is_known: bool


def num_blocks(spec: pl.BlockSpec, shape: Sequence[int]) -> tuple[int, ...]:
  """Blocks along each axis of an array; the last may be partial."""
  return tuple(
    pl.cdiv(extent, block_size(size))
    for size, extent in zip(block_sizes(spec), shape, strict=True)
  )


def block_sizes(spec: pl.BlockSpec) -> tuple[Any, ...]:
  """The sizes of a block as the user wrote them, () for a whole ref."""
  return tuple(spec.block_shape or ())


def block_size(size: Any) -> int:
  """Elements along one axis of a block; 1 for an axis that is dropped."""
  return 1 if size is None else getattr(size, "block_size", size)


def visits(
  label: str, spec: pl.BlockSpec, shape: Sequence[int], grid: Grid
) -> Visits:
  """Evaluates an index map on the first steps of the grid.

  Raises:
    ShapeError: the block's rank is not the array's.
    PipelineError: a block index outside the array.
  """
  check_rank(label, spec, shape)
  first = _evaluate(spec, (0,) * len(grid))
  if first is None:
    axes = _compat.used_arguments(_index_map(spec), len(grid))
    return Visits(label=label, axes=axes, is_known=False)
  _check_range(label, spec, shape, grid)
  axes = set()
  for axis, extent in enumerate(grid):
    for step in range(1, _extent(extent)):
      point = tuple(step if a == axis else 0 for a in range(len(grid)))
      if _evaluate(spec, point) != first:
        axes.add(axis)
  return Visits(label=label, axes=frozenset(axes), is_known=True)


def check_output(
  spec: pl.BlockSpec,
  seen: Visits,
  grid: Grid,
  *,
  is_accumulator: bool,
  parallel: Sequence[int],
) -> None:
  """Checks that an output block is visited in one unbroken run.

  Raises:
    PipelineError: the block is left and revisited, an accumulated axis is
      parallel, or a block stays without having been declared an accumulator.
  """
  kept = [a for a, n in enumerate(grid) if a not in seen.axes and n != 1]
  split = [a for a in kept if a in parallel]
  if split:
    raise errors.PipelineError(
      f"{seen.label} is accumulated along grid axis {split[0]}, which is"
      " parallel: two cores would write the same block. Leave the axis out"
      f" of parallel={tuple(parallel)}, or give each core an output of its"
      " own and add them afterwards."
    )
  for axis in kept:
    inner = [a for a in seen.axes if a > axis and grid[a] != 1]
    if inner:
      raise errors.PipelineError(
        f"{seen.label} is left and revisited: its block does not depend on"
        f" grid axis {axis}, but changes along the inner axis {inner[0]}. A"
        " block is only kept while consecutive steps use it. Make the"
        f" accumulated axis {axis} the innermost (last) one of the grid."
      )
  if kept and not is_accumulator:
    raise errors.PipelineError(
      f"{seen.label} keeps its block along grid axis {kept[0]}: each step"
      " would overwrite the one before. If it is summed over that axis,"
      " declare it: cm.accumulator(block_shape, index_map) in out_specs."
    )
  if seen.is_known:
    _check_unbroken(spec, seen, grid)


def check_body(
  body: Callable[..., None],
  types: Sequence[Any],
  labels: Sequence[str],
  *,
  grid: Grid,
  num_inputs: int,
  readable: Sequence[int],
) -> None:
  """Checks that a body only reads its inputs and only writes its outputs.

  Args:
    body: the pipeline's body.
    types: the memory type of each ref it is called with.
    labels: the name of each, for errors.
    grid: the pipeline's grid.
    num_inputs: how many of the refs are inputs.
    readable: positions of the outputs it may read, the accumulators.

  Raises:
    PipelineError: it writes an input or reads an output it has not written.
  """
  with _compat.grid_environment(grid):
    touched = _compat.ref_accesses(body, types)
  for position, kinds in touched.items():
    label = labels[position]
    if position < num_inputs:
      if "write" in kinds:
        raise errors.PipelineError(
          f"The body writes {label}. An input block is a copy in VMEM that"
          " is never written back; write to an output, or to a scratch."
        )
    elif kinds[0] == "read" and position not in readable:
      raise errors.PipelineError(
        f"The body reads {label} before it has written it. An output block"
        " starts with garbage: nothing is copied in. To add to it over"
        " several steps, declare it: cm.accumulator(block_shape, index_map)."
      )


def check_rank(label: str, spec: pl.BlockSpec, shape: Sequence[int]) -> None:
  """Checks that a block has as many axes as its array."""
  if len(block_sizes(spec)) != len(shape):
    raise errors.ShapeError(
      f"The block of {label} must have one size for each axis of the array;"
      f" got block {block_sizes(spec)} for shape {tuple(shape)}."
    )


def _check_range(label, spec, shape, grid) -> None:
  counts = num_blocks(spec, shape)
  corners = [(0, n - 1) if isinstance(n, int) else (0,) for n in grid]
  for point in itertools.product(*corners):
    index = _evaluate(spec, point)
    if index is None or any(isinstance(i, pl.Slice) for i in index):
      return
    for axis, (i, count) in enumerate(zip(index, counts, strict=True)):
      if not 0 <= i < count:
        raise errors.PipelineError(
          f"The index map of {label} returns {index} at grid point {point},"
          f" but axis {axis} of shape {tuple(shape)} has {count} blocks of"
          f" {block_sizes(spec)[axis]}. It must return block indices, not"
          " elements: the k-th block, not its first element."
        )


def _check_unbroken(spec, seen, grid) -> None:
  done, previous = set(), None
  for point in itertools.product(*(range(_extent(n)) for n in grid)):
    index = _evaluate(spec, point)
    if index is None or any(isinstance(i, pl.Slice) for i in index):
      return
    if index == previous:
      continue
    if index in done:
      raise errors.PipelineError(
        f"{seen.label} is left and revisited: block {index} comes again at"
        f" grid point {point}. What the first visit wrote is overwritten."
      )
    done.add(index)
    previous = index


def _extent(size: Any) -> int:
  return min(size, _PROBED_STEPS) if isinstance(size, int) else _PROBED_STEPS


def _evaluate(spec, point) -> tuple[Any, ...] | None:
  """The block index at a grid point, None if it is not plain integers."""
  result = _index_map(spec)(*point)
  index = tuple(result) if isinstance(result, tuple | list) else (result,)
  for item in index:
    parts = (item.start, item.size) if isinstance(item, pl.Slice) else (item,)
    if any(not isinstance(p, int | np.integer) for p in parts):
      return None
  if len(index) != len(block_sizes(spec)):
    raise errors.PipelineError(
      f"An index map must return one index for each axis of block"
      f" {block_sizes(spec)}; got {index}."
    )
  return index


def _index_map(spec: pl.BlockSpec) -> Callable[..., Any]:
  assert spec.index_map is not None  # Whole refs are not checked.
  return spec.index_map


def in_throwaway_trace(check: Callable[[], Any]) -> Any:
  """Runs `check`, leaving nothing it computes in the program being traced."""
  results: list[Any] = []
  jax.make_jaxpr(lambda: results.append(check()))()
  return results[0]
