"""Public functions that make pipelines, each in a kernel of its own."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

import coremesh as cm
from tests import small_kernels as small
from tests.covering import covers


def _scale(x, o):
  o[...] = x[...] * 3


_BLOCK = pl.BlockSpec(small.SLAB, lambda i, j: (i, j))


@small.any_kind
@covers("pltpu.emit_pipeline")
def test_emit_pipeline(dtype):
  x = small.values(32, 256, dtype=dtype, high=40, low=-40)

  def body(x, o):
    pltpu.emit_pipeline(
      _scale,
      grid=(4, 2),
      in_specs=[_BLOCK],
      out_specs=[_BLOCK],
      core_axis_name="core",
      dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
    )(x, o)

  cores = lambda chip: chip.tensor_cores("core")
  o = small.run(body, x, out=small.like(x), cores=cores)
  np.testing.assert_array_equal(o, x * np.asarray(3, dtype))


@small.words
@covers("pltpu.emit_pipeline")
def test_emit_pipeline_on_vector_subcores(dtype):
  x = small.values(256, dtype=dtype)
  spec = pl.BlockSpec((8,), lambda i: (i,))

  def body(x, o):
    pltpu.emit_pipeline(
      _scale,
      grid=(32,),
      in_specs=[spec],
      out_specs=[spec],
      core_axis_name=("core", "subcore"),
      dimension_semantics=(pltpu.PARALLEL,),
    )(x, o)

  cores = lambda chip: chip.vector_subcores(num_cores=2, num_subcores=4)
  o = small.run(body, x, out=small.like(x), cores=cores)
  np.testing.assert_array_equal(o, x * 3)


@covers("pltpu.emit_pipeline_with_allocations")
def test_emit_pipeline_with_allocations():
  x = small.values(32, 256)

  def body(x, o):
    pipeline, allocate = pltpu.emit_pipeline_with_allocations(
      _scale, grid=(4, 2), in_specs=[_BLOCK], out_specs=[_BLOCK]
    )

    def inside(buffers):
      pipeline(x, o, allocations=buffers)
      pipeline(x, o, allocations=buffers)

    pl.run_scoped(inside, allocate(x, o))

  o = small.run(body, x, out=small.like(x), cores=small.one_core)
  np.testing.assert_array_equal(o, x * 3)


@covers("pltpu.emit_pipeline_with_async_prefetch")
def test_emit_pipeline_with_async_prefetch():
  x = small.values(32, 256)
  chip = cm.chip("v5p:2x2x1")
  cores = chip.tensor_cores("core", 1)
  ahead = pl.BlockSpec(
    small.SLAB,
    lambda i, j: (i, j),
    pipeline_mode=pl.Buffered(2, prefetched_count=1),
  )

  def call(x):
    pipeline, prefetch = pltpu.emit_pipeline_with_async_prefetch(
      _scale, grid=(4, 2), in_specs=[ahead], out_specs=[_BLOCK], mesh=cores
    )
    x_ref = jax.new_ref(x, memory_space=pltpu.HBM)
    o_ref = jax.new_ref(jnp.zeros_like(x), memory_space=pltpu.HBM)
    buffers = prefetch(x_ref)

    def body(x, o):
      pipeline(x, o, allocations=buffers)

    run: Any = pl.kernel(body, mesh=cores)
    run(x_ref, o_ref)
    return o_ref[...]

  mesh = chip.device_mesh("device", on="simulator")
  one = jax.shard_map(
    call, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
  )
  with cm.simulation() as run:
    o = jax.jit(one)(x)
  np.testing.assert_array_equal(o, x * 3)
  assert not run.findings
