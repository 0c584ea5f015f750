"""TensorCore value primitives compute what JAX and plain loops compute."""

from fractions import Fraction
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coremesh.simulate import hardware_random, matrix_unit, tensor_core
from tests import simulate_rules

_BF16 = ml_dtypes.bfloat16
_INT4 = ml_dtypes.int4
_MXU_KIND = "TPU7x"  # has accumulators and result queues


def _evaluate(fn, *args, kind="TPU v5", states=()):
  closed = simulate_rules.trace(fn, *args, kind=kind)
  return simulate_rules.run(tensor_core.RULES, closed, *args, states=states)


def _bits(rng, shape, dtype):
  """Any bits at all, nan included, as values of `dtype`."""
  size = np.dtype(dtype).itemsize
  raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8)
  return raw.view(dtype)


def _words(x):
  """The bits of each value as Python integers, in the shape of `x`."""
  width = jax.dtypes.itemsize_bits(x.dtype)
  unsigned = x.view(f"u{x.dtype.itemsize}")
  return np.vectorize(lambda v: int(v) & ((1 << width) - 1), otypes="O")(
    unsigned
  )


# --- moving bits -----------------------------------------------------------


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(
  "old, new",
  [
    (np.float32, np.int32),
    (np.float32, _BF16),
    (_BF16, np.uint32),
    (np.int8, np.float32),
    (np.int32, np.int8),
    (np.int16, ml_dtypes.float8_e5m2),
    (_INT4, np.int8),
    (np.int8, _INT4),
    (_INT4, np.uint32),
    (np.int32, _INT4),
    (_INT4, ml_dtypes.int2),
    (ml_dtypes.int2, ml_dtypes.uint4),
    (_INT4, ml_dtypes.float4_e2m1fn),
  ],
)
def test_bitcast_joins_neighbours_from_the_lowest_bits_up(old, new, dim):
  rng = np.random.default_rng(0)
  x = _bits(rng, (2, 16, 16), old)
  (result,) = _evaluate(lambda x: pltpu.bitcast(x, new, dim=dim), x)
  old_bits, new_bits = (jax.dtypes.itemsize_bits(d) for d in (old, new))
  given = np.moveaxis(_words(x), dim, -1).reshape(32, 16)
  got = np.moveaxis(_words(np.ascontiguousarray(result)), dim, -1)
  for row, wanted in zip(got.reshape(32, -1), given, strict=True):
    # A row is one long number, whose lowest bits come first.
    assert sum(int(v) << i * new_bits for i, v in enumerate(row)) == sum(
      int(v) << i * old_bits for i, v in enumerate(wanted)
    )


@pytest.mark.parametrize(
  "old, new", [(np.float32, _BF16), (np.int8, np.int32), (np.int32, np.int16)]
)
def test_bitcast_of_rows_is_that_of_jax_on_a_cpu(old, new):
  x = _bits(np.random.default_rng(1), (2, 8, 3), old)
  (result,) = _evaluate(lambda x: pltpu.bitcast(x, new), x)
  expected = np.asarray(jax.jit(lambda x: pltpu.bitcast(x, new))(x))
  assert np.ascontiguousarray(result).tobytes() == expected.tobytes()


def test_bitcast_pairs_rows():
  x = np.array([[1, 2], [3, 4]], np.int16)
  (result,) = _evaluate(lambda x: pltpu.bitcast(x, jnp.int32), x)
  np.testing.assert_array_equal(result, [[0x30001, 0x40002]])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shift", [0, 1, 5, 8, 23, -3])
def test_roll_is_that_of_numpy(axis, shift):
  x = np.arange(3 * 8 * 5, dtype=np.float32).reshape(3, 8, 5)
  shift = np.int32(shift)  # traced, so that negative shifts pass
  (result,) = _evaluate(lambda x, s: pltpu.roll(x, s, axis), x, shift)
  np.testing.assert_array_equal(result, np.roll(x, int(shift), axis))


