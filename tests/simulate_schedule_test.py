"""Tests of who runs next: workers that poll."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import numpy as np
import pytest

import coremesh as cm
from tests import support

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
