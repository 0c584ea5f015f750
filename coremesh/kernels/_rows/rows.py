"""Runs a row operation: blocks of rows, shared over the cores.

Blocks of whole rows are read from HBM once and swept in VMEM. Of rows so wide
that not one tile of them fits there, blocks of columns are read once for each
sweep and once more to write.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import _compat, errors, launch, mesh, place, remote
from coremesh.kernels import batching, blocks
from coremesh.kernels._rows import windows
from coremesh.kernels._rows.operations import Numbers, RowOperation
from coremesh.kernels._rows.windows import Window
from coremesh.pipelines import blocks as specs
from coremesh.pipelines import emit

# Of the VMEM, one part in so many holds the blocks of a kernel.
_VMEM_SHARE = 2
# What is swept together, at most: the latency of the sum over lanes of some
# rows is hidden by that of others.
_STRIP_ELEMENTS = 128 * windows.CHUNK_COLUMNS


def run(
  operation: RowOperation,
  inputs: Sequence[jax.Array],
  *,
  out_dtypes: Sequence[Any],
  block_bytes: int | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Runs a row operation on every core of the chip traced for.

  Args:
    operation: what to do.
    inputs: the first says the shape, [..., rows, width]; the others broadcast
      to it.
    out_dtypes: of the outputs, all of that shape.
    block_bytes: of a block of the first input; default `blocks.BLOCK_BYTES`.

  Returns:
    The outputs, and the sums over all rows, each float32[width].
  """
  if not inputs[0].size:
    return _of_nothing(operation, inputs[0], out_dtypes)
  launch_on = functools.partial(
    _run,
    operation,
    out_dtypes=out_dtypes,
    block_bytes=block_bytes or blocks.BLOCK_BYTES,
  )
  if operation.num_sums:  # Which jax.vmap must keep apart.
    return launch_on(*inputs)

  def outs_of(*arrays):
    return launch_on(*arrays)[0]

  return batching.one_launch(outs_of, *inputs, repeats=False), []


def _run(operation, *inputs, out_dtypes, block_bytes):
  shape = inputs[0].shape
  views = blocks.as_matrices(inputs)
  chip = place.current_chip()
  plan = _plan(
    operation,
    views,
    out_dtypes,
    block_bytes=block_bytes,
    chip=chip,
  )
  types = [jax.ShapeDtypeStruct(views[0].shape, d) for d in out_dtypes]
  scratch: dict[str, Any] = {}
  if operation.num_sums:
    sums = operation.num_sums * blocks.SUBLANES, plan.sums_width
    shape_of_cores = chip.tensor_cores_per_device, *sums
    types.append(jax.ShapeDtypeStruct(shape_of_cores, jnp.float32))
    scratch["sums_vmem"] = pltpu.VMEM(sums, jnp.float32)
  if not plan.holds_rows:
    scratch["folded_vmem"] = pltpu.VMEM(plan.folded_shape, jnp.float32)
  results = launch.kernel(
    plan.body,
    mesh=chip.tensor_cores("core"),
    out=types,
    scratch=scratch,
    compiler_params=dict(
      vmem_limit_bytes=chip.vmem_bytes_per_tensor_core * 7 // 8
    ),
    name=operation.name,
  )(*views)
  outs = [y.reshape(shape) for y in results[: len(out_dtypes)]]
  if not operation.num_sums:
    return outs, []
  parts = results[-1].reshape(
    -1, operation.num_sums, blocks.SUBLANES, plan.sums_width
  )
  return outs, list(parts.sum(axis=(0, 2))[:, : shape[-1]])


def _of_nothing(operation, x, out_dtypes):
  def zeros(shape, dtype):
    return _compat.varying_as(jax.typeof(x), jnp.zeros(shape, dtype))

  sums = [zeros(x.shape[-1:], jnp.float32)] * operation.num_sums
  return [zeros(x.shape, dtype) for dtype in out_dtypes], sums


