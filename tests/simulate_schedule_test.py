"""Tests of who runs next: workers that poll."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.simulate import memories, schedule
from tests import simulating, support

_X = np.arange(32 * 128, dtype=np.float32).reshape(32, 128)


def _poll(sem):
  jax.lax.while_loop(
    lambda count: count == 0,
    lambda count: pl.semaphore_read(sem),
    pl.semaphore_read(sem),
  )


@pytest.mark.parametrize("dma", ["late", "early", "random"])
@pytest.mark.parametrize("polled", ["the copy", "a signal after the copy"])
def test_a_worker_that_polls_sees_the_copy_arrive(polled, dma):
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(
      mine=cm.vmem_slab(0),
      done=pltpu.SemaphoreType.REGULAR,
      copied=pltpu.SemaphoreType.DMA,
    ),
    interpret=cm.SimulatorParams(dma=dma, max_turns=100_000),
  )
  def polls(x_hbm, o_hbm, *, mine, done, copied):
    rows = cm.slab(x_hbm)
    is_first = jax.lax.axis_index("core") == 0
    cm.core_barrier("core")

    @pl.when(is_first)
    def _():
      copy = cm.start_copy(x_hbm.at[rows], mine, sem=copied)
      if polled == "the copy":
        _poll(copied)
      copy.wait()
      cm.signal(done, to={"core": 1})

    @pl.when(jax.lax.bitwise_not(is_first))
    def _():
      _poll(done)
      cm.wait(done)
      cm.copy(x_hbm.at[rows], mine)

    cm.copy(mine, o_hbm.at[rows])

  y = support.over_devices(polls, mesh)(_X)
  np.testing.assert_array_equal(y, _X)


def test_a_worker_that_spins_lets_a_copy_end():
  def spins(x_hbm, o_hbm, flag, mine):
    subcore = jax.lax.axis_index("subcore")

    @pl.when(subcore == 0)
    def _():
      flag[0] = 0

    plsc.subcore_barrier()

    @pl.when(subcore == 0)
    def _():
      pltpu.sync_copy(x_hbm, mine)
      pltpu.sync_copy(mine, o_hbm)
      plsc.fetch_and_add(flag.at[0], 1, subcore_id=0)

    @pl.when(subcore == 1)
    def _():
      look = lambda _: plsc.fetch_and_add(flag.at[0], 0, subcore_id=0)
      jax.lax.while_loop(lambda seen: seen == 0, look, jnp.int32(0))

    plsc.subcore_barrier()

  x = np.arange(16, dtype=np.int32)
  made = simulating.kernel(
    spins,
    x,
    out=jax.ShapeDtypeStruct(x.shape, x.dtype),
    cores=lambda chip: chip.vector_subcores(num_cores=1, num_subcores=2),
    compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False),
    scratch_types=[pltpu.SMEM((1,), np.int32), pltpu.VMEM((16,), np.int32)],
  )
  for seed in range(4):
    (y,) = made.run(x, seed=seed, max_turns=20_000)
    np.testing.assert_array_equal(y, x)


def test_a_worker_that_signals_while_it_polls_lets_a_copy_end():
  def ticks(x_hbm, o_hbm, mine, copied, tick):
    copy = pltpu.async_copy(x_hbm.at[pl.ds(0, 8)], mine, copied)

    def look(_):
      pl.semaphore_signal(tick, 1)
      pl.semaphore_wait(tick, 1)
      return pl.semaphore_read(copied)

    jax.lax.while_loop(lambda count: count == 0, look, jnp.int32(0))
    copy.wait()
    pltpu.sync_copy(mine, o_hbm)

  made = _on_tensor_cores(ticks, pltpu.SemaphoreType.DMA, _REGULAR, cores=1)
  (y,) = made.run(_X, max_turns=20_000)
  np.testing.assert_array_equal(y, _X[:8])


def test_workers_that_poll_for_what_never_comes_are_named():
  def polls(x_hbm, o_hbm, mine, done):
    @pl.when(jax.lax.axis_index("core") == 0)
    def _():
      _poll(done)

    pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], mine)
    pltpu.sync_copy(mine, o_hbm)

  made = _on_tensor_cores(polls, _REGULAR, cores=2)
  text = simulating.caught(made, "endless", _X, seeds=range(3))
  assert "1 of 2 workers only poll" in text
  assert "device 0, core 0 polls by semaphore_read of 'done' at" in text
  assert "simulate_schedule_test.py" in text
  assert "turns nothing has changed" in text


def _spin(flag):
  """Until another worker has written to `flag`."""
  jax.lax.while_loop(lambda seen: seen == 0, lambda seen: flag[0], flag[0])


def _spinning(*, carries_count=False, writes=True):
  """Core 0 writes to core 1's flag, for which core 1 spins on plain loads."""

  def body(x_hbm, o_hbm, mine, one, flag, sent):
    core = jax.lax.axis_index("core")
    flag[0] = 0
    one[0] = 1
    pltpu.core_barrier(pltpu.get_barrier_semaphore(), core_axis_name="core")
    if writes:

      @pl.when(core == 0)
      def _():
        pltpu.make_async_remote_copy(
          one, flag, sent.at[0], sent.at[1], device_id={"core": 1}
        ).start()
        pltpu.make_async_copy(one, one, sent.at[0]).wait()

    @pl.when(core == 1)
    def _():
      if carries_count:
        jax.lax.while_loop(
          lambda state: state[1] == 0,
          lambda state: (state[0] + 1, flag[0]),
          (0, flag[0]),
        )
      else:
        _spin(flag)  # the spin
      if writes:
        pltpu.make_async_copy(one, one, sent.at[1]).wait()

    pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], mine)
    pltpu.sync_copy(mine, o_hbm.at[pl.ds(core * 8, 8)])

  smem = pltpu.SMEM((1,), np.int32)
  return simulating.kernel(
    body,
    _X,
    out=jax.ShapeDtypeStruct((16, 128), np.float32),
    scratch_types=[
      *(pltpu.VMEM((8, 128), np.float32), smem, smem),
      pltpu.SemaphoreType.DMA((2,)),
    ],
    compiler_params=pltpu.CompilerParams(collective_id=0),
  )


