"""Two copies on one semaphore: a wait for one is not a wait for the other."""

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import numpy as np
import pytest

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
