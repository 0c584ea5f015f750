"""Public functions of vector subcores, each in a kernel of its own."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import numpy as np
import pytest

from tests import small_kernels as small
from tests.covering import covers

# --- memory of a vector subcore -----------------------------------------------


@pytest.fixture
def table():
  return small.values(16, dtype=np.int32, low=0, high=1000)


_PLACES = np.array([5, 4, 15, 0, 7, 6, 2, 9], np.int32)


def _on_table(operation, table, places=_PLACES, dtype: Any = np.int32):
  """Runs `operation(table, places, mask)` on a table in a subcore's VMEM.

  Returns:
    The table afterwards, and what the operation returned.
  """
  table, mask = table.astype(dtype), small.MASK

  def body(
    table_hbm, places_hbm, mask_hbm, o, line_out, held, index, bits, line
  ):
    pltpu.sync_copy(table_hbm, held)
    pltpu.sync_copy(places_hbm, index)
    pltpu.sync_copy(mask_hbm, bits)
    result = operation(held, index[...], bits[...] > 0)
    line[...] = jnp.zeros(8, dtype) if result is None else result
    pltpu.sync_copy(held, o)
    pltpu.sync_copy(line, line_out)

  return small.run(
    body,
    table,
    places,
    mask,
    out=(small.like(table), jax.ShapeDtypeStruct((8,), dtype)),
    cores=small.one_subcore,
    scratch_types=[
      pltpu.VMEM((16,), dtype),
      pltpu.VMEM((8,), np.int32),
      pltpu.VMEM((8,), np.int32),
      pltpu.VMEM((8,), dtype),
    ],
  )


_CHOSEN = small.MASK > 0


@small.words
@covers("plsc.load_gather")
def test_load_gather(table, dtype):
  def gather(held, places, mask):
    masked = plsc.load_gather(held, [places], mask=mask)
    return jnp.where(mask, masked, plsc.load_gather(held, [places]) * 2)

  _, line = _on_table(gather, table, dtype=dtype)
  taken = table[_PLACES]
  np.testing.assert_array_equal(line, np.where(_CHOSEN, taken, 2 * taken))


@small.words
@covers("plsc.store_scatter")
def test_store_scatter(table, dtype):
  def scatter(held, places, mask):
    plsc.store_scatter(held, [places], (places * 3).astype(dtype), mask=mask)

  found, _ = _on_table(scatter, table, dtype=dtype)
  table[_PLACES[_CHOSEN]] = _PLACES[_CHOSEN] * 3
  np.testing.assert_array_equal(found, table)


@small.words
@covers("plsc.addupdate_scatter")
def test_addupdate_scatter(table, dtype):
  def scatter(held, places, mask):
    values = places.astype(dtype)
    plsc.addupdate_scatter(held, [places // 4], values, mask=mask)
    plsc.addupdate_scatter(held, [places], values)

  found, _ = _on_table(scatter, table, dtype=dtype)
  np.add.at(table, _PLACES[_CHOSEN] // 4, _PLACES[_CHOSEN])
  np.add.at(table, _PLACES, _PLACES)
  np.testing.assert_array_equal(found, table)


@small.words
@covers("plsc.load_expanded")
def test_load_expanded(table, dtype):
  def load(held, places, mask):
    value = plsc.load_expanded(held.at[pl.ds(4, 8)], mask=mask)
    return jnp.where(mask, value, jnp.zeros(8, dtype))

  _, line = _on_table(load, table, dtype=dtype)
  expected = np.zeros(8, int)
  expected[_CHOSEN] = table[4 : 4 + small.MASK.sum()]
  np.testing.assert_array_equal(line, expected)


@small.words
@covers("plsc.store_compressed")
def test_store_compressed(table, dtype):
  def store(held, places, mask):
    part = held.at[pl.ds(4, 8)]
    plsc.store_compressed(part, places.astype(dtype), mask=mask)

  found, _ = _on_table(store, table, dtype=dtype)
  table[4 : 4 + small.MASK.sum()] = _PLACES[_CHOSEN]
  np.testing.assert_array_equal(found, table)


@small.words
@covers("plsc.addupdate_compressed")
def test_addupdate_compressed(table, dtype):
  def add(held, places, mask):
    part = held.at[pl.ds(4, 8)]
    plsc.addupdate_compressed(part, places.astype(dtype), mask=mask)

  found, _ = _on_table(add, table, dtype=dtype)
  table[4 : 4 + small.MASK.sum()] += _PLACES[_CHOSEN]
  np.testing.assert_array_equal(found, table)


@small.words
@covers("plsc.addupdate")
def test_addupdate(table, dtype):
  def add(held, places, mask):
    del mask
    plsc.addupdate(held.at[pl.ds(4, 8)], places.astype(dtype))

  found, _ = _on_table(add, table, dtype=dtype)
  table[4:12] += _PLACES
  np.testing.assert_array_equal(found, table)


@pytest.mark.parametrize("carried", [False, True])
@covers("plsc.parallel_loop")
def test_parallel_loop(table, carried):
  def loop(held, places, mask):
    del places, mask
    if carried:
      zero = jnp.zeros(8, jnp.int32)
      add = lambda i, total: total + held[pl.ds(i, 8)]
      return plsc.parallel_loop(0, 16, 8, carry=zero)(add)

    @plsc.parallel_loop(0, 16, 8)
    def _(i):
      held[pl.ds(i, 8)] = held[pl.ds(i, 8)] * 2

  found, line = _on_table(loop, table)
  np.testing.assert_array_equal(found, table if carried else table * 2)
  total = table.reshape(2, 8).sum(0) if carried else np.zeros(8)
  np.testing.assert_array_equal(line, total)


# --- values on a vector subcore -----------------------------------------------

_scan_kinds = small.kinds(np.int32, np.float32)


def _lanes_of(dtype):
  return np.array([5, -7, 1, 2, 9, -3, 4, 0]).astype(dtype), small.MASK


def _scanned(scan, dtype):
  """Without a mask, and with one."""
  x, mask = _lanes_of(dtype)
  fn = lambda x, m: (scan(x), scan(x, mask=m > 0))
  return small.on_lanes(fn, x, mask, out=(small.like(x), small.like(x)))


@_scan_kinds
@covers("plsc.cumsum")
def test_cumsum(dtype):
  whole, masked = _scanned(plsc.cumsum, dtype)
  np.testing.assert_array_equal(whole, [5, -2, -1, 1, 10, 7, 11, 11])
  np.testing.assert_array_equal(masked, [5, -7, -6, -6, 3, 3, 7, 7])


@_scan_kinds
@covers("plsc.cummax")
def test_cummax(dtype):
  whole, masked = _scanned(plsc.cummax, dtype)
  np.testing.assert_array_equal(whole, [5, 5, 5, 5, 9, 9, 9, 9])
  np.testing.assert_array_equal(masked, [5, -7, 1, 1, 9, 9, 9, 9])


@_scan_kinds
@covers("plsc.scan_count")
def test_scan_count(dtype):
  x = np.array([3, 1, 3, 3, 1, 7, 7, 3]).astype(dtype)

  def fn(x, m):
    counts, last = plsc.scan_count(x, m > 0)
    return counts, last.astype(jnp.int32)

  out = (small.like(x, np.int32),) * 2
  counts, last = small.on_lanes(fn, x, small.MASK, out=out)
  np.testing.assert_array_equal(counts[_CHOSEN], [1, 1, 2, 1, 2])
  np.testing.assert_array_equal(last, [0, 0, 0, 0, 1, 0, 1, 1])


@_scan_kinds
@pytest.mark.parametrize("descending", [False, True])
@covers("plsc.sort_key_val")
def test_sort_key_val(dtype, descending):
  x, mask = _lanes_of(dtype)

  def fn(x, m):
    both = plsc.sort_key_val(x, x * 2, descending=descending)
    keys, values, valid = plsc.sort_key_val(
      x, x * 2, mask=m > 0, descending=descending
    )
    return *both, keys, values, valid.astype(jnp.int32)

  out = (*(small.like(x),) * 4, small.like(x, np.int32))
  keys, values, some, theirs, valid = small.on_lanes(fn, x, mask, out=out)
  order = -1 if descending else 1
  np.testing.assert_array_equal(keys, np.sort(x)[::order])
  np.testing.assert_array_equal(values, 2 * keys)
  count = mask.sum()
  np.testing.assert_array_equal(some[:count], np.sort(x[_CHOSEN])[::order])
  np.testing.assert_array_equal(theirs[:count], 2 * some[:count])
  np.testing.assert_array_equal(valid, np.arange(8) < count)


@covers("plsc.all_reduce_ffs", "plsc.all_reduce_population_count")
def test_all_reduce():
  for lanes in (small.MASK, np.zeros(8, np.int32), np.ones(8, np.int32)):
    fn = lambda m: (
      plsc.all_reduce_ffs(m > 0),
      plsc.all_reduce_population_count(m > 0),
    )
    first, count = small.on_lanes(fn, lanes, out=(small.like(lanes),) * 2)
    there = np.flatnonzero(lanes)
    expected = there[0] if there.size else 8
    np.testing.assert_array_equal(first, np.full(8, expected))
    np.testing.assert_array_equal(count, np.full(8, there.size))


@pytest.mark.parametrize("layout", plsc.PackFormat)
@pytest.mark.parametrize(
  ("wide", "narrow"), [(np.float32, small.BF16), (np.int32, np.int16)]
)
@covers("plsc.pack", "plsc.unpack")
def test_pack_and_unpack(layout, wide, narrow):
  x, y = small.values(8, dtype=wide), small.values(8, dtype=wide, seed=1)

  def fn(x, y):
    both = plsc.pack(x, y, format=layout, preferred_element_type=narrow)
    return (
      both.reshape(16),
      *plsc.unpack(both, format=layout, preferred_element_type=wide),
    )

  out = (jax.ShapeDtypeStruct((16,), narrow), small.like(x), small.like(x))
  packed, a, b = small.on_lanes(fn, x, y, out=out)
  np.testing.assert_array_equal([a, b], [x, y])
  pairs = np.stack([x, y], -1 if layout == plsc.PackFormat.INTERLEAVED else 0)
  np.testing.assert_array_equal(packed, pairs.reshape(16).astype(narrow))


@small.kinds(np.float32, np.int16, np.uint8)
@pytest.mark.filterwarnings("ignore:plsc.bitcast is deprecated")
@covers("plsc.bitcast")
def test_bitcast_of_lanes(dtype):
  x = small.values(8, dtype=np.int32)
  count = 32 // np.dtype(dtype).itemsize
  out = jax.ShapeDtypeStruct((count,), dtype)
  o = small.on_lanes(lambda x: plsc.bitcast(x, dtype), x, out=out)
  assert o.tobytes() == x.tobytes()
