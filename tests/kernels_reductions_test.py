"""kernels.reduce_sum, reduce_mean and reduce_max against float64."""

import math

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels

_FLOATS = (jnp.float32, jnp.bfloat16)
# Half of a unit in the last place, of a number of size 1.
_UNIT = {jnp.float32: 2.0**-24, jnp.bfloat16: 2.0**-8}


def _array(shape, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(50 * rng.normal(size=shape), jnp.float32).astype(dtype)


@st.composite
def _shapes_and_axes(draw):
  shape = draw(
    st.one_of(
      st.tuples(st.integers(1, 40000)),
      st.tuples(st.integers(1, 200), st.integers(1, 1200)),
      st.tuples(*[st.integers(1, 20)] * 3, st.integers(1, 200)),
    )
  )
  axes = draw(st.sets(st.integers(0, len(shape) - 1)))
  return shape, draw(st.sampled_from([None, tuple(sorted(axes))]))


@hypothesis.given(
  case=_shapes_and_axes(),
  dtype=st.sampled_from([*_FLOATS, jnp.int8, jnp.int32]),
  keepdims=st.booleans(),
)
@hypothesis.settings(max_examples=4, deadline=None)
def test_any_shape_and_axes(case, dtype, keepdims):
  shape, axis = case
  x = _array(shape, dtype)
  wide = np.asarray(x, np.float64)
  options = dict(axis=axis, keepdims=keepdims)
  total = np.asarray(kernels.reduce_sum(x, **options), np.float64)
  want = wide.sum(**options)
  assert total.shape == want.shape
  # 9 roundings for each of at most 4 passes, and one to the dtype.
  size = np.abs(wide).sum(**options)
  unit = _UNIT.get(dtype, 0)
  is_float = dtype in _FLOATS
  most = is_float * 36 * 2.0**-24 * size + unit * np.abs(want)
  assert (np.abs(total - want) <= most).all()
  largest = kernels.reduce_max(x, **options)
  assert largest.dtype == x.dtype
  np.testing.assert_array_equal(largest, np.asarray(x).max(**options))
  mean = kernels.reduce_mean(x, **options)
  assert mean.dtype == (x.dtype if is_float else jnp.float32)
  count = wide.size // max(want.size, 1)
  most = 36 * 2.0**-24 * size / count + (unit or 2.0**-24) * np.abs(
    want / count
  )
  assert (np.abs(np.asarray(mean, np.float64) - want / count) <= most).all()


def test_a_sum_loses_nothing_to_the_many_that_came_before():
  # Each block adds less than half a unit in the last place of 2**24.
  x = jnp.zeros((64 * 40, 128)).at[0, :].set(2.0**24).at[64::64, :].set(0.75)
  total = kernels.reduce_sum(x, 0, block_bytes=1)
  np.testing.assert_array_equal(
    total, np.full(128, 2.0**24 + 39 * 0.75 // 2 * 2)
  )
  assert kernels.reduce_sum(jnp.ones(300, jnp.bfloat16)) == 300


def test_integers_wrap_around_in_32_bits():
  x = jnp.full((70, 3), 2**30, jnp.int32)
  np.testing.assert_array_equal(
    kernels.reduce_sum(x, 0), np.asarray(x).sum(0, dtype=np.int32)
  )
  assert kernels.reduce_sum(jnp.full(1000, 127, jnp.int8)) == 127000


def test_nan_and_infinity_go_where_they_belong():
  x = jnp.zeros((9, 300)).at[0, 5].set(jnp.nan).at[3, 200].set(jnp.inf)
  x = x.at[4, 0].set(-jnp.inf).at[4, 299].set(-jnp.inf)
  for axis in (0, 1):
    wide = np.asarray(x, np.float64)
    for name in ("sum", "max"):
      got = getattr(kernels, f"reduce_{name}")(x, axis)
      np.testing.assert_array_equal(got, getattr(wide, name)(axis))


@pytest.mark.parametrize("axis", [1, (0, 1), None])
def test_gradients_are_those_of_the_reference(axis):
  # Small numbers, so that some columns have several largest elements.
  x = jnp.asarray(np.random.default_rng(0).integers(0, 5, (7, 40, 3)))
  x = x.astype(jnp.float32)
  for name in ("reduce_sum", "reduce_mean", "reduce_max"):
    function = getattr(kernels, name)
    reference = getattr(kernels, f"{name}_reference")
    y, vjp = jax.vjp(lambda x, f=function: f(x, axis), x)
    _, want_vjp = jax.vjp(lambda x, f=reference: f(x, axis), x)
    dy = _array(y.shape, seed=1)
    # One division.
    np.testing.assert_allclose(vjp(dy)[0], want_vjp(dy)[0], rtol=1e-6)


def test_nothing_has_a_sum_and_no_maximum():
  x = jnp.zeros((3, 0, 4))
  np.testing.assert_array_equal(kernels.reduce_sum(x, 1), np.zeros((3, 4)))
  assert math.isnan(kernels.reduce_mean(x))
  assert kernels.reduce_max(x, 0).shape == (0, 4)
  with pytest.raises(cm.ShapeError, match=r"elements along .*\(3, 0, 4\)"):
    kernels.reduce_max(x, 1)


@pytest.mark.parametrize(
  ("x", "axis", "message"),
  [
    (
      jnp.zeros(3),
      1,
      r"axis must hold ints in \[-1, 1\) for shape",
    ),
    (jnp.zeros((3, 4)), (0, -2), "axis must name each axis once"),
    (jnp.zeros((3, 4)), (0, 1.0), "axis must hold ints"),
    (jnp.zeros(3, jnp.bool_), 0, "x must be float32 or .*; got bool"),
  ],
)
def test_wrong_arguments_are_named(x, axis, message):
  for name in ("reduce_sum", "reduce_mean", "reduce_max"):
    with pytest.raises(cm.CoreMeshError, match=message):
      getattr(kernels, name)(x, axis)
