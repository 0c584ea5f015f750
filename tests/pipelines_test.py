"""Tests for coremesh.pipelines.

Sums are in accumulate_test, tables in prefetch_test, and what an index map or
a body must not do in visits_test and bodies_test.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from tests import support
from tests.pipelining import (
  NUM_DEVICES,
  add,
  add_one,
  compile_for,
  in_blocks,
  numbers,
  on_devices,
  piped,
  rows,
  simulate,
)

_ROWS = cm.block((8, 128), rows)
_TILES = cm.block((8, 128), lambda i, j: (i, j))


# --- features: values and compilation --------------------------------------


class _Feature(NamedTuple):
  """A kernel body with what it is called on and what it must return."""

  body: Callable[..., None]
  args: tuple[Any, ...]
  expected: np.ndarray
  out: Any = cm.like(0)


def _add_one_to(x, block=(8, 128), **options):
  """The feature of adding one, block by block."""

  def body(x_hbm, o_hbm):
    cm.pipeline(
      add_one,
      grid=tuple(map(cm.num_blocks, x_hbm.shape, block)),
      in_specs=[cm.block(block, lambda *i: i)],
      out_specs=[cm.block(block, lambda *i: i)],
      over="core",
      **options,
    )(x_hbm, o_hbm)

  return _Feature(body, (x,), x + 1)


def _uneven_split():
  """Five blocks over two cores."""
  return _add_one_to(numbers(NUM_DEVICES * 40, 128))


def _split_of_an_inner_axis():
  """Three rows of four blocks: the columns are what divides by the cores."""
  return _add_one_to(numbers(NUM_DEVICES * 24, 512))


def _more_cores_than_blocks():
  return _add_one_to(numbers(NUM_DEVICES * 8, 128))


def _partial_blocks():
  return _add_one_to(numbers(NUM_DEVICES * 20, 130))


def _array_smaller_than_a_block():
  return _add_one_to(numbers(NUM_DEVICES * 3, 100))


def _vectors():
  return _add_one_to(numbers(NUM_DEVICES * 640), (128,))


def _rank_three():
  return _add_one_to(numbers(NUM_DEVICES * 3, 16, 128), (2, 8, 128))


def _split_of_the_named_axis():
  """Both axes may be split; the second is."""
  return _add_one_to(numbers(NUM_DEVICES * 16, 256), parallel=[1])


def _split_by_hand():
  """Five blocks, shared by index maps that start at the core's own."""

  def body(x_hbm, o_hbm):
    mine = cm.split(cm.num_blocks(x_hbm.shape[0], 8), jax.lax.axis_size("core"))
    core = jax.lax.axis_index("core")
    block = cm.block((8, 128), lambda i: (mine.start(core) + i, 0))
    piped(add_one, [block], [block], grid=(mine.size(core),), over=None)(
      x_hbm, o_hbm
    )

  x = numbers(NUM_DEVICES * 40, 128)
  return _Feature(body, (x,), x + 1)


def _split_by_the_index_map():
  """The index map itself asks which core it is on."""

  def body(x_hbm, o_hbm):
    cores = jax.lax.axis_size("core")
    block = cm.block(
      (8, 128), lambda i: (i * cores + jax.lax.axis_index("core"), 0)
    )
    steps = x_hbm.shape[0] // 8 // cores
    piped(add_one, [block], [block], grid=(steps,), over=None)(x_hbm, o_hbm)

  x = numbers(NUM_DEVICES * 32, 128)
  return _Feature(body, (x,), x + 1)


