"""kernels.layer_norm and rms_norm against float64."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels
from coremesh.kernels._rows import rows as rows

_EPSILON = 1e-6
# Of results of size 4: sums, rsqrt and products in 24 bits, some 20 roundings;
# then one to the dtype.
_MOST = {jnp.float32: 4 * 20 * 2.0**-24, jnp.bfloat16: 4 * 2.0**-8}


def _normal(shape, dtype=jnp.float32, seed=0, mean=0.0):
  rng = np.random.default_rng(seed)
  values = mean + rng.normal(size=shape)
  return jnp.asarray(values, jnp.float32).astype(dtype)


def _norm64(x, is_centred):
  x = np.asarray(x, np.float64)
  if is_centred:
    x = x - x.mean(-1, keepdims=True)
  return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + _EPSILON)


@hypothesis.given(
  lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
  num_rows=st.integers(1, 40),
  width=st.integers(2, 1200),
  dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
  has=st.tuples(st.booleans(), st.booleans()),
)
@hypothesis.settings(max_examples=3, deadline=None)
def test_any_shape(lead, num_rows, width, dtype, has):
  x = _normal((*lead, num_rows, width), dtype)
  scale = _normal((width,), dtype, seed=1) if has[0] else None
  offset = _normal((width,), dtype, seed=2) if has[1] else None
  times = np.asarray(1 if scale is None else scale, np.float64)
  plus = np.asarray(0 if offset is None else offset, np.float64)
  size = np.abs(times).max() + np.abs(plus).max()
  y = kernels.layer_norm(x, scale, offset, epsilon=_EPSILON)
  assert y.shape == x.shape and y.dtype == x.dtype
  want = _norm64(x, True) * times + plus
  assert np.abs(np.asarray(y, np.float64) - want).max() <= size * _MOST[dtype]
  y = np.asarray(kernels.rms_norm(x, scale, epsilon=_EPSILON), np.float64)
  want = _norm64(x, False) * times
  assert np.abs(y - want).max() <= size * _MOST[dtype]


def test_a_large_mean_costs_only_the_digits_that_it_takes():
  x = _normal((8, 512), mean=1000.0)
  # x itself is rounded to 1000 * 2**-24; a one-pass variance would lose the
  # square of that, every digit.
  y = kernels.layer_norm(x, epsilon=_EPSILON)
  most = 1000 * 4 * 2.0**-24
  assert np.abs(np.asarray(y, np.float64) - _norm64(x, True)).max() <= most


def test_a_constant_row_is_its_offset_and_zeros_have_a_gradient():
  x = jnp.full((3, 100), 7.0)
  offset = _normal((100,))
  y = kernels.layer_norm(x, None, offset)
  np.testing.assert_array_equal(y, jnp.broadcast_to(offset, x.shape))
  dx = jax.grad(lambda x: kernels.rms_norm(x)[0, 0])(jnp.zeros((3, 100)))
  # 1 / sqrt(epsilon), by rsqrt.
  np.testing.assert_allclose(dx[0, 0], 1e3, rtol=1e-6)
  assert not np.asarray(dx)[1:].any()


@pytest.mark.parametrize(
  ("shape", "is_wide"), [((9, 1300), True), ((3, 7, 300), False)]
)
def test_gradients_are_those_of_the_reference(shape, is_wide, monkeypatch):
  if is_wide:  # As if VMEM held 8 rows of 1024 columns, and no more.
    monkeypatch.setattr(rows, "_VMEM_SHARE", 2**10)
  x, dy = _normal(shape), _normal(shape, seed=1)
  vectors = [_normal(shape[-1:], seed=2), _normal(shape[-1:], seed=3)]
  for function, reference, count in (
    (kernels.layer_norm, kernels.layer_norm_reference, 2),
    (kernels.rms_norm, kernels.rms_norm_reference, 1),
  ):
    y, vjp = jax.vjp(function, x, *vectors[:count])
    want, want_vjp = jax.vjp(reference, x, *vectors[:count])
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    for dx, want_dx in zip(vjp(dy), want_vjp(dy), strict=True):
      # Sums of up to 1300 terms of size 4, each rounded to 24 bits.
      np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=2e-5)


def test_the_last_axis_must_leave_room_for_the_sums_over_rows():
  x, scale = jnp.zeros((1, 2**19 + 1)), jnp.zeros(2**19 + 1)

  def gradient(x, scale):
    return jax.grad(lambda s: kernels.layer_norm(x, s).sum())(scale)

  with pytest.raises(cm.ShapeError, match="layer_norm_grad sums over the rows"):
    jax.eval_shape(gradient, x, scale)


def test_each_synchronisation_is_needed():
  @jax.jit
  def gradients(x, scale):
    norm = functools.partial(kernels.layer_norm, block_bytes=1)
    return jax.vjp(norm, x, scale)[1](x)

  # Three blocks for each core, so that each wait has something to wait for.
  report = cm.mutate(gradients, _normal((48, 128)), jnp.ones(128), seeds=2)
  assert report.mutants and not report.survivors


@pytest.mark.parametrize(
  ("args", "options", "message"),
  [
    ((jnp.float32(1),), {}, "x must have a last axis"),
    ((jnp.zeros(3, jnp.int8),), {}, "x must be float32 or bfloat16; got int8"),
    ((jnp.zeros((2, 3)), jnp.zeros(2)), {}, r"scale must have shape \(3,\); g"),
    ((jnp.zeros(3), jnp.zeros(3, jnp.int32)), {}, "scale must be float32 or"),
    (
      (jnp.zeros(3),),
      dict(epsilon=-1),
      "epsilon must be a finite number of at least 0",
    ),
    ((jnp.zeros(3),), dict(block_bytes=0), "block_bytes must be None or an"),
  ],
)
def test_wrong_arguments_are_named(args, options, message):
  for function in (kernels.layer_norm, kernels.rms_norm):
    with pytest.raises(cm.CoreMeshError, match=message):
      function(*args, **options)
  with pytest.raises(cm.ShapeError, match=r"offset must have shape \(3,\)"):
    kernels.layer_norm(jnp.zeros((2, 3)), None, jnp.zeros(4))
