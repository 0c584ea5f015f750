"""Public functions that move data and synchronise, each in its own kernel."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from tests import simulating
from tests import small_kernels as small
from tests.covering import covers

_DMA = pltpu.SemaphoreType.DMA

# --- copies -------------------------------------------------------------------


@small.both_cores
@small.any_kind
@covers("pltpu.sync_copy")
def test_sync_copy(cores, dtype):
  x = small.values(16, 128, dtype=dtype)

  def compute(x, o):
    pltpu.sync_copy(x.at[pl.ds(0, 8)], o.at[pl.ds(8, 8)])
    pltpu.sync_copy(x.at[pl.ds(8, 8)], o.at[pl.ds(0, 8)])

  o = small.in_vmem(compute, x, out=small.like(x), cores=cores)
  np.testing.assert_array_equal(o, np.roll(x, 8, 0))


@small.both_cores
@small.any_kind
@covers("pltpu.async_copy")
def test_async_copy(cores, dtype):
  x = small.values(16, 128, dtype=dtype)

  def compute(x, o, first, second):
    copies = [
      pltpu.async_copy(x.at[pl.ds(8, 8)], o.at[pl.ds(0, 8)], first),
      pltpu.async_copy(x.at[pl.ds(0, 8)], o.at[pl.ds(8, 8)], second),
    ]
    for copy in copies:
      copy.wait()

  o = small.in_vmem(
    compute, x, out=small.like(x), cores=cores, scratch=[_DMA, _DMA]
  )
  np.testing.assert_array_equal(o, np.roll(x, 8, 0))


@small.both_cores
@covers("pltpu.make_async_copy")
def test_make_async_copy(cores):
  x = small.values(*small.SLAB)

  def compute(x, o, sem):
    pltpu.make_async_copy(x, o, sem).start()
    pltpu.make_async_copy(x, o, sem).wait()

  o = small.in_vmem(compute, x, out=small.like(x), cores=cores, scratch=[_DMA])
  np.testing.assert_array_equal(o, x)


def _exchange(remote):
  """Each device gives the next one its slab, and takes the one before's."""

  def body(x, o, mine, theirs, send, recv):
    other = {"device": 1 - lax.axis_index("device")}
    pltpu.sync_copy(x, mine)
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, 1, device_id=other)
    pl.semaphore_wait(barrier, 1)
    copy = remote(mine, theirs, send, recv, device_id=other)
    copy.wait()
    pltpu.sync_copy(theirs, o)

  return body


def _exchanged(remote, dtype, cores):
  x = small.values(16, 128, dtype=dtype)
  vmem = pltpu.VMEM(small.SLAB, dtype)
  o = small.run(
    _exchange(remote),
    x,
    out=jax.ShapeDtypeStruct(small.SLAB, dtype),
    cores=cores,
    devices=2,
    scratch_types=[vmem, vmem, _DMA, _DMA],
  )
  np.testing.assert_array_equal(o, np.roll(x, 8, 0))


@small.any_kind
@covers("pltpu.async_remote_copy", "pltpu.get_barrier_semaphore")
def test_async_remote_copy(dtype):
  _exchanged(pltpu.async_remote_copy, dtype, small.one_core)


@covers("pltpu.make_async_remote_copy")
def test_make_async_remote_copy():
  def remote(*args, **kwargs):
    copy = pltpu.make_async_remote_copy(*args, **kwargs)
    copy.start()
    return copy

  _exchanged(remote, np.float32, small.one_core)


# --- barriers and cores -------------------------------------------------------


@covers("pltpu.core_barrier", "pltpu.get_barrier_semaphore")
def test_core_barrier():
  x = small.values(2, *small.SLAB)

  def body(x, o, line):
    core = lax.axis_index("core")
    pltpu.sync_copy(x.at[core], line)
    pltpu.sync_copy(line, o.at[0, core])
    pltpu.core_barrier(pltpu.get_barrier_semaphore(), core_axis_name="core")
    pltpu.sync_copy(o.at[0, 1 - core], line)
    pltpu.sync_copy(line, o.at[1, core])

  o = small.run(
    body,
    x,
    out=jax.ShapeDtypeStruct((2, 2, *small.SLAB), np.float32),
    cores=lambda chip: chip.tensor_cores("core"),
    scratch_types=[pltpu.VMEM(small.SLAB, np.float32)],
  )
  np.testing.assert_array_equal(o, [x, x[::-1]])


@covers("pltpu.run_on_first_core")
def test_run_on_first_core():
  x = small.values(2, *small.SLAB)

  def body(x, o, line):
    core = lax.axis_index("core")
    pltpu.sync_copy(x.at[core], line)

    @pltpu.run_on_first_core("core")
    def _():
      line[...] *= 2

    pltpu.sync_copy(line, o.at[core])

  o = small.run(
    body,
    x,
    out=small.like(x),
    cores=lambda chip: chip.tensor_cores("core"),
    scratch_types=[pltpu.VMEM(small.SLAB, np.float32)],
  )
  np.testing.assert_array_equal(o, x * np.array([[[2]], [[1]]]))


@covers("plsc.subcore_barrier")
def test_subcore_barrier():
  x = small.values(4, 8, dtype=np.int32)

  def body(x, o, line, shared):
    subcore = lax.axis_index("subcore")
    pltpu.sync_copy(x.at[subcore], line)
    pltpu.sync_copy(line, shared.at[subcore])
    plsc.subcore_barrier()
    pltpu.sync_copy(shared.at[3 - subcore], line)
    pltpu.sync_copy(line, o.at[subcore])

  o = small.run(
    body,
    x,
    out=small.like(x),
    cores=lambda chip: chip.vector_subcores(num_cores=1, num_subcores=4),
    scratch_types=[
      pltpu.VMEM((8,), np.int32),
      pltpu.VMEM_SHARED((4, 8), np.int32),
    ],
  )
  np.testing.assert_array_equal(o, x[::-1])


