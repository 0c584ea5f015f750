"""Tests for coremesh.prefetch: tables that index maps of a pipeline read."""

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from tests import support
from tests.pipelining import (
  NUM_DEVICES,
  add_one,
  compile_for,
  in_blocks,
  numbers,
  piped,
  rows,
  simulate,
)

_INT32 = np.iinfo(np.int32)
_OUT = cm.block((8, 128), rows)


def _table(*entries):
  """A table of int32 for each device, the same on all."""
  return np.tile(np.array(entries, np.int32), NUM_DEVICES)


def _gather(index_map, **options):
  return piped(
    add_one,
    [cm.block((8, 128), index_map)],
    [_OUT],
    num_prefetch=1,
    **options,
  )


def _scatter(out_spec, **options):
  return piped(
    add_one,
    [cm.block((8, 128), lambda i, table: (i, 0))],
    [out_spec],
    num_prefetch=1,
    scatter=True,
    **options,
  )


# --- values ----------------------------------------------------------------


def test_an_index_map_reads_a_prefetched_table():
  x = numbers(128, 128)
  y = simulate(
    _gather(lambda i, table: (table[i], 0)),
    _table(2, 2, 0, 3),
    x,
    out=cm.like(1),
  )
  expected = in_blocks(x)[:, [2, 2, 0, 3]] + 1
  np.testing.assert_array_equal(in_blocks(y), expected)


@pytest.mark.parametrize(
  "entry, block",
  [(-1, 0), (_INT32.min, 0), (4, 3), (99, 3), (_INT32.max, 3)],
)
def test_a_block_outside_the_array_is_the_nearest_one(entry, block):
  """And -1 never the last, which plain Pallas reads on a CPU."""
  x = numbers(128, 128)
  y = simulate(
    _gather(lambda i, table: (table[i], 0)),
    _table(entry, 1, 2, entry),
    x,
    out=cm.like(1),
  )
  expected = in_blocks(x)[:, [block, 1, 2, block]] + 1
  np.testing.assert_array_equal(in_blocks(y), expected)


def test_a_constant_block_outside_the_array_is_clamped_like_another():
  x = numbers(128, 128)
  y = simulate(
    _gather(lambda i, table: (table[i], -1)),
    _table(0, 1, 2, 3),
    x,
    out=cm.like(1),
  )
  np.testing.assert_array_equal(y, x + 1)


def test_a_table_has_any_shape_and_there_may_be_several():
  x = numbers(128, 128)
  body = piped(
    add_one,
    [cm.block((8, 128), lambda i, a, b: (a[i, 2] + b[0], 0))],
    [_OUT],
    num_prefetch=2,
  )
  table = np.tile(
    np.array([[9, 9, 1], [9, 9, 0], [9, 9, 2], [9, 9, 1]], np.int32),
    (NUM_DEVICES, 1),
  )
  y = simulate(body, table, _table(1), x, out=cm.like(2))
  expected = in_blocks(x)[:, [2, 1, 3, 2]] + 1
  np.testing.assert_array_equal(in_blocks(y), expected)


def test_an_empty_table_need_not_be_read():
  x = numbers(128, 128)
  body = _gather(lambda i, table: (i, 0))
  empty = np.zeros(0, np.int32)
  y = simulate(body, empty, x, out=cm.like(1))
  np.testing.assert_array_equal(y, x + 1)
  compile_for("v5p:2x2x1", body, empty, x, out=cm.like(1))


def test_an_output_is_scattered_by_a_table():
  x = numbers(128, 128)
  body = _scatter(cm.block((8, 128), lambda i, table: (table[i], 0)))
  y = simulate(body, _table(2, 1, -5, 99), x, out=cm.like(1))
  expected = in_blocks(x) + 1
  np.testing.assert_array_equal(in_blocks(y)[:, [2, 1, 0, 3]], expected)


def _copy_segments(**options):
  spec = lambda: cm.block(
    (pl.BoundedSlice(4), 8, 128),
    lambda i, starts: (pl.ds(starts[i], starts[i + 1] - starts[i]), 0, 0),
  )
  return piped(
    add_one,
    [spec()],
    [spec()],
    grid=(4,),
    num_prefetch=1,
    scatter=True,
    **options,
  )


