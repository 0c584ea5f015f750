"""Pipelines inside a kernel: blocks in, compute, blocks out, overlapped.

A layer over `pltpu.emit_pipeline` that splits the grid over cores, prefetches
scalars, initialises accumulators, and turns the ways to misuse a pipeline into
errors with the reason.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from coremesh import blocks, errors, mesh

type OutSpec = pl.BlockSpec | blocks.Accumulator


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
      `pl.program_id(axis)` is the step.
    grid: steps along each axis, the last fastest: ints, or int32 scalars known
      at run time. A grid with a 0 runs no step; accumulators still get `init`.
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
    scatter: whether output index maps get the prefetched refs too. Then no two
      steps may write one block unless one after the other, which is not
      checked; indices are clamped likewise.
    tiling: as for `pltpu.emit_pipeline`.
    trace_scopes: as for `pltpu.emit_pipeline`.
    no_pipelining: copy each block, compute, copy back, for debugging.

  Returns:
    A function of the refs: tables, inputs, outputs, all in HBM.

  Raises:
    PipelineError: the body writes an input or reads an output; an output is
      accumulated but not declared, over a parallel axis, or over one that is
      not innermost; an index map leaves the array; there is no axis to split.
    ShapeError, DTypeError, AxisError: a block of another rank or a size the
      tiles do not allow, a table that is not int32 or does not fit SMEM, a
      name that is no core axis.
  """
  grid = _check_grid(grid)
  in_specs, out_specs = tuple(in_specs), tuple(out_specs)
  _check_specs(in_specs, out_specs)
  _check_axes("parallel", parallel, len(grid))
  if over is not None:
    over = _check_core_axes(over)

  def run(*refs: Any) -> None:
    expected = num_prefetch + len(in_specs) + len(out_specs)
    if len(refs) != expected:
      raise errors.PipelineError(
        f"The pipeline must be called with {expected} refs: {num_prefetch}"
        f" tables, {len(in_specs)} inputs, {len(out_specs)} outputs; got"
        f" {len(refs)}."
      )
    tables, arrays = refs[:num_prefetch], refs[num_prefetch:]
    inputs, outputs = arrays[: len(in_specs)], arrays[len(in_specs) :]
    _check_chip_is_known()
    for position, table in enumerate(tables):
      _check_table(position, table)
    if any(isinstance(n, int) and n == 0 for n in grid):
      _write_empty(grid, out_specs, outputs, over)
      return

    def with_tables(smem_tables):
      plan = _Plan(
        body=body,
        grid=grid,
        inputs=inputs,
        outputs=outputs,
        in_specs=_bind(in_specs, inputs, smem_tables),
        out_specs=_bind(out_specs, outputs, smem_tables if scatter else ()),
      )
      plan.emit(
        over=over,
        parallel=parallel,
        checks_outputs=not scatter,
        tiling=tiling,
        trace_scopes=trace_scopes,
        no_pipelining=no_pipelining,
      )

    _in_smem(tables, with_tables)

  return run


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
  """One pipeline with its refs, ready to be checked and emitted.

  Index maps take the grid indices only; tables are already bound to them.
  """

  body: Callable[..., None]
  grid: blocks.Grid
  inputs: Sequence[Any]
  outputs: Sequence[Any]
  in_specs: Sequence[pl.BlockSpec]
  out_specs: Sequence[OutSpec]

  @property
  def accumulators(self) -> dict[int, blocks.Accumulator]:
    """The declared accumulators by output position."""
    return {
      i: spec
      for i, spec in enumerate(self.out_specs)
      if isinstance(spec, blocks.Accumulator)
    }

  @property
  def plain_out_specs(self) -> list[pl.BlockSpec]:
    return [
      s.spec if isinstance(s, blocks.Accumulator) else s for s in self.out_specs
    ]

  def emit(self, *, over, parallel, checks_outputs, **options: Any) -> None:
    """Checks the pipeline, then emits it."""
    seen = blocks.in_throwaway_trace(self._visits)
    kept = {i: self._kept_axes(v) for i, v in enumerate(seen)}
    if parallel is None:
      accumulated = {a for axes in kept.values() for a in axes}
      parallel = [a for a in range(len(self.grid)) if a not in accumulated]
    if checks_outputs:
      blocks.in_throwaway_trace(
        functools.partial(self._check_outputs, seen, parallel)
      )
    self._check_body()
    if over is not None and mesh.num_workers(over) > 1 and not parallel:
      raise errors.PipelineError(
        f"over={over} shares out a parallel grid axis, but every axis of grid"
        f" {self.grid} is accumulated along. Add a grid axis of independent"
        " blocks, or let each core sum a part of its own."
      )
    semantics = tuple(
      pltpu.PARALLEL if a in parallel else pltpu.ARBITRARY
      for a in range(len(self.grid))
    )
    launch = functools.partial(
      self._launch, kept, over=over, semantics=semantics, options=options
    )
    types = {
      i: pltpu.VMEM(_block_type(acc.spec, self.outputs[i]).shape, acc.dtype)
      for i, acc in self.accumulators.items()
      if acc.dtype is not None and acc.dtype != self.outputs[i].dtype
    }
    if not types:
      launch({})
    else:
      pl.run_scoped(
        lambda *sums: launch(dict(zip(types, sums, strict=True))),
        *types.values(),
      )

  def _launch(self, kept, sums, *, over, semantics, options) -> None:
    body = self.body
    if self.accumulators:
      body = functools.partial(self._accumulating_body, kept, sums)
    run = pltpu.emit_pipeline(
      body,
      grid=self.grid,
      in_specs=list(self.in_specs),
      out_specs=self.plain_out_specs,
      core_axis_name=over,
      dimension_semantics=semantics,
      **options,
    )
    try:
      run(*self.inputs, *self.outputs)
    except ValueError as error:
      if "Block size must divide tiling" not in str(error):
        raise
      raise errors.ShapeError(
        "A block that does not divide its array must be whole tiles along"
        " the last two axes (8 x 128 for 32-bit elements, 16 x 128 for 16"
        f" bits): {error}. Round the block up to whole tiles."
      ) from error

  def _accumulating_body(self, kept, sums, *refs) -> None:
    """The body, with sums set at the first visit and stored at the last."""
    inputs = refs[: len(self.inputs)]
    outputs = dict(enumerate(refs[len(self.inputs) :]))
    for i, acc in self.accumulators.items():
      total = sums.get(i, outputs[i])
      start = functools.partial(_fill, total, acc.init)
      pl.when(_at_step(kept[i], lambda a: 0))(start)
    self.body(*inputs, *(outputs | sums).values())
    for i, total in sums.items():
      store = functools.partial(_store, total, outputs[i])
      pl.when(_at_step(kept[i], lambda a: self.grid[a] - 1))(store)

  def _visits(self) -> list[blocks.Visits]:
    for i, (spec, ref) in enumerate(
      zip(self.in_specs, self.inputs, strict=True)
    ):
      if _is_blocked(spec):
        blocks.visits(f"input {i}", spec, ref.shape, self.grid)
    return [
      blocks.visits(f"output {i}", spec, ref.shape, self.grid)
      for i, (spec, ref) in enumerate(
        zip(self.plain_out_specs, self.outputs, strict=True)
      )
    ]

  def _kept_axes(self, visits: blocks.Visits) -> tuple[int, ...]:
    return tuple(
      a
      for a, n in enumerate(self.grid)
      if a not in visits.axes and not (isinstance(n, int) and n == 1)
    )

  def _check_outputs(self, seen, parallel) -> None:
    for i, (spec, visits) in enumerate(
      zip(self.plain_out_specs, seen, strict=True)
    ):
      blocks.check_output(
        spec,
        visits,
        self.grid,
        is_accumulator=i in self.accumulators,
        parallel=parallel,
      )

  def _check_body(self) -> None:
    specs = (*self.in_specs, *self.plain_out_specs)
    refs = (*self.inputs, *self.outputs)
    if not all(_is_blocked(spec) for spec in specs):
      return  # A whole ref in HBM has no block type to try the body with.
    types = [_block_type(s, r) for s, r in zip(specs, refs, strict=True)]
    for i, acc in self.accumulators.items():
      if acc.dtype is not None:
        at = len(self.inputs) + i
        types[at] = pltpu.VMEM(types[at].shape, acc.dtype)
    blocks.check_body(
      self.body,
      types,
      [f"input {i}" for i in range(len(self.inputs))]
      + [f"output {i}" for i in range(len(self.outputs))],
      grid=self.grid,
      num_inputs=len(self.inputs),
      readable=[len(self.inputs) + i for i in self.accumulators],
    )