def _grid_of_run_time_size():
  """Only the first blocks; those after are left as the input has them."""

  def body(steps_hbm, x_hbm, o_hbm):
    def with_steps(steps_smem):
      cm.copy(steps_hbm, steps_smem)
      steps, columns = steps_smem[0], x_hbm.shape[1] // 128
      # Two sizes at run time: one is split, and JAX splits only one.
      grid = steps, jnp.int32(columns) + 0 * steps
      piped(add_one, [_TILES], [_TILES], grid=grid)(x_hbm, o_hbm)

    pl.run_scoped(with_steps, pltpu.SMEM((1,), jnp.int32))

  x = numbers(NUM_DEVICES * 24, 256)
  steps = np.full(NUM_DEVICES, 3, np.int32)
  return _Feature(body, (steps, x), x + 1, cm.like(1))


def _blocks_of_run_time_size():
  """Each core's rows in slices of up to 16, from where its share starts."""

  def body(x_hbm, o_hbm):
    mine = cm.split(x_hbm.shape[0], jax.lax.axis_size("core"), unit=8)
    core = jax.lax.axis_index("core")
    stop = mine.start(core) + mine.size(core)

    def index_map(i):
      start = jnp.minimum(mine.start(core) + 16 * i, stop)
      return pl.ds(pl.multiple_of(start, 8), jnp.minimum(16, stop - start)), 0

    block = cm.block((pl.BoundedSlice(16), 128), index_map)
    steps = pl.cdiv(mine.size(core), 16)
    piped(add_one, [block], [block], grid=(steps,), over=None)(x_hbm, o_hbm)

  x = numbers(NUM_DEVICES * 56, 128)
  return _Feature(body, (x,), x + 1)


def _squeezed_axes():
  def body(x_hbm, o_hbm):
    piped(
      add_one,
      [cm.block((None, 8, 128), lambda i: (i, 0, 0))],
      [_ROWS],
      grid=(x_hbm.shape[0],),
    )(x_hbm, o_hbm)

  x = numbers(NUM_DEVICES * 3, 8, 128)
  out = lambda x: jax.ShapeDtypeStruct((x.shape[0] * 8, 128), x.dtype)
  return _Feature(body, (x,), x.reshape(-1, 128) + 1, out)


def _overlapping_blocks():
  """Blocks at any element: each step sees half of the one before."""

  def body(x_hbm, o_hbm):
    window = cm.block((pl.Element(16), 128), lambda i: (i * 8, 0))
    piped(
      lambda x_vmem, o_vmem: o_vmem.__setitem__(..., x_vmem[:8] + x_vmem[8:]),
      [window],
      [_ROWS],
    )(x_hbm, o_hbm)

  x = numbers(NUM_DEVICES * 32, 128)
  pairs = in_blocks(x)[:, :-1] + in_blocks(x)[:, 1:]
  out = lambda x: jax.ShapeDtypeStruct((x.shape[0] - 8, 128), x.dtype)
  return _Feature(body, (x,), pairs.reshape(-1, 128), out)


def _blocks_in_scalar_memory():
  def scale(s_smem, x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] * s_smem[0, 0]

  body = piped(
    scale, [cm.block((1, 1), rows, memory_space=pltpu.SMEM), _ROWS], [_ROWS]
  )
  x, s = numbers(128, 128, dtype=np.int32), numbers(16, 1, dtype=np.int32)
  expected = (x.reshape(16, 8, 128) * s[:, None]).reshape(128, 128)
  return _Feature(body, (s, x), expected, cm.like(1))


def _whole_refs():
  """One operand whole in VMEM, one left in HBM for the body to copy from."""

  def add_both(x_hbm, w_vmem, o_vmem):
    def with_block(x_vmem):
      cm.copy(x_hbm.at[pl.ds(pl.program_id(0) * 8, 8)], x_vmem)
      o_vmem[...] = x_vmem[...] + w_vmem[...]

    pl.run_scoped(with_block, pltpu.VMEM((8, 128), jnp.float32))

  in_specs = [pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec()]
  x, w = numbers(128, 128), numbers(32, 128)[::-1]
  expected = in_blocks(x) + on_devices(w)[:, None]
  return _Feature(
    piped(add_both, in_specs, [_ROWS]), (x, w), expected.reshape(128, 128)
  )


