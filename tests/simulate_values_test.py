"""Tests for coremesh.simulate.values: every rule agrees with jax.jit."""

import itertools

import jax
from jax import lax
from jax.extend.core import primitives
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
# One of each way to compute: a kernel of XLA takes 15 ms to compile.
_SOME = (_F32, _BF16, _E4M3, _I32, _U8, _I4, _BOOL)

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


def _check_equal(found, expected, what, *, ulps=0.0, near=0.0, zero_signs=True):
  """Fails unless two results are equal, denormals counting as zero.

  Args:
    found: what the rule gave.
    expected: what jax.jit gave.
    what: said when it fails.
    ulps: how many times the dtype's epsilon results may differ, relatively.
    near: how far they may differ besides, absolutely.
    zero_signs: whether -0 and +0 differ.
  """
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


def _by_rules(fn, *args):
  traced = jax.make_jaxpr(fn)(*args)
  with np.errstate(all="ignore"):
    return _evaluate(traced.jaxpr, traced.consts, jax.tree.leaves(args))


def _compiled(fn, *args):
  results = jax.jit(fn, compiler_options=_OPTIONS)(*args)
  return [np.asarray(x) for x in jax.tree.leaves(results)]


def _agree(fn, *args, **how):
  """Fails unless the rules and jax.jit give the same results.

  Args:
    fn: of arrays; returns an array, or a tree of them.
    *args: numpy arrays, or lists of them.
    **how: as of `_check_equal`.
  """
  found, expected = _by_rules(fn, *args), _compiled(fn, *args)
  for number, (x, y) in enumerate(zip(found, expected, strict=True)):
    _check_equal(x, y, f"result {number}", **how)


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


# One result at other ranks; rank 0 comes as numpy's scalar and as an array.
_VIEWS = (
  lambda x: x,
  lambda x: x[-1],
  lambda x: np.asarray(x[1]),
  lambda x: x[-8:].reshape(2, 4),
  lambda x: x[-12:].reshape(2, 2, 3),
)


def _elementwise(op, dtypes, count, **how):
  """Checks `op` on all dtypes in one compilation, and at other ranks.

  All ranks for the first dtype; rank 0, which has rules of its own, for all.
  """
  cases = [_operands(dtype, count) for dtype in dtypes]
  expected = _compiled(lambda cases: [op(*case) for case in cases], cases)
  for operands, result in zip(cases, expected, strict=True):
    views = _VIEWS if operands is cases[0] else _VIEWS[:2]
    for number, view in enumerate(views):
      viewed = [view(x) for x in operands]
      [found] = _by_rules(op, *viewed)
      what = f"{operands[0].dtype}, view {number}"
      _check_equal(found, view(result), what, **how)


# --- arithmetic ------------------------------------------------------------


@pytest.mark.parametrize("op", [lax.add, lax.sub, lax.mul, lax.div])
def test_arithmetic_is_exact(op):
  _elementwise(op, _NUMBERS, 2)


def test_a_remainder_has_the_dividends_sign():
  _elementwise(lax.rem, _NUMBERS, 2)


@pytest.mark.parametrize("op", [lax.max, lax.min])
def test_max_and_min_propagate_nan(op):
  # Either zero is right.
  _elementwise(op, _SOME, 2, zero_signs=False)


@pytest.mark.parametrize("op", [lax.neg, lax.sign, lax.square])
def test_signs_and_squares_are_exact(op):
  _elementwise(op, (*_SOME[:-1], _F16, _U32), 1)


def test_an_absolute_value_wraps():
  _elementwise(lax.abs, (*_FLOATS, _I32, _I16, _I8), 1)


@pytest.mark.parametrize("exponent", [0, 1, 3, 7, -3])
def test_an_integer_power_multiplies(exponent):
  kinds = _FLOATS[:3] if exponent < 0 else (*_FLOATS[:2], _I32, _I4)
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


def test_what_derivatives_are_made_of_agrees():
  def made(x):
    return [
      primitives.one_minus_square_p.bind(x),
      primitives.add_jaxvals_p.bind(x, x),
      x.at[np.array([1, 1])].subtract(x[:2]),
      lax.empty((2, 3), x.dtype),
    ]

  # XLA may fuse the product and the sum.
  _agree(made, _random(_F32, (3, 4)), ulps=2)


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
  _elementwise(getattr(lax, name), _FLOATS[:2], 1, ulps=_ULPS[name], near=near)


