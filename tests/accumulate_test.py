"""Tests for coremesh.accumulate: outputs that several steps add to."""

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
  compile_for,
  in_blocks,
  numbers,
  on_devices,
  piped,
  simulate,
)

# A column of blocks is summed: the output has a row of blocks.
_BLOCK = cm.block((8, 128), lambda j, k: (k, j))


def _sums(block=(8, 128), index_map=lambda j, k: (0, j), **options):
  return cm.accumulator(block, index_map, **options)


def _column_sums(*, steps=4, over="core", **options):
  return piped(add, [_BLOCK], [_sums(**options)], grid=(2, steps), over=over)


def _out(dtype=jnp.float32, *, num_rows=8, num_columns=256):
  return jax.ShapeDtypeStruct((num_rows, num_columns), dtype)


# --- values ----------------------------------------------------------------


def test_a_sum_starts_from_zero():
  x = numbers(128, 256)
  y = simulate(_column_sums(), x, out=_out())
  np.testing.assert_array_equal(on_devices(y), in_blocks(x).sum(1))


@pytest.mark.parametrize("buffers", [1, 3])
def test_a_sum_starts_from_init_whatever_the_buffers(buffers):
  x = numbers(128, 256)
  y = simulate(_column_sums(init=7, buffers=buffers), x, out=_out())
  np.testing.assert_array_equal(on_devices(y), in_blocks(x).sum(1) + 7)


def test_a_maximum_starts_from_the_lowest_number():
  def keep_largest(x_vmem, o_vmem):
    o_vmem[...] = jnp.maximum(o_vmem[...], x_vmem[...])

  x = -numbers(128, 256) - 1
  body = piped(keep_largest, [_BLOCK], [_sums(init=-jnp.inf)], grid=(2, 4))
  y = simulate(body, x, out=_out())
  np.testing.assert_array_equal(on_devices(y), in_blocks(x).max(1))


def test_a_sum_over_the_whole_grid_is_one_block():
  def body(x_hbm, o_hbm):
    total = _sums(index_map=lambda k, j: (0, 0))
    block = cm.block((8, 128), lambda k, j: (k, j))

    @pl.when(jax.lax.axis_index("core") == 1)
    def _():
      cm.pipeline(add, grid=(4, 2), in_specs=[block], out_specs=[total])(
        x_hbm, o_hbm
      )

  x = numbers(128, 256)
  y = simulate(body, x, out=_out(num_columns=128))
  expected = in_blocks(x).sum(1).reshape(NUM_DEVICES, 8, 2, 128).sum(2)
  np.testing.assert_array_equal(on_devices(y), expected)


def test_a_sum_in_float32_is_rounded_to_bfloat16_once():
  """In bfloat16 256 + 1 is 256, however often."""
  x = jnp.ones((128, 256), jnp.bfloat16)

  def count(dtype):
    body = _column_sums(dtype=dtype, init=256)
    return simulate(body, x, out=_out(jnp.bfloat16))

  np.testing.assert_array_equal(count(jnp.float32), jnp.bfloat16(260))
  np.testing.assert_array_equal(count(None), jnp.bfloat16(256))


def test_a_sum_of_another_dtype_is_stored_for_every_block():
  x = numbers(128, 256, dtype=np.int32)
  body = _column_sums(dtype=jnp.float32, init=0.5)
  y = simulate(body, x, out=_out(jnp.int32))
  np.testing.assert_array_equal(on_devices(y), in_blocks(x).sum(1))


def test_sums_and_plain_outputs_go_together():
  def body(x_vmem, first_vmem, o_vmem, second_vmem):
    add(x_vmem, first_vmem)
    o_vmem[...] = x_vmem[...] + 1
    add(x_vmem, second_vmem)

  specs = [_sums(init=1), _BLOCK, _sums(dtype=jnp.int32)]
  x = numbers(128, 256)
  chip, mesh = support.simulated()
  kernel = cm.kernel(
    piped(body, [_BLOCK], specs, grid=(2, 4)),
    mesh=chip.tensor_cores("core"),
    out=(_out(), cm.like(0), _out()),
  )
  first, plain, second = support.over_devices(kernel, mesh)(x)
  np.testing.assert_array_equal(on_devices(first), in_blocks(x).sum(1) + 1)
  np.testing.assert_array_equal(plain, x + 1)
  np.testing.assert_array_equal(on_devices(second), in_blocks(x).sum(1))