@covers("plsc.slice_subcore_vmem_from_shared")
def test_slice_subcore_vmem_from_shared():
  x = small.values(16, 8, dtype=np.int32)

  def body(x, o, line, shared):
    subcore = lax.axis_index("subcore")
    mine = plsc.slice_subcore_vmem_from_shared(shared)
    pltpu.sync_copy(x.at[subcore], mine)
    mine[...] = mine[...] + subcore
    plsc.subcore_barrier()
    # What the subcores hold, one after another, is the shared memory.
    pltpu.sync_copy(shared.at[pl.ds(lax.rem(subcore + 1, 16) * 8, 8)], line)
    pltpu.sync_copy(line, o.at[subcore])

  o = small.run(
    body,
    x,
    out=small.like(x),
    cores=lambda chip: chip.vector_subcores(num_cores=1),
    scratch_types=[
      pltpu.VMEM((8,), np.int32),
      pltpu.VMEM_SHARED((16 * 8,), np.int32),
    ],
  )
  np.testing.assert_array_equal(o, np.roll(x + np.arange(16)[:, None], -1, 0))


@covers("plsc.fetch_and_add")
def test_fetch_and_add():
  def body(o, count, line):
    subcore = lax.axis_index("subcore")
    count[0] = 100
    plsc.subcore_barrier()
    old = plsc.fetch_and_add(count.at[0], 1 + subcore, subcore_id=2)
    plsc.subcore_barrier()
    line[...] = jnp.where(lax.iota(jnp.int32, 8) == 0, old, count[0])
    pltpu.sync_copy(line, o.at[subcore])

  made = simulating.kernel(
    body,
    out=jax.ShapeDtypeStruct((4, 8), np.int32),
    cores=lambda chip: chip.vector_subcores(num_cores=1, num_subcores=4),
    scratch_types=[pltpu.SMEM((1,), np.int32), pltpu.VMEM((8,), np.int32)],
    compiler_params=small.FLAT,
  )
  for seed in range(5):
    (o,) = made.run(seed=seed)
    np.testing.assert_array_equal(
      o[:, 1:], np.tile([[100], [100], [110], [100]], 7)
    )
    # In some order each found what those before it had added.
    added = {int(old): 1 + i for i, old in enumerate(o[:, 0])}
    sums = np.cumsum([added[old] for old in sorted(added)])
    assert sorted(added) == [100, *(100 + sums[:-1])]


# --- loads, stores, and what is said of refs ----------------------------------


@small.any_kind
@covers("pltpu.load", "pltpu.store")
def test_load_and_store(dtype):
  x = small.values(32, 128, dtype=dtype)

  def compute(x, o):
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    o[...] = jnp.full(x.shape, 7, dtype)
    pltpu.store(o, pltpu.load(x, mask=lane < 90), mask=lane < 60)
    pltpu.store(o.at[0:1], pltpu.load(x.at[1:2]))

  o = small.in_vmem(compute, x, out=small.like(x))
  expected = np.where(np.arange(128) < 60, x, np.asarray(7, dtype))
  expected[0] = x[1]
  np.testing.assert_array_equal(o, expected)


@small.both_cores
@covers("pltpu.touch", "pltpu.annotate")
def test_touch_and_annotate(cores):
  x = small.values(1, 8)

  def compute(x, o):
    pltpu.touch(x)
    o[...] = pltpu.annotate(x, no_bank_conflict=True)[...]

  o = small.in_vmem(compute, x, out=small.like(x), cores=cores)
  np.testing.assert_array_equal(o, x)


@covers("pltpu.trace_value")
def test_trace_value():
  x = small.values(*small.SLAB)

  def compute(x, o):
    pltpu.trace_value("sum", jnp.sum(x[...]))
    o[...] = x[...]

  np.testing.assert_array_equal(small.in_vmem(compute, x, out=small.like(x)), x)


@pytest.mark.parametrize("space", [pltpu.HBM, pltpu.VMEM])
@covers("pltpu.has_memory_space")
def test_has_memory_space(space):
  x = small.values(*small.SLAB)

  def body(x, o, line):
    is_there = pltpu.has_memory_space(x, space)
    line[...] = jnp.full(small.SLAB, is_there.astype(jnp.float32))
    pltpu.sync_copy(line, o)

  def call(x):
    return pl.kernel(
      lambda x, o: pl.run_scoped(
        lambda line: body(x, o, line), pltpu.VMEM(small.SLAB, np.float32)
      ),
      small.like(x),
      mesh=cm.chip("v5p:2x2x1").tensor_cores("core", 1),
    )(x)

  made = simulating.traced(call, x, chip="v5p:2x2x1", devices=1)
  (o,) = simulating.silent(made, x, seeds=range(3))
  np.testing.assert_array_equal(o, np.full(small.SLAB, space == pltpu.HBM))


@covers("pltpu.with_memory_space_constraint")
def test_with_memory_space_constraint():
  x = small.values(*small.SLAB)

  def body(x, o):
    o[...] = x[...] * 2

  def call(x):
    constrained = pltpu.with_memory_space_constraint(x, pltpu.VMEM)
    return pl.pallas_call(body, small.like(x))(constrained)

  made = simulating.traced(call, x, chip="v5p:2x2x1", devices=1)
  (o,) = simulating.silent(made, x, seeds=range(3))
  np.testing.assert_array_equal(o, x * 2)
