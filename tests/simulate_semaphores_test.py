"""Two copies on one semaphore: a wait for one is not a wait for the other."""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import numpy as np
import pytest

import coremesh as cm
from tests import simulating

_SLAB = (8, 128)
_VMEM = pltpu.VMEM(_SLAB, np.float32)


def _made(waits, x):
  def body(x_hbm, o_hbm, first, second, sem):
    one = pltpu.async_copy(x_hbm.at[0], first, sem)
    two = pltpu.async_copy(x_hbm.at[1], second, sem)
    if waits == "both":
      one.wait()
      two.wait()
      value = first[...] + second[...]
    else:
      one.wait()  # It may have counted the bytes of the second.
      value = first[...]
      two.wait()
      value += second[...]
    first[...] = value
    pltpu.sync_copy(first, o_hbm)

  return simulating.kernel(
    body,
    x,
    out=simulating.Shape(_SLAB, np.float32),
    scratch_types=[_VMEM, _VMEM, pltpu.SemaphoreType.DMA],
    cores=lambda chip: chip.tensor_cores("core", 1),
  )


@pytest.mark.parametrize("dma", ["late", "early", "random"])
def test_after_one_wait_of_two_no_copy_is_known_to_be_there(dma):
  x = np.arange(2 * 8 * 128, dtype=np.float32).reshape(2, *_SLAB)
  made = _made("one", x)
  for seed in range(10):
    found = made.findings(x, seed=seed, dma=dma)
    assert [f.kind for f in found][:1] == ["race"], (seed, found)


@pytest.mark.parametrize("dma", ["late", "early", "random"])
def test_after_both_waits_both_copies_are(dma):
  x = np.arange(2 * 8 * 128, dtype=np.float32).reshape(2, *_SLAB)
  made = _made("both", x)
  for seed in range(10):
    assert not made.findings(x, seed=seed, dma=dma)
    (y,) = made.run(x, seed=seed, dma=dma)
    np.testing.assert_array_equal(y, x[0] + x[1])


@pytest.mark.parametrize("waits", [2, 1])
@pytest.mark.parametrize("dma", ["late", "early", "random"])
def test_a_copy_raises_a_regular_semaphore_by_one(waits, dma):
  x = np.arange(2 * 8 * 128, dtype=np.float32).reshape(2, *_SLAB)

  def body(x_hbm, o_hbm, first, second, sem):
    pltpu.async_copy(x_hbm.at[0], first, sem)
    pltpu.async_copy(x_hbm.at[1], second, sem)
    pl.semaphore_wait(sem, waits)
    first[...] = first[...] + second[...]
    pltpu.sync_copy(first, o_hbm)

  made = simulating.kernel(
    body,
    x,
    out=simulating.Shape(_SLAB, np.float32),
    scratch_types=[_VMEM, _VMEM, pltpu.SemaphoreType.REGULAR],
    cores=lambda chip: chip.tensor_cores("core", 1),
  )
  if waits == 2:
    np.testing.assert_array_equal(made.run(x, dma=dma)[0], x[0] + x[1])
  else:
    found = {f.kind: f.text for f in made.findings(x, dma=dma)}
    assert "ends with 1 copies that nobody waited for" in found["unwaited"]
    assert "race" in found


def _two_senders(x_hbm, o_hbm, line, seen, ready):
  """Subcore 0 takes the first signal for subcore 1's if no other is there."""
  subcore = lax.axis_index("subcore")
  pltpu.sync_copy(x_hbm, line)
  plsc.subcore_barrier()

  @pl.when(subcore > 0)
  def _():
    pltpu.sync_copy(line, seen.at[subcore - 1])
    pl.semaphore_signal(ready, 1, device_id={"core": 0, "subcore": 0})

  @pl.when(subcore == 0)
  def _():
    pl.semaphore_wait(ready, 1)
    is_other_there = pl.semaphore_read(ready) == 1

    @pl.when(is_other_there)
    def _():
      pl.semaphore_wait(ready, 1)

    pltpu.sync_copy(seen.at[0], o_hbm)

    @pl.when(lax.bitwise_not(is_other_there))
    def _():
      pl.semaphore_wait(ready, 1)

  plsc.subcore_barrier()


def test_explore_finds_a_race_of_two_senders_that_some_seeds_hide():
  x = np.arange(16, dtype=np.float32)
  made = simulating.kernel(
    _two_senders,
    x,
    out=simulating.Shape((16,), np.float32),
    cores=lambda chip: chip.vector_subcores(num_cores=1, num_subcores=3),
    scratch_types=[
      pltpu.VMEM((16,), np.float32),
      pltpu.VMEM_SHARED((2, 16), np.float32),
      pltpu.SemaphoreType.REGULAR,
    ],
    compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False),
  )
  silent = [seed for seed in range(30) if not made.findings(x, seed=seed)]
  assert silent
  found = cm.explore(made.call, x)
  assert found.first is not None
  assert "race" in {f.kind for f in found.first.findings}
  assert "'seen'" in str(found) or "VMEM_SHARED" in str(found)