def test_a_table_gives_slices_of_run_time_size():
  x = numbers(NUM_DEVICES * 8, 8, 128)
  y = simulate(_copy_segments(), _table(0, 3, 3, 7, 8), x, out=cm.like(1))
  np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize(
  "starts",
  [(-9, 4, 4, 6, 8), (0, 4, 6, 8, 99), (0, 2, 4, 8, 0)],
  ids=["before", "beyond", "negative size"],
)
def test_a_slice_is_clamped_to_the_array_and_its_bound(starts):
  x = numbers(NUM_DEVICES * 8, 8, 128)
  y = simulate(_copy_segments(), _table(*starts), x, out=cm.like(1))
  np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_tables_compile(chip):
  x, table = numbers(128, 128), _table(2, 0, 3, 1)
  out = cm.like(1)
  gather = _gather(lambda i, table: (table[i], 0))
  compile_for(chip, gather, table, x, out=out)
  compile_for(chip, gather, np.zeros(NUM_DEVICES * 33, np.int32), x, out=out)
  wide = np.zeros((NUM_DEVICES * 4, 3), np.int32)
  compile_for(chip, _gather(lambda i, t: (t[i, 2], 0)), wide, x, out=out)
  scatter = _scatter(cm.block((8, 128), lambda i, table: (table[i], 0)))
  compile_for(chip, scatter, table, x, out=out)
  x = numbers(NUM_DEVICES * 8, 8, 128)
  compile_for(chip, _copy_segments(), _table(0, 3, 3, 7, 8), x, out=out)


# --- errors ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint32])
def test_a_table_is_int32(dtype):
  with pytest.raises(cm.DTypeError, match="table 0 must be int32.*got "):
    simulate(
      _gather(lambda i, table: (i, 0)),
      np.zeros(NUM_DEVICES * 4, dtype),
      numbers(128, 128),
      out=cm.like(1),
    )


@pytest.mark.parametrize(
  "shapes, size_bytes",
  [
    ([(262144,)], 1048576),
    ([(2048, 3)], 1048576),
    ([(2, 1024, 3)], 1048576),
    ([(200000,), (100000,)], 1200000),
  ],
)
def test_tables_must_fit_the_scalar_memory_together(shapes, size_bytes):
  body = piped(
    add_one,
    [cm.block((8, 128), lambda i, *tables: (i, 0))],
    [_OUT],
    num_prefetch=len(shapes),
  )
  tables = [
    np.zeros((NUM_DEVICES * n, *others), np.int32) for n, *others in shapes
  ]
  with pytest.raises(
    cm.ShapeError, match=rf"take {size_bytes} bytes of SMEM.* has 1048576"
  ):
    simulate(body, *tables, numbers(128, 128), out=cm.like(len(tables)))


@pytest.mark.parametrize("shape", [(250000,), (1900, 100)])
def test_a_table_that_is_said_to_fit_compiles(shape):
  body = _gather(lambda i, table: (table[(0,) * len(shape)], 0))
  table = jax.ShapeDtypeStruct((NUM_DEVICES * shape[0], *shape[1:]), jnp.int32)
  compile_for("v5p:2x2x1", body, table, numbers(128, 128), out=cm.like(1))


def test_a_block_of_an_accumulator_chosen_by_a_table_is_not_split():
  sums = cm.accumulator((8, 128), lambda i, table: (table[i], 0))
  with pytest.raises(
    cm.PipelineError,
    match=r"over='core' shares out a parallel grid axis, and grid \(4,\) has"
    " none.*accumulated by a table",
  ):
    simulate(
      _scatter(sums, grid=(4,)),
      _table(0, 0, 1, 1),
      numbers(128, 128),
      out=cm.like(1),
    )


def test_a_vector_subcore_has_no_prefetch():
  chip = cm.chip("v6e:2x2")

  @cm.kernel(mesh=chip.vector_subcores(), out=cm.like(0))
  def kernel(x_hbm, table_hbm, o_hbm):
    spec = cm.block((8, 128), lambda i, *_: (i, 0))
    cm.pipeline(
      lambda x_vmem, o_vmem: None,
      grid=(1,),
      in_specs=[spec],
      out_specs=[spec],
      num_prefetch=1,
    )(table_hbm, x_hbm, o_hbm)

  mesh = chip.device_mesh("device", on="compiler")
  fn = support.over_devices(kernel, mesh)
  x = jax.ShapeDtypeStruct((32, 128), jnp.float32)
  with pytest.raises(cm.UnsupportedError, match="no DMA from HBM to its SMEM"):
    cm.compile(fn, x, jax.ShapeDtypeStruct((4,), jnp.int32))
