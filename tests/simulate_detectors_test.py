"""What the simulator finds wrong, and what it must leave alone.

Each fault is in a body with a flag: with the fault it is found under every
seed, without it the kernel is silent, and right, under 50.
"""

import functools
import inspect
import re
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.simulate import memory
from tests import simulating, support

_DMA = pltpu.SemaphoreType.DMA
_REGULAR = pltpu.SemaphoreType.REGULAR
_SLAB = (8, 128)
_VMEM = pltpu.VMEM(_SLAB, np.float32)
_ID = pltpu.CompilerParams(collective_id=0)
_RIGHT_OR_WRONG = pytest.mark.parametrize("wrong", [False, True])


def _floats(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _ints(*shape):
  return np.random.default_rng(0).integers(0, 1000, shape, np.int32)


def _out(*shape, dtype: Any = np.float32) -> Any:
  return jax.ShapeDtypeStruct(shape, dtype)


def _one_core(chip):
  return chip.tensor_cores("core", 1)


def _subcores(chip, *, cores=1, subcores=4):
  return chip.vector_subcores(num_cores=cores, num_subcores=subcores)


def _on_tensor_core(body, *args, out=None, scratch=(), **options):
  return simulating.kernel(
    body, *args, out=out or _out(*_SLAB), scratch_types=scratch, **options
  )


_on_one_core = functools.partial(_on_tensor_core, cores=_one_core)


def _on_subcores(body, *args, out, scratch=(), cores=_subcores, **options):
  options.setdefault(
    "compiler_params", pltpu.CompilerParams(use_tc_tiling_on_sc=False)
  )
  return simulating.kernel(
    body, *args, out=out, scratch_types=scratch, cores=cores, **options
  )


def _line(body, marker):
  """Where a marked line of a body is: "file.py:12"."""
  lines, first = inspect.getsourcelines(body)
  (found,) = [i for i, text in enumerate(lines) if f"# {marker}" in text]
  return f"simulate_detectors_test.py:{first + found} "


# --- races of a core and its DMAs --------------------------------------------


def _use_of_copy(wrong):
  def body(x_hbm, o_hbm, acc, sem):
    copy = pltpu.async_copy(x_hbm, acc, sem)  # the copy
    if wrong:
      value = acc[...]  # the use
      copy.wait()
    else:
      copy.wait()
      value = acc[...]
    acc[...] = value + 1
    pltpu.sync_copy(acc, o_hbm)

  return body


def test_a_use_before_the_wait_is_a_race():
  x = _floats(*_SLAB)
  body = _use_of_copy(wrong=True)
  made = _on_one_core(body, x, scratch=[_VMEM, _DMA])
  text = simulating.caught(made, "race", x)
  assert "VMEM 'acc' of device 0, core 0" in text
  assert "write of VMEM" in text or "read of VMEM" in text
  assert f"copy from 'x_hbm' to 'acc' at {_line(body, 'the copy')}" in text
  assert f"load of 'acc' at {_line(body, 'the use')}" in text
  assert "wait for the DMA" in text


def test_a_use_after_the_wait_is_none():
  x = _floats(*_SLAB)
  made = _on_one_core(_use_of_copy(wrong=False), x, scratch=[_VMEM, _DMA])
  (y,) = simulating.silent(made, x)
  np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize("dma", ["late", "early", "random"])
def test_a_race_is_found_whenever_the_dma_is_done(dma):
  x = _floats(*_SLAB)
  made = _on_one_core(_use_of_copy(wrong=True), x, scratch=[_VMEM, _DMA])
  simulating.caught(made, "race", x, dma=dma)


def test_races_are_not_looked_for_if_not_asked():
  x = _floats(*_SLAB)
  made = _on_one_core(_use_of_copy(wrong=True), x, scratch=[_VMEM, _DMA])
  assert not made.findings(x, detect_races=False, dma="early")


def _reuse_of_source(wrong):
  def body(x_hbm, o_hbm, acc, sem):
    pltpu.sync_copy(x_hbm, acc)
    copy = pltpu.async_copy(acc, o_hbm, sem)
    if wrong:
      acc[...] = acc[...] * 2
      copy.wait()
    else:
      copy.wait()
      acc[...] = acc[...] * 2

  return body


@_RIGHT_OR_WRONG
def test_overwriting_the_source_of_a_copy_under_way(wrong):
  x = _floats(*_SLAB)
  made = _on_one_core(_reuse_of_source(wrong), x, scratch=[_VMEM, _DMA])
  if wrong:
    text = simulating.caught(made, "race", x)
    assert re.search("read (of VMEM 'acc' of .*)?by a DMA of device 0", text)
    assert "copy from 'acc' to 'o_hbm'" in text
    assert "store to 'acc'" in text
  else:
    (y,) = simulating.silent(made, x)
    np.testing.assert_array_equal(y, x)


def _two_copies(wrong):
  def body(x_hbm, o_hbm, acc, sems):
    first = pltpu.async_copy(x_hbm.at[0], acc, sems.at[0])
    if not wrong:
      first.wait()
    second = pltpu.async_copy(x_hbm.at[1], acc, sems.at[1])
    if wrong:
      first.wait()
    second.wait()
    pltpu.sync_copy(acc, o_hbm)

  return body


@_RIGHT_OR_WRONG
def test_two_copies_to_one_place(wrong):
  x = _floats(2, *_SLAB)
  made = _on_one_core(_two_copies(wrong), x, scratch=[_VMEM, _DMA((2,))])
  if wrong:
    text = simulating.caught(made, "race", x)
    assert text.count("by a DMA of device 0, core 0") == 2
  else:
    (y,) = simulating.silent(made, x)
    np.testing.assert_array_equal(y, x[1])


def _halves(overlap):
  def body(x_hbm, o_hbm, acc, sems):
    copies = [
      pltpu.async_copy(
        x_hbm.at[:, pl.ds(64 * i, 64)],
        acc.at[:, pl.ds(64 * i - overlap * i, 64)],
        sems.at[i],
      )
      for i in range(2)
    ]
    for copy in copies:
      copy.wait()
    pltpu.sync_copy(acc, o_hbm)

  return body


@pytest.mark.parametrize("overlap", [0, 1])
def test_copies_to_parts_of_a_buffer_race_where_they_meet(overlap):
  x = _floats(*_SLAB)
  made = _on_one_core(_halves(overlap), x, scratch=[_VMEM, _DMA((2,))])
  if overlap:
    simulating.caught(made, "race", x)
  else:
    (y,) = simulating.silent(made, x)
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("lanes", [64, 65])
def test_a_masked_store_touches_what_its_mask_says(lanes):
  x = _floats(*_SLAB)

  def body(x_hbm, o_hbm, acc, sem):
    right = pl.ds(64, 64)
    copy = pltpu.async_copy(x_hbm.at[:, right], acc.at[:, right], sem)
    lane = lax.broadcasted_iota(jnp.int32, _SLAB, 1)
    pltpu.store(acc, jnp.zeros(_SLAB), mask=lane < lanes)
    copy.wait()
    pltpu.sync_copy(acc, o_hbm)

  made = _on_one_core(body, x, scratch=[_VMEM, _DMA])
  if lanes == 64:
    (y,) = simulating.silent(made, x)
    np.testing.assert_array_equal(y, np.where(np.arange(128) < 64, 0, x))
  else:
    simulating.caught(made, "race", x)


# --- races of cores ----------------------------------------------------------


def _put(*, barrier=True, receive=True):
  """Each core puts its slab into the other's buffer, and returns that."""

  def body(x_hbm, o_hbm, mine, theirs, send, recv):
    core = lax.axis_index("core")
    pltpu.sync_copy(x_hbm.at[core], mine)
    if barrier:
      pltpu.core_barrier(pltpu.get_barrier_semaphore(), core_axis_name="core")
    copy = pltpu.async_remote_copy(
      mine, theirs, send, recv, device_id={"core": 1 - core}
    )
    if receive:
      copy.wait()
      value = theirs[...]
    else:
      value = theirs[...]
      copy.wait()
    mine[...] = value
    pltpu.sync_copy(mine, o_hbm.at[core])

  return body


def _putting(body, x):
  return _on_tensor_core(
    body,
    x,
    out=_out(2, *_SLAB),
    scratch=[_VMEM, _VMEM, _DMA, _DMA],
    compiler_params=_ID,
  )


def test_a_read_before_the_other_cores_copy_has_come_is_a_race():
  x = _floats(2, *_SLAB)
  text = simulating.caught(_putting(_put(receive=False), x), "race", x)
  assert re.search(r"VMEM 'theirs' of device 0, core [01]", text)
  assert re.search(r"write (of .*)?by a DMA of device 0, core [01]", text)
  assert "load of 'theirs'" in text
  assert "copy from 'mine' to 'theirs'" in text


def test_a_copy_between_cores_that_is_waited_for_is_none():
  x = _floats(2, *_SLAB)
  (y,) = simulating.silent(_putting(_put(), x), x)
  np.testing.assert_array_equal(y, x[::-1])


def test_a_put_before_the_owner_is_known_to_be_there_is_out_of_scope():
  x = _floats(2, *_SLAB)
  made = _putting(_put(barrier=False), x)
  text = simulating.caught(made, "scope", x)
  assert re.search(
    r"a DMA of device 0, core (\d): copy from 'mine' to 'theirs' at"
    r" simulate_detectors_test.py:\d+ \(\S*body\) touches VMEM 'theirs' of"
    r" device 0, core (\d) without knowing that device 0, core \2 has entered",
    text,
  )
  assert "Meet in a barrier" in text


def _into_hbm(wrong):
  def body(x_hbm, o_hbm, acc):
    core = lax.axis_index("core")
    pltpu.sync_copy(x_hbm.at[core], acc)
    pltpu.sync_copy(acc, o_hbm.at[0 if wrong else core])

  return body


@_RIGHT_OR_WRONG
def test_two_cores_write_to_one_place_of_hbm(wrong):
  x = _floats(2, *_SLAB)
  made = _on_tensor_core(
    _into_hbm(wrong), x, out=_out(2, *_SLAB), scratch=[_VMEM]
  )
  if wrong:
    text = simulating.caught(made, "race", x)
    assert "write of HBM 'o_hbm[0, 0:8, 0:128]' of device 0" in text
    assert "DMA of device 0, core 0" in text
    assert "DMA of device 0, core 1" in text
  else:
    (y,) = simulating.silent(made, x)
    np.testing.assert_array_equal(y, x)


def test_the_same_values_from_several_cores_are_no_race():
  x = _floats(*_SLAB)

  def body(x_hbm, o_hbm, acc):
    pltpu.sync_copy(x_hbm, acc)
    pltpu.sync_copy(acc, o_hbm)

  made = _on_tensor_core(body, x, scratch=[_VMEM])
  (y,) = simulating.silent(made, x)
  np.testing.assert_array_equal(y, x)


@_RIGHT_OR_WRONG
def test_a_copy_of_the_same_values_races_with_a_read(wrong):
  def body(x_hbm, o_hbm, acc, sem):
    pltpu.sync_copy(x_hbm.at[0], acc)
    copy = pltpu.async_copy(x_hbm.at[1], acc, sem)
    if not wrong:
      copy.wait()
    value = acc[...] + 1
    if wrong:
      copy.wait()
    acc[...] = value
    pltpu.sync_copy(acc, o_hbm)

  x = np.ones((2, *_SLAB), np.float32)
  made = _on_one_core(body, x, scratch=[_VMEM, _DMA])
  if wrong:
    for dma in "early", "late":
      simulating.caught(made, "race", x, dma=dma)
  else:
    simulating.silent(made, x)


def test_who_writes_a_table_may_read_it_while_others_write_the_same():
  def body(x_hbm, o_hbm, table, mine):
    for _ in range(2):
      pltpu.sync_copy(x_hbm, table)
      pltpu.sync_copy(table, mine)
    pltpu.sync_copy(mine, o_hbm.at[lax.axis_index("subcore")])

  x = _ints(16)
  made = _on_subcores(
    body,
    x,
    out=_out(4, 16, dtype=np.int32),
    scratch=[pltpu.VMEM_SHARED((16,), np.int32), pltpu.VMEM((16,), np.int32)],
  )
  (y,) = simulating.silent(made, x)
  np.testing.assert_array_equal(y, np.tile(x, (4, 1)))


@_RIGHT_OR_WRONG
def test_the_same_values_where_two_cores_overlap_are_no_race(wrong):
  x = _floats(12, 128)

  def body(x_hbm, o_hbm, acc):
    core = lax.axis_index("core")
    rows = pl.ds(core * 4, 8)
    pltpu.sync_copy(x_hbm.at[rows], acc)
    if wrong:
      acc[pl.ds(5 - core, 1)] = jnp.full((1, 128), core, jnp.float32)
    pltpu.sync_copy(acc, o_hbm.at[rows])

  made = _on_tensor_core(body, x, out=_out(12, 128), scratch=[_VMEM])
  if wrong:
    text = simulating.caught(made, "race", x)
    assert "write of HBM 'o_hbm[" in text
  else:
    (y,) = simulating.silent(made, x)
    np.testing.assert_array_equal(y, x)


def test_interleaved_columns_of_several_subcores_are_no_race():
  x = _ints(8, 32)

  def body(x_hbm, o_hbm, acc):
    worker = lax.axis_index("subcore")
    columns = pl.ds(worker * 8, 8)
    pltpu.sync_copy(x_hbm.at[:, columns], acc)
    pltpu.sync_copy(acc, o_hbm.at[:, columns])

  made = _on_subcores(
    body,
    x,
    out=_out(8, 32, dtype=np.int32),
    scratch=[pltpu.VMEM((8, 8), np.int32)],
  )
  (y,) = simulating.silent(made, x)
  np.testing.assert_array_equal(y, x)


# --- subcores ----------------------------------------------------------------


def _rotate_through_shared(wrong):
  def body(x_hbm, o_hbm, acc, shared):
    subcore = lax.axis_index("subcore")
    pltpu.sync_copy(x_hbm.at[subcore], acc)
    pltpu.sync_copy(acc, shared.at[subcore])
    if not wrong:
      plsc.subcore_barrier()
    pltpu.sync_copy(shared.at[lax.rem(subcore + 1, 4)], acc)
    pltpu.sync_copy(acc, o_hbm.at[subcore])

  return body


@_RIGHT_OR_WRONG
def test_subcores_exchange_through_shared_memory(wrong):
  x = _ints(4, 16)
  made = _on_subcores(
    _rotate_through_shared(wrong),
    x,
    out=_out(4, 16, dtype=np.int32),
    scratch=[
      pltpu.VMEM((16,), np.int32),
      pltpu.VMEM_SHARED((4, 16), np.int32),
    ],
  )
  if wrong:
    text = simulating.caught(made, "race", x)
    assert re.search(
      r"VMEM_SHARED 'shared\[\d, 0:16\]' of device 0, core 0", text
    )
    assert re.search(r"a DMA of device 0, core 0, subcore \d", text)
  else:
    (y,) = simulating.silent(made, x)
    np.testing.assert_array_equal(y, np.roll(x, -1, 0))


def test_each_sparse_core_has_a_barrier_of_its_own():
  x = _ints(2, 4, 16)

  def body(x_hbm, o_hbm, acc):
    core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
    pltpu.sync_copy(x_hbm.at[core, subcore], acc)
    pltpu.sync_copy(acc, o_hbm.at[core, subcore])
    plsc.subcore_barrier()  # Of one core: tells nothing of the other.
    other = o_hbm.at[1 - core, subcore]
    pltpu.sync_copy(other, acc)

  made = _on_subcores(
    body,
    x,
    out=_out(2, 4, 16, dtype=np.int32),
    scratch=[pltpu.VMEM((16,), np.int32)],
    cores=lambda chip: _subcores(chip, cores=2),
  )
  text = simulating.caught(made, "race", x)
  assert "HBM 'o_hbm[" in text and "]' of device 0" in text


def _add_to_shared(*, barrier, add=True):
  def body(x_hbm, o_hbm, acc, rows, shared):
    subcore = lax.axis_index("subcore")
    pltpu.sync_copy(x_hbm.at[subcore], acc)
    rows[...] = lax.iota(np.int32, 8)

    @pl.when(subcore == 0)
    def _():
      pltpu.sync_copy(x_hbm.at[4], shared)

    plsc.subcore_barrier()
    pltpu.sync_copy(acc, shared.at[rows], add=add)
    if barrier:
      plsc.subcore_barrier()

    @pl.when(subcore == 1)
    def _():
      pltpu.sync_copy(shared, o_hbm)

  return body


@pytest.mark.parametrize(
  ("options", "wrong"),
  [
    (dict(barrier=True), False),
    (dict(barrier=False), True),
    (dict(barrier=True, add=False), True),
  ],
)
def test_subcores_add_to_one_place(options, wrong):
  x = _ints(5, 8, 16)
  made = _on_subcores(
    _add_to_shared(**options),
    x,
    out=_out(8, 16, dtype=np.int32),
    scratch=[
      pltpu.VMEM((8, 16), np.int32),
      pltpu.VMEM((8,), np.int32),
      pltpu.VMEM_SHARED((8, 16), np.int32),
    ],
  )
  if wrong:
    assert "VMEM_SHARED 'shared'" in simulating.caught(made, "race", x)
  else:
    (y,) = simulating.silent(made, x)
    np.testing.assert_array_equal(y, x.sum(0))


def _count_up(*, barrier):
  def body(o_hbm, count, line):
    subcore = lax.axis_index("subcore")
    count[0] = 0
    if barrier:
      plsc.subcore_barrier()
    plsc.fetch_and_add(count.at[0], subcore + 1, subcore_id=0)
    plsc.subcore_barrier()
    line[...] = jnp.full(8, count[0])

    @pl.when(subcore == 0)
    def _():
      pltpu.sync_copy(line, o_hbm)

  return body


@_RIGHT_OR_WRONG
def test_fetch_and_add(wrong):
  made = _on_subcores(
    _count_up(barrier=not wrong),
    out=_out(8, dtype=np.int32),
    scratch=[pltpu.SMEM((1,), np.int32), pltpu.VMEM((8,), np.int32)],
  )
  if wrong:
    text = simulating.caught(made, "race")
    assert "SMEM 'count' of device 0, core 0, subcore 0" in text
    assert "fetch_and_add to 'count'" in text
  else:
    (y,) = simulating.silent(made)
    np.testing.assert_array_equal(y, np.full(8, 1 + 2 + 3 + 4))


def _hand_on(place):
  """Subcore 0 writes a line, then adds; subcore 1 adds, then writes it too."""

  def body(o_hbm, counts, line):
    subcore = lax.axis_index("subcore")
    counts[0], counts[1] = 0, 0
    line[...] = jnp.full(8, subcore)
    plsc.subcore_barrier()

    @pl.when(subcore == 0)
    def _():
      pltpu.sync_copy(line, o_hbm)
      plsc.fetch_and_add(counts.at[0], 1, subcore_id=0)

    @pl.when(subcore == 1)
    def _():
      lax.while_loop(
        lambda seen: seen == 0,
        lambda seen: (
          plsc.fetch_and_add(counts.at[0], 0, subcore_id=0)
          if place == 0
          else plsc.fetch_and_add(counts.at[1], 1, subcore_id=0)
        ),
        jnp.int32(0),
      )
      pltpu.sync_copy(line, o_hbm)

    plsc.subcore_barrier()

  return body


@pytest.mark.parametrize("place", [0, 1])
def test_additions_order_those_who_add_to_the_same_element(place):
  made = _on_subcores(
    _hand_on(place),
    out=_out(8, dtype=np.int32),
    scratch=[pltpu.SMEM((2,), np.int32), pltpu.VMEM((8,), np.int32)],
    cores=functools.partial(_subcores, subcores=2),
  )
  if place == 0:
    (y,) = simulating.silent(made, seeds=range(6))
    np.testing.assert_array_equal(y, np.ones(8))
  else:
    assert "'o_hbm'" in simulating.caught(made, "race", seeds=range(6))


# --- scopes ------------------------------------------------------------------


def _signal_scratch(wrong):
  def body(o_hbm, acc, sem):
    core = lax.axis_index("core")
    if not wrong:
      pltpu.core_barrier(pltpu.get_barrier_semaphore(), core_axis_name="core")
    pl.semaphore_signal(sem, 1, device_id={"core": 1 - core})
    pl.semaphore_wait(sem, 1)
    acc[...] = jnp.ones(_SLAB)
    pltpu.sync_copy(acc, o_hbm)

  return body


@_RIGHT_OR_WRONG
def test_a_signal_to_scratch_of_another_core(wrong):
  made = _on_tensor_core(
    _signal_scratch(wrong), scratch=[_VMEM, _REGULAR], compiler_params=_ID
  )
  if wrong:
    text = simulating.caught(made, "scope")
    assert re.search(
      r"core (\d): signal of 'sem' at .* signals semaphore", text
    )
    assert "'sem' of device 0, core" in text
  else:
    simulating.silent(made)


def _leave_early(wrong):
  def body(x_hbm, o_hbm, mine, sems):
    core = lax.axis_index("core")
    pltpu.sync_copy(x_hbm.at[core], mine)

    def inside(inbox):
      pltpu.core_barrier(pltpu.get_barrier_semaphore(), core_axis_name="core")
      copy = pltpu.async_remote_copy(
        mine, inbox, sems.at[0], sems.at[1], device_id={"core": 1 - core}
      )
      copy.wait_send()
      if not wrong:
        copy.wait_recv()
        pltpu.sync_copy(inbox, o_hbm.at[core])

    pl.run_scoped(inside, pltpu.VMEM(_SLAB, np.float32))
    if wrong:
      pltpu.make_async_copy(mine, mine, sems.at[1]).wait()

  return body


@_RIGHT_OR_WRONG
def test_a_put_is_under_way_when_the_owner_leaves_the_scope(wrong):
  x = _floats(2, *_SLAB)
  made = _on_tensor_core(
    _leave_early(wrong),
    x,
    out=_out(2, *_SLAB),
    scratch=[_VMEM, _DMA((2,))],
    compiler_params=_ID,
  )
  if wrong:
    text = simulating.caught(made, "scope", x)
    assert re.search(
      r"a DMA of device 0, core (\d): copy from 'mine' to 'inbox' at .* touches"
      r" VMEM 'inbox' of device 0, core (\d) when device 0, core \2 may have"
      r" left the scope of that memory \(run_scoped at",
      text,
    )
    text = simulating.caught(made, "scope", x, dma="early")
    assert re.search(
      r"leaves the scope of VMEM 'inbox' of device 0, core (\d) while a DMA of"
      r" device 0, core (\d): copy from 'mine' to 'inbox'",
      text,
    )
  else:
    (y,) = simulating.silent(made, x)
    np.testing.assert_array_equal(y, x[::-1])


# --- deadlocks ---------------------------------------------------------------


def _signals(*, signal=True, to=lambda core: 1 - core, amount=1, need=1):
  def body(o_hbm, acc):
    core = lax.axis_index("core")
    sem = pltpu.get_barrier_semaphore()
    if signal:
      pl.semaphore_signal(sem, amount, device_id={"core": to(core)})  # signal
    pl.semaphore_wait(sem, need)  # wait
    acc[...] = jnp.ones(_SLAB)
    pltpu.sync_copy(acc, o_hbm)

  return body


@pytest.mark.parametrize(
  ("options", "count", "waiting"),
  [
    (dict(signal=False), "0 of 1", 2),
    (dict(need=2), "1 of 2", 2),
    (dict(amount=2, need=3), "2 of 3", 2),
    (dict(to=lambda core: 1), "0 of 1", 1),
  ],
)
def test_a_wait_that_nothing_ends_is_a_deadlock(options, count, waiting):
  body = _signals(**options)
  made = _on_tensor_core(body, scratch=[_VMEM], compiler_params=_ID)
  text = simulating.caught(made, "deadlock")
  assert f"{waiting} of 2 workers wait for ever" in text
  assert re.search(
    r"device 0, core 0 waits for semaphore 'barrier' of device 0, core 0,"
    rf" which has {count} \(wait for 'barrier' at {_line(body, 'wait')}",
    text,
  )
  if options.get("signal", True):
    assert f"signalled by {_line(body, 'signal')}" in text
  else:
    assert "no line of the kernel signals it" in text


def test_enough_signals_are_no_deadlock():
  made = _on_tensor_core(_signals(), scratch=[_VMEM], compiler_params=_ID)
  (y,) = simulating.silent(made)
  np.testing.assert_array_equal(y, np.ones(_SLAB))


def test_a_deadlock_raises_whatever_was_asked_for():
  chip, mesh = support.simulated()
  body = _signals(signal=False)

  def call(x):
    return pl.kernel(
      lambda x, *refs: body(*refs),
      _out(*_SLAB),
      mesh=chip.tensor_cores("core"),
      scratch_types=[_VMEM],
      compiler_params=_ID,
    )(x)

  with (
    pytest.raises(cm.DeadlockError, match="8 workers|2 of 2 workers"),
    cm.simulation(on_finding="record") as run,
  ):
    support.over_devices(call, mesh, check_vma=False)(_floats(32, 128))
  assert [f.kind for f in run.findings][-1] == "deadlock"


def test_a_copy_waited_for_twice_is_a_deadlock():
  x = _floats(*_SLAB)

  def body(x_hbm, o_hbm, acc, sem):
    copy = pltpu.async_copy(x_hbm, acc, sem)
    copy.wait()
    copy.wait()

  made = _on_one_core(body, x, scratch=[_VMEM, _DMA])
  text = simulating.caught(made, "deadlock", x)
  assert "semaphore 'sem' of device 0, core 0, which has 0 of 4096" in text


def test_a_subcore_that_stays_away_from_the_barrier_is_named():
  def body(o_hbm, sem):
    subcore = lax.axis_index("subcore")

    @pl.when(subcore != 2)
    def _():
      plsc.subcore_barrier()

    @pl.when(subcore == 2)
    def _():
      pl.semaphore_wait(sem, 1)

  made = _on_subcores(body, out=_out(8, dtype=np.int32), scratch=[_REGULAR])
  text = simulating.caught(made, "deadlock")
  assert "4 of 4 workers wait" in text
  assert "subcore_barrier of device 0, core 0 (3 of 4 are there)" in text
  assert "device 0, core 0, subcore 2 is at wait for 'sem'" in text


def test_devices_that_wait_for_one_another_in_a_ring_deadlock():
  def body(o_hbm, sem, acc):
    device = lax.axis_index("device")
    pl.semaphore_wait(sem, 1)
    pl.semaphore_signal(sem, 1, device_id={"device": lax.rem(device + 1, 3)})

  made = _on_one_core(body, scratch=[_REGULAR, _VMEM], devices=3)
  text = simulating.caught(made, "deadlock")
  for device in range(3):
    assert f"device {device}, core 0 waits for semaphore 'sem'" in text
  assert "signalled by simulate_detectors_test.py" in text


# --- what is left ------------------------------------------------------------


@pytest.mark.parametrize(
  ("amount", "need", "kind", "text"),
  [
    (
      2,
      1,
      "leftover",
      r"'sem' of device 0, core 0 ends at 1, not 0 \(the last",
    ),
    (-1, None, "negative count", "ends at -1: it was signalled a negative"),
  ],
)
def test_counts_that_are_left(amount, need, kind, text):
  def body(o_hbm, sem):
    pl.semaphore_signal(sem, amount)
    if need is not None:
      pl.semaphore_wait(sem, need)

  made = _on_one_core(body, scratch=[_REGULAR])
  assert re.search(text, simulating.caught(made, kind))


def test_a_copy_that_nobody_waits_for():
  x = _floats(*_SLAB)

  def body(x_hbm, o_hbm, sems):
    pltpu.async_copy(x_hbm, o_hbm, sems.at[1])

  made = _on_one_core(body, x, scratch=[_DMA((2,))])
  text = simulating.caught(made, "unwaited", x)
  assert "semaphore 'sems[1]' of device 0, core 0 ends with 4096 bytes" in text
  assert "copy from 'x_hbm' to 'o_hbm' at simulate_detectors_test.py" in text


def test_as_many_waits_as_signals_leave_nothing():
  def body(o_hbm, sem, acc):
    pl.semaphore_signal(sem, 3)
    pl.semaphore_wait(sem, 1)
    pl.semaphore_wait(sem, 2)
    acc[...] = jnp.ones(_SLAB)
    pltpu.sync_copy(acc, o_hbm)

  made = _on_one_core(body, scratch=[_REGULAR, _VMEM])
  simulating.silent(made)


@pytest.mark.parametrize(
  "left, text",
  [
    (None, None),
    ("rhs", "ends with an operand in staging register 1 of MXU 0"),
    ("rows", "ends with 8 rows in the result queue of MXU 0"),
  ],
)
def test_what_is_left_in_the_matrix_units(left, text):
  weights, x = np.eye(256, dtype=np.float32), np.ones((16, 256), np.float32)

  def body(w_vmem, x_vmem, o_vmem):
    pltpu.matmul_push_rhs(w_vmem[...], 0, 0)
    if left == "rhs":
      pltpu.matmul_push_rhs(w_vmem[...], 1, 0)
    pltpu.matmul_lhs_fifo(x_vmem[...], 0, load_staged_rhs=0)
    rows = 8 if left == "rows" else 16
    o_vmem[:rows] = pltpu.matmul_pop_fifo((rows, 256), jnp.float32, 0)

  def call(weights, x):
    return pl.pallas_call(body, out_shape=_out(16, 256))(weights, x)

  made = simulating.traced(call, weights, x, chip="v6e", devices=1)
  if left is None:
    np.testing.assert_array_equal(simulating.silent(made, weights, x)[0], x)
  else:
    assert text in simulating.caught(made, "leftover", weights, x)


# --- checks and promises -----------------------------------------------------


def _promise(body):
  def call(x):
    return pl.pallas_call(body, out_shape=_out(*_SLAB))(x)

  x = np.zeros(_SLAB, np.float32)
  return simulating.traced(call, x, chip="v6e", devices=1), x


@_RIGHT_OR_WRONG
def test_a_debug_check(wrong):
  def body(x_vmem, o_vmem):
    first = 1.0 if wrong else 0.0
    pl.debug_check(x_vmem[0, 0] == first, "the first differs")  # check
    o_vmem[...] = x_vmem[...]

  with pl.enable_debug_checks():
    made, x = _promise(body)
    if wrong:
      text = simulating.caught(made, "check", x)
      assert _line(body, "check") in text
      assert "the first differs" in text
    else:
      simulating.silent(made, x)


@_RIGHT_OR_WRONG
def test_a_promise_of_a_multiple(wrong):
  def body(x_vmem, o_vmem):
    row = x_vmem[0, 0].astype(np.int32) + (4 if wrong else 8)
    row = pl.multiple_of(row, (2, 8))  # promise
    o_vmem[...] = x_vmem[...] + row.astype(np.float32)

  made, x = _promise(body)
  if wrong:
    text = simulating.caught(made, "check", x)
    assert _line(body, "promise") in text
    assert "4 is no multiple of 8" in text
  else:
    np.testing.assert_array_equal(simulating.silent(made, x)[0], x + 8)


def test_a_matrix_unit_that_has_no_operand():
  def body(x_vmem, o_vmem):
    pltpu.matmul_lhs_fifo(x_vmem[...], 0)  # product
    o_vmem[...] = pltpu.matmul_pop_fifo(_SLAB, jnp.float32, 0)

  made, x = _promise(body)
  text = simulating.caught(made, "check", x)
  assert _line(body, "product") in text
  assert "MXU 0 has no right-hand side yet" in text


# --- out of bounds -----------------------------------------------------------


def _dma_slice(index):
  def body(i_smem_hbm, x_hbm, o_hbm, acc, i_smem):
    pltpu.sync_copy(i_smem_hbm, i_smem)
    pltpu.sync_copy(x_hbm.at[pl.ds(i_smem[0], 8)], acc)
    pltpu.sync_copy(acc, o_hbm)

  return body


def _dynamic_index(index):
  def body(i_smem_hbm, x_hbm, o_hbm, acc, i_smem):
    pltpu.sync_copy(i_smem_hbm, i_smem)
    pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], acc)
    acc[0] = acc[i_smem[0]]

  return body


