"""SparseCore value primitives compute what loops over lanes compute."""

import functools
import math

from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coremesh.simulate import vector_subcore
from tests import simulate_rules

_LANES = 8  # of a v5p
_DTYPES = (np.int32, np.uint32, np.float32)
_SEEDS = range(4)
_PACK_FORMATS = tuple(plsc.PackFormat)
# jax defines it next to cummax but does not export it.
_cummin = plsc.cummax.__globals__["cummin"]


def _evaluate(fn, *args):
  closed = simulate_rules.trace(fn, *args)
  return simulate_rules.run(vector_subcore.RULES, closed, *args)


def _vector(rng, dtype, *, kind):
  """A vector of one kind of lanes; ties and extremes are likely."""
  if kind == "ties":
    return rng.integers(-2, 3, _LANES).astype(dtype)
  if np.dtype(dtype).kind == "f":
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-45]
    if kind == "wild":
      return rng.choice(np.array(special, dtype), _LANES)
    return rng.normal(size=_LANES).astype(dtype)
  info = np.iinfo(dtype)
  if kind == "wild":
    return rng.choice(np.array([info.min, info.max, 0, 1], dtype), _LANES)
  return rng.integers(info.min, info.max, _LANES, dtype, endpoint=True)


def _mask(rng, kind):
  return {
    "none": np.zeros(_LANES, bool),
    "all": np.ones(_LANES, bool),
    "some": rng.random(_LANES) < 0.5,
    "not first": np.arange(_LANES) >= rng.integers(1, _LANES),
  }[kind]


def _same(result, expected):
  """Equal bit for bit, but any nan is as good as another."""
  np.testing.assert_array_equal(result, expected)
  if np.asarray(expected).dtype.kind == "f":
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(
      np.signbit(result)[number], np.signbit(expected)[number]
    )


def _over_vectors(test):
  marks = [
    pytest.mark.parametrize("dtype", _DTYPES),
    pytest.mark.parametrize("kind", ["ties", "wild", "any"]),
    pytest.mark.parametrize("mask_kind", ["none", "all", "some", "not first"]),
  ]
  for mark in marks:
    test = mark(test)
  return test


# --- scans -----------------------------------------------------------------


def _scan_loop(x, mask, combine):
  """Lane by lane: pass through, then the first allowed, then combine."""
  result, so_far = [], None
  for value, allowed in zip(x, mask, strict=True):
    if allowed:
      so_far = value if so_far is None else combine(so_far, value)
    result.append(value if so_far is None else so_far)
  return np.array(result, x.dtype)


def _greater(a, b):
  return a if np.isnan(a) or a >= b else b


def _smaller(a, b):
  return a if np.isnan(a) or a <= b else b


def _wrapping_sum(a, b):
  if a.dtype.kind == "f":
    return a + b
  total = (int(a) + int(b)) & 0xFFFFFFFF
  return np.uint32(total).view(a.dtype)


@_over_vectors
@pytest.mark.parametrize(
  "scan, combine",
  [
    (plsc.cummax, _greater),
    (_cummin, _smaller),
    (plsc.cumsum, _wrapping_sum),
  ],
)
@np.errstate(all="ignore")
def test_masked_scans_are_running_loops(scan, combine, dtype, kind, mask_kind):
  for seed in _SEEDS:
    rng = np.random.default_rng(seed)
    x, mask = _vector(rng, dtype, kind=kind), _mask(rng, mask_kind)
    (result,) = _evaluate(lambda x, m: scan(x, mask=m), x, mask)
    expected = _scan_loop(x, mask, combine)
    np.testing.assert_array_equal(result, expected)


