"""Every function that docs/simulator.md lists has a test that simulates it."""

import importlib
import pathlib
import re
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from tests import covering
from tests import small_kernels as small
from tests.covering import covers

# They say what they cover when they are imported.
_TESTS = ("lane", "memory", "pipeline", "value")
for _kind in _TESTS:
  importlib.import_module(f"tests.simulate_{_kind}_functions_test")

# --- what tells about the chip ------------------------------------------------


@pytest.mark.parametrize("chip", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@covers("pltpu.get_tpu_info", "pltpu.is_tpu_device")
@covers("pltpu.get_tpu_info_for_chip", "plsc.get_sparse_core_info")
def test_kernels_know_their_chip(chip):
  def body(o, line):
    info, sparse = pltpu.get_tpu_info(), plsc.get_sparse_core_info()
    version: Any = info.chip_version
    same = pltpu.get_tpu_info_for_chip(version, info.num_cores)
    numbers = [
      *(info.mxu_column_size, same.mxu_column_size, info.vmem_capacity_bytes),
      *(sparse.num_cores, sparse.num_lanes, pltpu.is_tpu_device()),
    ]
    for i, number in enumerate(numbers):
      line[i] = jnp.full(128, int(number))
    pltpu.sync_copy(line, o)

  o = small.run(
    body,
    out=jax.ShapeDtypeStruct((6, 128), np.int32),
    cores=small.one_core,
    chip=chip,
    scratch_types=[pltpu.VMEM((6, 128), np.int32)],
  )
  found = cm.chip(chip)
  columns = found.mxu_columns
  expected = [columns, columns, found.vmem_bytes_per_tensor_core]
  expected += [found.sparse_cores_per_device, found.sparse_core_lanes, True]
  np.testing.assert_array_equal(o[:, 0], expected)


def _double(x):
  def body(x, o):
    o[...] = x[...] * 2

  return pl.pallas_call(body, small.like(x))(x)


@covers("pltpu.force_tpu_interpret_mode")
def test_force_tpu_interpret_mode():
  x = small.values(*small.SLAB)
  with pltpu.force_tpu_interpret_mode(cm.SimulatorParams()):
    np.testing.assert_array_equal(_double(x), 2 * x)


@covers("pltpu.set_tpu_interpret_mode", "pltpu.reset_tpu_interpret_mode_state")
def test_set_and_reset_tpu_interpret_mode():
  x = small.values(*small.SLAB)
  try:
    pltpu.set_tpu_interpret_mode(cm.SimulatorParams())
    np.testing.assert_array_equal(_double(x), 2 * x)
  finally:
    off: Any = None
    pltpu.set_tpu_interpret_mode(off)
    pltpu.reset_tpu_interpret_mode_state()
  with pytest.raises(ValueError, match="Only interpret mode is supported"):
    _double(x)


# --- the table of the docs ----------------------------------------------------


def _table() -> set[str]:
  text = pathlib.Path(__file__).parents[1] / "docs/simulator.md"
  section = text.read_text().split("## What it knows")[1].split("## Limits")[0]
  return set(re.findall(r"`(pl(?:tpu|sc)\.\w+)`", section))


def test_every_function_of_the_table_has_a_test_that_simulates_it():
  assert set(covering.COVERED) == _table()


def _rolled(x):
  return small.on_values(lambda x: pltpu.roll(x, 1, 0), x, out=small.like(x))


def test_a_test_that_does_not_call_what_it_covers_fails():
  with pytest.raises(AssertionError, match=r"never calls plsc.cumsum"):
    with covering.watching("plsc.cumsum") as seen:
      _rolled(small.values(*small.SLAB))
    seen.check()


def test_a_test_whose_kernel_drops_what_it_covers_fails():
  with pytest.raises(AssertionError, match=r"\['tpu.roll'\] of pltpu.roll"):
    with covering.watching("pltpu.roll") as seen:
      # Nobody uses the result, so that no kernel computes it.
      fn = lambda x: (pltpu.roll(x, 1, 0), x)[1]
      x = small.values(*small.SLAB)
      small.on_values(fn, x, out=small.like(x))
    seen.check()


def test_a_test_that_calls_it_outside_the_simulator_fails():
  with pytest.raises(AssertionError, match=r"\['tpu.roll'\] of pltpu.roll"):
    with covering.watching("pltpu.roll") as seen:
      jax.make_jaxpr(lambda x: pltpu.roll(x, 1, 0))(small.values(*small.SLAB))
    seen.check()