def _dynamic_store(index):
  def body(i_smem_hbm, x_hbm, o_hbm, acc, i_smem):
    pltpu.sync_copy(i_smem_hbm, i_smem)
    acc[pl.ds(i_smem[0], 1)] = jnp.zeros((1, 128))
    pltpu.sync_copy(acc, o_hbm)

  return body


@pytest.mark.parametrize("by", ["load", "store"])
@pytest.mark.parametrize("last", [4, 5])
def test_a_core_may_not_touch_the_padding_of_its_memory(by, last):
  def body(i_hbm, x_hbm, o_hbm, acc, i_smem):
    pltpu.sync_copy(i_hbm, i_smem)
    pltpu.sync_copy(x_hbm, acc)
    if by == "load":
      acc[0:1] = acc[pl.ds(i_smem[0], 1)]
    else:
      acc[pl.ds(i_smem[0], 1)] = acc[0:1]
    pltpu.sync_copy(acc, o_hbm)

  x, i = _floats(5, 128), np.array([last], np.int32)
  scratch = [pltpu.VMEM((5, 128), np.float32), pltpu.SMEM((1,), np.int32)]
  made = _on_one_core(body, i, x, out=_out(5, 128), scratch=scratch)
  if last < 5:
    simulating.silent(made, i, x, seeds=range(5))
  else:
    text = simulating.caught(made, "out of bounds", i, x)
    assert "elements [5, 6) of a dimension of 5 of 'acc'" in text