def _write_empty(grid, out_specs, outputs, over) -> None:
  """What a grid without steps leaves: `init` in each accumulator.

  Raises:
    PipelineError: an output that some step should have written.
  """
  once = tuple(max(n, 1) if isinstance(n, int) else n for n in grid)
  for i, (spec, ref) in enumerate(zip(out_specs, outputs, strict=True)):
    if math.prod(ref.shape) == 0:
      continue
    if not isinstance(spec, blocks.Accumulator):
      raise errors.PipelineError(
        f"The grid {grid} has no steps, so nothing writes output {i} of"
        f" shape {tuple(ref.shape)}. Leave it out, or declare it a"
        " cm.accumulator, which then holds init."
      )
    fill = functools.partial(_fill, value=spec.init)
    pipeline(
      fill,
      grid=once,
      out_specs=[blocks.Accumulator(spec=spec.spec, init=spec.init)],
      over=over,
    )(ref)


def _bind(specs, refs, smem_tables) -> list[Any]:
  """The specs with tables passed to their index maps and results clamped."""
  if not smem_tables:
    return list(specs)
  bound = []
  for spec, ref in zip(specs, refs, strict=True):
    inner = spec.spec if isinstance(spec, blocks.Accumulator) else spec
    if _is_blocked(inner):
      index_map = functools.partial(
        _clamped_index_map, inner, tuple(ref.shape), tuple(smem_tables)
      )
      inner = dataclasses.replace(inner, index_map=index_map)
    if isinstance(spec, blocks.Accumulator):
      inner = dataclasses.replace(spec, spec=inner)
    bound.append(inner)
  return bound


