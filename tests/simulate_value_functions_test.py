"""Public functions of TensorCore values, each in a kernel of its own."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import coremesh as cm
from tests import small_kernels as small
from tests.covering import covers

# --- values on a TensorCore ---------------------------------------------------


@small.any_kind
@covers("pltpu.roll")
def test_roll(dtype):
  x = small.values(32, 256, dtype=dtype)
  fn = lambda x: (
    pltpu.roll(x, 5, 0),
    pltpu.roll(x, jnp.int32(130), 1),
    pltpu.roll(x, 3, 1, stride=2, stride_axis=0),
  )
  rows, columns, skewed = small.on_values(fn, x, out=(small.like(x),) * 3)
  np.testing.assert_array_equal(rows, np.roll(x, 5, 0))
  np.testing.assert_array_equal(columns, np.roll(x, 130, 1))
  for i, row in enumerate(x):
    np.testing.assert_array_equal(skewed[i], np.roll(row, 3 + 2 * i))


@small.kinds(np.int32, np.float32, np.int16, small.BF16, np.int8)
@covers("pltpu.bitcast")
def test_bitcast(dtype):
  x = small.values(16, 128, dtype=np.float32)
  packing = 4 // np.dtype(dtype).itemsize
  out = jax.ShapeDtypeStruct((16 * packing, 128), dtype)
  o = small.on_values(lambda x: pltpu.bitcast(x, dtype), x, out=out)
  # The rows of a word follow one another, its lowest bits first.
  words = x.view(dtype).reshape(16, 128, packing)
  expected = np.swapaxes(words, 1, 2).reshape(-1, 128)
  assert o.tobytes() == expected.tobytes()


@small.any_kind
@covers("pltpu.einshape")
def test_einshape(dtype):
  x = small.values(16, 256, dtype=dtype)
  fn = lambda x: pltpu.einshape("a(bc)->bac", x, b=2)
  out = jax.ShapeDtypeStruct((2, 16, 128), dtype)
  o = small.on_values(fn, x, out=out)
  np.testing.assert_array_equal(o, np.moveaxis(x.reshape(16, 2, 128), 1, 0))


@small.kinds(np.float32, small.BF16)
@pytest.mark.parametrize("approx", [False, True])
@covers("pltpu.reciprocal")
def test_reciprocal(dtype, approx):
  x = small.values(16, 128, dtype=dtype, low=1)
  fn = lambda x: pltpu.reciprocal(x, approx=approx)
  o = small.on_values(fn, x, out=small.like(x))
  expected = (1 / x.astype(np.float32)).astype(dtype)
  np.testing.assert_array_equal(o, expected)


@pytest.mark.parametrize(
  ("wide", "narrow"),
  [(np.int32, np.int16), (np.int32, np.int8), (np.float32, small.BF16)],
)
@covers("pltpu.pack_elementwise", "pltpu.unpack_elementwise")
def test_pack_and_unpack_elementwise(wide, narrow):
  count = 4 // np.dtype(narrow).itemsize
  xs = [small.values(*small.SLAB, dtype=wide, seed=i) for i in range(count)]

  def fn(*xs):
    packed = pltpu.pack_elementwise(xs, packed_dtype=narrow)
    return packed, *(
      pltpu.unpack_elementwise(
        packed, index=i, packed_dtype=narrow, unpacked_dtype=wide
      )
      for i in range(count)
    )

  word = np.uint32 if wide is np.float32 else wide
  out = (jax.ShapeDtypeStruct(small.SLAB, word), *map(small.like, xs))
  packed, *unpacked = small.on_values(fn, *xs, out=out)
  np.testing.assert_array_equal(unpacked, xs)
  parts = np.stack([x.astype(narrow) for x in xs], -1)
  assert packed.tobytes() == parts.tobytes()


@covers("pltpu.split_bits", "pltpu.join_bits")
def test_split_and_join_bits():
  x = small.values(32, 128, dtype=np.int8, low=-128, high=128)

  def fn(x):
    low, high = pltpu.split_bits(x, (4, 2))
    return (
      low.astype(jnp.int32),
      high.astype(jnp.int32),
      pltpu.join_bits(two_bits=high, four_bits=low),
    )

  word = small.like(x, np.int32)
  low, high, joined = small.on_values(fn, x, out=(word, word, small.like(x)))
  wide = x.astype(np.int32)
  np.testing.assert_array_equal(low & 15, wide & 15)
  np.testing.assert_array_equal(high & 3, wide >> 4 & 3)
  np.testing.assert_array_equal(joined, wide & 63)


@covers("pltpu.pack_fp6", "pltpu.unpack_fp6")
def test_pack_and_unpack_fp6():
  x = small.values(32, 128, dtype=np.int8, low=0, high=64)
  fn = lambda x: pltpu.unpack_fp6(*pltpu.pack_fp6(x))
  np.testing.assert_array_equal(small.on_values(fn, x, out=small.like(x)), x)


@small.kinds(small.BF16, jnp.float8_e5m2, jnp.float8_e4m3fn)
@covers("pltpu.stochastic_round")
def test_stochastic_round(dtype):
  rng = np.random.default_rng(0)
  x = rng.uniform(1, 2, (32, 128)).astype(np.float32)
  bits = rng.integers(0, 1 << 32, x.shape, np.uint32)
  fn = lambda x, b: pltpu.stochastic_round(x, b, target_dtype=dtype)
  o = small.on_values(fn, x, bits, out=small.like(x, dtype))
  step = float(ml_dtypes.finfo(dtype).eps)
  low, high = np.floor(x / step) * step, np.ceil(x / step) * step
  o = o.astype(np.float32)
  assert ((o == low) | (o == high)).all()
  # Unbiased: 4096 errors of at most a step have a mean of 5 deviations.
  assert abs((o - x).mean()) < 5 * step / 2 / np.sqrt(x.size)


# --- random numbers -----------------------------------------------------------


def _drawn(draw, *, dtype: Any = np.float32, seed=3):
  """What a kernel draws, twice one after another."""

  def body(o, line):
    pltpu.prng_seed(seed)
    for i in range(2):
      line[...] = draw()
      pltpu.sync_copy(line, o.at[i])

  return small.run(
    body,
    out=jax.ShapeDtypeStruct((2, 64, 128), dtype),
    cores=small.one_core,
    scratch_types=[pltpu.VMEM((64, 128), dtype)],
  )


def _bits():
  return pltpu.bitcast(pltpu.prng_random_bits((64, 128)), jnp.uint32)


@covers("pltpu.prng_seed", "pltpu.prng_random_bits")
def test_prng():
  o = _drawn(_bits, dtype=np.uint32)
  assert (o[0] != o[1]).any()
  np.testing.assert_array_equal(o, _drawn(_bits, dtype=np.uint32))
  assert (o != _drawn(_bits, dtype=np.uint32, seed=4)).any()
  # 524288 bits: 14 standard deviations.
  assert abs(np.unpackbits(o.view(np.uint8)).mean() - 0.5) < 0.01


# Each with its mean and deviation; 16384 draws are off by a hundredth of it.
_SAMPLERS = {
  "uniform": (lambda: pltpu.stateful_uniform((64, 128)), 0.5, 12**-0.5),
  "normal": (lambda: pltpu.stateful_normal((64, 128)), 0.0, 1.0),
  "bernoulli": (
    lambda: pltpu.stateful_bernoulli(0.25, shape=(64, 128)).astype(jnp.float32),
    0.25,
    (0.25 * 0.75) ** 0.5,
  ),
  "bits": (
    lambda: (
      (pltpu.stateful_bits((64, 128)) >> 8)
      .astype(jnp.int32)
      .astype(jnp.float32)
      * 2**-24
    ),
    0.5,
    12**-0.5,
  ),
}


def _check_sampler(name):
  draw, mean, deviation = _SAMPLERS[name]
  o = _drawn(draw)
  assert (o[0] != o[1]).any()
  assert abs(o.mean() - mean) < 0.05 * deviation
  assert abs(o.std() - deviation) < 0.05 * deviation


@covers("pltpu.stateful_uniform")
def test_stateful_uniform():
  _check_sampler("uniform")


@covers("pltpu.stateful_normal")
def test_stateful_normal():
  _check_sampler("normal")


@covers("pltpu.stateful_bernoulli")
def test_stateful_bernoulli():
  _check_sampler("bernoulli")


@covers("pltpu.stateful_bits")
def test_stateful_bits():
  _check_sampler("bits")


@covers("pltpu.to_pallas_key")
def test_to_pallas_key():
  def call(words):
    key = pltpu.to_pallas_key(jax.random.wrap_key_data(words))

    def body(key, o):
      o[0] = jax.random.uniform(key[...], small.SLAB)
      o[1] = jax.random.uniform(key[...], small.SLAB)
      o[2] = jax.random.uniform(jax.random.fold_in(key[...], 1), small.SLAB)

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    out = jax.ShapeDtypeStruct((3, *small.SLAB), np.float32)
    return pl.pallas_call(body, out, in_specs=[smem])(key)

  with cm.simulation() as run:
    a, same, other = jax.jit(call)(np.array([3, 4], np.uint32))
  np.testing.assert_array_equal(a, same)
  assert (a != other).any()
  assert 0 <= a.min() < 0.02 and 0.98 < a.max() < 1
  assert not run.findings


@covers("pltpu.sample_block")
def test_sample_block():
  whole, tile = (32, 256), (8, 128)
  uniform: Any = jax.random.uniform

  def sampled(block):
    """The same numbers, whatever the blocks."""

    def body(key, o):
      o[...] = pltpu.sample_block(
        uniform,
        key[...],
        block_size=block,
        tile_size=tile,
        total_size=whole,
        block_index=(pl.program_id(0), pl.program_id(1)),
      )

    grid = tuple(n // b for n, b in zip(whole, block, strict=True))
    key = pltpu.to_pallas_key(jax.random.key(0))
    with cm.simulation() as run:
      o = pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(whole, np.float32),
        grid=grid,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)],
        out_specs=pl.BlockSpec(block, lambda i, j: (i, j)),
      )(key)
    assert not run.findings
    return np.asarray(o)

  o = sampled((8, 128))
  np.testing.assert_array_equal(o, sampled((16, 256)))
  assert len(np.unique(o)) > 0.99 * o.size


# --- the matrix unit ----------------------------------------------------------


@small.kinds(np.float32, small.BF16, np.int8)
@covers("pltpu.conv")
def test_conv(dtype):
  x = small.values(1, 8, 16, 128, dtype=dtype, low=-4, high=5)
  w = small.values(3, 2, 128, 128, dtype=dtype, low=-4, high=5)
  total = np.int32 if np.dtype(dtype).kind == "i" else np.float32
  out = jax.ShapeDtypeStruct((1, 6, 15, 128), total)
  fn = lambda x, w: pltpu.conv(
    x,
    w,
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
    preferred_element_type=total,
  )
  o = small.on_values(fn, x, w, out=out)
  x, w = x.astype(np.int64), w.astype(np.int64)
  expected = sum(
    x[:, i : i + 6, j : j + 15] @ w[i, j] for i in range(3) for j in range(2)
  )
  np.testing.assert_array_equal(o, expected)


_ON_TPU7X: dict[str, Any] = {"chip": "tpu7x:2x2x1"}


@small.kinds(small.BF16, jnp.float8_e4m3fn)
@covers("pltpu.matmul_push_rhs", "pltpu.matmul_acc_lhs", "pltpu.matmul_pop")
def test_matmul_with_accumulators(dtype):
  a = small.values(16, 256, dtype=dtype, low=-4, high=5)
  w = small.values(256, 256, dtype=dtype, low=-4, high=5, seed=1)

  def compute(a, w, o):
    def inside(acc):
      pltpu.matmul_push_rhs(w[...], 0, 0)
      pltpu.matmul_acc_lhs(acc, a[...], load_staged_rhs=0)
      pltpu.matmul_acc_lhs(acc, a[...])
      o[...] = pltpu.matmul_pop(acc)

    pl.run_scoped(inside, pltpu.ACC(0)((16, 256), np.float32))

  out = jax.ShapeDtypeStruct((16, 256), np.float32)
  o = small.in_vmem(compute, a, w, out=out, **_ON_TPU7X)
  np.testing.assert_array_equal(o, 2 * a.astype(int) @ w.astype(int))


@covers(
  "pltpu.matmul_push_rhs", "pltpu.matmul_lhs_fifo", "pltpu.matmul_pop_fifo"
)
def test_matmul_with_queues():
  a = small.values(16, 256, dtype=small.BF16, low=-4, high=5)
  w = small.values(256, 256, dtype=small.BF16, low=-4, high=5, seed=1)

  def compute(a, w, o):
    pltpu.matmul_push_rhs(w[...], 1, 0, transpose=True)
    pltpu.matmul_lhs_fifo(a[...], 0, load_staged_rhs=1)
    o[...] = pltpu.matmul_pop_fifo((16, 256), jnp.float32, 0)

  out = jax.ShapeDtypeStruct((16, 256), np.float32)
  o = small.in_vmem(compute, a, w, out=out, **_ON_TPU7X)
  np.testing.assert_array_equal(o, a.astype(int) @ w.astype(int).T)