def test_an_axis_may_change_the_block_every_few_steps():
  """Eight steps a block: one grid axis holds both the block and the sum."""
  x = numbers(NUM_DEVICES * 16 * 8, 128)
  sums = _sums((1, 8, 128), lambda k: (k // 8, 0, 0), init=3)
  block = cm.block((None, 8, 128), lambda k: (k, 0, 0))

  def add_block(x_vmem, o_vmem):
    o_vmem[0] += x_vmem[...]

  body = piped(add_block, [block], [sums], grid=(16,), over=None)

  def on_one_core(x_hbm, o_hbm):
    pl.when(jax.lax.axis_index("core") == 0)(lambda: body(x_hbm, o_hbm))

  x = x.reshape(-1, 8, 128)
  y = simulate(on_one_core, x, out=jax.ShapeDtypeStruct((2, 8, 128), x.dtype))
  expected = x.reshape(NUM_DEVICES * 2, 8, 8, 128).sum(1) + 3
  np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
  "index_map",
  [lambda i, k: (4 * i + k) // 6, lambda i, k: 2 * i + jnp.where(k < 3, 0, 1)],
)
def test_a_block_may_end_anywhere_in_the_grid(index_map):
  x = numbers(NUM_DEVICES * 8 * 12, 128)
  body = piped(
    add,
    [cm.block((8, 128), lambda i, k: (4 * i + k, 0))],
    [_sums(index_map=lambda i, k: (index_map(i, k), 0), dtype=jnp.int32)],
    grid=(3, 4),
    over=None,
  )

  def on_one_core(x_hbm, o_hbm):
    pl.when(jax.lax.axis_index("core") == 0)(lambda: body(x_hbm, o_hbm))

  owners = [int(index_map(i, k)) for i in range(3) for k in range(4)]
  num_blocks = max(owners) + 1
  out = _out(num_rows=8 * num_blocks, num_columns=128)
  y = simulate(on_one_core, x, out=out)
  expected = np.zeros((NUM_DEVICES, num_blocks, 8, 128), np.float32)
  for step, owner in enumerate(owners):
    expected[:, owner] += in_blocks(x)[:, step]
  np.testing.assert_array_equal(in_blocks(y), expected)


def test_runs_of_equal_table_entries_are_summed():
  x = numbers(128, 128)
  table = np.tile(np.array([1, 1, 0, 0], np.int32), NUM_DEVICES)
  body = piped(
    add,
    [cm.block((8, 128), lambda k, table: (k, 0))],
    [_sums(index_map=lambda k, table: (table[k], 0), init=1)],
    grid=(4,),
    num_prefetch=1,
    scatter=True,
    parallel=[0],  # The first core has the first run, the second the other.
  )
  out = _out(num_rows=16, num_columns=128)
  y = simulate(body, table, x, out=out)
  pairs = in_blocks(x).reshape(NUM_DEVICES, 2, 2, 8, 128).sum(2) + 1
  np.testing.assert_array_equal(in_blocks(y), pairs[:, ::-1])


def test_each_core_sums_a_part_of_its_own():
  def body(x_hbm, o_hbm):
    core = jax.lax.axis_index("core")
    piped(
      add,
      [cm.block((8, 128), lambda k: (k, core))],
      [_sums(index_map=lambda k: (0, core))],
      grid=(4,),
      over=None,
    )(x_hbm, o_hbm)

  x = numbers(128, 256)
  y = simulate(body, x, out=_out())
  np.testing.assert_array_equal(on_devices(y), in_blocks(x).sum(1))


def test_a_sum_may_start_from_a_number_known_at_run_time():
  def body(init_hbm, x_hbm, o_hbm):
    def with_init(init_smem):
      cm.copy(init_hbm, init_smem)
      _column_sums(init=init_smem[0])(x_hbm, o_hbm)

    pl.run_scoped(with_init, pltpu.SMEM((1,), jnp.int32))

  x = numbers(128, 256, dtype=np.int32)
  init = np.arange(NUM_DEVICES, dtype=np.int32)
  y = simulate(body, init, x, out=_out(jnp.int32))
  expected = in_blocks(x).sum(1) + init[:, None, None]
  np.testing.assert_array_equal(on_devices(y), expected)


# --- no steps --------------------------------------------------------------


def _with_run_time_steps(**options):
  """Column sums over as many blocks as the first argument says."""

  def body(steps_hbm, x_hbm, o_hbm):
    def with_steps(steps_smem):
      cm.copy(steps_hbm, steps_smem)
      _column_sums(steps=steps_smem[0], **options)(x_hbm, o_hbm)

    pl.run_scoped(with_steps, pltpu.SMEM((1,), jnp.int32))

  return body


@pytest.mark.parametrize("steps", [-2, 0, 1, 3])
def test_a_sum_over_a_run_time_number_of_steps(steps):
  x = numbers(128, 256)
  given = np.full(NUM_DEVICES, steps, np.int32)
  y = simulate(_with_run_time_steps(init=5), given, x, out=_out())
  expected = in_blocks(x)[:, : max(steps, 0)].sum(1) + 5
  np.testing.assert_array_equal(on_devices(y), expected)


def test_a_sum_over_no_steps_is_init():
  y = simulate(_column_sums(steps=0, init=5), numbers(128, 256), out=_out())
  np.testing.assert_array_equal(y, np.full((32, 256), 5))


def test_a_sum_of_no_rows_is_init():
  def body(x_hbm, o_hbm):
    steps = cm.num_blocks(x_hbm.shape[0], 8)
    _column_sums(steps=steps, init=5)(x_hbm, o_hbm)

  y = simulate(body, np.zeros((0, 256), np.float32), out=_out())
  np.testing.assert_array_equal(y, np.full((32, 256), 5))


def test_an_output_that_no_step_would_write_is_an_error():
  body = piped(add, [_BLOCK], [_sums()], grid=(0, 4))
  with pytest.raises(
    cm.PipelineError,
    match=r"grid \(0, 4\) has no steps, so nothing writes output 0 of shape"
    r" \(8, 256\).*cm.accumulator over the axes without steps",
  ):
    simulate(body, numbers(128, 256), out=_out())


# --- errors ----------------------------------------------------------------


@pytest.mark.parametrize("init", [-jnp.inf, 0.5, np.float32(0.5)])
def test_an_integer_sum_starts_from_an_integer(init):
  with pytest.raises(
    cm.DTypeError, match=rf"output 0 .* in int32, .* init={init}.*jnp.iinfo"
  ):
    simulate(
      _column_sums(init=init),
      numbers(128, 256, dtype=np.int32),
      out=_out(jnp.int32),
    )


@pytest.mark.parametrize(
  "make_init", [lambda: 2.0, lambda: np.int32(-1), lambda: jnp.int32(3)]
)
def test_an_integer_sum_may_start_from_any_whole_number(make_init):
  init = make_init()
  x = numbers(128, 256, dtype=np.int32)
  y = simulate(_column_sums(init=init), x, out=_out(jnp.int32))
  np.testing.assert_array_equal(on_devices(y), in_blocks(x).sum(1) + int(init))


# --- compiled --------------------------------------------------------------


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_sums_compile(chip):
  def body(x_hbm, o_hbm):
    steps = x_hbm.shape[0] // 16
    piped(
      add,
      [cm.block((16, 128), lambda j, k: (k, j))],
      [_sums((16, 128), dtype=jnp.float32, buffers=1)],
      grid=(2, steps),
    )(x_hbm, o_hbm)

  out = _out(jnp.bfloat16, num_rows=16)
  compile_for(chip, body, numbers(256, 256, dtype=jnp.bfloat16), out=out)
  steps = np.zeros(NUM_DEVICES, np.int32)
  body = _with_run_time_steps(init=5)
  compile_for(chip, body, steps, numbers(128, 256), out=_out())