@pytest.mark.parametrize(
  ("make", "index", "text"),
  [
    (_dma_slice, 9, r"elements \[9, 17\) of a dimension of 16 of 'x_hbm'"),
    (_dma_slice, -1, r"elements \[-1, 7\) of a dimension of 16 of 'x_hbm'"),
    (_dynamic_index, 8, "element 8 of a dimension of 8 of 'acc'"),
    (_dynamic_index, -1, "element -1 of a dimension of 8 of 'acc'"),
    (_dynamic_store, 8, r"elements \[8, 9\) of a dimension of 8 of 'acc'"),
    (_dma_slice, 8, None),
    (_dynamic_store, 7, None),
  ],
)
def test_indices_of_a_core_are_checked(make, index, text):
  x, i = _floats(16, 128), np.array([index], np.int32)
  body = make(index)
  made = _on_one_core(body, i, x, scratch=[_VMEM, pltpu.SMEM((1,), np.int32)])
  if text is None:
    simulating.silent(made, i, x, seeds=range(5))
  else:
    found = simulating.caught(made, "out of bounds", i, x)
    assert re.search(text, found)
    assert "device 0, core 0: " in found
    assert "simulate_detectors_test.py" in found


def _gathers(how):
  def body(i_hbm, x_hbm, o_hbm, index, table, line):
    pltpu.sync_copy(i_hbm, index)
    pltpu.sync_copy(x_hbm, table)
    if how == "load_gather":
      line[...] = plsc.load_gather(table, [index[...]])
    elif how == "store_scatter":
      plsc.store_scatter(table, [index[...]], jnp.zeros(8, np.int32))
    else:
      pltpu.sync_copy(x_hbm.at[index], line)
    pltpu.sync_copy(line, o_hbm)

  return body