@pytest.mark.parametrize("carries_count", [False, True])
def test_a_worker_that_spins_on_loads_lets_others_run(carries_count):
  made = _spinning(carries_count=carries_count)
  # It sees the write, and races with it.
  text = simulating.caught(made, "race", _X, seeds=range(3))
  assert "load of 'flag'" in text
  (y,) = made.run(_X, detect_races=False)
  np.testing.assert_array_equal(y, np.tile(_X[:8], (2, 1)))


def test_a_worker_that_spins_on_what_nobody_writes_is_named():
  made = _spinning(writes=False)
  text = simulating.caught(made, "endless", _X, seeds=range(2))
  assert "1 of 2 workers only poll" in text
  assert "device 0, core 1 polls by load of 'flag' at" in text
  assert "simulate_schedule_test.py" in text
  assert (
    "changed by simulate_schedule_test.py" in text
  )  # Its own `flag[0] = 0`.


def test_a_subcore_that_spins_on_a_gather_is_named(monkeypatch):
  monkeypatch.setattr(schedule, "_MAX_IDLE", 100)  # To be told of it soon.

  def body(x_hbm, o_hbm, flags):
    lanes = jax.lax.iota(jnp.int32, 8)
    flags[...] = jnp.zeros(8, jnp.int32)
    jax.lax.while_loop(
      lambda seen: jnp.all(seen == 0),
      lambda seen: plsc.load_gather(flags, [lanes]),
      jnp.zeros(8, jnp.int32),
    )
    pltpu.sync_copy(x_hbm, o_hbm)

  x = np.arange(8, dtype=np.int32)
  made = simulating.kernel(
    body,
    x,
    out=jax.ShapeDtypeStruct(x.shape, x.dtype),
    cores=lambda chip: chip.vector_subcores(num_cores=1, num_subcores=1),
    compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False),
    scratch_types=[pltpu.VMEM((8,), np.int32)],
  )
  text = simulating.caught(made, "endless", x, seeds=[0])
  assert "subcore 0 polls by load_gather of 'flags' at" in text


@pytest.mark.parametrize("way", ["copies", "stores"])
def test_a_worker_that_looks_again_and_again_is_named(monkeypatch, way):
  monkeypatch.setattr(schedule, "_MAX_IDLE", 100)  # To be told of it soon.
  monkeypatch.setattr(memories, "_FEW_POLLS", 100)

  def body(x_hbm, o_hbm, mine, seen):
    def look(count):
      if way == "copies":
        pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], mine)
      else:
        seen[0] = 0
        count = seen[0]
      return mine[0, 0].astype(jnp.int32) * 0 + count

    mine[...] = jnp.zeros((8, 128), jnp.float32)
    jax.lax.while_loop(lambda count: count == 0, look, jnp.int32(0))
    pltpu.sync_copy(mine, o_hbm)

  made = _on_tensor_cores(body, pltpu.SMEM((1,), np.int32), cores=1)
  text = simulating.caught(made, "endless", _X, seeds=[0])
  assert "1 of 1 workers only poll" in text


def test_a_loop_whose_copies_change_what_it_looks_at_is_not_endless(
  monkeypatch,
):
  monkeypatch.setattr(schedule, "_MAX_IDLE", 5)
  monkeypatch.setattr(memories, "_FEW_POLLS", 5)

  def body(x_hbm, o_hbm, mine, count):
    count[0] = 0

    def look(_):
      count[0] = count[0] + 1
      return count[0]

    jax.lax.while_loop(lambda n: n < 200, look, jnp.int32(0))
    pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], mine)
    pltpu.sync_copy(mine, o_hbm)

  made = _on_tensor_cores(body, pltpu.SMEM((1,), np.int32), cores=1)
  (y,) = made.run(_X)
  np.testing.assert_array_equal(y, _X[:8])


def test_a_long_loop_over_loads_is_not_endless():
  def body(x_hbm, o_hbm, mine, numbers):
    jax.lax.fori_loop(0, 64, lambda i, _: numbers.__setitem__(i, i), None)

    def add(state):
      i, total = state
      return i + 1, total + numbers[jax.lax.rem(i, 64)]

    last, total = jax.lax.while_loop(
      lambda state: state[0] < 20_000, add, (0, 0)
    )
    mine[...] = jnp.full((8, 128), total - last, jnp.float32)
    pltpu.sync_copy(mine, o_hbm)

  made = _on_tensor_cores(body, pltpu.SMEM((64,), np.int32), cores=1)
  (y,) = made.run(_X)
  total = sum(i % 64 for i in range(20_000))
  np.testing.assert_array_equal(
    y, np.full((8, 128), total - 20_000, np.float32)
  )


_REGULAR = pltpu.SemaphoreType.REGULAR


def _on_tensor_cores(body, *semaphores, cores):
  slab = (8, 128)
  return simulating.kernel(
    body,
    _X,
    out=jax.ShapeDtypeStruct(slab, np.float32),
    cores=lambda chip: chip.tensor_cores("core", cores),
    scratch_types=[pltpu.VMEM(slab, np.float32), *semaphores],
  )