def test_lanes_before_the_first_allowed_one_pass_through():
  x = np.array([5, -7, 1, 2, 9, 3, 4, 0], np.int32)
  mask = np.array([0, 0, 1, 1, 0, 1, 0, 1], bool)
  for scan, expected in [
    (plsc.cumsum, [5, -7, 1, 3, 3, 6, 6, 6]),
    (plsc.cummax, [5, -7, 1, 2, 2, 3, 3, 3]),
    (_cummin, [5, -7, 1, 1, 1, 1, 1, 0]),
  ]:
    (result,) = _evaluate(lambda x, m, scan=scan: scan(x, mask=m), x, mask)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_scans_without_a_mask_take_every_lane(dtype):
  x = np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype)
  (result,) = _evaluate(plsc.cumsum, x)
  np.testing.assert_array_equal(result, np.cumsum(x, dtype=dtype))
  (result,) = _evaluate(plsc.cummax, x)
  np.testing.assert_array_equal(result, [3, 3, 4, 4, 5, 9, 9, 9])


def test_a_sum_that_starts_with_minus_zero_keeps_its_sign():
  x = np.full(_LANES, -0.0, np.float32)
  mask = np.arange(_LANES) >= 3
  (result,) = _evaluate(lambda x, m: plsc.cumsum(x, mask=m), x, mask)
  assert np.signbit(result).all()


@_over_vectors
def test_scan_count_counts_occurrences_lane_by_lane(dtype, kind, mask_kind):
  for seed in _SEEDS:
    rng = np.random.default_rng(seed)
    x, mask = _vector(rng, dtype, kind=kind), _mask(rng, mask_kind)
    counts, last = _evaluate(plsc.scan_count, x, mask)
    for i in range(_LANES):
      earlier = sum(x[j] == x[i] and mask[j] for j in range(i))
      later = any(x[j] == x[i] and mask[j] for j in range(i + 1, _LANES))
      assert counts[i] == (1 + earlier if mask[i] else 1)
      assert last[i] == (mask[i] and not later)


# --- sorting ---------------------------------------------------------------


def _sort_loop(keys, values, mask, descending):
  """Insertion sort of the allowed lanes; the others follow as they were."""

  def precedes(a, b):
    if math.isnan(a) or math.isnan(b):  # the largest, equal to one another
      later, earlier = math.isnan(a), math.isnan(b)
      return later > earlier if descending else earlier > later
    return a > b if descending else a < b

  order = []
  for i in range(_LANES):
    if mask[i]:
      at = len(order)
      while at and precedes(float(keys[i]), float(keys[order[at - 1]])):
        at -= 1
      order.insert(at, i)
  num_valid = len(order)
  order += [i for i in range(_LANES) if not mask[i]]
  return keys[order], values[order], np.arange(_LANES) < num_valid


@_over_vectors
@pytest.mark.parametrize("descending", [False, True])
def test_masked_sort_is_a_stable_insertion_sort(
  dtype, kind, mask_kind, descending
):
  for seed in _SEEDS:
    rng = np.random.default_rng(seed)
    keys, mask = _vector(rng, dtype, kind=kind), _mask(rng, mask_kind)
    values = rng.permutation(_LANES).astype(np.float32)
    results = _evaluate(
      lambda k, v, m: plsc.sort_key_val(k, v, mask=m, descending=descending),
      *(keys, values, mask),
    )
    expected = _sort_loop(keys, values, mask, descending)
    for result, wanted in zip(results, expected, strict=True):
      _same(result, wanted)


@pytest.mark.parametrize("descending", [False, True])
def test_sort_without_a_mask_has_two_results(descending):
  rng = np.random.default_rng(0)
  keys = _vector(rng, np.int32, kind="ties")
  values = np.arange(_LANES, dtype=np.int32)
  results = _evaluate(
    lambda k, v: plsc.sort_key_val(k, v, descending=descending), keys, values
  )
  every = np.ones(_LANES, bool)
  expected = _sort_loop(keys, values, every, descending)[:2]
  assert len(results) == 2
  np.testing.assert_array_equal(results, expected)


# --- packing ---------------------------------------------------------------


