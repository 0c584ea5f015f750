"""Tests for coremesh.partition."""

import dataclasses
import doctest
import itertools
import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from coremesh import partition
from coremesh.errors import ShapeError
from coremesh.partition import flat_worker, num_blocks, padded, split, tail

_TOTALS = st.integers(0, 10_000)
_WORKERS = st.integers(1, 200)
_UNITS = st.integers(1, 128)
_SPLITS = st.builds(
  lambda total, workers, unit: split(total, workers, unit=unit),
  _TOTALS,
  _WORKERS,
  _UNITS,
)
# Every kind: even, spread, ragged, ragged with idle workers, idle, empty.
_KINDS = [
  split(64, 4, unit=8),
  split(72, 4, unit=8),
  split(50, 4, unit=8),
  split(20, 6, unit=8),
  split(3, 5),
  split(0, 3),
]


def _start_and_size(shares, workers):
  def of(worker):
    return shares.start(worker), jnp.asarray(shares.size(worker), jnp.int32)

  return jax.jit(jax.vmap(of))(workers)


def _traced_methods(shares):
  return (shares.start,) if shares.is_even else (shares.start, shares.size)


# --- shares ----------------------------------------------------------------


@given(_SPLITS)
def test_shares_cover_every_item_once_and_in_order(shares):
  assert len(shares.shares) == shares.workers
  owned = [range(start, start + size) for start, size in shares.shares]
  assert all(size >= 0 for _, size in shares.shares)
  assert list(itertools.chain(*owned)) == list(range(shares.total))
  stops = [0, *(start + size for start, size in shares.shares)]
  assert [start for start, _ in shares.shares] == stops[:-1]


@given(_SPLITS)
def test_first_workers_own_one_unit_more(shares):
  units = math.ceil(shares.total / shares.unit)
  more = units % shares.workers
  missing = units * shares.unit - shares.total
  expected = [
    (units // shares.workers + (w < more)) * shares.unit
    for w in range(shares.workers)
  ]
  # The last unit may be ragged: its owner is the last one with any unit.
  if units:
    expected[min(units, shares.workers) - 1] -= missing
  assert [size for _, size in shares.shares] == expected


@given(_SPLITS)
def test_shares_are_whole_units_but_for_the_one_with_the_tail(shares):
  busy = [size for _, size in shares.shares if size]
  assert all(size % shares.unit == 0 for size in busy[:-1])
  assert sum(busy) == shares.total


@given(_SPLITS)
def test_max_size_and_imbalance_agree_with_the_shares(shares):
  sizes = [size for _, size in shares.shares]
  assert shares.max_size == max(sizes)
  mean = sum(sizes) / len(sizes)
  expected = max(sizes) / mean if mean else 1.0
  assert shares.imbalance == pytest.approx(expected)
  assert shares.imbalance >= 1.0


@given(_SPLITS)
def test_is_even_means_equal_shares_of_whole_units(shares):
  sizes = {size for _, size in shares.shares}
  whole = all(size % shares.unit == 0 for size in sizes)
  assert shares.is_even == (len(sizes) == 1 and whole)


def test_more_workers_than_items_leaves_the_last_ones_idle():
  assert split(2, 4).shares == ((0, 1), (1, 1), (2, 0), (2, 0))
  assert split(12, 4, unit=8).shares == ((0, 8), (8, 4), (12, 0), (12, 0))


def test_nothing_to_split_is_even_and_balanced():
  nothing = split(0, 3, unit=8, uneven="refuse")
  assert nothing.shares == ((0, 0),) * 3
  assert nothing.is_even
  assert nothing.imbalance == 1.0


def test_a_split_is_an_immutable_value():
  assert split(8, 2) == split(8, 2)
  assert hash(split(8, 2)) == hash(split(8, 2))
  with pytest.raises(dataclasses.FrozenInstanceError):
    split(8, 2).total = 9


# --- traced workers --------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(_SPLITS, st.booleans())
def test_traced_shares_equal_the_python_ones(shares, x64):
  with jax.enable_x64(x64):
    workers = jnp.arange(shares.workers, dtype=jnp.int32)
    starts, sizes = _start_and_size(shares, workers)
  assert starts.dtype == sizes.dtype == jnp.int32
  assert (
    tuple(zip(starts.tolist(), sizes.tolist(), strict=True)) == shares.shares
  )


@pytest.mark.parametrize("shares", _KINDS, ids=repr)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.int64])
def test_traced_results_are_strong_int32_scalars_even_with_x64(shares, dtype):
  with jax.enable_x64(True):
    for method in _traced_methods(shares):
      traced = jax.make_jaxpr(method)(jnp.zeros((), dtype))
      (result,) = traced.out_avals
      assert (result.shape, result.dtype) == ((), jnp.int32)
      assert not result.weak_type
      if dtype != jnp.int64:
        assert "i64" not in str(traced)


