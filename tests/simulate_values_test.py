"""Tests for coremesh.simulate.values: every rule agrees with jax.jit."""

import itertools

import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coremesh.simulate import values

_F32, _F16 = np.dtype(np.float32), np.dtype(np.float16)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_E4M3, _E5M2 = (
  np.dtype(ml_dtypes.float8_e4m3fn),
  np.dtype(ml_dtypes.float8_e5m2),
)
_I4, _U4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)
_I32, _I16, _I8, _U32, _U8 = map(np.dtype, ("i4", "i2", "i1", "u4", "u1"))
_BOOL = np.dtype(np.bool_)

_FLOATS = (_F32, _BF16, _F16, _E4M3, _E5M2)
_INTS = (_I32, _I16, _I8, _U32, _U8, _I4, _U4)
_NUMBERS = _FLOATS + _INTS
_ALL = (*_NUMBERS, _BOOL)

# Compiled code runs once: what XLA spends on speed is lost.
_OPTIONS = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}


# --- jax and the rules -----------------------------------------------------


def _frozen(value):
  """An input that a rule which writes to it fails on."""
  if isinstance(value, np.ndarray):
    value = value.view()
    value.flags.writeable = False
  return value


def _evaluate(jaxpr, consts, args):
  """The program's results, every equation by its rule."""
  env = dict(zip(jaxpr.constvars, consts, strict=True))
  env.update(zip(jaxpr.invars, args, strict=True))

  def read(atom):
    if hasattr(atom, "val"):
      return np.asarray(atom.val, atom.aval.dtype)[()]
    return env[atom]

  for eqn in jaxpr.eqns:
    inputs = [_frozen(read(atom)) for atom in eqn.invars]
    out_avals = [var.aval for var in eqn.outvars]
    if "jaxpr" in eqn.params and eqn.primitive.name == "jit":
      inner = eqn.params["jaxpr"]
      results = _evaluate(inner.jaxpr, inner.consts, inputs)
    else:
      in_avals = [atom.aval for atom in eqn.invars]
      rule = values.RULES[eqn.primitive.name]
      results = rule(eqn.params, in_avals, out_avals)(*inputs)
      if not eqn.primitive.multiple_results:
        results = [results]
    for var, value in zip(eqn.outvars, results, strict=True):
      what = f"{eqn.primitive} of {[str(a.aval) for a in eqn.invars]}"
      assert isinstance(value, np.ndarray | np.generic), what
      assert value.dtype == var.aval.dtype, (what, value.dtype)
      assert value.shape == var.aval.shape, (what, value.shape)
      env[var] = value
  return [read(atom) for atom in jaxpr.outvars]


def _double(x):
  return np.asarray(x).astype(np.float64)


def _check_equal(found, expected, what, *, ulps, near, zero_signs):
  """Of one result; denormal results count as zero, as XLA may flush them."""
  if not jnp.issubdtype(expected.dtype, jnp.floating):
    np.testing.assert_array_equal(found, expected, what)
    return
  info = ml_dtypes.finfo(expected.dtype)
  x, y = _double(found), _double(expected)
  tiny = float(info.smallest_normal)
  if zero_signs:
    shown = ~np.isnan(y)
    np.testing.assert_array_equal(
      np.signbit(x)[shown], np.signbit(y)[shown], what
    )
  with np.errstate(invalid="ignore"):
    close = np.abs(x - y) <= ulps * float(info.eps) * np.abs(y) + near
  same = (x == y) | (np.isnan(x) & np.isnan(y)) | close
  same |= (np.abs(x) <= tiny) & (np.abs(y) <= tiny)
  if not same.all():
    raise AssertionError(f"{what}: {x[~same][:9]} for {y[~same][:9]}")