def _parts_of_arrays():
  """Each core's half of the rows, as a ref of its own."""

  def body(x_hbm, o_hbm):
    mine = cm.slab(x_hbm)
    piped(add_one, [_ROWS], [_ROWS], over=None)(x_hbm.at[mine], o_hbm.at[mine])

  x = numbers(NUM_DEVICES * 48, 128)
  return _Feature(body, (x,), x + 1)


def _pipeline_in_a_loop():
  def body(x_hbm, o_hbm):
    half = x_hbm.shape[0] // 16

    @pl.loop(0, 2)
    def _(turn):
      block = cm.block((8, 128), lambda i: (turn * half + i, 0))
      piped(add_one, [block], [block], grid=(half,))(x_hbm, o_hbm)

  x = numbers(NUM_DEVICES * 48, 128)
  return _Feature(body, (x,), x + 1)


def _pipeline_in_a_pipeline():
  def inner(x_vmem, o_vmem):
    piped(add_one, [_ROWS], [_ROWS], over=None)(x_vmem, o_vmem)

  def body(x_hbm, o_hbm):
    outer = cm.block((16, 128), rows)
    steps = x_hbm.shape[0] // 16
    piped(inner, [outer], [outer], grid=(steps,))(x_hbm, o_hbm)

  x = numbers(NUM_DEVICES * 32, 128)
  return _Feature(body, (x,), x + 1)


def _copies_in_the_body():
  """It takes 3 of the kernel's 4 links, though it is traced more than once."""

  def body(x_vmem, o_vmem):
    cm.start_copy(x_vmem.at[0:2], o_vmem.at[0:2]).wait()
    cm.start_copy(x_vmem.at[2:4], o_vmem.at[2:4]).wait()
    cm.start_copy(x_vmem.at[4:8], o_vmem.at[4:8]).wait()

  x = numbers(128, 128)
  return _Feature(piped(body, [_ROWS], [_ROWS]), (x,), x)


_FEATURES = [
  _uneven_split,
  _split_of_an_inner_axis,
  _more_cores_than_blocks,
  _partial_blocks,
  _array_smaller_than_a_block,
  _vectors,
  _rank_three,
  _split_of_the_named_axis,
  _split_by_hand,
  _split_by_the_index_map,
  _grid_of_run_time_size,
  _blocks_of_run_time_size,
  _squeezed_axes,
  _overlapping_blocks,
  _blocks_in_scalar_memory,
  _whole_refs,
  _parts_of_arrays,
  _pipeline_in_a_loop,
  _pipeline_in_a_pipeline,
  _copies_in_the_body,
]
_each_feature = pytest.mark.parametrize(
  "make", _FEATURES, ids=lambda f: f.__name__[1:]
)


@_each_feature
def test_a_feature_gives_the_right_values_without_a_race(make):
  feature = make()
  with cm.simulation(races=True):
    y = simulate(feature.body, *feature.args, out=feature.out)
  np.testing.assert_array_equal(y, feature.expected)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@_each_feature
def test_a_feature_compiles(make, chip):
  feature = make()
  compile_for(chip, feature.body, *feature.args, out=feature.out)


def test_a_program_id_counts_the_whole_grid_and_num_programs_this_cores_part():
  def body(x_vmem, o_vmem):
    del x_vmem
    here = 100 * pl.num_programs(0) + pl.program_id(0)
    o_vmem[...] = jnp.full(o_vmem.shape, here)

  x = numbers(NUM_DEVICES * 40, 128, dtype=np.int32)
  y = simulate(piped(body, [_ROWS], [_ROWS]), x)
  np.testing.assert_array_equal(
    in_blocks(y)[:, :, 0, 0], [[300, 301, 302, 203, 204]] * NUM_DEVICES
  )


def test_the_core_map_route_gives_the_same():
  x = numbers(128, 128)
  y = simulate(piped(add_one, [_ROWS], [_ROWS]), x, route="core_map")
  np.testing.assert_array_equal(y, x + 1)