@pytest.mark.parametrize("shares", _KINDS, ids=repr)
def test_concrete_jax_scalars_are_answered_with_jax_scalars(shares):
  for method in _traced_methods(shares):
    result = method(jnp.int32(1))
    assert isinstance(result, jax.Array)
    assert int(result) == method(1)


@pytest.mark.parametrize("shares", _KINDS, ids=repr)
def test_the_size_is_a_plain_int_exactly_where_all_shares_are_alike(shares):
  size = shares.size(jnp.int32(1))
  assert isinstance(size, int) == shares.is_even
  assert int(size) == shares.size(1)


@pytest.mark.parametrize(
  "shares", [split(500, 3, unit=128), split(640, 3, unit=128)], ids=repr
)
def test_traced_start_ends_in_a_product_with_the_unit(shares):
  # The TPU compiler refuses a lane slice from min(w * 128, 500): E2003.
  *_, last = jax.make_jaxpr(shares.start)(jnp.int32(0)).eqns
  assert last.primitive.name == "mul"
  assert last.invars[1].val == shares.unit


def test_traced_arithmetic_does_not_overflow_at_the_largest_total():
  largest = split(2**31 - 2, 3, unit=2)
  starts, sizes = _start_and_size(largest, jnp.arange(3, dtype=jnp.int32))
  assert (
    tuple(zip(starts.tolist(), sizes.tolist(), strict=True)) == largest.shares
  )


# --- slices ----------------------------------------------------------------


def test_slice_of_an_int_is_static_even_if_uneven():
  assert split(10, 4).slice(1) == pl.ds(3, 3)
  assert split(10, 4).slice(3) == pl.ds(8, 2)
  assert split(1, 2).slice(1) == pl.ds(1, 0)


def test_slice_of_a_traced_worker_selects_its_rows_in_a_kernel():
  rows = split(32, 4, unit=8)

  def body(x_hbm, o_hbm):
    worker = pl.program_id(0)
    mine = rows.slice(worker)
    assert type(mine.size) is int
    o_hbm[mine, :] = x_hbm[mine, :] * (worker + 1)

  x = jnp.ones((32, 128), jnp.int32)
  y = pl.pallas_call(body, out_shape=x, grid=(4,), interpret=True)(x)
  np.testing.assert_array_equal(y[:, 0], np.repeat([1, 2, 3, 4], 8))


@pytest.mark.parametrize("shares", [k for k in _KINDS if not k.is_even])
def test_slice_of_a_traced_worker_refuses_an_uneven_split(shares):
  with pytest.raises(ShapeError, match=r"static size.*start\(worker\)"):
    jax.make_jaxpr(lambda w: shares.slice(w).start)(jnp.int32(0))


def test_slice_refusal_says_what_was_given_and_what_to_do():
  with pytest.raises(
    ShapeError,
    match=r"total must be a multiple of workers \* unit; got total=50,"
    r" workers=4, unit=8\. Use total=64, or start\(worker\) and size\(worker\)"
    r" with the bounded blocks of cm\.pipeline\.$",
  ):
    split(50, 4, unit=8).slice(jnp.int32(0))


# --- refusals --------------------------------------------------------------