@pytest.mark.parametrize("axis, stride_axis", [(0, 1), (1, 0), (2, 0), (1, 2)])
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_roll_with_a_stride_moves_each_row_further(axis, stride_axis, stride):
  x = np.arange(3 * 8 * 5, dtype=_BF16).reshape(3, 8, 5)
  for shift in (0, 2, 11):
    (result,) = _evaluate(
      lambda x, s: pltpu.roll(
        x, s, axis, stride=stride, stride_axis=stride_axis
      ),
      *(x, np.int32(shift)),
    )
    for i in range(x.shape[stride_axis]):
      at = (slice(None),) * stride_axis + (slice(i, i + 1),)
      expected = jnp.roll(x[at], shift + i * stride, axis)
      np.testing.assert_array_equal(result[at], expected)


@pytest.mark.parametrize(
  "dtype, packed_dtype",
  [
    (np.int32, np.int16),
    (np.int32, np.int8),
    (np.uint32, np.uint8),
    (np.int16, np.int8),
    (np.int8, _INT4),
    (np.int8, ml_dtypes.int2),
    (np.int32, _INT4),
  ],
)
def test_pack_elementwise_cuts_integers_and_unpack_extends_them(
  dtype, packed_dtype
):
  rng = np.random.default_rng(0)
  width = jax.dtypes.itemsize_bits(packed_dtype)
  factor = np.dtype(dtype).itemsize * 8 // width
  xs = [_bits(rng, (3, 5), dtype) for _ in range(factor)]
  (packed,) = _evaluate(
    lambda *xs: pltpu.pack_elementwise(xs, packed_dtype=packed_dtype), *xs
  )
  cut = [_words(x) & ((1 << width) - 1) for x in xs]
  expected = np.sum([c << i * width for i, c in enumerate(cut)], axis=0)
  np.testing.assert_array_equal(packed, expected.astype(packed.dtype))
  for i, c in enumerate(cut):
    (result,) = _evaluate(
      lambda x, i=i: pltpu.unpack_elementwise(
        x, index=i, packed_dtype=packed_dtype, unpacked_dtype=dtype
      ),
      packed,
    )
    # By their sign, unsigned ones too.
    wanted = np.where(c >> (width - 1), c - (1 << width), c)
    modulus = 1 << result.dtype.itemsize * 8
    np.testing.assert_array_equal(_words(result), wanted % modulus)


def test_pack_elementwise_rounds_floats_and_unpack_is_exact():
  rng = np.random.default_rng(0)
  xs = rng.normal(size=(2, 4, 8)).astype(np.float32)
  xs[0, 0, :5] = np.nan, np.inf, -0.0, 3.4e38, 1 + 2**-8
  (packed,) = _evaluate(
    lambda *xs: pltpu.pack_elementwise(xs, packed_dtype=jnp.bfloat16), *xs
  )
  assert packed.dtype == np.uint32
  for i, x in enumerate(xs):
    (result,) = _evaluate(
      lambda p, i=i: pltpu.unpack_elementwise(
        p, index=i, packed_dtype=jnp.bfloat16, unpacked_dtype=jnp.float32
      ),
      packed,
    )
    np.testing.assert_array_equal(result, x.astype(_BF16).astype(np.float32))
    np.testing.assert_array_equal(
      packed >> 16 * i & 0xFFFF, x.astype(_BF16).view(np.uint16)
    )


def test_unpack_elementwise_finds_what_its_docstring_says():
  packed = _bits(np.random.default_rng(0), (4, 6), np.int16)
  (rows,) = _evaluate(lambda x: pltpu.bitcast(x, jnp.int8), packed)
  for index in (0, 1):
    (result,) = _evaluate(
      lambda x, i=index: pltpu.unpack_elementwise(
        x, index=i, packed_dtype=jnp.int8, unpacked_dtype=jnp.int16
      ),
      packed,
    )
    np.testing.assert_array_equal(result, rows[index::2].astype(np.int16))


# --- arithmetic ------------------------------------------------------------


