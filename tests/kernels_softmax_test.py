"""kernels.softmax and log_softmax against float64, masks and infinities."""

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels
from coremesh.kernels._rows import rows as rows

# Of the largest result 1: exp, the sum's reciprocal and two products in 24
# bits, then one rounding to the dtype.
_MOST = {jnp.float32: 2.0**-20, jnp.bfloat16: 2.0**-9}
_DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])


def _scores(shape, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(4 * rng.normal(size=shape), jnp.float32).astype(dtype)


def _softmax64(x, mask):
  x = np.where(mask, np.asarray(x, np.float64), -np.inf)
  largest = x.max(-1, keepdims=True)
  terms = np.exp(x - np.where(np.isinf(largest), 0, largest))
  total = terms.sum(-1, keepdims=True)
  return terms / np.where(total == 0, 1, total)


@hypothesis.given(
  lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
  num_rows=st.integers(1, 40),
  width=st.integers(1, 1200),
  dtype=_DTYPES,
  mask=st.sampled_from(["none", "whole", "rows", "columns"]),
)
@hypothesis.settings(max_examples=3, deadline=None)
def test_any_shape_and_mask(lead, num_rows, width, dtype, mask):
  x = _scores((*lead, num_rows, width), dtype)
  shape = dict(whole=x.shape, rows=(num_rows, 1), columns=(width,)).get(mask)
  chosen = None
  if shape is not None:
    chosen = jnp.asarray(np.random.default_rng(1).random(shape) < 0.7)
    x = jnp.where(jnp.broadcast_to(chosen, x.shape), x, jnp.nan).astype(dtype)
  want = _softmax64(x, np.asarray(True if chosen is None else chosen))
  y = kernels.softmax(x, chosen)
  assert y.shape == x.shape and y.dtype == x.dtype
  assert np.abs(np.asarray(y, np.float64) - want).max() <= _MOST[dtype]
  log_y = np.asarray(kernels.log_softmax(x, chosen), np.float64)
  # Relative to the size of the score, which is what is rounded.
  most = 40 * _MOST[dtype]
  with np.errstate(divide="ignore"):
    np.testing.assert_allclose(np.exp(log_y), want, rtol=0, atol=most)
  assert (np.isneginf(log_y) == (want == 0)).all()


# A row each: what does not count; -inf; and finite scores that a sentinel such
# as -1e30 would take for -inf.
_NAN, _INF = jnp.nan, jnp.inf
_ROWS = jnp.array(
  [
    [_NAN, _NAN, 1.0, _NAN],  # Nothing counts.
    [-_INF, -_INF, -_INF, -_INF],
    [-3e38, -3e38, _NAN, -_INF],
    [0.0, _NAN, -_INF, 0.0],
  ]
)
_MASK = jnp.array([[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 1, 1]]) > 0
_WANT = np.array(
  [[0, 0, 0, 0], [0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0, 0, 0.5]], np.float32
)


def test_rows_without_scores_are_zero_and_pass_no_gradient():
  dy = jnp.array([[1.0, 2.0, 3.0, _NAN]] * 2 + [[1.0, 2.0, _NAN, 4.0]] * 2)
  y, vjp = jax.vjp(lambda x: kernels.softmax(x, _MASK), _ROWS)
  np.testing.assert_array_equal(y, _WANT)
  dx = np.zeros((4, 4), np.float32)
  dx[2] = [-0.25, 0.25, 0, 0]
  dx[3] = [-0.75, 0, 0, 0.75]
  np.testing.assert_array_equal(vjp(dy)[0], dx)


def test_log_softmax_of_what_does_not_count_is_minus_infinity():
  dy = jnp.array([[1.0, 2.0, _NAN, _NAN]] * 3 + [[1.0, _NAN, _NAN, 4.0]])
  y, vjp = jax.vjp(lambda x: kernels.log_softmax(x, _MASK), _ROWS)
  with np.errstate(divide="ignore"):
    np.testing.assert_allclose(y, np.log(_WANT), rtol=1e-6)
  dx = np.zeros((4, 4), np.float32)
  dx[2] = [-0.5, 0.5, 0, 0]
  dx[3] = [-1.5, 0, 0, 1.5]
  np.testing.assert_array_equal(vjp(dy)[0], dx)


def test_nan_and_infinity_stay_in_their_row():
  x = jnp.zeros((3, 200)).at[0, 7].set(_NAN).at[1, 150].set(_INF)
  y = np.asarray(kernels.softmax(x))
  assert np.isnan(y[:2]).all()
  np.testing.assert_array_equal(y[2], np.full(200, 1 / 200, np.float32))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("is_wide", [False, True])
def test_gradients_are_those_of_the_reference(name, is_wide, monkeypatch):
  if is_wide:  # As if VMEM held 8 rows of 1024 columns, and no more.
    monkeypatch.setattr(rows, "_VMEM_SHARE", 2**10)
  x, dy = _scores((9, 1300)), _scores((9, 1300), seed=1)
  mask = jnp.asarray(np.random.default_rng(2).random((1, 1300)) < 0.7)
  function, reference = (
    getattr(kernels, name),
    getattr(kernels, f"{name}_reference"),
  )
  y, vjp = jax.vjp(lambda x: function(x, mask), x)
  want, want_vjp = jax.vjp(lambda x: reference(x, mask), x)
  # The sum of 1300 gradients of size 4 is rounded some 20 times.
  np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(vjp(dy)[0], want_vjp(dy)[0], rtol=1e-5, atol=2e-4)


def test_blocks_change_no_bit():
  x = _scores((70, 400))
  y = kernels.softmax(x)
  for block_bytes in (1, 2**14):
    other = kernels.softmax(x, block_bytes=block_bytes)
    np.testing.assert_array_equal(y, other)


@pytest.mark.parametrize(
  ("x", "mask", "options", "message"),
  [
    (jnp.float32(1), None, {}, "x must have a last axis"),
    (jnp.zeros(3, jnp.int32), None, {}, "x must be float32 or bfloat16; got i"),
    (jnp.zeros((2, 3)), jnp.zeros(3), {}, "mask must be bool; got float32"),
    (
      jnp.zeros((2, 3)),
      jnp.zeros((2, 2), jnp.bool_),
      {},
      r"mask must broadcast to the shape \(2, 3\); got \(2, 2\)",
    ),
    (
      jnp.zeros((2, 3)),
      jnp.zeros((4, 2, 3), jnp.bool_),
      {},
      "mask must broadcast",
    ),
    (jnp.zeros(3), None, dict(block_bytes=0), "block_bytes must be None or"),
  ],
)
def test_wrong_arguments_are_named(x, mask, options, message):
  for function in (kernels.softmax, kernels.log_softmax):
    with pytest.raises(cm.CoreMeshError, match=message):
      function(x, mask, **options)
