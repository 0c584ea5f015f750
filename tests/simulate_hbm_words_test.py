"""Copies of vector subcores start at a word of HBM."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import numpy as np
import pytest

from tests import simulating


def _findings(start, *, out, of_vmem=False):
  """What is found of a copy in or out that starts there in HBM, or in VMEM."""
  in_hbm, in_vmem = (0, start) if of_vmem else (start, 0)

  def body(x_hbm, o_hbm, buf):
    held = buf.at[pl.ds(in_vmem, 8)]
    pltpu.sync_copy(x_hbm.at[pl.ds(0 if out else in_hbm, 8)], held)
    pltpu.sync_copy(held, o_hbm.at[pl.ds(in_hbm if out else 0, 8)])

  x = np.arange(64, dtype=np.int32)
  made = simulating.kernel(
    body,
    x,
    out=jax.ShapeDtypeStruct((64,), np.int32),
    cores=lambda chip: chip.vector_subcores(num_cores=1, num_subcores=1),
    scratch_types=[pltpu.VMEM((32,), np.int32)],
  )
  return made.findings(x)


@pytest.mark.parametrize(("out", "name"), [(False, "x_hbm"), (True, "o_hbm")])
def test_a_copy_that_starts_amid_a_word_of_hbm_is_found(out, name):
  # libtpu compiles it to an interrupt: `sint`, before the stream.
  [found] = _findings(3, out=out)
  assert found.kind == "check"
  assert f"starts at HBM '{name}[3:11]' of device 0, 12 bytes" in found.text
  assert "multiples of 32 bytes of HBM, 8 elements" in found.text
  assert not _findings(8, out=out)
  assert not _findings(3, out=out, of_vmem=True)
