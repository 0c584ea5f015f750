"""Padding of arrays: against what libtpu allocates, and what JAX assumes."""

import re

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import tiles
from coremesh.compiler import ledger
from coremesh.simulate import memory
from tests import simulate_rules

_SLABS = 1 << 18  # too many for VMEM and SMEM, so that libtpu says their size
_X = jax.ShapeDtypeStruct((8, 128), np.float32)


def _allocated_bytes(space, shape, dtype):
  """What libtpu says a scratch of a kernel takes, which it refuses."""

  def body(x, o, scratch):
    pltpu.touch(scratch)
    o[...] = x[...]

  kernel = pl.pallas_call(body, _X, scratch_shapes=[space(shape, dtype)])
  with (
    pytest.MonkeyPatch.context() as patch,
    pytest.raises(cm.CompileError) as caught,
  ):
    # Or coremesh would refuse it before libtpu does.
    patch.setattr(ledger.Ledger, "least_vmem_bytes", 0)
    cm.compile(kernel, _X, chip="v5p:2x2x1")
  size = re.search(r"would exceed|size=(\d+)", caught.value.original)
  assert size is not None
  return int(size[1])


@pytest.mark.parametrize(
  ("space", "shape", "dtype"),
  [
    (pltpu.VMEM, (_SLABS, 3, 128), jnp.int4),
    (pltpu.VMEM, (_SLABS, 40, 100), jnp.int4),
    (pltpu.VMEM, (_SLABS, 3, 128), jnp.int2),
    (pltpu.VMEM, (_SLABS, 40, 128), np.int8),
    (pltpu.VMEM, (_SLABS, 3, 128), np.bool_),
    (pltpu.VMEM, (_SLABS, 40, 128), jnp.bfloat16),
    (pltpu.VMEM, (_SLABS * 4, 1, 128), jnp.bfloat16),
    (pltpu.VMEM, (_SLABS, 3, 130), np.float32),
    (pltpu.VMEM, (_SLABS * 1000 + 1,), jnp.int4),
    (pltpu.SMEM, (_SLABS, 3), np.int32),
    (pltpu.SMEM, (_SLABS * 20 + 1,), np.int8),
  ],
)
def test_buffers_take_what_libtpu_allocates(space, shape, dtype):
  expected = _allocated_bytes(space, shape, dtype)
  assert tiles.padded_bytes(shape, dtype) == expected


def _tiling_of_jax(shape, dtype):
  """The tile that JAX's pipelines round the last block to."""
  with simulate_rules.tpu_context():
    infer = pltpu.emit_pipeline.__globals__["tpu_info"].infer_tiling
    return infer(jax.typeof(jnp.zeros(shape, dtype)))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16, 33, 64, 100])
@pytest.mark.parametrize(
  "dtype", [np.float32, jnp.bfloat16, np.int8, jnp.float8_e5m2, jnp.int4]
)
def test_tiles_are_those_that_pipelines_take_for_granted(rows, dtype):
  shape = (3, rows, 256)
  found = memory.tile(shape, np.dtype(dtype))
  assert found == tuple(_tiling_of_jax(shape, dtype))


@pytest.mark.parametrize(
  ("dtype", "rows"), [(jnp.int2, 16), (jnp.uint4, 8), (jnp.float4_e2m1fn, 8)]
)
def test_a_row_of_narrow_elements_takes_whole_words(dtype, rows):
  # JAX's own table has no narrow dtypes but int4.
  assert memory.padded_shape((1, 1), np.dtype(dtype)) == (rows, 128)
  assert memory.padded_shape((rows + 1, 1), np.dtype(dtype)) == (2 * rows, 128)


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.int64])
def test_an_element_of_more_than_a_word_shares_none(dtype):
  # No TPU holds them; the simulator, with JAX's x64, does.
  assert tiles.packing(dtype) == 1
  assert tiles.padded_bytes((130,), dtype) == 256 * 8