def _agree(fn, *args, ulps=0.0, near=0.0, zero_signs=True):
  """Fails unless the rules and jax.jit give the same results.

  Args:
    fn: of arrays; returns an array, or a tree of them.
    *args: numpy arrays, or lists of them.
    ulps: how many times the dtype's epsilon results may differ, relatively.
    near: how far they may differ besides, absolutely.
    zero_signs: whether -0 and +0 differ.
  """
  flat, _ = jax.tree.flatten(args)
  traced = jax.make_jaxpr(fn)(*args)
  with np.errstate(all="ignore"):
    found = _evaluate(traced.jaxpr, traced.consts, flat)
  expected = jax.tree.leaves(
    jax.jit(fn, compiler_options=_OPTIONS)(*args)
  )
  types = [str(jax.typeof(x)) for x in flat]
  for number, (x, y) in enumerate(zip(found, expected, strict=True)):
    _check_equal(
      x,
      np.asarray(y),
      f"result {number} of {types}",
      ulps=ulps,
      near=near,
      zero_signs=zero_signs,
    )


# --- arguments -------------------------------------------------------------


def _specials(dtype):
  """Values where rules go wrong; no denormals."""
  if dtype == _BOOL:
    return np.array([False, True])
  if jnp.issubdtype(dtype, jnp.integer):
    info = ml_dtypes.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    some = [low, low + 1, -7, -1, 0, 1, 2, 3, 7, high // 2, high - 1, high]
    return np.array([x for x in some if low <= x <= high]).astype(dtype)
  some = [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3, 0.75]
  some += [np.inf, -np.inf, np.nan]
  info = ml_dtypes.finfo(dtype)
  some += [float(info.max), float(info.min), float(info.smallest_normal)]
  return np.array(some).astype(dtype)


def _random(dtype, shape, seed=0, scale=4.0):
  rng = np.random.default_rng(seed)
  if dtype == _BOOL:
    return rng.random(shape) < 0.5
  if jnp.issubdtype(dtype, jnp.integer):
    info = ml_dtypes.iinfo(dtype)
    drawn = rng.integers(int(info.min), int(info.max) + 1, shape)
    return np.asarray(drawn).astype(dtype)
  return np.asarray(rng.normal(0, scale, shape)).astype(dtype)


def _operands(dtype, count):
  """`count` arguments: special values, each with each, then random ones."""
  special = _specials(dtype)
  columns = list(zip(*itertools.product(special, repeat=count), strict=True))
  return [
    np.concatenate(
      [np.array(column, dtype), _random(dtype, 16, seed, scale=3.0)]
    )
    for seed, column in enumerate(columns)
  ]


def _ranks(operands):
  """The operands as they are, and at ranks 0, 2 and 3.

  Rank 0 comes as numpy's scalar and as an array.
  """
  yield operands
  yield [x[-1] for x in operands]
  yield [np.asarray(x[1]) for x in operands]
  yield [x[-8:].reshape(2, 4) for x in operands]
  yield [x[-12:].reshape(2, 2, 3) for x in operands]


def _elementwise(op, dtypes, count, *, ranked=(_F32, _I32, _BOOL), **how):
  """Checks `op` on all dtypes in one compilation."""
  cases = []
  for dtype in dtypes:
    operands = _operands(dtype, count)
    cases += list(_ranks(operands)) if dtype in ranked else [operands]
    if dtype not in ranked:
      cases.append([x[-1] for x in operands])
  _agree(lambda cases: [op(*case) for case in cases], cases, **how)


# --- arithmetic ------------------------------------------------------------


@pytest.mark.parametrize("op", [lax.add, lax.sub, lax.mul, lax.div])
def test_arithmetic_is_exact(op):
  _elementwise(op, _NUMBERS, 2)


def test_a_remainder_has_the_dividends_sign():
  _elementwise(lax.rem, _NUMBERS, 2)


@pytest.mark.parametrize("op", [lax.max, lax.min])
def test_max_and_min_propagate_nan(op):
  # Either zero is right.
  _elementwise(op, _ALL, 2, zero_signs=False)


@pytest.mark.parametrize("op", [lax.neg, lax.sign, lax.square])
def test_signs_and_squares_are_exact(op):
  _elementwise(op, _NUMBERS, 1)


def test_an_absolute_value_wraps():
  _elementwise(lax.abs, (*_FLOATS, _I32, _I16, _I8), 1)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 7, -1, -3])