@pytest.mark.parametrize("op", [lax.exp, lax.tanh, lax.floor])
def test_functions_of_narrow_floats_round_once(op):
  # XLA rounds to float16 on the way.
  _elementwise(op, _FLOATS[2:], 1, ulps=1)


@pytest.mark.parametrize("op", [lax.pow, lax.atan2])
def test_functions_of_two_are_close(op):
  _elementwise(op, _FLOATS[:2], 2, ulps=8)


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
  _elementwise(op, (_I32, _U8, _I4, _BOOL), 2)


def test_bits_invert():
  _elementwise(lax.bitwise_not, (_I32, _U8, _I4, _BOOL), 1)


@pytest.mark.parametrize(
  "op", [lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic]
)
def test_shifts_by_the_width_or_more_leave_zero_or_sign(op):
  _elementwise(op, (_I32, _I8, _U32, _U8, _I4), 2)


def test_ones_are_counted():
  # XLA on CPU counts the sign of int4 four times more: not compared.
  _elementwise(lax.population_count, (_I32, _I16, _I8, _U32, _U8, _U4), 1)


def test_leading_zeros_are_counted():
  _elementwise(lax.clz, _INTS, 1)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_are_false_of_nan(name):
  _elementwise(getattr(lax, name), _SOME, 2)


@pytest.mark.parametrize("name", ["eq_to_p", "le_to_p", "lt_to_p"])
def test_the_total_order_tells_zeros_apart(name):
  op = getattr(primitives, name).bind
  _elementwise(op, (_F32, _BF16, _F16, _I32), 2)


def test_infinities_and_nan_are_not_finite():
  _elementwise(lax.is_finite, _FLOATS, 1)


def test_neighbours_are_those_of_the_dtype():
  _elementwise(lax.nextafter, (_F32, _BF16, _F16), 2)


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_a_selection_takes_the_case(shape):
  which = _random(_BOOL, shape)
  for_each = [
    [_random(d, shape or (3, 2)), _random(d, shape or (3, 2), 1)] for d in _SOME
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


@pytest.mark.parametrize("target", [*_FLOATS, _I32, *_SOME[4:]], ids=str)
def test_a_conversion_wraps_saturates_or_rounds(target):
  sources = (*_SOME, _F16, _U32)
  _elementwise(lambda x: lax.convert_element_type(x, target), sources, 1)


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
  _elementwise(lambda x: lax.reduce_precision(x, *kept), (_F32, _BF16, _F16), 1)
  x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 6e-5], np.float32)
  _agree(lambda x: lax.reduce_precision(x, *kept), x)


# --- shape -----------------------------------------------------------------


def _on_all(fn, shape, dtypes=(_BF16, _I4)):
  """Checks `fn` on arrays of the shape and of each dtype."""
  arrays = [_random(dtype, shape) for dtype in dtypes]
  _agree(lambda arrays: [fn(x) for x in arrays], arrays)


def test_shapes_change():
  def moves(x):
    return [
      lax.reshape(x, (6, 4)),
      lax.reshape(x, (6, 4), (2, 0, 1)),
      lax.squeeze(x[:1, :, 1:2], (0, 2)),
      lax.squeeze(x[:1, :1, 1:2], (0, 1, 2)),
      lax.reshape(x[:1, :1, 1:2], ()),
      lax.expand_dims(x, (0, 2)),
      lax.expand_dims(lax.squeeze(x[:1, :1, 1:2], (0, 1, 2)), (0,)),
      lax.transpose(x, (2, 0, 1)),
      lax.rev(x, (0, 2)),
      lax.rev(x, ()),
      lax.tile(x, (2, 1, 3)),
    ]

  _on_all(moves, (2, 3, 4))


def test_broadcasts_place_axes():
  def broadcasts(x):
    return [
      lax.broadcast_in_dim(x, (2, 3, 4), (0, 2)),
      lax.broadcast_in_dim(x, (80, 2, 80, 4), (1, 3)),
      lax.broadcast_in_dim(x[:1], (3, 4), (0, 1)),
      lax.broadcast_in_dim(lax.squeeze(x[:1, :1], (0, 1)), (3, 2), ()),
      lax.broadcast_in_dim(lax.squeeze(x[:1, :1], (0, 1)), (80, 80), ()),
      lax.broadcast_in_dim(x, (2, 4), (0, 1)),
    ]

  _on_all(broadcasts, (2, 4))


