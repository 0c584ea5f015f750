"""The pipeline itself: checked, split over cores, emitted.

A layer over `pltpu.emit_pipeline` that splits the grid over cores, prefetches
tables, starts accumulators, and turns the ways to misuse a pipeline into
errors with the reason.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import errors, mesh
from coremesh.pipelines import accumulate, blocks, bodies, prefetch, visits
from coremesh.pipelines.blocks import Accumulator, Grid, Operand

type OutSpec = pl.BlockSpec | Accumulator


def pipeline(
  body: Callable[..., None],
  *,
  grid: Sequence[Any],
  in_specs: Sequence[pl.BlockSpec] = (),
  out_specs: Sequence[OutSpec] = (),
  over: mesh.Axes | None = None,
  parallel: Sequence[int] | None = None,
  num_prefetch: int = 0,
  scatter: bool = False,
  tiling: pltpu.Tiling | None = None,
  trace_scopes: bool = True,
  no_pipelining: bool = False,
) -> Callable[..., None]:
  """Makes a pipeline over blocks, to be called inside a kernel body.

  The array sizes need not divide by the block sizes: the last block is
  partial. What the body sees beyond the array is garbage and is not written
  back, so an elementwise body needs no mask, and a reduction does.

  Args:
    body: called once a grid step with the input and output blocks, in VMEM.
      `pl.program_id(axis)` is the step in the whole grid, and
      `pl.num_programs(axis)` the number of steps of this core.
    grid: steps along each axis, the last fastest: ints, or int32 scalars known
      at run time. A grid with a 0 runs no step; an accumulator whose
      accumulated axes have none holds `init`.
    in_specs: a `cm.block` (or any `pl.BlockSpec`) for each input.
    out_specs: a `cm.block` or `cm.accumulator` for each output.
    over: core axes that share the grid; each core runs part of one parallel
      grid axis. None: every core runs the whole grid, to be shared by index
      maps that use the core's index.
    parallel: grid axes that may be split. Default: all along which no output
      is accumulated.
    num_prefetch: how many leading refs are int32 tables to copy to SMEM before
      the first step. Input index maps get them after the grid indices. A
      block index outside the array that they lead to is clamped to the
      nearest block: -1 reads the first block, never the last.
    scatter: whether output index maps get the prefetched refs too, clamped
      likewise. What they hold is not checked: the steps of one block must
      follow each other, and be on one core. An accumulator whose block a table
      chooses is split over cores only along axes named in `parallel`.
    tiling: as for `pltpu.emit_pipeline`.
    trace_scopes: as for `pltpu.emit_pipeline`.
    no_pipelining: copy each block, compute, copy back, for debugging. Not with
      `over`.

  Returns:
    A function of the refs: tables, inputs, outputs, all in HBM.

  Raises:
    PipelineError: the body writes an input or reads an output; an output is
      accumulated but not declared, over a parallel axis, or over one that is
      not innermost; an index map leaves the array; there is no axis to split.
    ShapeError, DTypeError, AxisError: a block of another rank or a size the
      tiles do not allow, a table that is not int32 or does not fit SMEM, a
      name that is no core axis.
    UnsupportedError: `no_pipelining` and `over`.
  """
  in_specs = _check_specs("in_specs", in_specs, pl.BlockSpec)
  out_specs = _check_specs("out_specs", out_specs, pl.BlockSpec | Accumulator)
  grid = _check_grid(grid)
  plan = _Plan(
    body=body,
    grid=grid,
    over=None if over is None else _check_core_axes(over),
    parallel=_check_parallel(parallel, len(grid)),
    options=dict(
      tiling=tiling, trace_scopes=trace_scopes, no_pipelining=no_pipelining
    ),
  )
  if no_pipelining and plan.is_shared:
    raise errors.UnsupportedError(
      "no_pipelining=True runs the same steps on every core, whatever over"
      f" says (a limit of JAX); got over={over!r}. Leave one of them out."
    )

  def run(*refs: Any) -> None:
    counts = num_prefetch, len(in_specs), len(out_specs)
    if len(refs) != sum(counts):
      raise errors.PipelineError(
        f"The pipeline must be called with {sum(counts)} refs: {counts[0]}"
        f" tables, {counts[1]} inputs, {counts[2]} outputs; got {len(refs)}."
      )
    _check_chip_is_known()
    tables, arrays = refs[:num_prefetch], refs[num_prefetch:]
    operands = []
    for i, (ref, spec) in enumerate(
      zip(arrays, in_specs + out_specs, strict=True)
    ):
      is_output = i >= len(in_specs)
      label = f"output {i - len(in_specs)}" if is_output else f"input {i}"
      operand = blocks.operand(label, ref, spec, is_output=is_output)
      operand.check()
      accumulate.check_init(operand)
      operands.append(operand)
    prefetch.check_tables(tables)

    def with_tables(smem_tables):
      plan.emit(
        [
          prefetch.bound(o, smem_tables) if scatter or not o.is_output else o
          for o in operands
        ]
      )

    prefetch.in_smem(tables, with_tables)

  return run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
  """A pipeline, but for the refs it is called with."""

  body: accumulate.Body
  grid: Grid
  over: str | tuple[str, ...] | None
  parallel: tuple[int, ...] | None
  options: dict[str, Any]

  @property
  def is_shared(self) -> bool:
    """Whether several cores share the grid."""
    return self.over is not None and mesh.num_workers(self.over) > 1

  def emit(self, operands: Sequence[Operand]) -> None:
    """Checks the pipeline, then emits it."""
    seen = [
      visits.walk(o, self.grid)
      for o in operands
      # Of an input that reads tables nothing is known, and nothing needed.
      if o.has_blocks and (o.is_output or not o.reads_tables)
    ]
    written = [v for v in seen if v.operand.is_output and v.operand.is_copied]
    parallel = self._parallel_axes(written)
    for output in written:
      visits.check_output(output, parallel)
    if self.is_shared and not parallel:
      raise errors.PipelineError(
        f"over={self.over!r} shares out a parallel grid axis, and grid"
        f" {self.grid} has none: an output is accumulated along each, or is"
        " accumulated by a table or by the core's index. Add a grid axis of"
        " independent blocks, name one in parallel=, or let each core sum a"
        " part of its own."
      )
    for output in written:
      self._start_empty_sums(output)
    if _has_no_steps(self.grid):
      self._check_unwritten(operands, written)
      return
    accumulators = {
      operands.index(v.operand): v for v in written if v.operand.accumulator
    }
    accumulate.with_sums(
      bodies.checked(self.body, operands),
      accumulators,
      self.grid,
      lambda body: self._emit(body, self.grid, operands, parallel),
    )

  def _parallel_axes(self, written: Iterable[visits.Visits]) -> tuple[int, ...]:
    if self.parallel is not None:
      return self.parallel
    shared: set[int] = set()
    for output in written:
      if output.shared is None:
        return ()
      shared |= output.shared
    return tuple(a for a in range(len(self.grid)) if a not in shared)

  def _start_empty_sums(self, output: visits.Visits) -> None:
    """Writes `init` to an accumulator whose accumulated axes have no steps."""
    grid, operand = _without_sums(self.grid, output), output.operand
    if _has_no_steps(grid) or not operand.accumulator or _is_empty(operand):
      return
    body = functools.partial(accumulate.fill, operand)
    start = functools.partial(
      self._emit, body, grid, [operand], range(len(grid))
    )
    summed = math.prod(self.grid[a] for a in output.kept)
    pl.when(summed == 0)(start)

  def _check_unwritten(self, operands, written) -> None:
    """Checks that a grid without steps leaves no output unwritten.

    Raises:
      PipelineError: it does.
    """
    started = [
      v.operand
      for v in written
      if v.operand.accumulator
      and not _has_no_steps(_without_sums(self.grid, v))
    ]
    for operand in operands:
      if (
        operand.is_output and operand not in started and not _is_empty(operand)
      ):
        raise errors.PipelineError(
          f"The grid {self.grid} has no steps, so nothing writes"
          f" {operand.label} of shape {tuple(operand.ref.shape)}. Leave it out,"
          " or declare it a cm.accumulator over the axes without steps: it then"
          " holds init."
        )

  def _emit(self, body, grid, operands, parallel) -> None:
    dynamic = [a for a in parallel if not isinstance(grid[a], int)]
    semantics = [
      # JAX splits no grid with several parallel axes of run-time size.
      pltpu.PARALLEL
      if a in parallel and a not in dynamic[1:]
      else pltpu.ARBITRARY
      for a in range(len(grid))
    ]
    run = pltpu.emit_pipeline(
      body,
      grid=grid,
      in_specs=[o.spec for o in operands if not o.is_output],
      out_specs=[o.spec for o in operands if o.is_output],
      core_axis_name=self.over,
      dimension_semantics=tuple(semantics),
      **self.options,
    )
    try:
      run(*(o.ref for o in operands))
    except ValueError as error:
      if "Block size must divide tiling" not in str(error):
        raise
      raise errors.ShapeError(
        "A block that does not divide its array, or is a pl.BoundedSlice, must"
        " be a multiple of 8 along the last axis but one and of 128 along the"
        f" last: {error}. Round the block up."
      ) from error


def _without_sums(grid: Grid, output: visits.Visits) -> Grid:
  """The grid with one step along the axes an output is accumulated over."""
  return tuple(1 if a in output.kept else n for a, n in enumerate(grid))


def _has_no_steps(grid: Grid) -> bool:
  return any(isinstance(n, int) and n == 0 for n in grid)


def _is_empty(operand: Operand) -> bool:
  return 0 in operand.ref.shape


def _check_specs(argument: str, specs: Any, allowed: Any) -> tuple[Any, ...]:
  what = "cm.block" if allowed is pl.BlockSpec else "cm.block or cm.accumulator"
  if not isinstance(specs, Sequence):
    raise errors.PipelineError(
      f"{argument} must be a sequence of {what}, one for each ref; got one"
      f" {type(specs).__name__}."
    )
  for i, spec in enumerate(specs):
    if not isinstance(spec, allowed):
      raise errors.PipelineError(
        f"{argument}[{i}] must be a {what}; got {type(spec).__name__}."
      )
  return tuple(specs)


def _check_grid(grid: Sequence[Any]) -> Grid:
  checked = []
  for axis, size in enumerate(grid):
    is_int = isinstance(size, int | np.integer) and not isinstance(size, bool)
    if is_int and size >= 0:
      checked.append(int(size))
    elif (
      isinstance(size, jax.Array) and jax.typeof(size).str_short() == "int32[]"
    ):
      checked.append(jnp.maximum(size, 0))
    else:
      raise errors.PipelineError(
        f"grid must hold ints of at least 0 or int32 scalars; axis {axis} is"
        f" {size!r}."
      )
  return tuple(checked)


def _check_parallel(axes: Any, rank: int) -> tuple[int, ...] | None:
  if axes is None:
    return None
  if not isinstance(axes, Sequence) or not all(a in range(rank) for a in axes):
    raise errors.PipelineError(
      f"parallel must be a sequence of grid axes in [0, {rank}); got {axes!r}."
    )
  return tuple(axes)


def _check_core_axes(over: mesh.Axes) -> str | tuple[str, ...]:
  names = mesh.as_axes(over, argument="over")
  wrong = [n for n in names if n not in mesh.core_axes()]
  if wrong:
    raise errors.AxisError(
      f"over must name core axes, {list(mesh.core_axes())}; got {wrong}. Work"
      " is shared over devices by the in_specs of jax.shard_map."
    )
  return names[0] if len(names) == 1 else names


def _check_chip_is_known() -> None:
  try:
    pltpu.get_tpu_info()
  except (ValueError, RuntimeError) as error:
    raise errors.PipelineError(
      "A pipeline needs to know the chip's tiles, and the device mesh in"
      " scope is one of plain CPU devices. Build it with"
      " cm.chip(...).device_mesh(...)."
    ) from error
