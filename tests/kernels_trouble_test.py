"""Faults that kernels elsewhere were shipped with, and the right answers.

Those that tests of single kernels look for are not repeated here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels
from coremesh.kernels._matmul.blocks import Blocks


def _normal(*shape: int, seed: int = 0) -> jax.Array:
  return jnp.asarray(
    np.random.default_rng(seed).normal(size=shape), jnp.float32
  )


_X, _W = _normal(8, 64), _normal(64, 64, seed=1) / 8
_HEADS = functools.partial(jnp.reshape, shape=(2, 8, 32))
_SIZES = jnp.int32([3, 0, 4])


def _attention(fn, x, w):
  y = fn(_HEADS(x), _HEADS(x @ w), _HEADS(x), is_causal=True)
  return y.reshape(x.shape)


# By name: what layer of x [8, 64] and w [64, 64] to x's shape is made of a
# kernel or of its reference.
_LAYERS: dict[str, Any] = {
  "attention": _attention,
  "grouped_matmul": lambda fn, x, w: fn(x, jnp.stack([w, 2 * w, -w]), _SIZES),
  "matmul": lambda fn, x, w: fn(x, w, epilogue=jnp.tanh),
  "reduce_max": lambda fn, x, w: x - fn(x * w[:8], -1, keepdims=True),
  "rms_norm": lambda fn, x, w: fn(x, w[0]),
  "softmax": lambda fn, x, w: fn(x + w[:8]),
}


@pytest.mark.parametrize("name", _LAYERS)
def test_derivatives_in_a_scan(name):
  def loss(fn, x, w):
    layer = functools.partial(_LAYERS[name], fn)
    y, _ = jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=2)
    return jnp.sum(jnp.cos(y))

  got, want = (
    jax.jit(jax.value_and_grad(functools.partial(loss, fn), (0, 1)))(_X, _W)
    for fn in (getattr(kernels, name), getattr(kernels, f"{name}_reference"))
  )
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    # Two layers of sums of 64 terms, and a sum of 512.
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_what_is_checkpointed_compiles():
  @jax.checkpoint
  def block(x, w):
    for name in ("rms_norm", "matmul", "softmax"):
      x = _LAYERS[name](getattr(kernels, name), x, w)
    return x

  gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(block(x, w) ** 2)))
  types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (_X, _W)]
  compiled = cm.compile(gradient, *types, chip="v5p:2x2x1")
  names = {operation.kernel for operation in compiled.operations}
  assert names >= {"matmul", "rms_norm_grad", "softmax_grad"}


@pytest.mark.parametrize("name", ["matmul", "rms_norm"])
def test_a_gradient_sums_over_devices_no_more_often_than_jnp(name):
  mesh = cm.chip("v5p:2x2x1").device_mesh("device")

  def all_reduces(fn):
    layer = functools.partial(_LAYERS[name], fn)
    mapped = jax.shard_map(
      lambda x, w: jax.lax.psum(jnp.sum(layer(x, w)), "device"),
      mesh=mesh,
      in_specs=(P("device"), P()),
      out_specs=P(),
    )
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    lowered = jax.jit(jax.grad(mapped, (0, 1))).lower(x, _W)
    return lowered.as_text().count("stablehlo.all_reduce")

  count = all_reduces(getattr(kernels, name))
  assert 0 < count <= all_reduces(getattr(kernels, f"{name}_reference"))


def test_second_derivatives_of_a_product():
  def curvature(fn, x):
    return jax.grad(
      lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(fn(x, _W) ** 3))(x) ** 2)
    )(x)

  got, want = (
    curvature(fn, _X) for fn in (kernels.matmul, kernels.matmul_reference)
  )
  # Relative to the largest: sums of 64 terms, in chains of four.
  np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
  ("x_shape", "w_shape"),
  [((0, 8), (8, 128)), ((3, 8, 0), (0, 128)), ((8, 8), (8, 0))],
)
def test_products_without_elements_have_gradients(x_shape, w_shape):
  x, w = jnp.ones(x_shape), jnp.ones(w_shape)
  y, pull = jax.vjp(kernels.matmul, x, w)
  for gradient, array in zip(pull(y), (x, w), strict=True):
    np.testing.assert_array_equal(gradient, jnp.zeros_like(array))


def test_ones_of_bfloat16_are_counted_beyond_256():
  k = 257
  x, w = jnp.ones((8, k), jnp.bfloat16), jnp.ones((k, 128), jnp.bfloat16)
  blocks = Blocks(rows=16, columns=128, inner=128)
  y = kernels.matmul(x, w, out_dtype=jnp.float32, blocks=blocks)
  assert (y == k).all()
  sizes = jnp.int32([8])
  y = kernels.grouped_matmul(x, w[None], sizes, out_dtype=jnp.float32)
  assert (y == k).all()
  total = kernels.grouped_weight_gradient(
    x.T, w[:, :8], jnp.int32([k]), out_dtype=jnp.float32
  )
  assert (total == k).all()


def test_sums_of_int8_are_exact_where_float32_is_not():
  k = 1041  # So that the sum is odd, and beyond 2^24.
  x, w = jnp.full((32, k), 127, jnp.int8), jnp.full((k, 128), 127, jnp.int8)
  assert (kernels.matmul(x, w) == 127 * 127 * k).all()
  y = kernels.grouped_matmul(x, w[None], jnp.int32([32]))
  assert (y == 127 * 127 * k).all()


def test_what_an_8_bit_float_cannot_hold_is_nan():
  x = jnp.array([448, 464, 465, -1e4], jnp.float32)[:, None]
  y = kernels.matmul(x, jnp.ones((1, 8)), out_dtype=jnp.float8_e4m3fn)
  # 464 is half way to what would come after 448, and rounds to even.
  want = np.array([448, 448, np.nan, np.nan], np.float32)
  np.testing.assert_array_equal(y[:, 0].astype(jnp.float32), want)


@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_the_lse_of_scores_of_any_size(size):
  q, v = jnp.zeros((1, 8, 16)), _normal(1, 140, 16)
  bias = jnp.full((8, 140), size)
  out, lse = kernels.attention(q, v, v, bias=bias, return_lse=True)
  # Half a unit in the last place of 10^4, and of the logarithm's base.
  np.testing.assert_allclose(lse, size + np.log(140), rtol=2**-23)
  mean = np.broadcast_to(v.mean(1, keepdims=True), out.shape)
  np.testing.assert_allclose(out, mean, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_ragged_tail_of_keys_gives_the_same_bits_each_time(is_causal):
  q, k, v = (_normal(1, 192, 16, seed=i) for i in range(3))
  run = jax.jit(functools.partial(kernels.attention, is_causal=is_causal))
  first = run(q, k, v)
  for _ in range(4):
    np.testing.assert_array_equal(run(q, k, v), first)
  ones = run(q * 0, k, jnp.ones_like(v))
  # Sums of ones, and 1 / n * n, which may be a rounding off.
  np.testing.assert_allclose(ones, 1.0, rtol=2**-23)


@pytest.mark.parametrize(
  "name",
  ["layer_norm", "log_softmax", "reduce_max", "reduce_sum", "rms_norm"],
)
def test_blocks_change_no_bit(name):
  x = _normal(70, 200)
  args = (-1,) if name.startswith("reduce") else ()
  kernel = functools.partial(getattr(kernels, name), x, *args)
  first = kernel()
  for block_bytes in (1, 2**14):
    np.testing.assert_array_equal(first, kernel(block_bytes=block_bytes))


def test_lengths_that_smem_does_not_hold():
  x = jax.ShapeDtypeStruct((10**6, 1, 8, 16), jnp.float32)
  lengths = jax.ShapeDtypeStruct((10**6,), jnp.int32)

  def run(x, lengths):
    return kernels.attention(x, x, x, kv_lengths=lengths)

  with pytest.raises(
    cm.ShapeError, match="kv_lengths .* 4000000 bytes of SMEM"
  ):
    jax.eval_shape(run, x, lengths)


def test_64_bits_are_refused_before_anything_is_traced():
  with jax.enable_x64(True):
    x, wide, long = (
      jnp.ones((8, 8), d) for d in (jnp.float32, jnp.float64, jnp.int64)
    )
    w, q, size = x[None], x[None], jnp.ones(1, jnp.int32)
    calls = {
      "matmul": lambda: kernels.matmul(wide, wide),
      "matmul of ints": lambda: kernels.matmul(long, long),
      "operand": lambda: kernels.matmul(x, x, wide, epilogue=lambda a, b: a),
      "output": lambda: kernels.matmul(x, x, out_dtype=jnp.float64),
      "grouped": lambda: kernels.grouped_matmul(wide, wide[None], size),
      "sizes": lambda: kernels.grouped_matmul(x, w, size.astype(jnp.int64)),
      "gradient": lambda: kernels.grouped_weight_gradient(wide, wide, size),
      "attention": lambda: kernels.attention(*[wide[None]] * 3),
      "bias": lambda: kernels.attention(q, q, q, bias=wide),
      "lengths": lambda: kernels.attention(q, q, q, kv_lengths=long[0, 0]),
      "ids": lambda: kernels.attention(q, q, q, segment_ids=long[0]),
      "scale": lambda: kernels.rms_norm(x, wide[0]),
      "sum": lambda: kernels.reduce_sum(long, 0),
    }
    for name, call in calls.items():
      with pytest.raises(cm.DTypeError, match="64"):
        call()
        pytest.fail(f"{name} of 64 bits is taken")