def test_arrays_are_joined_and_parted():
  def joins(x):
    return [
      lax.concatenate([x, x[:, :2], x], 1),
      *lax.split(x, (1, 0, 3), 1),
      lax.stack([x, x], 1),
      *lax.unstack(x, 1),
      *lax.unstack(x[0], 0),
    ]

  _on_all(joins, (3, 4))


@pytest.mark.parametrize(
  "config",
  [
    ((1, 2, 0), (0, 0, 0)),
    ((1, 2, 3), (-1, 0, 0)),
    ((-1, -2, 1), (-3, 5, 2)),
    ((-7, 9, 1), (2, -9, 1)),
    ((3, -5, 0), (0, -4, 0)),
  ],
)
def test_padding_may_cut_and_spread(config):
  def pad(x):
    return lax.pad(x, lax.squeeze(x[:1, :1], (0, 1)), config)

  _on_all(pad, (4, 5))


def test_values_pass_through():
  def through(x):
    whole = lax.optimization_barrier((x, x))
    return [jnp.copy(x), lax.stop_gradient(x), *whole]

  _on_all(through, (2, 3))


def test_iota_counts_along_an_axis():
  def count():
    kinds = (_F32, _BF16, _I32, _U8, _I8)
    return [lax.broadcasted_iota(d, (3, 4), a) for d in kinds for a in (0, 1)]

  _agree(count)


def test_complex_numbers_come_apart():
  x = _random(_F32, (3, 4))
  _agree(
    lambda x: [
      lax.real(lax.complex(x, -x)),
      lax.imag(lax.conj(lax.complex(x, -x))),
    ],
    x,
  )


# --- slices ----------------------------------------------------------------


def test_slices_start_and_step():
  def slices(x):
    return [lax.slice(x, (1, 0), (3, 5), (1, 2)), lax.slice(x, (1, 0), (3, 5))]

  _on_all(slices, (4, 5))


@pytest.mark.parametrize("start", [(0, 1), (-3, 2), (9, 100), (2, -(2**31))])
def test_computed_starts_are_held_inside(start):
  x, update = _random(_BF16, (5, 6)), _random(_BF16, (2, 3), 1)
  first, second = np.int32(start[0]), np.asarray(start[1], np.int32)

  def slices(x, update, first, second):
    at = (first, second)
    return [
      primitives.dynamic_slice_p.bind(x, *at, slice_sizes=(2, 3)),
      primitives.dynamic_update_slice_p.bind(x, update, *at),
      primitives.dynamic_update_slice_p.bind(update, update, *at),
    ]

  _agree(slices, x, update, first, second)


@pytest.mark.parametrize(
  ("dtype", "mode"),
  [
    (_BF16, "clip"),
    (_I32, "promise_in_bounds"),
    *((dtype, "fill") for dtype in (_F32, _BF16, _I4, _U8, _BOOL)),
  ],
  ids=str,
)
def test_gathers_agree(dtype, mode):
  x = _random(dtype, (5, 6, 4))
  i, j = (np.array([[0, 9, 2], [-1, 4, 1]], np.int32) - k for k in (0, 1))
  along = np.array([[[1, 7, 0, 3]], [[2, 2, -9, 5]]], np.int32)
  along = np.concatenate([along, along, along[:1]])

  def gathers(x, i, j, along):
    return [
      x.at[i].get(mode=mode),
      x.at[:, i].get(mode=mode),
      x.at[i, :, j].get(mode=mode),
      x.at[1:3, i, j].get(mode=mode),
      jnp.take_along_axis(x, along, 1, mode=mode),
      lax.gather(
        x,
        i.reshape(3, 2),
        lax.GatherDimensionNumbers(
          offset_dims=(0, 2), collapsed_slice_dims=(1,), start_index_map=(2, 0)
        ),
        slice_sizes=(2, 1, 3),
        mode=mode,
      ),
    ]

  _agree(gathers, x, i, j, along)


