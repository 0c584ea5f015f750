"""kernels.elementwise against plain jnp."""

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels


def _normal(shape, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


def _parts(a, b):
  """Several results, of other dtypes than the arguments."""
  product = a.astype(jnp.float32) * b.astype(jnp.float32)
  return {
    "product": product.astype(jnp.bfloat16),
    "larger": (product > 0.5).astype(jnp.int32),
    "kept": a,
  }


@hypothesis.given(
  shape=st.one_of(
    st.lists(st.integers(1, 40), min_size=0, max_size=4),
    st.tuples(st.integers(1, 3000)),
    st.tuples(st.integers(1, 100), st.integers(1, 1200)),
  ),
  dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8]),
)
@hypothesis.settings(max_examples=4, deadline=None)
def test_any_shape_and_results(shape, dtype):
  a = (4 * _normal(shape)).astype(dtype)
  b = (4 * _normal(shape, seed=1)).astype(dtype)
  y = kernels.elementwise(_parts, a, b)
  want = kernels.elementwise_reference(_parts, a, b)
  assert jax.tree.structure(y) == jax.tree.structure(want)
  leaves = jax.tree.leaves(y), jax.tree.leaves(want)
  for leaf, want_leaf in zip(*leaves, strict=True):
    assert leaf.dtype == want_leaf.dtype
    # The same operations on the same numbers.
    np.testing.assert_array_equal(leaf, want_leaf)


def _mixed(a, b, i):
  return jnp.sin(a) * b, i + 1, a + i.astype(a.dtype)


def test_gradients_are_those_of_the_function():
  a, b = _normal((9, 200)), _normal((9, 200), seed=1)
  i = jnp.arange(9 * 200, dtype=jnp.int32).reshape(9, 200)
  y, vjp = jax.vjp(lambda a, b: kernels.elementwise(_mixed, a, b, i), a, b)
  want, want_vjp = jax.vjp(lambda a, b: _mixed(a, b, i), a, b)
  cotangents = (
    _normal((9, 200), seed=2),
    np.zeros((9, 200), jax.dtypes.float0),
    _normal((9, 200), seed=3),
  )
  for got, right in zip(
    jax.tree.leaves((y, vjp(cotangents))),
    jax.tree.leaves((want, want_vjp(cotangents))),
    strict=True,
  ):
    # sin and cos of two libraries, each off by a few roundings.
    np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  ("form", "at_minus_two"), [(False, -0.04550026), (True, -0.04540231)]
)
def test_gelu_is_the_form_asked_for_and_exact_where_it_must_be(
  form, at_minus_two
):
  def gelu(x):
    return jax.nn.gelu(x, approximate=form)

  x = jnp.array([0.0, -2.0, -3.7, -1e4, 1e4, 1.0, jnp.nan], jnp.float32)
  y, vjp = jax.vjp(lambda x: kernels.elementwise(gelu, x), x)
  # float32 of a number of size 1.
  np.testing.assert_allclose(y[1], at_minus_two, rtol=0, atol=1e-6)
  np.testing.assert_array_equal(y[0], 0)
  np.testing.assert_array_equal(y[3:5], [0, 1e4])
  assert np.isnan(y[6])
  (dx,) = vjp(jnp.ones_like(x))
  assert dx[2] < 0 and np.isfinite(dx[:6]).all()


def test_blocks_change_no_bit():
  x = _normal((70, 400))
  y = kernels.elementwise(jnp.sin, x)
  other = kernels.elementwise(jnp.sin, x, block_bytes=1)
  np.testing.assert_array_equal(y, other)


def test_no_results_are_no_kernel():
  assert kernels.elementwise(lambda x: (), jnp.ones(3)) == ()


@pytest.mark.parametrize(
  ("fn", "arrays", "message"),
  [
    (jnp.add, (), "elementwise needs at least one array"),
    (jnp.add, (jnp.ones(3), jnp.ones(1)), r"arrays\[1\] must have shape \(3,"),
    (
      jnp.sum,
      (jnp.ones(3),),
      "fn of elementwise .* with reduce_sum, which mix",
    ),
    (
      lambda x: x[None],
      (jnp.ones(3),),
      r"The result of fn must have shape \(3,\); got \(1, 3\)",
    ),
    (jnp.isnan, (jnp.ones(3),), "The result of fn must hold numbers of at mo"),
    (jnp.sin, (jnp.ones(3, jnp.bool_),), r"arrays\[0\] must hold numbers of "),
  ],
)
def test_wrong_arguments_are_named(fn, arrays, message):
  with pytest.raises(cm.CoreMeshError, match=message):
    kernels.elementwise(fn, *arrays)