@pytest.mark.parametrize(
  # JAX cannot lower an approximate one of bfloat16 for a CPU.
  "dtype, approx",
  [(np.float32, False), (np.float32, True), (_BF16, False)],
)
@pytest.mark.parametrize("full_range", [True, False])
def test_reciprocal_is_that_of_jax_on_a_cpu(dtype, approx, full_range):
  x = np.random.default_rng(0).normal(size=64).astype(dtype)
  x[:7] = 1e30, 1e-30, 0.0, -0.0, np.inf, -np.inf, np.nan
  fn = lambda x: pltpu.reciprocal(x, approx=approx, full_range=full_range)
  (result,) = _evaluate(fn, x)
  np.testing.assert_array_equal(
    result.astype(np.float32), jax.jit(fn)(x).astype(np.float32)
  )


def test_an_approximate_reciprocal_is_seen_to_be_one():
  x = np.array([1, 2, 1 + 2**-9, 3], np.float32)
  (result,) = _evaluate(lambda x: pltpu.reciprocal(x, approx=True), x)
  np.testing.assert_array_equal(result, 1 / x[[0, 1, 0, 3]])
  x = x.astype(_BF16)
  (result,) = _evaluate(lambda x: pltpu.reciprocal(x, approx=True), x)
  np.testing.assert_array_equal(result, np.divide(_BF16(1), x))


def _round_loop(x, bits, dtype):
  """One value, with fractions: adds the random bits to what is cut off."""
  info = ml_dtypes.finfo(dtype)
  cut_bits = 23 - info.nmant
  exact = Fraction(abs(float(x)))
  exponent = max(math.frexp(float(exact))[1] - 1, int(info.minexp))
  step = Fraction(2) ** (exponent - info.nmant)
  chance = Fraction(int(bits) % (1 << cut_bits), 1 << cut_bits)
  rounded = math.floor(exact / step + chance) * step
  return math.copysign(float(rounded), float(x))


@pytest.mark.parametrize(
  "dtype",
  [
    _BF16,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float4_e2m1fn,
  ],
)
def test_stochastic_round_adds_random_bits_and_cuts(dtype):
  rng = np.random.default_rng(0)
  x = rng.normal(size=400).astype(np.float32)
  x[:200] *= np.exp2(rng.integers(-12, 2, 200)).astype(np.float32)
  bits = rng.integers(0, 1 << 32, 400, np.uint32)
  bits[::7], bits[1::7] = 0, 0xFFFFFFFF
  fn = lambda x, b: pltpu.stochastic_round(x, b, target_dtype=jnp.dtype(dtype))
  (result,) = _evaluate(fn, x, bits)
  expected = [_round_loop(v, b, dtype) for v, b in zip(x, bits, strict=True)]
  np.testing.assert_array_equal(
    result.astype(np.float64), np.array(expected).astype(dtype).astype(float)
  )


def test_stochastic_round_is_the_integer_sum_that_bfloat16_allows():
  x = _bits(np.random.default_rng(0), (1000,), np.float32)
  bits = _bits(np.random.default_rng(1), (1000,), np.uint32)
  keep = np.isfinite(x) & (np.abs(x) > 1e-37)
  x, bits = x[keep], bits[keep]
  fn = lambda x, b: pltpu.stochastic_round(x, b, target_dtype=jnp.bfloat16)
  (result,) = _evaluate(fn, x, bits)
  total = x.view(np.uint32) + (bits & 0xFFFF)
  np.testing.assert_array_equal(
    result.view(np.uint16), (total >> 16).astype(np.uint16)
  )


def test_stochastic_round_leaves_what_no_bits_can_move():
  x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0], np.float32)
  bits = np.full(x.shape, 0xFFFFFFFF, np.uint32)
  fn = lambda x, b: pltpu.stochastic_round(x, b, target_dtype=jnp.bfloat16)
  (result,) = _evaluate(fn, x, bits)
  np.testing.assert_array_equal(result.astype(np.float32), x)
  np.testing.assert_array_equal(np.signbit(result)[1:], np.signbit(x)[1:])