@pytest.mark.parametrize(
  ("dtype", "mode"),
  [(_F32, "clip"), (_BF16, "drop"), (_I4, "clip"), (_U8, "drop")],
  ids=str,
)
def test_scatters_agree(dtype, mode):
  x = _random(dtype, (5, 6, 4))
  i = np.array([0, 9, 2, -1, 4, 2], np.int32)
  once = np.array([3, -1, 1, 7], np.int32)

  def scatters(x, i, once):
    row, column = x[0, :, 0], x[:1]
    results = [
      x.at[i].add(column, mode=mode),
      x.at[:, i, 1].add(row, mode=mode),
      x.at[i].max(column, mode=mode),
      x.at[i].min(column, mode=mode),
      x.at[i].mul(column, mode=mode),
      x.at[i, i - 1].add(column[0, :, :], mode=mode),
      x.at[1:3, :, once].set(x[:2, :, ::-1], mode=mode),
      x.at[2, 3].set(x[0, 0], mode=mode),
      x.at[2, 3, 1].set(x[0, 0, 0], mode=mode),
    ]
    return results

  # XLA on CPU may add bfloat16 in another order.
  _agree(scatters, x, i, once, zero_signs=False)


# --- reductions ------------------------------------------------------------


def _with_nan(dtype, shape):
  x = np.array(_random(dtype, shape))
  if dtype in _FLOATS:
    x[..., 1, 2] = np.nan
    x[..., 2, 1] = x[..., 2, 3] = dtype.type(30)
  return x


@pytest.mark.parametrize("axes", [(1,), (0, 2)])
def test_reductions_agree(axes):
  arrays = [_with_nan(dtype, (2, 3, 4)) for dtype in _SOME]
  # lax has no int4 here.
  whole = [_random(dtype, (2, 3, 4)) for dtype in (_I32, _U8, _BOOL)]
  numbers = [_random(dtype, (2, 3, 4), scale=1) for dtype in _SOME[:-1]]

  def exact(arrays, whole):
    return [
      [lax.reduce_max(x, axes) for x in arrays],
      [lax.reduce_min(x, axes) for x in arrays],
      [lax.reduce_and(x, axes) for x in whole],
      [lax.reduce_or(x, axes) for x in whole],
      [lax.reduce_xor(x, axes) for x in whole],
    ]

  def rounded(numbers):
    return [
      [lax.reduce_sum(x, axes) for x in numbers],
      [lax.reduce_prod(x, axes) for x in numbers],
    ]

  _agree(exact, arrays, whole, zero_signs=False)
  # XLA adds in another order, and may round bfloat16 between.
  _agree(rounded, numbers, ulps=4, near=0.25)


def test_sums_of_float32_are_close():
  x = _random(_F32, (33, 65))
  _agree(lambda x: [lax.reduce_sum(x, ()), lax.reduce_max(x, ())], x)
  _agree(lambda x: [lax.reduce_sum(x, (0,)), jnp.sum(x)], x, near=1e-4)
  _agree(lambda x: jnp.sum(x, dtype=jnp.float32), x.astype(_BF16), near=1e-4)


def test_an_empty_axis_gives_the_identity():
  def reduce(x):
    return [lax.reduce_max(x, (0,)), lax.reduce_min(x, (0,))]

  _on_all(reduce, (0, 3), (_F32, _BF16, _F16, _I32, _I4, _U8, _BOOL))
  _agree(lambda x: lax.reduce_sum(x, (0,)), np.zeros((0, 3), _BF16))


@pytest.mark.parametrize("op", [lax.argmax, lax.argmin])
def test_the_first_of_equals_is_found(op):
  arrays = [_with_nan(dtype, (2, 3, 4)) for dtype in _SOME]
  kinds = (np.int32, np.uint8)

  def found(arrays):
    return [
      op(x, a, d) for x in arrays for a, d in zip((1, 2), kinds, strict=True)
    ]

  _agree(found, arrays)


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_agree(reverse):
  numbers = [_random(dtype, (3, 4, 5), scale=1) for dtype in _SOME[:-1]]
  numbers = numbers[reverse::2]
  floats = [_random(dtype, (3, 4, 5)) for dtype in (_F32, _BF16)]

  def exact(numbers):
    return [[lax.cummax(x, 1, reverse), lax.cummin(x, 2)] for x in numbers]

  def rounded(numbers):
    return [[lax.cumsum(x, 0, reverse), lax.cumprod(x, 1)] for x in numbers]

  _agree(exact, numbers, zero_signs=False)
  # As for reductions.
  _agree(rounded, numbers, ulps=4, near=0.25, zero_signs=False)
  _agree(lambda x: lax.cumsum(x, 1, reverse), floats[0], near=1e-5)
  _agree(
    lambda xs: [lax.cumlogsumexp(x, 1, reverse) for x in xs],
    floats,
    ulps=2,
    near=1e-5,
  )


