"""Tests for coremesh.profile.predict: kernels that libtpu compiles here.

Every kernel compiled in this file also passes `_check`: each read of a register
finds the value it means (else `trace` raises), checks of bounds hold, branches
stay inside, and semaphores are zero when the kernel clears them.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.errors import ChipError, UnsupportedError
from coremesh.profile import (
  bundles,
  dma,
  rates,
  scalar,
  statements,
  tensor_cores,
)
from tests import profiling, support

every_chip = pytest.mark.parametrize("chip", support.COMPILED_CHIPS)


@functools.cache
def _compiled(make, chip, *sizes, **options) -> cm.Compiled:
  fn, args = make(*sizes, **options)
  compiled = cm.compile(fn, *args, chip=chip)
  _check(compiled)
  return compiled


def _predicted(make, chip, *sizes, args=(), **options) -> cm.Prediction:
  return cm.predict(_compiled(make, chip, *sizes, **options), *args)


def _check(compiled: cm.Compiled) -> None:
  """What holds for every kernel, whatever it does."""
  chip = cm.chip(compiled.chip)
  rate = rates.rates(chip)
  program = bundles.parse(profiling.kernel(compiled).text("bundles"))
  assert all(
    s.target is None or 0 <= s.target < len(program.bundles)
    for s in program.slots
  )
  traces = [
    scalar.trace(program, core=core, delay_slots=rate.delay_slots)
    for core in range(chip.tensor_cores_per_device)
  ]
  if any(t.assumed for t in traces):
    return  # Copies and waits that data decide need not balance.
  for which in ("fast", "central", "slow"):
    for core in dma.timings(traces, rate.hbm(which)):
      assert core.left_over == {}


@every_chip
def test_a_copy_of_many_bytes_takes_what_hbm_needs_for_them(chip):
  rows = 32768
  found = _predicted(profiling.double, chip, rows)
  [kernel] = found.kernels
  num_bytes = 2 * rows * 1024 * 4
  rate = cm.chip(chip).hbm_bytes_per_second_per_device
  floor = num_bytes / rate * 1e6
  moved = sum(c.read_bytes + c.written_bytes for c in kernel.cores)
  assert moved == num_bytes
  assert kernel.floor_microseconds == pytest.approx(floor)
  assert floor <= kernel.microseconds.low <= kernel.microseconds.high
  assert kernel.microseconds.low < 1.1 * floor
  assert kernel.limit == "DMA"
  assert not kernel.is_assumed


@every_chip
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_matmul_does_not_beat_the_mxu(chip, dtype):
  size = 2048
  found = _predicted(profiling.matmul, chip, size, 512, dtype=dtype)
  [kernel] = found.kernels
  device = cm.chip(chip)
  rate = rates.rates(device)
  cores = device.tensor_cores_per_device
  # A unit takes a row a cycle, or two on units of 256 x 256.
  per_cycle = rate.mxus * 2 * device.mxu_columns**2
  per_cycle *= 16 / rate.matmul_cycles_bf16
  floor = 2 * size**3 / cores / per_cycle
  assert kernel.cycles.low >= floor
  share = kernel.shares["MXU"] * kernel.cycles.central
  assert share == pytest.approx(floor, rel=1e-3)
  assert not kernel.is_assumed


def test_a_matmul_in_large_blocks_is_bound_by_the_mxu_of_both_cores():
  found = _predicted(profiling.matmul, "v5p:2x2x1", 2048, 512)
  [kernel] = found.kernels
  assert kernel.limit == "MXU"
  assert kernel.shares["MXU"] > 0.75
  # 2048^3 at 459 TFLOP/s is 37.4 us.
  assert 37.4 < kernel.microseconds.central < 1.35 * 37.4
  assert [c.core for c in kernel.cores] == [0, 1]
  assert sum(h.cycles for h in kernel.hottest) == pytest.approx(
    kernel.cores[1].cycles.central, rel=0.05
  )


@every_chip
def test_more_work_takes_longer_and_the_same_takes_the_same(chip):
  times = [
    _predicted(profiling.double, chip, rows).microseconds
    for rows in (1024, 4096, 32768)
  ]
  assert times[0].central < times[1].central < times[2].central
  assert times[0].high < times[2].low
  again = _predicted(profiling.double, chip, 4096)
  assert again.microseconds == times[1]
  assert again.operations == _predicted(profiling.double, chip, 4096).operations


@every_chip
def test_a_loop_takes_its_rounds_from_the_argument(chip):
  def cycles(rounds):
    n = np.array([rounds], np.int32)
    args = (n, np.zeros((8, 128), np.float32))
    found = _predicted(profiling.count, chip, args=args)
    assert not found.kernels[0].is_assumed
    return found.kernels[0].cores[0].issued_cycles

  one, two, thousand = map(cycles, (1, 2, 1001))
  assert thousand - one == 1000 * (two - one) > 0


def test_what_is_not_given_is_assumed_and_named():
  found = _predicted(profiling.count, "v5p:2x2x1")
  [kernel] = found.kernels
  assert kernel.is_assumed
  assert "operand 0 (s32[1]), whose value is not given" in found.assumed[0]
  text = str(found)
  assert f"count ({kernel.name}), kernel," in text
  assert "  assumed\n" in text
  assert "tests/profiling.py" in text


def test_a_table_given_as_an_array_steers_the_copies():
  def time(table):
    args = (np.array(table, np.int32), profiling.shape(64 * 512, 128))
    found = _predicted(profiling.gather, "v5p:2x2x1", 16, args=args)
    assert not found.assumed
    return found.microseconds.central

  assert time([3] * 16) < time([1, 2] * 8)


def test_operations_of_xlas_are_predicted_too():
  def fn(x):
    return jnp.sin(x @ x)

  x = profiling.shape(1024, 1024, dtype=jnp.bfloat16)
  found = cm.predict(fn, x, chip="v5p:2x2x1")
  assert found.kernels == ()
  assert found.microseconds.low > 2 * 1024**3 / 459e12 * 1e6


def test_a_prediction_is_plain_data_and_says_that_nothing_was_measured():
  found = _predicted(profiling.double, "v5p:2x2x1", 1024)
  data = json.loads(json.dumps(found.as_dict()))
  assert data["source"] == "predicted from compiled bundles, not measured"
  assert data["operations"][0]["cycles"]["central"] > 0
  assert "not measured" in str(found)
  assert "byte floor" in str(found)


def test_a_4096_matmul_is_predicted_within_seconds():
  found = _predicted(profiling.matmul, "v5p:2x2x1", 4096, 512)
  assert found.predict_seconds < 5


def test_another_chip_than_that_compiled_for_is_an_error():
  compiled = _compiled(profiling.double, "v5p:2x2x1", 1024)
  with pytest.raises(ChipError, match="compiled for v5p:2x2x1. Leave chip out"):
    cm.predict(compiled, chip="v6e:2x2")
  cm.predict(compiled, chip="v5p:4x4x4")  # Its devices are the same.


def test_a_kernel_that_cannot_be_predicted_is_named(monkeypatch):
  fn, args = profiling.swap(256)
  compiled = cm.compile(fn, *args, chip="v5p:2x2x1")
  monkeypatch.setattr(statements, "_WAITS", {})  # As if no wait were known.
  tensor_cores._code.cache_clear()  # What is translated is kept.
  with pytest.raises(UnsupportedError, match="'swap' cannot be predicted.*vwa"):
    cm.predict(compiled, *args)


def test_a_chip_without_rates_is_an_error():
  with pytest.raises(UnsupportedError, match="must be one of v5p, v5e"):
    rates.rates(cm.chip("v4"))


def test_a_function_that_is_not_jitted_is_predicted():
  @jax.jit
  def inner(x):
    return x * 2

  x = profiling.shape(8, 128)
  one = cm.predict(inner, x, chip="v6e:2x2").microseconds
  assert one == cm.predict(lambda x: inner(x), x, chip="v6e:2x2").microseconds