def test_an_integer_power_multiplies(exponent):
  kinds = _FLOATS[:3] if exponent < 0 else (*_FLOATS[:3], _I32, _U8, _I4)
  # bfloat16 and float16: XLA may round between the products.
  _elementwise(lambda x: lax.integer_pow(x, exponent), kinds, 1, ulps=4)


def test_a_product_may_be_wider_than_its_factors():
  args = [_random(_BF16, (4, 5)), _random(_BF16, (4, 5), 1)]
  args += [_random(_I8, (4, 5)), _random(_I8, (4, 5), 1)]

  def products(a, b, c, d):
    return [
      lax.mul(a, b, out_dtype=jnp.float32),
      lax.mul(c, d, out_dtype=jnp.int32),
    ]

  _agree(products, *args)


def test_a_clamp_holds_between_limits():
  _elementwise(lax.clamp, (_F32, _BF16, _I32, _I4), 3, zero_signs=False)
  x = _random(_F32, (3, 4))
  _agree(lambda x: lax.clamp(np.float32(-1), x, np.float32(2)), x)


def test_polynomials_follow_horner():
  x = _random(_F32, (3, 4))
  one, two = np.float32(1.5), np.float32(-2)
  # XLA may fuse the product and the sum.
  _agree(lambda x: lax.polynomial(x, [one, two, one]), x, ulps=4, near=1e-5)
  _agree(lambda x: lax.polynomial(x, [one]), x)
  _agree(lambda x: 1 - jnp.tanh(x) ** 2, x, ulps=8, near=1e-6)


@pytest.mark.parametrize("dtype", [_I32, _U32, _I8, _U8])
def test_the_high_half_of_a_product(dtype):
  _agree(lax.mulhi, *_operands(dtype, 2))


# --- functions -------------------------------------------------------------

# numpy's, scipy's and XLA's float32 functions each err by an ulp or two; XLA's
# approximations of the second group by more.
_ULPS = {
  **dict.fromkeys(("floor", "ceil", "sqrt"), 0),
  **dict.fromkeys(("exp", "exp2", "log", "log1p", "expm1", "log2"), 4),
  **dict.fromkeys(("tanh", "logistic", "sin", "cos", "atan", "cbrt"), 4),
  **dict.fromkeys(("rsqrt", "erf", "erfc", "asin", "acos", "sinh"), 8),
  **dict.fromkeys(("cosh", "asinh", "acosh", "atanh", "tan"), 8),
  **dict.fromkeys(("erf_inv", "lgamma", "digamma"), 32),
}


@pytest.mark.parametrize("name", _ULPS)
def test_functions_are_close(name):
  # Near a root the absolute error is what the approximation keeps.
  near = 1e-5 if name in ("lgamma", "digamma") else 0
  _elementwise(
    getattr(lax, name), _FLOATS, 1, ulps=_ULPS[name], near=near
  )


@pytest.mark.parametrize("op", [lax.pow, lax.atan2])
def test_functions_of_two_are_close(op):
  _elementwise(op, _FLOATS, 2, ulps=8)


def test_a_power_may_be_an_integer():
  base, power = _random(_F32, (40,)), _random(_I32, (40,)) % 7
  _agree(lax.pow, base, power, ulps=8)
  _agree(lax.pow, base.astype(_BF16), power, ulps=1)


@pytest.mark.parametrize("method", lax.RoundingMethod)
def test_ties_round_as_asked(method):
  _elementwise(lambda x: lax.round(x, method), _FLOATS, 1)
  x = np.array([0.49999997, -0.49999997, 3.5, -4.5, 8388609], np.float32)
  _agree(lambda x: lax.round(x, method), x)


