"""Every example in the simulator: silent under 50 seeds, and as JAX has it."""

from collections.abc import Callable, Mapping
import importlib
import pathlib

from jax.experimental.pallas import tpu as pltpu
import numpy as np
import pytest

import coremesh as cm
from examples import flash_attention, fused_mlp, matmul_study, softmax_rows
from tests import simulating

# Small sizes whose last blocks are partial.
_SIZES = {
  "add_one": dict(rows_per_device=20, columns=200),
  "flash_attention": dict(heads=2, kv_heads=2, length=9, head_dim=8),
  "fused_mlp": dict(rows_per_row=3, features=32, hidden_per_column=7),
  "indexed_add_one": dict(rows_per_device=20, columns=512),
  "matmul_study": dict(size=128),
  "ring_shift": dict(steps=3, rows=5, columns=100),
  "sc_add_one": dict(rows_per_device=35),
  "softmax_rows": dict(rows_per_device=20, columns=300),
  "sum_blocks": dict(terms=3, rows_per_device=20, columns=200),
  "swap_cores": dict(rows_per_device=5, columns=200),
}
# JAX's interpreter has each subcore believe that it is the first, and refuses
# the copy of a partial block as out of bounds.
_SIZES_IN_JAX = {
  "add_one": dict(rows_per_device=24, columns=128),
  "indexed_add_one": dict(rows_per_device=24, columns=512),
  "ring_shift": dict(steps=3, rows=5, columns=100),
  "softmax_rows": dict(rows_per_device=16, columns=256),
  "sum_blocks": dict(terms=3, rows_per_device=24, columns=128),
  "swap_cores": dict(rows_per_device=5, columns=200),
}
_SUMS = ("flash_attention", "fused_mlp", "matmul_study", "softmax_rows")
# What NumPy gives for the first of these sizes.
_EXPECTED: Mapping[str, Callable[..., np.ndarray]] = {
  "add_one": lambda x: x + np.float32(1),
  "flash_attention": flash_attention.expected,
  "fused_mlp": fused_mlp.expected,
  "indexed_add_one": lambda x, _: x[:, 128 : 128 + 256] + np.float32(1),
  "matmul_study": matmul_study.expected,
  "ring_shift": lambda x: np.roll(x, 3, axis=0),
  "sc_add_one": lambda x: x + 1,
  "softmax_rows": softmax_rows.expected,
  "sum_blocks": lambda x: x.sum(axis=0),
  "swap_cores": lambda x: np.roll(x, 100, axis=1) * 2,
}


def _built(name: str, sizes: Mapping[str, int], chip_name: str):
  """The function of an example and its arguments."""
  chip = cm.chip(chip_name)
  config = importlib.import_module(f"configs.{name}").get_config()
  config.update(sizes)
  build, args = importlib.import_module(f"examples.{name}").case(chip, config)
  return build(chip, chip.device_mesh("device", on="simulator")), args


def test_every_example_is_here():
  folder = pathlib.Path(__file__).parents[1] / "examples"
  files = {p.stem: p.read_text() for p in folder.glob("*.py")}
  assert {n for n, text in files.items() if "\ndef case(" in text} == {*_SIZES}


@pytest.mark.parametrize("name", _SIZES)
def test_an_example_is_silent(name):
  chip_name = "v6e:1x1" if name == "sc_add_one" else "v5p:2x1x1"
  fn, args = _built(name, _SIZES[name], chip_name)
  (y,) = simulating.silent_calls(fn, *args)
  # Sums are rounded a few times to 24 bits; all others are exact.
  tolerance = 1e-5 * (name in _SUMS)
  np.testing.assert_allclose(
    y, _EXPECTED[name](*args), rtol=tolerance, atol=tolerance
  )


@pytest.mark.parametrize("name", _SIZES_IN_JAX)
def test_an_example_equals_that_of_jax(name):
  # JAX compiles the kernel once more for each core and device.
  sends = name in ("ring_shift", "swap_cores")
  chip_name = "v5p:2x1x1" if sends else "v5p:1x1x1"
  fn, args = _built(name, _SIZES_IN_JAX[name], chip_name)
  with cm.simulation() as run:
    found = np.asarray(fn(*args))
  assert run.runs and not run.findings
  fn, args = _built(name, _SIZES_IN_JAX[name], chip_name)
  interpreter = pltpu.InterpretParams(num_cores_or_threads=2)
  with cm.simulation() as run, pltpu.force_tpu_interpret_mode(interpreter):
    expected = np.asarray(fn(*args))
  assert not run.runs  # It was JAX's interpreter that ran.
  # XLA's exp differs from NumPy's in the last bits.
  rtol = 1e-6 if name == "softmax_rows" else 0
  np.testing.assert_allclose(found, expected, rtol=rtol)