def test_stochastic_round_to_integers_saturates():
  x = np.array([2.25, -2.25, 2.25, -2.25, 9, -99, np.nan, 7.5], np.float32)
  bits = np.array([0, 0, 3 << 30, 3 << 30, 0, 0, 0, 1 << 31], np.uint32)
  fn = lambda x, b: pltpu.stochastic_round(x, b, target_dtype=jnp.int4)
  (result,) = _evaluate(fn, x, bits)
  np.testing.assert_array_equal(
    result.astype(np.int32), [2, -2, 3, -3, 7, -8, 0, 7]
  )


# --- hints -----------------------------------------------------------------


def test_delays_and_traces_leave_no_value():
  def fn(x):
    pl.delay(5)
    pltpu.trace_value("x", x)
    return x

  assert _evaluate(fn, np.int32(3)) == [3]


# --- convolution -----------------------------------------------------------

_NHWC = ("NHWC", "HWIO", "NHWC")
_NCHW = ("NCHW", "OIHW", "NCHW")


@pytest.mark.parametrize(
  "lhs_shape, rhs_shape, options",
  [
    ((2, 7, 6, 3), (3, 2, 3, 4), {}),
    ((2, 7, 6, 3), (3, 2, 3, 4), {"padding": "SAME"}),
    ((2, 9, 8, 3), (3, 3, 3, 4), {"window_strides": (2, 3)}),
    ((1, 5, 5, 2), (3, 3, 2, 2), {"padding": ((1, 2), (0, -1))}),
    ((1, 6, 5, 2), (2, 2, 2, 2), {"padding": ((-2, 0), (-1, -1))}),
    ((1, 6, 5, 2), (2, 2, 2, 2), {"padding": ((-2, 0), (-1, -3))}),  # empty
    (
      (1, 6, 5, 2),
      (2, 2, 2, 2),
      {"lhs_dilation": (2, 3), "padding": ((-1, 2), (-2, -1))},
    ),
    ((1, 9, 9, 2), (3, 2, 2, 2), {"rhs_dilation": (2, 3)}),
    ((3, 6, 6, 4), (3, 3, 2, 6), {"feature_group_count": 2}),
    ((4, 6, 6, 3), (3, 3, 3, 6), {"batch_group_count": 2}),
    ((2, 3, 6, 5), (4, 3, 2, 3), {"dimension_numbers": _NCHW}),
    ((2, 6, 3), (4, 3, 5), {"dimension_numbers": ("NHC", "HIO", "HCN")}),
  ],
)
@pytest.mark.parametrize("dtype", [_BF16, np.int8])
def test_conv_is_that_of_jax(lhs_shape, rhs_shape, options, dtype):
  rng = np.random.default_rng(0)
  # Small integers: every order of summation gives the same floats.
  lhs, rhs = (
    rng.integers(-4, 5, shape).astype(dtype) for shape in (lhs_shape, rhs_shape)
  )
  kind = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32
  options = {
    "dimension_numbers": _NHWC,
    "preferred_element_type": kind,
    **options,
  }
  (result,) = _evaluate(lambda a, b: pltpu.conv(a, b, **options), lhs, rhs)
  space = len(lhs_shape) - 2
  defaults = {"window_strides": (1,) * space, "padding": "VALID"}
  expected = jax.lax.conv_general_dilated(
    jnp.asarray(lhs), jnp.asarray(rhs), **(defaults | options)
  )
  np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_conv_reverses_windows_and_adds_to_an_accumulator(dtype):
  rng = np.random.default_rng(0)
  lhs = rng.integers(-4, 5, (1, 6, 7, 2)).astype(dtype)
  rhs = rng.integers(-4, 5, (3, 2, 2, 5)).astype(dtype)
  acc = rng.integers(-4, 5, (1, 4, 6, 5)).astype(dtype)
  (result,) = _evaluate(
    lambda a, b, c: pltpu.conv(
      *(a, b, c), dimension_numbers=_NHWC, window_reversal=(True, False)
    ),
    *(lhs, rhs, acc),
  )
  expected = acc + jax.lax.conv_general_dilated(
    jnp.asarray(lhs),
    jnp.asarray(rhs)[::-1],
    (1, 1),
    "VALID",
    dimension_numbers=_NHWC,
  )
  np.testing.assert_array_equal(result, expected)