@pytest.mark.parametrize("how", ["load_gather", "store_scatter", "dma"])
@pytest.mark.parametrize("index", [15, 16, -1])
def test_indices_of_a_subcore_are_checked(how, index):
  x, i = _ints(16), np.array([0, 1, index, 3, 2, 1, 0, 5], np.int32)
  made = _on_subcores(
    _gathers(how),
    i,
    x,
    out=_out(8, dtype=np.int32),
    scratch=[
      pltpu.VMEM((8,), np.int32),
      pltpu.VMEM((16,), np.int32),
      pltpu.VMEM((8,), np.int32),
    ],
    cores=lambda chip: _subcores(chip, subcores=1),
  )
  if index == 15:
    simulating.silent(made, i, x, seeds=range(5))
  else:
    text = simulating.caught(made, "out of bounds", i, x)
    assert f"index {index} into a dimension of 16" in text
    assert "device 0, core 0, subcore 0" in text


def _lists_rows(scatter, wrong):
  def body(i_hbm, x_hbm, o_hbm, index, rows, sem):
    pltpu.sync_copy(i_hbm, index)
    pltpu.sync_copy(x_hbm, rows)
    src, dst = (rows, o_hbm.at[index]) if scatter else (x_hbm.at[index], rows)
    copy = pltpu.async_copy(src, dst, sem)
    if not wrong:
      copy.wait()
    index[...] = jnp.zeros(8, np.int32)
    if wrong:
      copy.wait()
    if not scatter:
      pltpu.sync_copy(rows, o_hbm)

  return body


