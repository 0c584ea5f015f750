"""Tests of kernels that run again and again: what they hold, they let go."""

import gc

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import numpy as np
import pytest

from coremesh.simulate import memory
from tests import simulating

_SLAB = (8, 128)
_X = np.ones(_SLAB, np.float32)


@pytest.fixture
def num_held(monkeypatch):
  """How many buffers are there, and the most that were."""
  held = [0, 0]

  class Counted(memory.Buffer):
    def __init__(self, *args):
      super().__init__(*args)
      held[0] += 1
      held[1] = max(held)

    def __del__(self):
      held[0] -= 1

  monkeypatch.setattr(memory, "Buffer", Counted)
  gc.disable()
  yield held
  gc.enable()


def _on_one_core(body, *scratch):
  return simulating.kernel(
    body,
    _X,
    out=jax.ShapeDtypeStruct(_SLAB, np.float32),
    cores=lambda chip: chip.tensor_cores("core", 1),
    scratch_types=scratch,
  )


def test_a_scope_in_a_loop_holds_one_memory_at_a_time(num_held):
  def body(x_hbm, o_hbm):
    @pl.loop(0, 50)
    def _(i):
      def inside(held, sem):
        pltpu.async_copy(x_hbm, held, sem).wait()
        pltpu.async_copy(held, o_hbm, sem).wait()

      pl.run_scoped(
        inside, pltpu.VMEM(_SLAB, np.float32), pltpu.SemaphoreType.DMA
      )

  made = _on_one_core(body)
  (y,) = made.run(_X)
  np.testing.assert_array_equal(y, _X)
  assert num_held[1] < 10


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_run_lets_go_of_its_memory_without_a_collection(num_held, is_wrong):
  def body(x_hbm, o_hbm, held, sem, never):
    pltpu.async_copy(x_hbm, held, sem).wait()
    pltpu.async_copy(held, o_hbm, sem).wait()
    if is_wrong:
      pl.semaphore_wait(never, 1)

  made = _on_one_core(
    body,
    pltpu.VMEM(_SLAB, np.float32),
    pltpu.SemaphoreType.DMA,
    pltpu.SemaphoreType.REGULAR,
  )
  assert bool(made.findings(_X)) == is_wrong
  assert num_held[1] == 3
  assert num_held[0] == 0
