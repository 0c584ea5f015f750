"""Tests for coremesh.profile.produced: what operations hand to the next."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.profile import produced
from coremesh.profile.events import Result, Run, Trace
from coremesh.profile.values import Unknown
from tests import profiling


def _trace(*results: Result, counts: int = 1, core: int = 0) -> Trace:
  return Trace(
    core=core,
    cycles=4,
    runs=(Run(start=0, end=4, count=counts),),
    events=(),
    assumed=(),
    skipped=0,
    results=results,
  )


def test_words_from_the_first_on_are_known():
  first = Result(bundle=1, operand=3, first=0, words=(7, 8))
  second = Result(bundle=2, operand=3, first=2, words=(9, Unknown("data"), 5))
  found = produced.words([_trace(first, second)], 4)
  assert {i: w.tolist() for i, w in found.items()} == {3: [7, 8, 9]}


@pytest.mark.parametrize(
  "traces",
  [
    [_trace(Result(1, 3, 0, (7,)), counts=2)],
    [_trace(Result(1, 3, 0, (7,))), _trace(Result(1, 3, 0, (8,)), core=1)],
    [_trace(Result(1, 3, 0, (7,)), Result(2, 3, 0, (Unknown("data"),)))],
    [_trace(Result(1, 3, 1, (7,)))],
  ],
  ids=["twice", "two cores", "overwritten", "not the first"],
)
def test_what_is_not_sure_is_not_known(traces):
  assert produced.words(traces, 4) == {}


def _pair(places, x):
  """A kernel that works out which tiles the next one copies."""

  def work_out(places_smem, o_smem):
    for i in range(places.size):
      o_smem[i] = places_smem[places.size - 1 - i] // 8

  def copy(places_smem, x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...]

  smem = pl.BlockSpec(memory_space=pltpu.SMEM)
  tiles = pl.pallas_call(
    work_out,
    in_specs=[smem],
    out_specs=smem,
    out_shape=jax.ShapeDtypeStruct(places.shape, jnp.int32),
  )(places)
  grid_spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=1,
    grid=places.shape,
    in_specs=[pl.BlockSpec((8, 128), lambda i, p: (p[i], 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i, p: (i, 0)),
  )
  return pl.pallas_call(
    copy,
    grid_spec=grid_spec,
    out_shape=jax.ShapeDtypeStruct((places.size * 8, 128), x.dtype),
    name="copy_tiles",
  )(tiles, x)


def _copies(places) -> tuple[bool, int]:
  predicted = cm.predict(
    _pair, places, profiling.shape(512, 128), chip="v5p:2x2x1"
  )
  [kernel] = [k for k in predicted.kernels if k.kernel == "copy_tiles"]
  return kernel.is_assumed, sum(c.read_bytes for c in kernel.cores)


def test_tables_that_one_kernel_makes_steer_the_next():
  is_assumed, num_bytes = _copies(np.array([8, 16, 24, 32], np.int32))
  assert not is_assumed
  # A block that is there already is not copied again.
  assert _copies(np.array([8, 8, 8, 8], np.int32))[1] < num_bytes


def test_xlas_grouped_product_takes_what_its_sizes_say():
  x = profiling.shape(1024, 1024, dtype=jnp.bfloat16)
  w = profiling.shape(4, 1024, 512, dtype=jnp.bfloat16)
  times = []
  for rows in (256, 16):
    sizes = np.full(4, rows, np.int32)
    found = cm.predict(jax.lax.ragged_dot, x, w, sizes, chip="v5p:2x2x1")
    assert not any(o.is_assumed for o in found.operations)
    times.append(found.microseconds.central)
  assert times[0] > times[1]