@_RIGHT_OR_WRONG
@pytest.mark.parametrize("scatter", [False, True])
def test_a_list_of_indices_is_read_while_the_copy_runs(scatter, wrong):
  x, i = _ints(8, 16), np.array([3, 6, 1, 0, 2, 7, 5, 4], np.int32)
  made = _on_subcores(
    _lists_rows(scatter, wrong),
    i,
    x,
    out=_out(8, 16, dtype=np.int32),
    scratch=[pltpu.VMEM((8,), np.int32), pltpu.VMEM((8, 16), np.int32), _DMA],
    cores=lambda chip: _subcores(chip, subcores=1),
  )
  if wrong:
    for dma in "early", "late":
      text = simulating.caught(made, "race", i, x, dma=dma)
      assert "of VMEM 'index'" in text
      assert "read by a DMA of" in text or "read of VMEM" in text
  else:
    (y,) = simulating.silent(made, i, x)
    np.testing.assert_array_equal(y, x[np.argsort(i) if scatter else i])


@pytest.mark.parametrize("place", [2, -1])
@pytest.mark.parametrize("by", ["axis", "number"])
def test_a_device_that_does_not_exist(place, by):
  def body(i_hbm, o_hbm, i_smem, sem):
    pltpu.sync_copy(i_hbm, i_smem)
    if by == "axis":
      pl.semaphore_signal(sem, 1, device_id={"device": i_smem[0]})
    else:
      pl.semaphore_signal(sem, 1, device_id=i_smem[0])

  i = np.array([place] * 2, np.int32)
  made = _on_one_core(
    body, i, scratch=[pltpu.SMEM((1,), np.int32), _REGULAR], devices=2
  )
  text = simulating.caught(made, "out of bounds", i)
  assert re.search("device [01], core 0: device_id", text)
  assert f" {place} " in text


