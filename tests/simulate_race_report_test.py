"""What a finding says of a race: which parts, and on how many workers."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from coremesh.simulate import regions
from tests import simulating

_X = np.ones((32, 128), np.float32)


def _race(body, *scratch, num_cores=2, **how):
  made = simulating.kernel(
    body,
    _X,
    out=jax.ShapeDtypeStruct(_X.shape, _X.dtype),
    cores=lambda chip: chip.tensor_cores("core", num_cores),
    scratch_types=scratch,
  )
  [found] = [f for f in made.findings(_X, **how) if f.kind == "race"]
  return found.text


def _copy_and_store(x_hbm, o_hbm, buf, sem):
  copy = pltpu.async_copy(x_hbm.at[0:8], buf.at[1], sem)
  buf[1, 4:6] = jnp.zeros((2, 128), np.float32)
  copy.wait()
  pltpu.sync_copy(buf.at[1], o_hbm.at[pl.ds(8 * jax.lax.axis_index("core"), 8)])


_BUF = pltpu.VMEM((2, 8, 128), np.float32)
_DMA = pltpu.SemaphoreType.DMA


@pytest.mark.parametrize("dma", ["late", "early"])
def test_both_parts_are_named_whichever_came_first(dma):
  text = _race(_copy_and_store, _BUF, _DMA, dma=dma)
  copy = "write of {}'buf[1, 0:8, 0:128]'"
  store = "write of {}'buf[1, 4:6, 0:128]'"
  first, second = (copy, store) if dma == "late" else (store, copy)
  assert text.startswith(first.format("VMEM ") + " of device 0, core ")
  assert f" and {second.format('')} by " in text


@pytest.mark.parametrize("num_cores", [1, 2])
def test_workers_that_do_the_same_are_counted(num_cores):
  text = _race(_copy_and_store, _BUF, _DMA, num_cores=num_cores)
  assert text.endswith("The same on 1 other worker.") is (num_cores == 2)


def test_a_buffer_that_is_touched_as_a_whole_has_no_index():
  def body(x_hbm, o_hbm, buf, sem):
    copy = pltpu.async_copy(x_hbm.at[0:8], buf, sem)
    buf[...] = jnp.zeros((8, 128), np.float32)
    copy.wait()
    pltpu.sync_copy(buf, o_hbm.at[pl.ds(8 * jax.lax.axis_index("core"), 8)])

  text = _race(body, pltpu.VMEM((8, 128), np.float32), _DMA)
  assert "write of VMEM 'buf' of device 0, core" in text
  assert "and write by device 0, core" in text


def test_the_box_of_a_part_is_the_smallest_that_holds_it():
  data = np.zeros((8, 128))
  box = regions.box_of_part(data, [(slice(1, 8, 3), 5)])
  assert box == ((1, 8), (5, 6))
  assert regions.index(box, (8, 100)) == "[1:8, 5]"
  # Padding, which is beyond the shape, is no part a user knows.
  assert regions.index(((0, 8), (0, 128)), (8, 100)) == ""
  assert regions.box_of_part(data, [(slice(0, 0),)]) is None