# --- the matrix unit -------------------------------------------------------


def _run_mxu(fn, *args):
  mxu = matrix_unit.Mxu()
  states = [(matrix_unit.STATEFUL, mxu)]
  return _evaluate(fn, *args, kind=_MXU_KIND, states=states), mxu


def _operands(dtype, count):
  rng = np.random.default_rng(0)
  arrays = rng.integers(-8, 8, (count, 256, 256)).astype(dtype)
  return list(arrays)


@pytest.mark.parametrize("dtype", [_BF16, np.float32, np.int8])
def test_accumulators_sum_products_until_popped(dtype):
  sums = np.int32 if dtype is np.int8 else np.float32

  def kernel(w, v, a, b):
    def body(acc):
      pltpu.matmul_push_rhs(w, 0, 1)
      pltpu.matmul_push_rhs(v, 1, 1, transpose=True)
      pltpu.matmul_acc_lhs(acc, a, load_staged_rhs=0)
      pltpu.matmul_acc_lhs(acc, b)
      pltpu.matmul_acc_lhs(acc, b, load_staged_rhs=1)
      return pltpu.matmul_pop(acc), pltpu.matmul_pop(acc)

    return pl.run_scoped(body, pltpu.ACC(1)((16, 256), sums))

  w, v, a, b = _operands(dtype, 4)
  a, b = a[:16], b[:16]
  (first, second), mxu = _run_mxu(kernel, w, v, a, b)
  w, v, a, b = (x.astype(np.int64) for x in (w, v, a, b))
  np.testing.assert_array_equal(first, a @ w + b @ w + b @ v.T)
  np.testing.assert_array_equal(second, np.zeros((16, 256)))
  assert not mxu.leftovers()


def test_queues_give_rows_in_order_and_units_apart():
  def kernel(w, v, a, b):
    pltpu.matmul_push_rhs(w, 0, 0)
    pltpu.matmul_push_rhs(v, 0, 1)
    pltpu.matmul_lhs_fifo(a, 0, load_staged_rhs=0)
    pltpu.matmul_lhs_fifo(b, 1, load_staged_rhs=0)
    pltpu.matmul_lhs_fifo(b, 0)
    return [
      pltpu.matmul_pop_fifo((m, 256), jnp.float32, unit)
      for m, unit in [(8, 0), (16, 1), (24, 0)]
    ]

  w, v, a, b = _operands(_BF16, 4)
  a, b = a[:16], b[:16]
  results, mxu = _run_mxu(kernel, w, v, a, b)
  w, v, a, b = (x.astype(np.int64) for x in (w, v, a, b))
  rows = np.concatenate([a @ w, b @ w])
  for result, expected in zip(
    results, [rows[:8], b @ v, rows[8:]], strict=True
  ):
    np.testing.assert_array_equal(result, expected)
  assert not mxu.leftovers()


def test_sums_of_integers_wrap():
  a = np.full((1, 4), 1 << 15, np.int32)
  b = np.full((4, 1), 1 << 14, np.int32)
  mxu = matrix_unit.Mxu()
  mxu.push_rhs(b, staging_register=0, mxu_index=0)
  acc = np.zeros((1, 1), np.int32)
  mxu.acc_lhs(acc, a, mxu_index=0, load_staged_rhs=0)
  assert acc[0, 0] == -(1 << 31)


def test_misuse_of_the_matrix_unit_is_named():
  mxu = matrix_unit.Mxu()
  x = np.ones((8, 8), np.float32)
  with pytest.raises(ValueError, match="MXU 0 has no right-hand side"):
    mxu.lhs_fifo(x, mxu_index=0)
  with pytest.raises(ValueError, match="register of MXU 0 is empty"):
    mxu.lhs_fifo(x, mxu_index=0, load_staged_rhs=1)
  mxu.push_rhs(x, staging_register=1, mxu_index=0)
  with pytest.raises(ValueError, match="holds an operand that was not loaded"):
    mxu.push_rhs(x, staging_register=1, mxu_index=0)
  mxu.push_rhs(x, staging_register=1, mxu_index=2)
  mxu.lhs_fifo(x, mxu_index=0, load_staged_rhs=1)
  with pytest.raises(ValueError, match=r"float32\[16, 8\], but its queue"):
    mxu.pop_fifo((16, 8), np.float32, mxu_index=0)
  with pytest.raises(ValueError, match="operands of a matmul must be"):
    mxu.lhs_fifo(x.astype(_BF16), mxu_index=0)
  assert mxu.leftovers() == [
    "an operand in staging register 1 of MXU 2",
    "8 rows in the result queue of MXU 0",
  ]