def test_a_core_that_does_not_exist():
  def body(o_hbm, sem):
    core = lax.axis_index("core")

    @pl.when(core == 1)
    def _():
      pl.semaphore_signal(sem, 1, device_id={"core": core + 1})

  made = _on_tensor_core(body, scratch=[_REGULAR])
  text = simulating.caught(made, "out of bounds")
  assert "core 1: signal of 'sem' at simulate_detectors_test.py" in text
  assert "reaches core 2, but a device has 2 of them" in text


# --- inputs, poison, capacity ------------------------------------------------


def _write_input(*, alias):
  del alias

  def body(x_hbm, o_hbm, acc):
    acc[...] = jnp.ones(_SLAB)
    pltpu.sync_copy(acc, o_hbm)
    pltpu.sync_copy(acc, x_hbm)

  return body


def test_an_input_that_is_written():
  x = _floats(*_SLAB)
  made = _on_one_core(_write_input(alias=False), x, scratch=[_VMEM])
  text = simulating.caught(made, "input written", x)
  assert re.search(
    r"a DMA of device 0, core 0: copy from 'acc' to 'x_hbm' at"
    r" simulate_detectors_test.py:\d+ \(\S+\) writes to HBM 'x_hbm' of device"
    r" 0, an input of the kernel",
    text,
  )