def _clamped_index_map(spec, shape, smem_tables, *indices):
  result = spec.index_map(*indices, *smem_tables)
  index = tuple(result) if isinstance(result, tuple | list) else (result,)
  counts = blocks.num_blocks(spec, shape)
  return tuple(
    i if isinstance(i, pl.Slice) else jnp.clip(jnp.int32(i), 0, count - 1)
    for i, count in zip(index, counts, strict=True)
  )


def _in_smem(
  tables: Sequence[Any], use: Callable[[Sequence[Any]], None]
) -> None:
  """Calls `use` with each table copied to SMEM."""
  if not tables:
    use(())
    return

  def copied(*smem_tables):
    for table, smem_table in zip(tables, smem_tables, strict=True):
      pltpu.sync_copy(table, smem_table)
    use(smem_tables)

  pl.run_scoped(copied, *(pltpu.SMEM(t.shape, t.dtype) for t in tables))


def _fill(ref, value) -> None:
  ref[...] = jnp.full(ref.shape, value, ref.dtype)


def _store(total, out) -> None:
  out[...] = total[...].astype(out.dtype)


def _at_step(axes: Sequence[int], step_of: Callable[[int], Any]) -> Any:
  """Whether the grid is at the given step along each of `axes`."""
  here = [pl.program_id(a) == step_of(a) for a in axes]
  return functools.reduce(jnp.logical_and, here, jnp.bool_(True))


def _is_blocked(spec: pl.BlockSpec) -> bool:
  return (
    spec.block_shape is not None
    and spec.index_map is not None
    and spec.memory_space not in (pl.ANY, pltpu.HBM)
  )


def _block_type(spec: pl.BlockSpec, ref: Any) -> Any:
  """The memory type of the block that the body sees."""
  sizes: list[Any] = [
    getattr(size, "block_size", size)
    for size in spec.block_shape or ref.shape
    if size is not None and not isinstance(size, pl.Squeezed)
  ]
  return (spec.memory_space or pltpu.VMEM)(tuple(sizes), ref.dtype)


def _check_grid(grid: Sequence[Any]) -> blocks.Grid:
  for axis, size in enumerate(grid):
    is_static = isinstance(size, int) and not isinstance(size, bool)
    if is_static and size >= 0:
      continue
    if isinstance(size, jax.Array) and size.shape == ():
      continue
    raise errors.PipelineError(
      f"grid must hold ints of at least 0 or int32 scalars; axis {axis} is"
      f" {size!r}."
    )
  return tuple(grid)


def _check_specs(in_specs, out_specs) -> None:
  for name, specs, allowed in (
    ("in_specs", in_specs, pl.BlockSpec),
    ("out_specs", out_specs, pl.BlockSpec | blocks.Accumulator),
  ):
    for i, spec in enumerate(specs):
      if not isinstance(spec, allowed):
        raise errors.PipelineError(
          f"{name}[{i}] must be a cm.block"
          + (" or a cm.accumulator" if name == "out_specs" else "")
          + f"; got {type(spec).__name__}."
        )


def _check_axes(argument: str, axes: Sequence[int] | None, rank: int) -> None:
  for axis in axes or ():
    if not 0 <= axis < rank:
      raise errors.PipelineError(
        f"{argument} must name grid axes in [0, {rank}); got {axis}."
      )


def _check_core_axes(over: mesh.Axes) -> str | tuple[str, ...]:
  names = mesh.as_axes(over, argument="over")
  wrong = [n for n in names if n not in mesh.core_axes()]
  if wrong:
    raise errors.AxisError(
      f"over must name core axes, {list(mesh.core_axes())}; got {wrong}. Work"
      " is shared over devices by the in_specs of jax.shard_map."
    )
  return names[0] if len(names) == 1 else names


def _check_table(position: int, table: Any) -> None:
  if table.dtype != jnp.int32:
    raise errors.DTypeError(
      f"Prefetched table {position} must be int32, which is what SMEM and"
      f" index maps hold; got {table.dtype}."
    )
  size_bytes = 4 * math.prod(table.shape)
  limit_bytes = pltpu.get_tpu_info().smem_capacity_bytes
  if size_bytes > limit_bytes:
    raise errors.ShapeError(
      f"Prefetched table {position} of shape {tuple(table.shape)} takes"
      f" {size_bytes} bytes of SMEM, and a core has {limit_bytes}. Prefetch"
      " the part of it that this core uses, or run one pipeline for each"
      " chunk of it."
    )


def _check_chip_is_known() -> None:
  try:
    pltpu.get_tpu_info()
  except (ValueError, RuntimeError) as error:
    raise errors.PipelineError(
      "A pipeline needs to know the chip's tiles, and the device mesh in"
      " scope is one of plain CPU devices. Build it with"
      " cm.chip(...).device_mesh(...)."
    ) from error