# --- random numbers --------------------------------------------------------


def _run_random(fn, *args, prng=None):
  prng = prng or hardware_random.Prng()
  return _evaluate(fn, *args, states=[(hardware_random.STATEFUL, prng)])


def test_the_same_seeds_give_the_same_bits_and_others_other_ones():
  def draw(*seeds):
    pltpu.prng_seed(*seeds)
    return pltpu.prng_random_bits((8, 128)), pltpu.prng_random_bits((8, 128))

  seeds = [(0,), (1,), (1, 0), (0, 1), (-1,), (1 << 30, 7, 9)]
  drawn = [_run_random(draw, *map(np.int32, s)) for s in seeds]
  again = [_run_random(draw, *map(np.int32, s)) for s in seeds]
  np.testing.assert_array_equal(drawn, again)
  different = {x.tobytes() for pair in drawn for x in pair}
  assert len(different) == 2 * len(seeds)


def test_bits_are_uniform():
  draw = lambda: pltpu.prng_random_bits((64, 128))
  (bits,) = _run_random(draw)
  ones = np.unpackbits(bits.view(np.uint8)).mean()
  assert abs(ones - 0.5) < 0.01  # 262144 bits: 10 standard deviations


def test_stateful_samplers_draw_on():
  def draw():
    pltpu.prng_seed(3)
    return [pltpu.stateful_uniform((8, 128)) for _ in range(2)]

  a, b = _run_random(draw)
  assert a.dtype == np.float32 and (a != b).any()
  assert 0 <= a.min() < 0.01 and 0.99 < a.max() < 1


def test_keys_seed_the_generator_each_time():
  data = np.array([[5, 6]], np.uint32)
  key = jax.random.wrap_key_data(jnp.asarray(data), impl="pallas_tpu")

  def draw(key):
    bits = jax.random.bits(key, (8, 128))
    folded = jax.random.fold_in(key, 3)
    return (
      bits,
      jax.random.bits(key, (8, 128)),
      jax.random.bits(folded, (8, 128)),
    )

  closed = simulate_rules.trace(draw, key)
  prng = hardware_random.Prng()
  one, same, other = simulate_rules.run(
    *(tensor_core.RULES, closed, data),
    states=[(hardware_random.STATEFUL, prng)],
  )
  np.testing.assert_array_equal(one, same)
  assert (one != other).any()
  prng.seed(5, 6)
  np.testing.assert_array_equal(one, prng.random_bits((8, 128), np.uint32))


def test_fold_in_mixes_as_jax_does():
  data = np.array([[5, 0xFFFFFFFE]], np.uint32)
  key = jax.random.wrap_key_data(jnp.asarray(data), impl="pallas_tpu")
  closed = simulate_rules.trace(lambda k: jax.random.fold_in(k, 9), key)
  (folded,) = simulate_rules.run(
    *(tensor_core.RULES, closed, data),
    states=[(hardware_random.STATEFUL, hardware_random.Prng())],
  )
  # (5, 7) after the sum; 12; 7 << 13; exclusive or.
  np.testing.assert_array_equal(folded, [[12, 7 << 13 ^ 12]])


def test_keys_split_and_join():
  data = np.array([[5, 6]], np.uint32)
  words = tensor_core.RULES["tpu.split_key"]({}, [], [])(data)
  assert [int(w) for w in words] == [5, 6]
  assert all(w.dtype == np.uint32 and w.shape == () for w in words)
  joined = tensor_core.RULES["tpu.join_key"]({}, [], [])(*words)
  np.testing.assert_array_equal(joined, data)