def _plan(operation, views, out_dtypes, *, block_bytes, chip) -> "_Plan":
  """Chooses the blocks."""
  batch, num_rows, width = views[0].shape
  dtypes = [*(v.dtype for v in views), *out_dtypes]
  itemsizes = [jnp.dtype(d).itemsize for d in dtypes]
  # Of the first input; the other operands take as much for each element.
  vmem_bytes = chip.vmem_bytes_per_tensor_core // _VMEM_SHARE
  most_bytes = vmem_bytes // 2 * itemsizes[0] // sum(itemsizes)
  block_bytes = min(block_bytes, most_bytes)
  tile = blocks.tile_rows(dtypes)
  padded_width = pl.cdiv(width, blocks.LANES) * blocks.LANES
  _check_sums(operation, padded_width, chip)
  block_width = padded_width
  if tile * padded_width * itemsizes[0] > most_bytes:
    block_width = blocks.even_size(
      width,
      unit=windows.CHUNK_COLUMNS,
      unit_bytes=tile * windows.CHUNK_COLUMNS * itemsizes[0],
      block_bytes=block_bytes,
    )
  row_bytes = block_width * itemsizes[0]
  chunk = min(block_width, windows.CHUNK_COLUMNS)
  strip = _strip_rows(
    num_rows,
    tile=tile,
    most=min(block_bytes // row_bytes, _STRIP_ELEMENTS // chunk),
  )
  rows, block_batch = strip, 1
  if block_width == padded_width:
    rows = blocks.even_size(
      num_rows,
      unit=strip,
      unit_bytes=strip * row_bytes,
      block_bytes=block_bytes,
      num_cores=chip.tensor_cores_per_device if batch == 1 else 1,
    )
    if rows >= num_rows:
      block_batch = blocks.even_size(
        batch,
        unit_bytes=max(rows, blocks.SUBLANES) * row_bytes,
        block_bytes=block_bytes,
        num_cores=chip.tensor_cores_per_device,
      )
  return _Plan(
    operation=operation,
    shapes=tuple(v.shape for v in views),
    block=(block_batch, rows, block_width),
    strip=strip,
    padded_width=padded_width,
    num_outputs=len(out_dtypes),
  )


def _strip_rows(num_rows: int, *, tile: int, most: int) -> int:
  """A power of 2 of tiles, no more than there are rows; or less than a tile."""
  strip = min(num_rows, tile)
  while tile <= strip < num_rows and 2 * strip <= most:
    strip *= 2
  return strip


def _check_sums(operation, padded_width: int, chip) -> None:
  """Raises ShapeError if the sums over rows do not fit VMEM."""
  size_bytes = 4 * operation.num_sums * blocks.SUBLANES * padded_width
  limit_bytes = chip.vmem_bytes_per_tensor_core // 4
  if size_bytes > limit_bytes:
    raise errors.ShapeError(
      f"{operation.name} sums over the rows of an array of {padded_width}"
      f" columns, and its sums take {size_bytes} bytes of VMEM, of which they"
      f" may take {limit_bytes}. Shard the last axis over devices."
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
  """A row operation with its blocks.

  Attributes:
    operation: what to do.
    shapes: of the inputs, [batch, rows, columns] each.
    block: of the first input and of the outputs.
    strip: rows of a block that are swept together.
    padded_width: the columns of the first input, in whole lanes.
    num_outputs: how many arrays are written.
  """

  operation: RowOperation
  shapes: tuple[tuple[int, ...], ...]
  block: tuple[int, int, int]
  strip: int
  padded_width: int
  num_outputs: int

  @property
  def holds_rows(self) -> bool:
    """Whether a block holds whole rows."""
    return self.block[2] == self.padded_width

  @property
  def sums_width(self) -> int:
    """The columns of all blocks, which may reach beyond the array."""
    return pl.cdiv(self.padded_width, self.block[2]) * self.block[2]

  @property
  def folded_shape(self) -> tuple[int, int, int]:
    """Of the accumulators of all sweeps."""
    count = sum(len(s.start) for s in self.operation.sweeps)
    return count, self.strip, blocks.LANES

  def body(self, *refs, sums_vmem=None, folded_vmem=None) -> None:
    """The kernel."""
    operands = refs[: len(self.shapes) + self.num_outputs]
    if sums_vmem is not None:
      sums_vmem[...] = jnp.zeros(sums_vmem.shape, sums_vmem.dtype)
    if self.holds_rows:
      self._over_rows(operands, sums_vmem)
    else:
      self._over_columns(operands, sums_vmem, folded_vmem)
    if sums_vmem is not None:
      remote.copy(sums_vmem, refs[-1].at[mesh.worker_index("core")])

  def _over_rows(self, operands, sums_vmem) -> None:
    """Sweeps blocks of whole rows."""

    def index_map(b, r):
      return b, r, 0

    emit.pipeline(
      functools.partial(self._rows_step, sums_vmem=sums_vmem),
      grid=self._row_grid,
      in_specs=[self._in_spec(shape, index_map) for shape in self.shapes],
      out_specs=[specs.block(self.block, index_map)] * self.num_outputs,
      over="core",
    )(*operands)

  def _over_columns(self, operands, sums_vmem, folded_vmem) -> None:
    """Reads all columns of some rows for each sweep, and to write."""
    num_sweeps = len(self.operation.sweeps)
    num_columns = pl.cdiv(self.shapes[0][2], self.block[2])

    def out_map(b, r, sweep, c):
      # Until the sweeps are done, the first block waits to be written.
      return b, r, c * (sweep // num_sweeps)

    emit.pipeline(
      functools.partial(
        self._columns_step, sums_vmem=sums_vmem, folded_vmem=folded_vmem
      ),
      grid=[*self._row_grid, num_sweeps + 1, num_columns],
      in_specs=[
        self._in_spec(shape, lambda b, r, _, c: (b, r, c))
        for shape in self.shapes
      ],
      out_specs=[specs.accumulator(self.block, out_map)] * self.num_outputs,
      over="core",
    )(*operands)

  @property
  def _row_grid(self) -> list[int]:
    sizes = zip(self.shapes[0][:2], self.block[:2], strict=True)
    return [pl.cdiv(n, size) for n, size in sizes]

  def _in_spec(self, shape, index_map) -> pl.BlockSpec:
    """The block of an input: 1 along an axis that it is broadcast along."""
    whole = self.shapes[0]
    block = [
      size if own == n else 1
      for size, own, n in zip(self.block, shape, whole, strict=True)
    ]

    def own_map(*point):
      index = index_map(*point)
      return tuple(
        i if own == n else 0
        for i, own, n in zip(index, shape, whole, strict=True)
      )

    return specs.block(block, own_map)

  def _rows_step(self, *refs, sums_vmem) -> None:
    def sweep_strip(i, _):
      here = self._window(refs, strip=i, sums_vmem=sums_vmem)
      known: Numbers = ()
      for sweep in self.operation.sweeps:
        known += sweep.finish(known, here.fold(sweep, known, here.start(sweep)))
      here.write(self.operation, known)

    blocks.loop(self._num_strips(), sweep_strip, None)

  def _columns_step(self, *refs, sums_vmem, folded_vmem) -> None:
    phase, column = pl.program_id(2), pl.program_id(3)
    sweeps = self.operation.sweeps
    here = self._window(
      refs, strip=0, sums_vmem=sums_vmem, column=column * self.block[2]
    )
    counts = [len(sweep.start) for sweep in sweeps]
    first = [sum(counts[:i]) for i in range(len(counts))]

    def folded(i) -> Numbers:
      return tuple(folded_vmem[first[i] + k] for k in range(counts[i]))

    def keep(i, values) -> None:
      for k, value in enumerate(values, first[i]):
        folded_vmem[k] = value

    def known_before(i) -> Numbers:
      known: Numbers = ()
      for k, sweep in enumerate(sweeps[:i]):
        known += sweep.finish(known, folded(k))
      return known

    def fold(i, sweep) -> None:
      pl.when(column == 0)(lambda: keep(i, here.start(sweep)))
      keep(i, here.fold(sweep, known_before(i), folded(i)))

    for i, sweep in enumerate(sweeps):
      pl.when(phase == i)(functools.partial(fold, i, sweep))
    pl.when(phase == len(sweeps))(
      lambda: here.write(self.operation, known_before(len(sweeps)))
    )

  def _num_strips(self) -> Any:
    """Of this block; those beyond the array are left out."""
    batch, num_rows, _ = self.shapes[0]
    if self.block[0] > 1:
      return self._strips_of_batch * blocks.within(batch, self.block[0], axis=0)
    return blocks.num_parts(
      blocks.within(num_rows, self.block[1], axis=1), self.strip
    )

  @property
  def _strips_of_batch(self) -> int:
    return pl.cdiv(self.shapes[0][1], self.strip)  # One block holds them all.

  def _window(self, refs, *, strip, sums_vmem, column: Any = 0) -> Window:
    _, num_rows, width = self.shapes[0]
    b = 0
    if self.block[0] > 1:
      b = jax.lax.div(strip, np.int32(self._strips_of_batch))
      strip = jax.lax.rem(strip, np.int32(self._strips_of_batch))
    row = strip * self.strip
    in_array = None
    if num_rows % self.strip:
      first = pl.program_id(1) * self.block[1] + row
      in_array = blocks.iota((self.strip, 1), 0) < num_rows - first
    num_columns = width
    if not self.holds_rows:
      num_columns = blocks.within(width, self.block[2], axis=3)
    return Window(
      inputs=refs[: len(self.shapes)],
      outputs=refs[len(self.shapes) :],
      sums_vmem=sums_vmem,
      batch=b,
      row=row,
      num_rows=self.strip,
      first_column=column,
      num_columns=num_columns,
      block_width=self.block[2],
      in_array=in_array,
    )