@pytest.mark.parametrize("pack_format", _PACK_FORMATS)
@pytest.mark.parametrize(
  "wide, half, preferred",
  [
    (np.float32, ml_dtypes.bfloat16, None),
    (np.float32, np.float16, np.float16),
    (np.int32, np.int16, None),
    (np.uint32, np.uint16, np.uint16),
    (np.int16, np.int8, np.int8),
    (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2),
  ],
)
def test_pack_places_lane_by_lane_and_unpack_undoes_it(
  wide, half, preferred, pack_format
):
  rng = np.random.default_rng(0)
  options = {"format": pack_format, "preferred_element_type": preferred}
  if jnp.issubdtype(wide, jnp.floating):
    a, b = rng.normal(size=(2, _LANES)).astype(wide)
  else:
    info = np.iinfo(wide)
    a, b = rng.integers(
      info.min, info.max, (2, _LANES), dtype=wide, endpoint=True
    )
  (packed,) = _evaluate(lambda a, b: plsc.pack(a, b, **options), a, b)
  flat = packed.reshape(-1)
  small = [x.astype(half) for x in (a, b)]
  for i in range(_LANES):
    if pack_format == plsc.PackFormat.INTERLEAVED:
      assert (flat[2 * i], flat[2 * i + 1]) == (small[0][i], small[1][i])
    else:
      assert (flat[i], flat[_LANES + i]) == (small[0][i], small[1][i])
  if preferred is not None:
    options["preferred_element_type"] = wide
  unpacked = _evaluate(lambda ab: plsc.unpack(ab, **options), packed)
  # Unsigned halves come back by their sign, see `vector_subcore`.
  read = {np.uint16: np.int16}.get(half, half)
  for result, x in zip(unpacked, small, strict=True):
    np.testing.assert_array_equal(result, x.view(read).astype(wide))


def test_pack_shows_the_layouts_of_its_docstring():
  a, b = np.array([1, 2], np.int32), np.array([3, 4], np.int32)
  compressed, interleaved = (
    _evaluate(lambda a, b, f=f: plsc.pack(a, b, format=f), a, b)[0]
    for f in (plsc.PackFormat.COMPRESSED, plsc.PackFormat.INTERLEAVED)
  )
  np.testing.assert_array_equal(compressed, [[1, 2], [3, 4]])
  np.testing.assert_array_equal(interleaved, [1, 3, 2, 4])


def test_pack_rounds_to_even_and_cuts_integers():
  x = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
  interleaved = functools.partial(plsc.pack, format=plsc.PackFormat.INTERLEAVED)
  (packed,) = _evaluate(interleaved, x, x)
  np.testing.assert_array_equal(packed[::2], [1, 1 + 2**-6])
  x = np.array([0x12348001, -1], np.int32)
  (packed,) = _evaluate(interleaved, x, x)
  np.testing.assert_array_equal(packed[::2], [0x8001 - 0x10000, -1])


def test_pack_between_floats_and_integers_is_refused():
  x = np.zeros(_LANES, np.float32)
  with pytest.raises(NotImplementedError, match=r"plsc\.pack converts floats"):
    _evaluate(
      lambda a, b: plsc.pack(
        *(a, b),
        format=plsc.PackFormat.INTERLEAVED,
        preferred_element_type=jnp.int16,
      ),
      *(x, x),
    )


# --- reductions of masks ---------------------------------------------------


@pytest.mark.parametrize("reduce", [1, 2, 8])
@pytest.mark.parametrize("mask_kind", ["none", "all", "some", "not first"])
def test_mask_reductions_give_every_lane_the_answer(mask_kind, reduce):
  for seed in _SEEDS:
    mask = _mask(np.random.default_rng(seed), mask_kind)
    count = sum(1 for lane in mask if lane)
    first = next((i for i, lane in enumerate(mask) if lane), _LANES)
    for fn, expected in [
      (plsc.all_reduce_population_count, count),
      (plsc.all_reduce_ffs, first),
    ]:
      (result,) = _evaluate(lambda x, fn=fn: fn(x, reduce=reduce), mask)
      np.testing.assert_array_equal(result, [expected] * (_LANES // reduce))
