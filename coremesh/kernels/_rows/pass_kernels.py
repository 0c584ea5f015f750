"""The kernels that reduce along an axis, one for each place it can have.

A TPU holds the last two axes of an array in sublanes and lanes. So there are
three: along the last axis, which ends in a transpose; along the last but one;
and along those before, which never mix the elements of a register.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from coremesh import launch
from coremesh.kernels import blocks
from coremesh.kernels._rows import folds as folds
from coremesh.pipelines import blocks as specs
from coremesh.pipelines import emit

# What one turn of a loop reads: at most 64 registers of 32 bits.
_ROWS = 64
_COLUMNS = 512


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Blocks:
  """Blocks of a pass; the last grid axis goes along what is reduced.

  Attributes:
    grid: the steps along each axis.
    in_spec: of the array.
    out_spec: of the result, which stays while the last grid axis goes by.
    out_shape: of the result.
    sums_shape: of one accumulator in VMEM.
  """

  grid: tuple[int, ...]
  in_spec: pl.BlockSpec
  out_spec: specs.Accumulator
  out_shape: tuple[int, ...]
  sums_shape: tuple[int, ...]


def _launch(fold, x, cut: _Blocks, add, write, *, chip) -> jax.Array:
  """Runs a pass.

  Args:
    fold: how to reduce.
    x: what.
    cut: its blocks.
    add: from a block and the accumulators' refs, adds the block to them.
    write: from the accumulators' refs and the block of the result, writes it.
    chip: what it runs on.
  """
  dtype = folds.dtype_of(x)
  num_steps = cut.grid[-1]

  def body(x_hbm, y_hbm, *sums_vmem):
    def step(x_vmem, y_vmem):
      index = pl.program_id(len(cut.grid) - 1)

      @pl.when(index == 0)
      def _():
        for i, ref in enumerate(sums_vmem):
          start = 0 if i else fold.identity(dtype)
          ref[...] = jnp.full(ref.shape, start, dtype)

      add(x_vmem, sums_vmem)
      pl.when(index == num_steps - 1)(lambda: write(sums_vmem, y_vmem))

    emit.pipeline(
      step,
      grid=cut.grid,
      in_specs=[cut.in_spec],
      out_specs=[cut.out_spec],
      over="core",
    )(x_hbm, y_hbm)

  return launch.kernel(
    body,
    mesh=chip.tensor_cores("core"),
    out=jax.ShapeDtypeStruct(cut.out_shape, dtype),
    scratch=[pltpu.VMEM(cut.sums_shape, dtype)] * fold.num_parts(dtype),
    compiler_params=dict(
      vmem_limit_bytes=chip.vmem_bytes_per_tensor_core * 7 // 8
    ),
    name=f"reduce_{fold.name}",
  )(x)


def last_axis(fold, x, *, block_bytes, chip) -> jax.Array:
  """[..., rows, columns] to [batch, rows].

  Lane by lane first; 128 rows of lanes are then transposed and reduced as rows.
  """
  (view,) = blocks.as_matrices([x])
  batch, num_rows, width = view.shape
  dtype = folds.dtype_of(x)
  strip = min(_whole_tiles(num_rows, x.dtype), blocks.LANES)
  unit = _column_unit(width)
  columns = blocks.whole_or_even(
    width,
    unit=unit,
    unit_bytes=strip * unit * x.dtype.itemsize,
    block_bytes=block_bytes,
  )
  rows = blocks.even_size(
    num_rows,
    unit=strip,
    unit_bytes=strip * columns * x.dtype.itemsize,
    block_bytes=block_bytes,
    num_cores=chip.tensor_cores_per_device if batch == 1 else 1,
  )
  padded_strip = pl.cdiv(strip, blocks.SUBLANES) * blocks.SUBLANES
  num_strips = rows // strip
  part_columns = math.gcd(columns, _COLUMNS)
  part_rows = blocks.part_size(strip, _ROWS // 2 * (_COLUMNS // part_columns))
  # Strips that are transposed together, to hide the latency of each.
  together = math.gcd(num_strips, 4)

  def add(x_vmem, sums_vmem) -> None:
    inside = blocks.within(num_rows, rows, axis=1)
    valid = blocks.within(width, columns, axis=2)

    def add_rows(i, _):
      where = pl.ds(i * part_rows, part_rows)

      def add_columns(j, so_far):
        value = x_vmem[0, where, pl.ds(j * part_columns, part_columns)]
        value = value.astype(dtype)
        if width % part_columns:
          value = _kept(fold, value, valid - j * part_columns, axis=1)
        return fold.add(so_far, fold.down(value, size=blocks.LANES, axis=1))

      so_far = tuple(ref[where, :] for ref in sums_vmem)
      count = blocks.num_parts(valid, part_columns)
      for ref, value in zip(
        sums_vmem, blocks.loop(count, add_columns, so_far), strict=True
      ):
        ref[where, :] = value

    blocks.loop(blocks.num_parts(inside, part_rows), add_rows, None)

  def write(sums_vmem, y_vmem) -> None:
    def write_strips(i, _):
      for k in range(together):
        where = pl.ds((i * together + k) * strip, padded_strip)
        lanes = fold.result(tuple(ref[where, :] for ref in sums_vmem))
        y_vmem[0, :, where] = fold.down(lanes.T, size=1, axis=0)

    blocks.loop(num_strips // together, write_strips, None)

  cut = _Blocks(
    grid=(batch, pl.cdiv(num_rows, rows), pl.cdiv(width, columns)),
    in_spec=specs.block((1, rows, columns), lambda b, r, c: (b, r, c)),
    out_spec=specs.accumulator(
      (1, 1, pl.cdiv(rows, blocks.LANES) * blocks.LANES),
      lambda b, r, c: (b, 0, r),
    ),
    out_shape=(batch, 1, num_rows),
    sums_shape=((num_strips - 1) * strip + padded_strip, blocks.LANES),
  )
  return _launch(fold, view, cut, add, write, chip=chip)


def rows(fold, x, *, block_bytes, chip) -> jax.Array:
  """[outer, rows, columns] to [outer, 1, columns].

  Rows that are 8 apart first, then the 8 sublanes.
  """
  outer, num_rows, width = x.shape
  dtype = folds.dtype_of(x)
  cores = chip.tensor_cores_per_device
  group = min(_whole_tiles(num_rows, x.dtype), _ROWS)
  unit = _column_unit(width)
  columns = blocks.even_size(
    width,
    unit=unit,
    unit_bytes=group * unit * x.dtype.itemsize,
    block_bytes=block_bytes,
    num_cores=cores if outer % cores else 1,
  )
  rows = blocks.even_size(
    num_rows,
    unit=group,
    unit_bytes=group * columns * x.dtype.itemsize,
    block_bytes=block_bytes,
  )
  part_columns = math.gcd(columns, _COLUMNS)
  sublanes = 1 if group % blocks.SUBLANES else blocks.SUBLANES

  def each_part(body) -> None:
    inside = blocks.within(width, columns, axis=1)
    blocks.loop(
      blocks.num_parts(inside, part_columns),
      lambda i, _: body(pl.ds(i * part_columns, part_columns)),
      None,
    )

  def add(x_vmem, sums_vmem) -> None:
    valid = blocks.within(num_rows, rows, axis=2)

    def add_part(where) -> None:
      def add_rows(i, so_far):
        value = x_vmem[0, pl.ds(i * group, group), where].astype(dtype)
        if num_rows % group:
          value = _kept(fold, value, valid - i * group, axis=0)
        return fold.add(so_far, fold.down(value, size=sublanes, axis=0))

      so_far = tuple(ref[:, where] for ref in sums_vmem)
      count = blocks.num_parts(valid, group)
      for ref, value in zip(
        sums_vmem, blocks.loop(count, add_rows, so_far), strict=True
      ):
        ref[:, where] = value

    each_part(add_part)

  def write(sums_vmem, y_vmem) -> None:
    def write_part(where) -> None:
      total = fold.result(tuple(ref[:, where] for ref in sums_vmem))
      y_vmem[0, :, where] = fold.down(total, size=1, axis=0)

    each_part(write_part)

  cut = _Blocks(
    grid=(outer, pl.cdiv(width, columns), pl.cdiv(num_rows, rows)),
    in_spec=specs.block((1, rows, columns), lambda o, c, r: (o, r, c)),
    out_spec=specs.accumulator((1, 1, columns), lambda o, c, r: (o, 0, c)),
    out_shape=(outer, 1, width),
    sums_shape=(sublanes, columns),
  )
  return _launch(fold, x, cut, add, write, chip=chip)


def leading(fold, x, *, block_bytes, chip) -> jax.Array:
  """[outer, n, middle, rows, columns] to [outer, middle, rows, columns]."""
  outer, n, middle, num_rows, width = x.shape
  dtype = folds.dtype_of(x)
  cores = chip.tensor_cores_per_device
  group = min(n, blocks.SUBLANES)
  unit = _column_unit(width)
  tile = min(_whole_tiles(num_rows, x.dtype), blocks.tile_rows([x.dtype]))
  columns = blocks.whole_or_even(
    width,
    unit=unit,
    unit_bytes=group * tile * unit * x.dtype.itemsize,
    block_bytes=block_bytes,
  )
  rows = blocks.even_size(
    num_rows,
    unit=tile,
    unit_bytes=group * tile * columns * x.dtype.itemsize,
    block_bytes=block_bytes,
    num_cores=cores if outer * middle % cores else 1,
  )
  depth = blocks.even_size(
    n,
    unit=group,
    unit_bytes=group * rows * columns * x.dtype.itemsize,
    block_bytes=block_bytes,
  )
  part_columns = math.gcd(columns, _COLUMNS)

  def each_part(body) -> None:
    in_rows = blocks.within(num_rows, rows, axis=2)
    in_columns = blocks.within(width, columns, axis=3)

    def each_row(i, _):
      def each_column(j, _):
        body(pl.ds(i * tile, tile), pl.ds(j * part_columns, part_columns))

      blocks.loop(blocks.num_parts(in_columns, part_columns), each_column, None)

    blocks.loop(blocks.num_parts(in_rows, tile), each_row, None)

  def add(x_vmem, sums_vmem) -> None:
    valid = blocks.within(n, depth, axis=4)

    def add_part(*where) -> None:
      def add_group(i, so_far):
        value = x_vmem[0, pl.ds(i * group, group), 0, *where].astype(dtype)
        if n % group:
          value = _kept(fold, value, valid - i * group, axis=0)
        return fold.add(so_far, fold.down(value, size=1, axis=0)[0])

      so_far = tuple(ref[where] for ref in sums_vmem)
      count = blocks.num_parts(valid, group)
      for ref, value in zip(
        sums_vmem, blocks.loop(count, add_group, so_far), strict=True
      ):
        ref[where] = value

    each_part(add_part)

  def write(sums_vmem, y_vmem) -> None:
    def write_part(*where) -> None:
      y_vmem[0, 0, *where] = fold.result(tuple(ref[where] for ref in sums_vmem))

    each_part(write_part)

  cut = _Blocks(
    grid=(
      outer,
      middle,
      pl.cdiv(num_rows, rows),
      pl.cdiv(width, columns),
      pl.cdiv(n, depth),
    ),
    in_spec=specs.block(
      (1, depth, 1, rows, columns), lambda o, m, r, c, i: (o, i, m, r, c)
    ),
    out_spec=specs.accumulator(
      (1, 1, rows, columns), lambda o, m, r, c, i: (o, m, r, c)
    ),
    out_shape=(outer, middle, num_rows, width),
    sums_shape=(rows, columns),
  )
  return _launch(fold, x, cut, add, write, chip=chip)


def _kept(fold, value, size, *, axis: int) -> jax.Array:
  """The value, with what changes nothing beyond `size` along an axis."""
  shape = [1] * value.ndim
  shape[axis] = value.shape[axis]
  index = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
  return jnp.where(index < size, value, fold.identity(value.dtype))


def _whole_tiles(num_rows: int, dtype: Any) -> int:
  """The rows of whole tiles that hold these; of less than one, themselves."""
  tile = blocks.tile_rows([dtype])
  return num_rows if num_rows < tile else pl.cdiv(num_rows, tile) * tile


def _column_unit(width: int) -> int:
  return _COLUMNS if width >= _COLUMNS else blocks.LANES