def test_a_plain_block_spec_is_a_block():
  x = numbers(128, 128)
  spec = pl.BlockSpec((8, 128), rows)
  np.testing.assert_array_equal(
    simulate(piped(add_one, [spec], [spec]), x), x + 1
  )


@settings(max_examples=4)
@given(num_rows=st.integers(1, 33), num_columns=st.integers(1, 257))
def test_an_array_of_any_size_is_covered(num_rows, num_columns):
  feature = _add_one_to(numbers(NUM_DEVICES * num_rows, num_columns))
  y = simulate(feature.body, *feature.args)
  np.testing.assert_array_equal(y, feature.expected)


@pytest.mark.parametrize("shape", [(0, 128), (32, 0)])
def test_an_empty_array_gives_an_empty_array(shape):
  feature = _add_one_to(np.zeros(shape, np.float32))
  assert simulate(feature.body, *feature.args).shape == shape


# --- buffers ---------------------------------------------------------------


def _buffered(buffers, *, lookahead=False, out_buffers=2):
  """A block of x and one of w, which stays for a row, for each step."""

  def multiply(x_vmem, w_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] * w_vmem[...]

  options = dict(buffers=buffers, lookahead=lookahead)

  def body(x_hbm, w_hbm, o_hbm):
    grid = tuple(map(cm.num_blocks, x_hbm.shape, (8, 128)))
    piped(
      multiply,
      [
        cm.block((8, 128), lambda i, j: (i, j), **options),
        cm.block((8, 128), lambda i, j: (i, 0), **options),
      ],
      [cm.block((8, 128), lambda i, j: (i, j), buffers=out_buffers)],
      grid=grid,
    )(x_hbm, w_hbm, o_hbm)

  x, w = numbers(NUM_DEVICES * 24, 256), numbers(NUM_DEVICES * 24, 128)[::-1]
  return _Feature(body, (x, w), x * np.tile(w, 2))


_each_buffering = pytest.mark.parametrize(
  "options",
  [
    dict(buffers=1, out_buffers=1),
    dict(buffers=3, out_buffers=4),
    dict(buffers=2, lookahead=True),
    dict(buffers=4, lookahead=True, out_buffers=1),
  ],
  ids=str,
)


@_each_buffering
def test_the_buffering_does_not_change_the_values(options):
  feature = _buffered(**options)
  with cm.simulation(races=True):
    y = simulate(feature.body, *feature.args)
  np.testing.assert_array_equal(y, feature.expected)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@_each_buffering
def test_each_buffering_compiles(options, chip):
  feature = _buffered(**options)
  compile_for(chip, feature.body, *feature.args)


def test_each_buffer_is_a_block_of_vmem():
  def vmem_bytes(**options):
    feature = _buffered(**options)
    compiled = compile_for("v5p:2x2x1", feature.body, *feature.args)
    return compiled.kernels[0].usage.vmem_bytes_per_core

  block_bytes = 8 * 128 * 4
  two_each = vmem_bytes(buffers=2, out_buffers=2)
  assert two_each == 6 * block_bytes
  assert vmem_bytes(buffers=3, out_buffers=1) == two_each + block_bytes


def test_a_pipeline_may_copy_one_block_after_the_other_for_debugging():
  def body(x_hbm, o_hbm):
    @pl.when(jax.lax.axis_index("core") == 1)
    def _():
      piped(add_one, [_ROWS], [_ROWS], over=None, no_pipelining=True)(
        x_hbm, o_hbm
      )

  x = numbers(128, 128)
  np.testing.assert_array_equal(simulate(body, x), x + 1)


def test_debugging_does_not_share_the_grid():
  with pytest.raises(
    cm.UnsupportedError, match="no_pipelining=True runs the same .*over='core'"
  ):
    simulate(
      piped(add_one, [_ROWS], [_ROWS], no_pipelining=True), numbers(128, 128)
    )


