"""Arrays that fill no tile: what the compiler, and it alone, would refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels


def _compiles(fn, *types):
  args = [jax.ShapeDtypeStruct(*t) for t in types]
  return cm.compile(jax.jit(fn), *args, chip="v5p:2x2x1").kernels


def _normal(*shape):
  return jnp.asarray(
    np.random.default_rng(len(shape)).normal(size=shape), jnp.float32
  )


# XLA gives arrays of at most 4 rows tiles of fewer rows than 8.
def _attention_and_gradients(q, k, v, bias):
  def fn(q, k, v, bias):
    return kernels.attention(q, k, v, bias=bias, is_causal=True)

  out, pull = jax.vjp(fn, q, k, v, bias)
  return out, *pull(out)


@pytest.mark.parametrize(
  ("q_len", "kv_len", "dtype"), [(2, 3, jnp.float32), (3, 140, jnp.bfloat16)]
)
def test_few_rows_of_attention_compile(q_len, kv_len, dtype):
  shapes = (2, q_len, 130), (1, kv_len, 130), (1, kv_len, 136)
  types = [(s, dtype) for s in (*shapes, (2, q_len, kv_len))]
  assert len(_compiles(_attention_and_gradients, *types)) == 3


def test_few_rows_of_attention_are_those_of_the_reference():
  args = [_normal(2, 2, 130), _normal(1, 3, 130), _normal(1, 3, 136)]
  args.append(_normal(2, 2, 3))
  got = _attention_and_gradients(*args)
  want, pull = jax.vjp(
    lambda q, k, v, bias: kernels.attention_reference(
      q, k, v, bias=bias, is_causal=True
    ),
    *args,
  )
  for a, b in zip(got, (want, *pull(got[0])), strict=True):
    # Differences of sums of 136 terms in float32.
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_few_rows_of_grouped_products_compile():
  def both(x, w, sizes):
    y = kernels.grouped_matmul(x, w, sizes, transpose_w=True)
    d = kernels.grouped_weight_gradient(x[:, :3], x, sizes)
    return y, kernels.grouped_matmul(y, w, sizes), d

  types = ((4, 256), jnp.bfloat16), ((2, 3, 256), jnp.bfloat16)
  assert len(_compiles(both, *types, ((2,), jnp.int32))) == 3


def test_few_rows_of_grouped_products_are_those_of_the_reference():
  x, w, sizes = _normal(3, 256), _normal(2, 3, 256), jnp.array([1, 1])
  highest = jax.lax.Precision.HIGHEST

  def both(product, gradient):
    y = product(x, w, sizes, transpose_w=True, precision=highest)
    return y, gradient(x[:, :3], x, sizes, precision=highest)

  got = both(kernels.grouped_matmul, kernels.grouped_weight_gradient)
  want = both(
    kernels.grouped_matmul_reference,
    kernels.grouped_weight_gradient_reference,
  )
  for a, b in zip(got, want, strict=True):
    # Sums of up to 256 terms in float32.
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# Pallas lowers a product with a single row as one with a vector.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_products_with_a_vector_compile(dtype):
  def both(x, w):
    return kernels.matmul(x, w, transpose_w=True), kernels.matmul(x, w.T)

  assert _compiles(both, ((9, 130), dtype), ((1, 130), dtype))


def test_products_with_a_vector_are_those_of_the_reference():
  x, w = (a.astype(jnp.bfloat16) for a in (_normal(9, 130), _normal(1, 130)))
  np.testing.assert_allclose(
    kernels.matmul(x, w, transpose_w=True, out_dtype=jnp.float32),
    kernels.matmul_reference(x, w, transpose_w=True, out_dtype=jnp.float32),
    rtol=1e-5,  # Sums of 130 terms in float32.
    atol=1e-5,
  )


# More rows than a register of 32 bits has, and fewer than a tile of the dtype.
@pytest.mark.parametrize(("rows", "dtype"), [(9, jnp.bfloat16), (17, jnp.int8)])
def test_rows_between_a_register_and_a_tile_compile(rows, dtype):
  def both(x):
    y = kernels.elementwise(lambda a: a.astype(jnp.float32) + 1, x)
    return y, kernels.reduce_max(x, -1)

  assert len(_compiles(both, ((3, rows, 16), dtype))) == 2