def test_an_input_of_another_device_that_is_written():
  x = _floats(2 * 8, 128)

  def body(x_hbm, o_hbm, send, recv):
    other = 1 - lax.axis_index("device")
    pltpu.async_remote_copy(
      x_hbm.at[pl.ds(0, 4)],
      x_hbm.at[pl.ds(4, 4)],
      send,
      recv,
      device_id={"device": other},
    ).wait()

  made = _on_one_core(body, x, scratch=[_DMA, _DMA], devices=2)
  text = simulating.caught(made, "input written", x)
  assert re.search("HBM 'x_hbm' of device [01]", text)


def test_an_input_that_is_an_output_may_be_written():
  x = _floats(*_SLAB)

  def call(x):
    ref = jax.new_ref(x)

    @pl.kernel(
      out_type=(),
      mesh=_one_core(cm.chip("v5p:2x2x1")),
      scratch_types=[_VMEM],
    )
    def double(x_hbm, acc):
      pltpu.sync_copy(x_hbm, acc)
      acc[...] = acc[...] * 2
      pltpu.sync_copy(acc, x_hbm)

    double(ref)
    return jax.freeze(ref)

  made = simulating.traced(call, x, chip="v5p:2x2x1", devices=1)
  (y,) = simulating.silent(made, x)
  np.testing.assert_array_equal(y, x * 2)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.int8])
@pytest.mark.parametrize("space", ["output", "scratch"])
def test_memory_that_nobody_wrote_holds_poison(dtype, space):
  def body(o_hbm, acc):
    if space == "scratch":
      pltpu.sync_copy(acc, o_hbm)

  made = _on_one_core(
    body, out=_out(32, 128, dtype=dtype), scratch=[pltpu.VMEM((32, 128), dtype)]
  )
  (y,) = made.run()
  if jnp.issubdtype(dtype, jnp.floating):
    assert np.isnan(y.astype(np.float32)).all()
  else:
    assert (y == memory.poison(np.dtype(dtype))).all()
    assert memory.poison(np.dtype(dtype)) != 0


def _holding(space, shape, dtype, *, twice=False):
  def body(o_hbm):
    for _ in range(2 if twice else 1):
      pl.run_scoped(lambda held: None, space(shape, dtype))

  return body


@pytest.mark.parametrize(
  ("chip", "space", "shape", "dtype", "text"),
  [
    ("v5p:2x2x1", pltpu.VMEM, (65, 512, 512), np.float32, "64 MiB of VMEM"),
    ("v5p:2x2x1", pltpu.VMEM, (64, 512, 512), np.float32, None),
    # Ten columns of 40 bytes take tiles of 512.
    ("v6e:2x2", pltpu.VMEM, (300_000, 10), np.float32, "holds 146.484 MiB"),
    ("v6e:2x2", pltpu.VMEM, (200_000, 10), np.float32, None),
    ("v6e:2x2", pltpu.VMEM, (33, 2048, 2048), np.int8, "128 MiB of VMEM"),
    # A narrower element takes a byte too, and a bool a word.
    ("v6e:2x2", pltpu.VMEM, (33, 2048, 2048), jnp.int4, "128 MiB of VMEM"),
    ("v6e:2x2", pltpu.VMEM, (31, 2048, 2048), jnp.int4, None),
    ("v6e:2x2", pltpu.VMEM, (31, 2048, 2048), np.bool_, "128 MiB of VMEM"),
    ("v5p:2x2x1", pltpu.SMEM, (300_000,), np.int32, "1 MiB of SMEM"),
    ("v5p:2x2x1", pltpu.SMEM, (200_000,), np.int32, None),
    # Rows of 3 words take 128.
    ("v5p:2x2x1", pltpu.SMEM, (3000, 3), np.int32, "holds 1.46484 MiB"),
  ],
)
def test_memory_over_the_capacity_of_a_tensor_core(
  chip, space, shape, dtype, text
):
  made = simulating.kernel(
    _holding(space, shape, dtype),
    out=_out(*_SLAB),
    chip=chip,
    cores=_one_core,
  )
  if text is None:
    assert not made.program_excess()
  else:
    (found,) = made.program_excess()
    assert text in found
    assert f"A TensorCore of {chip.partition(':')[0]} has" in found
    assert "'held'" in found


def test_scopes_that_follow_one_another_share_memory():
  body = _holding(pltpu.VMEM, (40, 512, 512), np.float32, twice=True)
  made = simulating.kernel(body, out=_out(*_SLAB), cores=_one_core)
  assert not made.program_excess()


@pytest.mark.parametrize(
  ("chip", "words", "fits"),
  [
    ("v5p:2x2x1", 128 * 1024, True),
    ("v5p:2x2x1", 128 * 1024 + 1, False),
    ("v6e:2x2", 64 * 1024, True),
    ("v6e:2x2", 64 * 1024 + 1, False),
  ],
)
def test_memory_over_the_capacity_of_a_vector_subcore(chip, words, fits):
  def body(o_hbm, table):
    pass

  made = _on_subcores(
    body,
    out=_out(8, dtype=np.int32),
    scratch=[pltpu.VMEM((words,), np.int32)],
    chip=chip,
  )
  if fits:
    assert not made.findings()
  else:
    text = simulating.caught(made, "memory", seeds=range(1))
    assert "A vector subcore of" in text
    assert "'table'" in text


@pytest.mark.parametrize(
  ("chip", "scratch", "text"),
  [
    ("v5p", [pltpu.VMEM_SHARED((1 << 21,), np.int32)], None),
    ("v5p", [pltpu.VMEM_SHARED((9 << 18,), np.int32)], "has 8 MiB for VMEM_SH"),
    ("v6e", [pltpu.VMEM_SHARED((1 << 21,), np.int32)], "has 4 MiB for VMEM_SH"),
    # The VMEM of 16 subcores comes out of the same memory.
    (
      "v5p",
      [
        pltpu.VMEM((1 << 16,), np.int32),
        pltpu.VMEM_SHARED((1 << 20,), np.int32),
      ],
      None,
    ),
    (
      "v5p",
      [
        pltpu.VMEM((1 << 16,), np.int32),
        pltpu.VMEM_SHARED((5 << 18,), np.int32),
      ],
      "256 KiB of VMEM on each",
    ),
    ("v5p", [pltpu.SMEM((1024,), np.int32)], None),
    (
      "tpu7x",
      [pltpu.SMEM((4096,), np.int32)],
      "subcore of tpu7x has 7.99609 KiB",
    ),
    ("v5p", [_REGULAR((16,))], None),
    ("v6e", [_REGULAR((32,))], "has 28 of SEMAPHORES, but the kernel holds 32"),
    ("tpu7x", [_REGULAR((32,))], None),
  ],
)
def test_what_the_subcores_of_a_sparse_core_hold(chip, scratch, text):
  """libtpu takes, and refuses, the same (0.0.50.1)."""
  made = _on_subcores(
    lambda o_hbm, *held: None,
    out=_out(8, dtype=np.int32),
    scratch=scratch,
    chip=chip,
  )
  if text is None:
    assert not made.program_excess()
  else:
    (found,) = made.program_excess()
    assert text in found