# --- dtypes ----------------------------------------------------------------


def _doubled(dtype):
  def double(x_vmem, o_vmem):
    o_vmem[...] = (x_vmem[...].astype(jnp.float32) * 2).astype(o_vmem.dtype)

  block = cm.block((32, 128), rows)
  x = (numbers(NUM_DEVICES * 96, 128) % 16).astype(dtype)

  def body(x_hbm, o_hbm):
    grid = (x_hbm.shape[0] // 32,)
    piped(double, [block], [block], grid=grid)(x_hbm, o_hbm)

  return _Feature(body, (x,), (x.astype(np.float32) * 2).astype(dtype))


_each_dtype = pytest.mark.parametrize(
  "dtype",
  [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2],
  ids=lambda d: jnp.dtype(d).name,
)


@_each_dtype
def test_any_dtype_a_kernel_holds_goes_through_a_pipeline(dtype):
  feature = _doubled(dtype)
  y = simulate(feature.body, jnp.asarray(feature.args[0]))
  assert y.dtype == dtype
  np.testing.assert_array_equal(y, feature.expected)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@_each_dtype
def test_any_dtype_compiles(dtype, chip):
  compile_for(chip, _doubled(dtype).body, *_doubled(dtype).args)


@pytest.mark.parametrize("make", [_split_by_hand, _grid_of_run_time_size])
def test_64_bit_mode_gives_the_same_bits(make):
  feature = make()
  with jax.enable_x64(True):
    y = simulate(feature.body, *feature.args, out=feature.out)
  np.testing.assert_array_equal(y, feature.expected)


def test_64_bit_mode_gives_the_same_sums_by_table():
  block = cm.block((8, 128), lambda k, table: (table[k], 0))
  sums = cm.accumulator((8, 128), lambda k: (k // 2, 0), dtype=jnp.int32)
  body = piped(add, [block], [sums], grid=(4,), num_prefetch=1, over=None)

  def on_one_core(*refs):
    pl.when(jax.lax.axis_index("core") == 0)(lambda: body(*refs))

  x, table = numbers(128, 128), np.array([3, -1, 9, 1] * 4, np.int32)
  out = jax.ShapeDtypeStruct((16, 128), jnp.float32)
  with jax.enable_x64(True):
    y = simulate(on_one_core, table, x, out=out)
  expected = in_blocks(x)[:, [[3, 0], [3, 1]]].sum(2)
  np.testing.assert_array_equal(in_blocks(y), expected)


# --- what is around an array -----------------------------------------------


def test_nan_around_a_part_of_an_array_does_not_reach_the_result():
  def body(x_hbm, o_hbm):
    part = x_hbm.at[pl.ds(0, 20), pl.ds(0, 130)]
    piped(add_one, [_TILES], [_TILES], grid=(3, 2))(part, o_hbm)

  x = numbers(NUM_DEVICES * 20, 130)
  padded = np.full((NUM_DEVICES, 40, 256), np.nan, np.float32)
  padded[:, :20, :130] = on_devices(x)
  out = jax.ShapeDtypeStruct((20, 130), jnp.float32)
  y = simulate(body, padded.reshape(-1, 256), out=out)
  np.testing.assert_array_equal(y, x + 1)


def _one_from_a_part(apart):
  """20 rows of each device's 96 from row `apart` times the device, plus 1."""

  def body(x_hbm, o_hbm):
    part = pl.ds(cm.worker_index("device") * apart, 20)
    piped(add_one, [_ROWS], [_ROWS], grid=(3,))(x_hbm.at[part], o_hbm)

  x = numbers(NUM_DEVICES * 96, 128)
  return x, simulate(body, x, out=jax.ShapeDtypeStruct((20, 128), jnp.float32))


def test_a_part_that_starts_at_a_tile_is_copied_to_the_end_of_a_tile():
  with cm.simulation() as run:
    x, y = _one_from_a_part(24)
  assert not run.findings
  for device, rows_of_x in enumerate(on_devices(x)):
    part = rows_of_x[24 * device :][:20]
    np.testing.assert_array_equal(on_devices(y)[device], part + 1)


def test_a_part_that_starts_within_a_tile_is_not_read_beyond_its_end():
  message = r"elements \[16, 24\) of a dimension of 20 of 'input 0'"
  with pytest.raises(cm.SimulationError, match=message), cm.simulation():
    _one_from_a_part(20)


def test_nan_in_the_padding_of_an_array_does_not_reach_the_result():
  x = numbers(NUM_DEVICES * 20, 130)
  padded = np.full((NUM_DEVICES * 24, 256), np.nan, np.float32)
  padded.reshape(NUM_DEVICES, 24, 256)[:, :20, :130] = on_devices(x)
  chip, mesh = support.simulated()
  kernel = cm.kernel(
    _add_one_to(x).body, mesh=chip.tensor_cores("core"), out=cm.like(0)
  )
  fn = support.over_devices(lambda x: kernel(x[:20, :130]), mesh)
  np.testing.assert_array_equal(fn(padded), x + 1)


def test_what_no_step_writes_stays_as_it_was():
  """A part of an output is written to its last row, and no further."""

  def body(x_hbm, o_hbm):
    @pl.when(jax.lax.axis_index("core") == 0)
    def _():
      piped(add_one, [_ROWS], [_ROWS], over=None)(x_hbm, o_hbm)
      part = pl.ds(8, 16)
      piped(
        lambda x, o: o.__setitem__(..., -x[...]), [_ROWS], [_ROWS], over=None
      )(x_hbm.at[part], o_hbm.at[part])

  x = numbers(NUM_DEVICES * 32, 128)
  y = on_devices(simulate(body, x))
  np.testing.assert_array_equal(y[:, 8:24], -on_devices(x)[:, 8:24])
  np.testing.assert_array_equal(y[:, :8], on_devices(x)[:, :8] + 1)
  np.testing.assert_array_equal(y[:, 24:], on_devices(x)[:, 24:] + 1)


def test_cores_that_write_the_same_blocks_race():
  """What `over` is there to avoid, to show that a race would be found."""

  def add_core(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] + cm.worker_index("core").astype(x_vmem.dtype)

  body = piped(add_core, [_ROWS], [_ROWS], over=None)
  with pytest.raises(cm.SimulationError) as caught, cm.simulation(races=True):
    simulate(body, numbers(128, 128))
  assert {f.kind for f in caught.value.findings} == {"race"}


def test_cores_that_write_the_same_values_race_in_jaxs_interpreter_only():
  x = numbers(128, 128)
  body = piped(add_one, [_ROWS], [_ROWS], over=None)
  np.testing.assert_array_equal(simulate(body, x), x + 1)
  of_jax = pltpu.InterpretParams(detect_races=True)
  with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
    simulate(body, x, interpret=of_jax)


# --- SparseCores -----------------------------------------------------------


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@pytest.mark.parametrize("is_sum", [False, True], ids=["blocks", "sums"])
def test_a_pipeline_over_vector_subcores_runs_and_compiles(chip, is_sum):
  chip = cm.chip(chip)
  lanes = chip.sparse_core_lanes

  def add_registers(x_vmem, o_vmem):
    @pl.loop(0, 8)
    def _(row):
      @pl.loop(0, 128, step=lanes)
      def _(column):
        register = row, pl.ds(column, lanes)
        start = o_vmem[register] if is_sum else 1
        o_vmem[register] = x_vmem[register] + start

  sums = cm.accumulator((8, 128), lambda i, k: (i, 0), dtype=jnp.int32)
  mesh = chip.device_mesh("device", on="compiler")
  kernel = cm.kernel(
    piped(
      add_registers,
      [_TILES],
      [sums if is_sum else _TILES],
      grid=(70, 2),  # More blocks than subcores, and no multiple of them.
      over=("core", "subcore"),
    ),
    mesh=chip.vector_subcores("core", "subcore"),
    out=jax.ShapeDtypeStruct(
      (560, 128 if is_sum else 256), jnp.float32 if is_sum else jnp.int32
    ),
  )
  x = jax.ShapeDtypeStruct((560 * mesh.size, 256), jnp.int32)
  compiled = cm.compile(support.over_devices(kernel, mesh), x)
  assert compiled.kernels[0].usage.semaphores_per_core > 0
  one = jax.devices()[:1]  # For all devices it would take long.
  mesh = chip.device_mesh("device", (1,), on="simulator", devices=one)
  x = numbers(560, 256, dtype=np.int32)
  with cm.simulation() as run:
    y = support.over_devices(kernel, mesh)(x)
  assert not run.findings
  expected = x[:, :128] + x[:, 128:] if is_sum else x + 1
  np.testing.assert_array_equal(y, expected)


# --- errors ----------------------------------------------------------------


def _refused(error, match, body, *args, **options):
  with pytest.raises(error, match=match):
    simulate(body, *(args or (numbers(128, 128),)), **options)


def test_a_grid_with_nothing_to_split_is_not_shared():
  _refused(
    cm.PipelineError,
    r"over='core' shares out a parallel grid axis, and grid \(4,\) has none",
    piped(
      add, [_ROWS], [cm.accumulator((8, 128), lambda k: (0, 0))], grid=(4,)
    ),
    out=jax.ShapeDtypeStruct((8, 128), jnp.float32),
  )
  _refused(
    cm.PipelineError,
    "name one in parallel=",
    piped(add_one, [_ROWS], [_ROWS], parallel=[]),
  )


def test_an_accumulated_axis_must_not_be_named_parallel():
  block = cm.block((8, 128), lambda j, k: (k, j))
  sums = cm.accumulator((8, 128), lambda j, k: (0, j))
  _refused(
    cm.PipelineError,
    "output 0 is accumulated along grid axis 1, which is parallel",
    piped(add, [block], [sums], grid=(1, 4), parallel=[1]),
    out=jax.ShapeDtypeStruct((8, 128), jnp.float32),
  )


def test_an_axis_must_be_innermost_to_be_reduced_over():
  block = cm.block((8, 128), lambda k, j: (k, j))
  sums = cm.accumulator((8, 128), lambda k, j: (0, j))
  _refused(
    cm.PipelineError,
    "output 0 is left and revisited.*innermost",
    piped(add, [block], [sums], grid=(4, 2)),
    numbers(128, 256),
    out=jax.ShapeDtypeStruct((8, 256), jnp.float32),
  )


def test_a_body_must_not_read_an_output_or_write_an_input():
  def read(x_vmem, o_vmem):
    o_vmem[...] += x_vmem[...]

  def write(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...]
    x_vmem[...] = x_vmem[...] * 0

  _refused(cm.PipelineError, "reads output 0", piped(read, [_ROWS], [_ROWS]))
  _refused(cm.PipelineError, "writes input 0", piped(write, [_ROWS], [_ROWS]))


def test_an_input_is_read_within_the_array():
  elements = cm.block((8, 128), lambda i: (i * 8, 0))
  _refused(
    cm.PipelineError,
    r"index map of input 0 returns \(8, 0\).* not elements",
    piped(add_one, [elements], [_ROWS]),
  )


def test_a_whole_output_in_vmem_is_one_block():
  _refused(
    cm.PipelineError,
    "output 0 keeps its block along grid axis 0",
    piped(add_one, [_ROWS], [pl.BlockSpec()], grid=(4,)),
    out=jax.ShapeDtypeStruct((8, 128), jnp.float32),
  )


def test_a_block_fits_its_array():
  _refused(
    cm.ShapeError,
    "block of input 0 must have one size for each axis",
    piped(add_one, [cm.block((128,), lambda i: (i,))], [_ROWS]),
  )


def test_a_partial_block_is_whole_tiles():
  block = cm.block((12, 128), rows)
  _refused(
    cm.ShapeError,
    "does not divide its array.*multiple of 8.*block_size=12.*Round the block",
    piped(add_one, [block], [block], grid=(2,)),
    numbers(NUM_DEVICES * 20, 128),
  )


def test_other_errors_of_pallas_pass_through():
  def body(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...]
    return 1 / 0

  _refused(ZeroDivisionError, "zero", piped(body, [_ROWS], [_ROWS]))


@pytest.mark.parametrize("size", [-1, 1.5, True, None, "4"])
def test_a_grid_holds_sizes(size):
  _refused(
    cm.PipelineError,
    "grid must hold ints of at least 0 or int32 scalars; axis 0 is ",
    piped(add_one, [_ROWS], [_ROWS], grid=(size,)),
  )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_a_grid_size_known_at_run_time_is_an_int32_scalar(dtype):
  def body(x_hbm, o_hbm):
    grid = (jax.lax.axis_size("core") * jnp.ones((), dtype),)
    piped(add_one, [_ROWS], [_ROWS], grid=grid)(x_hbm, o_hbm)

  _refused(cm.PipelineError, "int32 scalars; axis 0 is", body)


def test_a_grid_size_may_be_a_numpy_integer():
  x = numbers(128, 128)
  y = simulate(piped(add_one, [_ROWS], [_ROWS], grid=(np.int64(4),)), x)
  np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize("parallel", [0, [1], [-1], ["i"]])
def test_parallel_names_grid_axes(parallel):
  _refused(
    cm.PipelineError,
    r"parallel must be a sequence of grid axes in \[0, 1\)",
    piped(add_one, [_ROWS], [_ROWS], parallel=parallel),
  )


def test_specs_are_sequences_of_blocks():
  sums = cm.accumulator((8, 128), rows)
  _refused(
    cm.PipelineError,
    "in_specs must be a sequence of cm.block, .* got one BlockSpec",
    piped(add_one, _ROWS, [_ROWS]),
  )
  _refused(
    cm.PipelineError,
    r"in_specs\[0\] must be a cm.block; got Accumulator",
    piped(add_one, [sums], [_ROWS]),
  )
  _refused(
    cm.PipelineError,
    r"out_specs\[0\] must be a cm.block or cm.accumulator; got tuple",
    piped(add_one, [_ROWS], [(8, 128)]),
  )


def test_a_pipeline_is_called_with_a_ref_for_each_spec():
  _refused(
    cm.PipelineError,
    "called with 3 refs: 1 tables, 1 inputs, 1 outputs; got 2",
    piped(add_one, [_ROWS], [_ROWS], num_prefetch=1),
  )


def test_a_grid_without_steps_writes_nothing():
  _refused(
    cm.PipelineError,
    r"grid \(0,\) has no steps, so nothing writes output 0 of shape \(32, 12",
    piped(add_one, [_ROWS], [_ROWS], grid=(0,)),
  )


@pytest.mark.parametrize(
  "over, match",
  [
    ("device", r"over must name core axes, \['core'\]; got \['device'\]"),
    ("cores", r"over must name axes in scope; \['cores'\] are not"),
  ],
)
def test_the_grid_is_shared_over_core_axes(over, match):
  _refused(cm.AxisError, match, piped(add_one, [_ROWS], [_ROWS], over=over))


def test_the_devices_must_say_which_chip_they_stand_for():
  chip = cm.chip("v5p:2x2x1")
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:NUM_DEVICES]), ("device",))
  kernel = cm.kernel(
    piped(add_one, [_ROWS], [_ROWS]),
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
  )
  with pytest.raises(cm.PipelineError, match="needs to know the chip's tiles"):
    support.over_devices(kernel, mesh)(numbers(128, 128))