@given(_TOTALS, _WORKERS, _UNITS)
def test_refuse_raises_iff_units_do_not_divide(total, workers, unit):
  if total % unit == 0 and (total // unit) % workers == 0:
    refused = split(total, workers, unit=unit, uneven="refuse")
    assert refused.shares == split(total, workers, unit=unit).shares
  else:
    with pytest.raises(ShapeError, match=f"total={total}, workers={workers}"):
      split(total, workers, unit=unit, uneven="refuse")


@given(st.integers(0, 78), _WORKERS, _UNITS)
def test_refuse_accepts_every_multiple(quotient, workers, unit):
  total = quotient * workers * unit
  sizes = {
    size for _, size in split(total, workers, unit=unit, uneven="refuse").shares
  }
  assert sizes == {quotient * unit}


@given(_TOTALS, _WORKERS, _UNITS)
def test_refusal_gives_advice_that_is_accepted(total, workers, unit):
  assume(total % (workers * unit))
  with pytest.raises(ShapeError) as caught:
    split(total, workers, unit=unit, uneven="refuse")
  advice = str(caught.value).split("Use ")[1]
  values = dict(
    pair.split("=") for pair in advice.replace(",", "").split() if "=" in pair
  )
  padded_total = int(values["total"])
  assert total < padded_total < total + workers * unit
  split(padded_total, workers, unit=unit, uneven="refuse")
  assert ("workers" in values) == (total % unit == 0)
  if "workers" in values:
    fewer = int(values["workers"])
    split(total, fewer, unit=unit, uneven="refuse")
    assert fewer == max(w for w in range(1, workers) if total // unit % w == 0)


def test_refusal_names_sizes_and_ways_out():
  with pytest.raises(
    ShapeError,
    match=r"total must be a multiple of workers \* unit; got total=80,"
    r" workers=4, unit=8\. Use total=96, workers=2, or uneven='spread'\.$",
  ):
    split(80, 4, unit=8, uneven="refuse")


@pytest.mark.parametrize(
  "arguments, message",
  [
    ({"total": -1}, r"total must be an int >= 0; got -1\."),
    ({"total": True}, r"total must be an int >= 0; got True\."),
    ({"total": 8.0}, r"total must be an int >= 0; got 8\.0\."),
    ({"total": np.int64(8)}, r"got np\.int64\(8\)\. Pass int\(\.\.\.\)"),
    ({"workers": 0}, r"workers must be an int >= 1; got 0\."),
    ({"workers": -2}, r"workers must be an int >= 1; got -2\."),
    ({"workers": True}, r"workers must be an int >= 1; got True\."),
    ({"unit": 0}, r"unit must be an int >= 1; got 0\."),
    ({"unit": "8"}, r"unit must be an int >= 1; got '8'\."),
    ({"workers": 0, "unit": 0}, r"workers must .* unit must be"),
    (
      {"uneven": "floor"},
      r"uneven must be one of \('spread', 'refuse'\); got 'floor'\.",
    ),
    ({"total": 2**31}, r"must fit in the int32.*got 2147483648\."),
    ({"total": 2**31 - 1, "unit": 8}, r"total .*int32.*got 2147483648\."),
  ],
)
def test_split_rejects(arguments, message):
  with pytest.raises(ShapeError, match=message):
    partition.Split(**({"total": 8, "workers": 2} | arguments))


@pytest.mark.parametrize("method", ["start", "size", "slice"])
@pytest.mark.parametrize(
  "worker, given_text",
  [
    (4, "4"),
    (-1, "-1"),
    (True, "True"),
    (1.0, r"1\.0"),
    (np.int64(1), r"np\.int64\(1\)"),
    (jnp.float32(1), r"float32\[\]"),
    (jnp.zeros(3, jnp.int32), r"int32\[3\]"),
  ],
)
def test_methods_reject_what_is_no_worker(method, worker, given_text):
  message = rf"worker must be an int in \[0, 4\) .*; got {given_text}\. "
  with pytest.raises(ShapeError, match=message):
    getattr(split(8, 4), method)(worker)


# --- blocks ----------------------------------------------------------------


@given(_TOTALS, st.integers(1, 300))
def test_blocks_cover_the_size_and_only_the_last_is_ragged(size, block):
  blocks = [min(block, size - start) for start in range(0, size, block)]
  assert num_blocks(size, block) == len(blocks)
  assert tail(size, block) == (blocks[-1] if blocks else 0)
  assert padded(size, block) == len(blocks) * block


@pytest.mark.parametrize("function", [num_blocks, padded, tail])
def test_block_functions_reject_bad_sizes(function):
  second = "multiple" if function is padded else "block"
  with pytest.raises(ShapeError, match="size must be an int >= 0; got -1"):
    function(-1, 8)
  with pytest.raises(ShapeError, match="size must be an int >= 0; got 8.0"):
    function(8.0, 8)
  with pytest.raises(ShapeError, match=f"{second} must be an int >= 1; got 0"):
    function(8, 0)


# --- grids of workers ------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_flat_worker_counts_the_grid_in_row_major_order(sizes):
  grid = itertools.product(*map(range, sizes))
  flat = [flat_worker(indices, sizes) for indices in grid]
  assert flat == list(range(math.prod(sizes)))


@pytest.mark.parametrize("x64", [False, True])
def test_traced_flat_worker_equals_the_python_one(x64):
  sizes = (4, 2, 16)
  flat = jax.jit(lambda core, subcore: flat_worker((3, core, subcore), sizes))
  with jax.enable_x64(x64):
    traced = flat(jnp.int32(1), jnp.uint8(5))
    program = jax.make_jaxpr(flat)(jnp.int32(1), jnp.uint8(5))
  assert traced == flat_worker((3, 1, 5), sizes) == 117
  assert traced.dtype == jnp.int32
  assert "i64" not in str(program)


def test_rows_split_over_cores_and_subcores_cover_each_row_once():
  sizes = (2, 16)
  rows = split(1000, math.prod(sizes), unit=8)

  def owned(core, subcore):
    worker = flat_worker((core, subcore), sizes)
    return rows.start(worker), rows.size(worker)

  grid = np.indices(sizes, np.int32).reshape(2, -1)
  starts, stops = jax.jit(jax.vmap(owned))(*grid)
  assert tuple(zip(starts.tolist(), stops.tolist(), strict=True)) == rows.shares


@pytest.mark.parametrize(
  "indices, sizes, message",
  [
    ((), (), "one entry for each axis, and at least one; got 0 indices"),
    ((1,), (2, 3), "got 1 indices and 2 sizes"),
    ((1, 2, 0), (2, 3), "got 3 indices and 2 sizes"),
    ((0, 3), (2, 3), r"indices\[1\] must be an int in \[0, 3\) .*; got 3"),
    ((0, True), (2, 3), r"indices\[1\] must be an int .*; got True"),
    ((0, 0), (2, 0), r"sizes\[1\] must be an int >= 1; got 0"),
    ((0, 0), (2**16, 2**15), r"prod\(sizes\) must fit in the int32"),
  ],
)
def test_flat_worker_rejects(indices, sizes, message):
  with pytest.raises(ShapeError, match=message):
    flat_worker(indices, sizes)


# --- the printed plan ------------------------------------------------------


def test_plan_has_a_line_for_each_worker():
  assert (
    split(50, 4, unit=8).plan()
    == """\
50 items, 4 workers, unit 8
worker  start  stop  size  share
     0      0    16    16    32%
     1     16    32    16    32%
     2     32    48    16    32%
     3     48    50     2     4%
imbalance 1.280 (largest / mean share), idle workers: none"""
  )


def test_plan_puts_equal_neighbours_on_one_line_beyond_16_workers():
  assert (
    split(1001, 200, unit=8).plan()
    == """\
1001 items, 200 workers, unit 8
  worker  start  stop  size each  share each
  0..124      0  1000          8      0.799%
     125   1000  1001          1     0.0999%
126..199   1001  1001          0          0%
imbalance 1.598 (largest / mean share), idle workers: 126..199"""
  )


def test_plan_of_16_workers_is_still_one_line_each():
  assert len(split(32, 16).plan().splitlines()) == 16 + 3
  assert len(split(34, 17).plan().splitlines()) == 1 + 3


def test_plan_of_nothing_has_no_share_and_only_idle_workers():
  lines = split(0, 2).plan().splitlines()
  assert lines[2].split() == ["0", "0", "0", "0", "-"]
  assert lines[-1].endswith("idle workers: 0..1")


def test_plan_names_a_single_idle_worker():
  assert split(2, 3).plan().endswith("idle workers: 2")


@given(st.integers(0, 2**31 - 200), _WORKERS, _UNITS)
def test_plan_is_under_80_columns(total, workers, unit):
  plan = split(total, workers, unit=unit).plan()
  assert max(map(len, plan.splitlines())) < 80


def test_a_split_prints_as_its_plan():
  assert str(split(10, 4)) == split(10, 4).plan()
  assert "total=10" in repr(split(10, 4))


def test_docstring_examples_hold():
  failed, tried = doctest.testmod(partition)
  assert (failed, tried > 0) == (0, True)
