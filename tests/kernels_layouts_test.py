"""Kernels take matrices as XLA lays them out: no copy before or after."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels
from coremesh.kernels import layouts

# XLA puts its rows along the lanes.
_SHAPE = (250, 130)
_X = np.arange(250 * 130, dtype=np.float32).reshape(_SHAPE)

_CALLS = {
  "elementwise": functools.partial(kernels.elementwise, lambda x: x * 2 + 1),
  "sum 0": functools.partial(kernels.reduce_sum, axis=0),
  "sum 1": functools.partial(kernels.reduce_sum, axis=1),
  "max of all": kernels.reduce_max,
}
_WANT = {
  "elementwise": _X * 2 + 1,
  "sum 0": _X.astype(np.float64).sum(0),
  "sum 1": _X.astype(np.float64).sum(1),
  "max of all": _X.max(),
}


@pytest.mark.parametrize("name", _CALLS)
def test_values(name):
  assert layouts.lies_transposed(_SHAPE)
  # Whole numbers: sums of up to 2^23 are exact but for the last rounding.
  np.testing.assert_allclose(
    _CALLS[name](jnp.asarray(_X)), _WANT[name], rtol=2.0**-23
  )


@pytest.mark.parametrize("name", ["elementwise", "sum 1"])
def test_nothing_is_copied(name):
  x = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
  hlo = cm.compile(jax.jit(_CALLS[name]), x, chip="v5p:2x2x1").text("hlo")
  assert "custom-call" in hlo
  assert " copy(" not in hlo


def test_gradients():
  x = jnp.asarray(_X)
  slope = jax.grad(lambda x: kernels.elementwise(jnp.square, x).sum())(x)
  np.testing.assert_array_equal(slope, 2 * _X)
  of_mean = jax.grad(lambda x: kernels.reduce_mean(x, axis=0).sum())(x)
  np.testing.assert_allclose(of_mean, 1 / 250, rtol=1e-6)