@pytest.mark.parametrize("moves", [True, False])
def test_blocks_that_move_over_a_grid_have_two_buffers(moves):
  """Four blocks of 20 MiB do not fit into 64 MiB, two do."""
  block = pl.BlockSpec((40 * 1024, 128), lambda i: (i if moves else 0, 0))

  def call(x):
    return pl.pallas_call(
      lambda x_block, o_block: None,
      jax.ShapeDtypeStruct(x.shape, x.dtype),
      grid=(2,),
      in_specs=[block],
      out_specs=block,
    )(x)

  x = jax.ShapeDtypeStruct((80 * 1024, 128), np.float32)
  excess = simulating.traced(call, x, chip="v5p", devices=1).program_excess()
  if moves:
    (found,) = excess
    assert "holds 80 MiB at once" in found
    assert "'x_block' (40960, 128) of float32, 40 MiB in 2 buffers" in found
  else:
    assert not excess


def test_a_kernel_without_a_device_mesh_has_the_memory_of_the_default_chip():
  def body(o, held):
    o[...] = jnp.ones(_SLAB)

  scratch = [pltpu.VMEM((40_000, 1024), np.float32)]
  expected = pytest.raises(
    cm.SimulationError, match="A TensorCore of v5p has 64 MiB"
  )
  with expected, cm.simulation():
    pl.pallas_call(body, _out(*_SLAB), scratch_shapes=scratch)()


def test_a_parallel_grid_without_a_device_mesh_is_shared_by_two_cores():
  def copies(x, o):
    o[...] = x[...]

  with pytest.raises(cm.SimulationError) as caught, cm.simulation():
    pl.pallas_call(
      copies,
      _out(*_SLAB),
      grid=(4,),
      in_specs=[pl.BlockSpec(_SLAB, lambda i: (i, 0))],
      out_specs=pl.BlockSpec(_SLAB, lambda i: (0, 0)),
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(_floats(32, 128))
  assert {f.kind for f in caught.value.findings} == {"race"}
  copy = "(copy of a block of 'o' at the BlockSpec of kernel 'copies')"
  assert copy in str(caught.value)


def test_a_block_without_elements_is_refused():
  def body(x, o):
    o[...] = jnp.zeros(_SLAB)

  refused = pytest.raises(
    cm.UnsupportedError,
    match=r"that of 'x' of kernel 'body' has shape \(0, 128",
  )
  with refused, cm.simulation():
    pl.pallas_call(body, _out(*_SLAB))(np.zeros((0, 128), np.float32))


# --- barriers of kernels that follow one another -----------------------------


def _ring(kind):
  """Each device gives its slab to the right, after meeting its neighbours."""

  def body(x_hbm, o_hbm, mine, theirs, sem, send, recv, second):
    device, devices = lax.axis_index("device"), lax.axis_size("device")
    right = lax.rem(device + 1, devices)
    left = lax.rem(device + devices - 1, devices)
    barrier = pltpu.get_barrier_semaphore()
    if kind == "one sided":  # Who will write to me is told that I am here.
      pl.semaphore_signal(barrier, 1, device_id={"device": left})
      pl.semaphore_wait(barrier, 1)
    elif kind.startswith("all"):
      for i in range(1, 5):
        other = lax.rem(device + i, devices)
        pl.semaphore_signal(barrier, 1, device_id={"device": other})
      pl.semaphore_wait(barrier, 4)
    else:
      for other in (left, right):
        pl.semaphore_signal(barrier, 1, device_id={"device": other})
      pl.semaphore_wait(barrier, 2)
    if kind == "twice":  # As in the docs of Pallas.
      for other in (left, right):
        pl.semaphore_signal(second, 1, device_id={"device": other})
      pl.semaphore_wait(second, 2)
    pltpu.sync_copy(x_hbm, mine)
    if kind == "all, alone":
      pltpu.sync_copy(mine, o_hbm)
      return
    pltpu.async_remote_copy(
      mine, theirs, send, recv, device_id={"device": right}
    ).wait()
    pltpu.sync_copy(theirs, o_hbm)

  return body


@pytest.mark.parametrize(
  "kind", ["once", "twice", "one sided", "all", "all, alone"]
)
def test_a_barrier_that_the_next_kernel_may_confuse(kind):
  x = _floats(5 * 8, 128)
  made = _on_one_core(
    _ring(kind),
    x,
    scratch=[_VMEM, _VMEM, _DMA, _DMA, _DMA, _REGULAR],
    compiler_params=_ID,
    chip="v5p:2x2x2",
    devices=5,
  )
  if kind == "once":
    text = simulating.caught(made, "barrier reuse", x)
    assert re.search(
      r"device (\d) may end, and signal semaphore 'barrier' of device (\d),"
      r" core 0 again in the next kernel, before device (\d), core 0: signal of"
      r" 'barrier' at simulate_detectors_test.py",
      text,
    )
    # It depends on what follows: noted, not raised.
    np.testing.assert_array_equal(made.run(x)[0], np.roll(x, 8, 0))
  else:
    (y,) = simulating.silent(made, x, seeds=range(20))
    shift = 0 if kind == "all, alone" else 8
    np.testing.assert_array_equal(y, np.roll(x, shift, 0))


# --- in the words of a user --------------------------------------------------


def test_a_simulation_raises_what_a_plain_kernel_does_wrong():
  chip, mesh = support.simulated()
  body = _use_of_copy(wrong=True)

  def call(x):
    return pl.kernel(
      body,
      _out(*_SLAB),
      mesh=_one_core(chip),
      scratch_types=[_VMEM, _DMA],
      name="early",
    )(x)

  with (
    pytest.raises(cm.SimulationError, match=r"\[race\] kernel 'early': "),
    cm.simulation(seed=3),
  ):
    support.over_devices(call, mesh, check_vma=False)(_floats(32, 128))
  with cm.simulation(seed=3, on_finding="record") as run:
    support.over_devices(call, mesh, check_vma=False)(_floats(32, 128))
  assert {f.kind for f in run.findings} == {"race"}
  assert [r.seed for r in run.runs] == [3] * len(run.runs)