# --- logic -----------------------------------------------------------------


@pytest.mark.parametrize(
  "op", [lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor]
)
def test_bits_combine(op):
  _elementwise(op, (*_INTS, _BOOL), 2)


def test_bits_invert():
  _elementwise(lax.bitwise_not, (*_INTS, _BOOL), 1)


@pytest.mark.parametrize(
  "op", [lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic]
)
def test_shifts_by_the_width_or_more_leave_zero_or_sign(op):
  _elementwise(op, _INTS, 2)


def test_ones_are_counted():
  # XLA on CPU counts the sign of int4 four times more: not compared.
  _elementwise(lax.population_count, (_I32, _I16, _I8, _U32, _U8, _U4), 1)


def test_leading_zeros_are_counted():
  _elementwise(lax.clz, _INTS, 1)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_are_false_of_nan(name):
  _elementwise(getattr(lax, name), _ALL, 2)


@pytest.mark.parametrize("name", ["eq_to_p", "le_to_p", "lt_to_p"])
def test_the_total_order_tells_zeros_apart(name):
  op = getattr(jax.extend.core.primitives, name).bind
  _elementwise(op, (_F32, _BF16, _F16, _I32), 2)


def test_infinities_and_nan_are_not_finite():
  _elementwise(lax.is_finite, _FLOATS, 1)


def test_neighbours_are_those_of_the_dtype():
  _elementwise(lax.nextafter, (_F32, _BF16, _F16), 2)


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_a_selection_takes_the_case(shape):
  which = _random(_BOOL, shape)
  for_each = [
    [_random(d, shape or (3, 2)), _random(d, shape or (3, 2), 1)] for d in _ALL
  ]
  _agree(
    lambda which, pairs: [lax.select_n(which, *pair) for pair in pairs],
    which,
    for_each,
  )
  three = [_random(_BF16, shape, seed) for seed in range(3)]
  number = np.asarray(_random(_U8, shape) % 3, np.int32)
  _agree(lax.select_n, number, *three)
  _agree(lax.select_n, number % 2, *three[:2])


# --- casts -----------------------------------------------------------------


@pytest.mark.parametrize("target", _ALL, ids=str)
def test_a_conversion_wraps_saturates_or_rounds(target):
  _elementwise(
    lambda x: lax.convert_element_type(x, target), _ALL, 1, ranked=_ALL
  )


def test_far_floats_saturate_as_integers():
  x = np.array([3e9, -3e9, 2147483520, 1e30, 127.9, -128.9, 300, -1.5], "f4")

  def convert(x):
    return [
      lax.convert_element_type(x, t) for t in (*_INTS, _F16, *_FLOATS[3:])
    ]

  _agree(convert, x)


def test_a_bitcast_keeps_the_pattern():
  x = _random(_F32, (3, 4))
  _agree(lambda x: lax.bitcast_convert_type(x, jnp.int32), x)
  _agree(lambda x: lax.bitcast_convert_type(x.T, jnp.uint8), x)
  _agree(lambda x: lax.bitcast_convert_type(x[0, 0], jnp.bfloat16), x)
  _agree(lambda x: lax.bitcast_convert_type(x[0, 0], jnp.int32), x)
  pairs = _random(_BF16, (3, 4, 2))
  _agree(lambda x: lax.bitcast_convert_type(x, jnp.uint32), pairs)
  _agree(lambda x: lax.bitcast_convert_type(x[0, 0], jnp.uint32), pairs)


@pytest.mark.parametrize("kept", [(5, 10), (8, 7), (4, 3), (8, 23), (3, 23)])
def test_precision_is_reduced_to_even(kept):
  _elementwise(
    lambda x: lax.reduce_precision(x, *kept), (_F32, _BF16, _F16), 1
  )
  x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 6e-5], np.float32)
  _agree(lambda x: lax.reduce_precision(x, *kept), x)