# --- dot -------------------------------------------------------------------

_DOTS = [
  (((1,), (0,)), ((), ()), (3, 4), (4, 5)),
  (((1,), (1,)), ((), ()), (3, 4), (5, 4)),
  (((0,), (0,)), ((), ()), (4, 3), (4, 5)),
  (((2,), (1,)), ((0,), (0,)), (2, 3, 4), (2, 4, 5)),
  (((0, 2), (2, 1)), ((1,), (0,)), (3, 2, 4), (2, 4, 3, 5)),
  (((), ()), ((), ()), (3,), (2, 2)),
  (((0,), (0,)), ((), ()), (6,), (6,)),
  (((1,), (0,)), ((), ()), (3, 4), (4,)),
]


@pytest.mark.parametrize(("contracting", "batch", "left", "right"), _DOTS)
def test_products_of_matrices_agree(contracting, batch, left, right):
  outs = {_I8: _I32, _U8: _U32, _I4: _I32, _I16: _I32, _BF16: _F32}
  kinds = (_F32, _BF16, _E4M3, _I32, _I8, _U8)
  pairs = [(_random(d, left), _random(d, right, 1)) for d in kinds]

  def products(pairs):
    found = []
    for x, y in pairs:
      numbers = (contracting, batch)
      out = outs.get(np.dtype(x.dtype))
      found.append(lax.dot_general(x, y, numbers))
      if out:
        found.append(lax.dot_general(x, y, numbers, preferred_element_type=out))
    return found

  # XLA adds float32 in another order.
  _agree(products, pairs, ulps=2, near=1e-4)


def test_deep_integer_products_are_exact():
  x, y = _random(_I8, (3, 3000)), _random(_I8, (3000, 2), 1)
  z, w = _random(_I32, (3, 300)), _random(_I32, (300, 2), 1)
  _agree(
    lambda x, y, z, w: [
      jnp.dot(x, y, preferred_element_type=jnp.int32),
      jnp.dot(z, w),
    ],
    *(x, y, z, w),
  )


# --- sorting ---------------------------------------------------------------


def _with_ties(dtype, shape):
  drawn = np.random.default_rng(7).choice(_specials(dtype), shape)
  return drawn.astype(dtype)


@pytest.mark.parametrize("axis", [0, 1])
def test_sorts_are_stable_with_nan_last(axis):
  arrays = [_with_ties(dtype, (9, 12)) for dtype in _SOME]

  def sorts(arrays):
    found = []
    for x in arrays:
      places = lax.broadcasted_iota(jnp.int32, x.shape, axis)
      found += [lax.sort(x, axis), lax.sort([x, places], axis, num_keys=1)]
    x, y = arrays[0], arrays[1]
    return found, lax.sort([x, y, places], axis, num_keys=2)

  _agree(sorts, arrays)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_largest_are_in_the_total_order(axis):
  arrays = [_with_ties(dtype, (9, 12)) for dtype in _SOME[:5]]
  _agree(lambda arrays: [lax.top_k(x, 4, axis=axis) for x in arrays], arrays)


# --- whole programs --------------------------------------------------------


def test_a_program_of_many_agrees():
  def program(x, i):
    y = jax.nn.softmax(jax.nn.gelu(x) * jnp.float32(2), axis=-1)
    z = jnp.where(i % 3 == 0, jnp.clip(y, 0.1, 0.9), -y)
    return z, i // 7, jnp.roll(z, 2, 1), jnp.var(x), jnp.argsort(i, axis=0)

  _agree(program, _random(_F32, (6, 8)), _random(_I32, (6, 8)), near=1e-5)
