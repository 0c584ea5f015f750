"""Correct kernels of many kinds: nothing is found under 50 seeds.

Each is right in every interleaving, so whatever is found would be false. DMAs
are done at random times, and the result is that of NumPy under each seed.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from tests import simulating, support

_SLAB = (8, 128)
_DMA, _REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
_VMEM = pltpu.VMEM(_SLAB, np.int32)
_ID = pltpu.CompilerParams(collective_id=0)
_FLAT = pltpu.CompilerParams(
  use_tc_tiling_on_sc=False, needs_layout_passes=False
)
_ROWS = pl.BlockSpec(_SLAB, lambda i: (i, 0))


def _ints(*shape, high=1000):
  return np.random.default_rng(0).integers(0, high, shape, np.int32)


def _out(*shape) -> Any:
  return jax.ShapeDtypeStruct(shape, np.int32)


def _silent(body, *args, out, **options) -> np.ndarray:
  """The output of a plain `pl.kernel`, the same under every seed."""
  made = simulating.kernel(body, *args, out=out, **options)
  (y,) = simulating.silent(made, *args, dma="random")
  return y


def _silent_call(fn, *args) -> np.ndarray:
  """The output of a function of kernels, the same under every seed."""
  (y,) = simulating.silent_calls(jax.jit(fn), *args)
  return y


def _subcores(num_subcores):
  return lambda chip: chip.vector_subcores(
    num_cores=1, num_subcores=num_subcores
  )


# --- that silence says something ---------------------------------------------


def _putting(*, meets: bool, waits: bool):
  """Each core sends its block to the other one."""
  chip = cm.chip("v5p:1x1x1")

  def body(x_hbm, o_hbm, mine, theirs, send, recv):
    core = lax.axis_index("core")
    pltpu.sync_copy(x_hbm.at[core], mine)
    if meets:
      barrier = pltpu.get_barrier_semaphore()
      pltpu.core_barrier(barrier, core_axis_name="core")
    copy = pltpu.async_remote_copy(
      mine, theirs, send, recv, device_id={"core": 1 - core}
    )
    if not waits:
      mine[...] = jnp.zeros(_SLAB, jnp.int32)
    copy.wait()
    pltpu.sync_copy(theirs, o_hbm.at[core])

  return lambda x: pl.kernel(
    body,
    _out(2, *_SLAB),
    mesh=chip.tensor_cores("core"),
    scratch_types=[_VMEM, _VMEM, _DMA, _DMA],
    compiler_params=_ID if meets else None,
  )(x)


def test_blocks_that_are_sent_when_the_other_core_is_there():
  x = _ints(2, *_SLAB)
  y = _silent_call(_putting(meets=True, waits=True), x)
  np.testing.assert_array_equal(y, x[::-1])


@pytest.mark.parametrize(
  ("wrong", "kind"), [("meets", "scope"), ("waits", "race")]
)
def test_a_wrong_kernel_is_not_silent(wrong, kind):
  how = {"meets": True, "waits": True, wrong: False}
  with pytest.raises(AssertionError, match=rf"seed=0, .*kind='{kind}'"):
    _silent_call(_putting(**how), _ints(2, *_SLAB))


def test_a_warning_is_not_silent():
  def body(o_hbm, line, sem):
    other = 1 - lax.axis_index("core")
    pl.semaphore_signal(sem, 1, device_id={"core": other})  # It may not be in.
    pl.semaphore_wait(sem, 1)
    line[...] = jnp.zeros(_SLAB, jnp.int32)
    pltpu.sync_copy(line, o_hbm)

  mesh = cm.chip("v5p:1x1x1").tensor_cores("core")

  def call():
    made: Any = pl.kernel(
      body, _out(*_SLAB), mesh=mesh, scratch_types=[_VMEM, _REGULAR]
    )
    return made()

  with pytest.raises(AssertionError, match="is_warning=True"):
    _silent_call(call)


# --- pipelines and grids -----------------------------------------------------


def test_a_pipeline_in_three_buffers_with_partial_blocks():
  x = _ints(29, 200)

  def body(x_hbm, o_hbm):
    def step(x_vmem, o_vmem):
      o_vmem[...] = x_vmem[...] * 3

    index = lambda i, j: (i, j)
    buffered = pl.BlockSpec(_SLAB, index, pipeline_mode=pl.Buffered(3))
    pltpu.emit_pipeline(
      step,
      grid=(4, 2),
      in_specs=[buffered],
      out_specs=[pl.BlockSpec(_SLAB, index)],
      core_axis_name="core",
      dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
    )(x_hbm, o_hbm)

  y = _silent(body, x, out=_out(*x.shape))
  np.testing.assert_array_equal(y, x * 3)


def test_a_product_that_accumulates_over_the_inner_grid_axis():
  x, y = (_ints(*s, high=9).astype("f4") for s in ((16, 256), (256, 128)))

  def body(x_hbm, y_hbm, o_hbm):
    def step(x_vmem, y_vmem, o_vmem):
      @pl.when(pl.program_id(1) == 0)
      def _():
        o_vmem[...] = jnp.zeros(_SLAB)

      o_vmem[...] += jnp.dot(x_vmem[...], y_vmem[...])

    pltpu.emit_pipeline(
      step,
      grid=(2, 2),
      in_specs=[
        pl.BlockSpec(_SLAB, lambda i, k: (i, k)),
        pl.BlockSpec((128, 128), lambda i, k: (k, 0)),
      ],
      out_specs=[pl.BlockSpec(_SLAB, lambda i, k: (i, 0))],
      core_axis_name="core",
      dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
    )(x_hbm, y_hbm, o_hbm)

  out = jax.ShapeDtypeStruct((16, 128), np.float32)
  np.testing.assert_array_equal(_silent(body, x, y, out=out), x @ y)


def test_a_pipeline_whose_grid_is_known_only_at_run_time():
  count, x = np.array([3], np.int32), _ints(5 * 8, 128)

  def body(count_hbm, x_hbm, o_hbm, count_smem):
    pltpu.sync_copy(count_hbm, count_smem)
    count = count_smem[0]

    def scaled(factor, first, num_blocks):
      def step(x_vmem, o_vmem):
        o_vmem[...] = x_vmem[...] * factor

      spec = pl.BlockSpec(_SLAB, lambda i: (first + i, 0))
      pltpu.emit_pipeline(
        step, grid=(num_blocks,), in_specs=[spec], out_specs=[spec]
      )(x_hbm, o_hbm)

    core = lax.axis_index("core")
    pl.when(core == 0)(lambda: scaled(2, 0, count))
    pl.when(core == 1)(lambda: scaled(5, count, 5 - count))

  y = _silent(
    body,
    count,
    x,
    out=_out(*x.shape),
    scratch_types=[pltpu.SMEM((1,), np.int32)],
  )
  factors = np.repeat([2, 5], [3 * 8, 2 * 8])
  np.testing.assert_array_equal(y, x * factors[:, None])


def test_a_grid_with_a_parallel_dimension_and_one_that_accumulates():
  x = _ints(4 * 8, 300)

  def body(x, o):
    @pl.when(pl.program_id(1) == 0)
    def _():
      o[...] = jnp.zeros(_SLAB, jnp.int32)

    lane = lax.broadcasted_iota(jnp.int32, _SLAB, 1)
    is_inside = pl.program_id(1) * 128 + lane < 300
    o[...] += jnp.where(is_inside, x[...], 0)

  def call(x):
    return pl.pallas_call(
      body,
      _out(4 * 8, 128),
      grid=(4, 3),
      in_specs=[pl.BlockSpec(_SLAB, lambda i, j: (i, j))],
      out_specs=pl.BlockSpec(_SLAB, lambda i, j: (i, 0)),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary")
      ),
    )(x)

  wide = np.pad(x, [(0, 0), (0, 84)]).reshape(4 * 8, 3, 128)
  np.testing.assert_array_equal(_silent_call(call, x), wide.sum(1))


def test_a_grid_whose_blocks_a_prefetched_table_chooses():
  table, x = np.array([3, 0, 3, 1], np.int32), _ints(4 * 8, 128)

  def body(table, x, o):
    o[...] = x[...] + table[pl.program_id(0)]

  def call(table, x):
    return pl.pallas_call(
      body,
      _out(*x.shape),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4,),
        in_specs=[pl.BlockSpec(_SLAB, lambda i, table: (table[i], 0))],
        out_specs=pl.BlockSpec(_SLAB, lambda i, table: (i, 0)),
      ),
    )(table, x)

  expected = x.reshape(4, *_SLAB)[table] + table[:, None, None]
  y = _silent_call(call, table, x)
  np.testing.assert_array_equal(y, expected.reshape(x.shape))


def test_blocks_copied_ahead_by_hand():
  x = _ints(6, *_SLAB)

  def body(x_hbm, o_hbm, blocks, ins, outs):
    def arriving(i):
      return pltpu.make_async_copy(
        x_hbm.at[i], blocks.at[lax.rem(i, 3)], ins.at[lax.rem(i, 3)]
      )

    def leaving(i):
      return pltpu.make_async_copy(
        blocks.at[lax.rem(i, 3)], o_hbm.at[i], outs.at[lax.rem(i, 3)]
      )

    arriving(0).start()

    @pl.loop(0, 6)
    def _(i):
      pl.when(i >= 2)(lambda: leaving(i - 2).wait())
      pl.when(i < 5)(lambda: arriving(i + 1).start())
      arriving(i).wait()
      blocks[lax.rem(i, 3)] += i
      leaving(i).start()

    leaving(4).wait()
    leaving(5).wait()

  y = _silent(
    body,
    x,
    out=_out(*x.shape),
    cores=lambda chip: chip.tensor_cores("core", 1),
    scratch_types=[pltpu.VMEM((3, *_SLAB), np.int32), _DMA((3,)), _DMA((3,))],
  )
  np.testing.assert_array_equal(y, x + np.arange(6)[:, None, None])


# --- cores and devices -------------------------------------------------------


def test_an_exchange_in_rounds_with_a_barrier_before_each():
  x = _ints(4, *_SLAB)

  def body(x_hbm, o_hbm, mine, theirs, send, recv):
    core = lax.axis_index("core")
    pltpu.sync_copy(x_hbm.at[core], mine)

    @pl.loop(0, 3)
    def _(i):
      barrier = pltpu.get_barrier_semaphore()
      pltpu.core_barrier(barrier, core_axis_name="core")
      pltpu.async_remote_copy(
        mine, theirs, send, recv, device_id={"core": 1 - core}
      ).wait()
      mine[...] = theirs[...] + i

    pltpu.sync_copy(mine, o_hbm.at[core])

  y = _silent(
    body,
    x,
    out=_out(2, *_SLAB),
    devices=2,
    scratch_types=[_VMEM, _VMEM, _DMA, _DMA],
    compiler_params=_ID,
  )
  swapped = x.reshape(2, 2, *_SLAB)[:, ::-1].reshape(x.shape)
  np.testing.assert_array_equal(y, swapped + 3)


def test_blocks_shifted_and_swapped_over_devices_and_cores():
  chip, mesh = support.simulated("v5p:2x1x1")
  x = _ints(4, *_SLAB)

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(
      here=cm.vmem_slab(0), arriving=cm.vmem_slab(0), ready=_REGULAR
    ),
  )
  def move(x_hbm, o_hbm, *, here, arriving, ready):
    block = cm.slab(x_hbm)
    cm.copy(x_hbm.at[block], here)

    @pl.loop(0, 3)
    def _(_):
      cm.ring_shift(here, arriving, axis=("device", "core"))
      cm.swap(arriving, here, axis="core", sem=ready)

    cm.copy(here, o_hbm.at[block])

  expected = x
  for _ in range(3):
    expected = np.roll(expected, 1, axis=0)[[1, 0, 3, 2]]
  y = _silent_call(support.over_devices(move, mesh), x)
  np.testing.assert_array_equal(y, expected)


def test_a_ring_that_gathers_into_the_output():
  x = _ints(4, *_SLAB)

  def body(x_hbm, o_hbm, send, recv):
    me = lax.axis_index("device")
    right, left = lax.rem(me + 1, 4), lax.rem(me + 3, 4)
    pltpu.sync_copy(x_hbm.at[0], o_hbm.at[me])
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, 1, device_id={"device": left, "core": 0})
    pl.semaphore_wait(barrier, 1)

    @pl.loop(0, 3)
    def _(i):
      slot = lax.rem(me + 4 - i, 4)
      copy = pltpu.make_async_remote_copy(
        o_hbm.at[slot],
        o_hbm.at[slot],
        send,
        recv.at[slot],
        device_id={"device": right, "core": 0},
      )
      copy.start()
      copy.wait_send()
      arrived = lax.rem(me + 3 - i, 4)
      pltpu.make_async_copy(
        o_hbm.at[arrived], o_hbm.at[arrived], recv.at[arrived]
      ).wait()

  y = _silent(
    body,
    x,
    out=_out(4, *_SLAB),
    cores=lambda chip: chip.tensor_cores("core", 1),
    devices=4,
    scratch_types=[_DMA, _DMA((4,))],
    compiler_params=_ID,
  )
  np.testing.assert_array_equal(y, np.tile(x, (4, 1, 1)))


def test_a_producer_and_a_consumer_with_two_slots():
  x = _ints(5, *_SLAB)

  def body(x_hbm, o_hbm, slots, free, send, full):
    core = lax.axis_index("core")
    barrier = pltpu.get_barrier_semaphore()
    pltpu.core_barrier(barrier, core_axis_name="core")

    def produce():
      @pl.loop(0, 5)
      def _(i):
        slot = lax.rem(i, 2)
        pl.semaphore_wait(free, 1)
        pltpu.async_remote_copy(
          x_hbm.at[i],
          slots.at[slot],
          send,
          full.at[slot],
          device_id={"core": 1},
        ).wait_send()

    def consume():
      pl.semaphore_signal(free, 2, device_id={"core": 0})

      @pl.loop(0, 5)
      def _(i):
        slot = lax.rem(i, 2)
        block = slots.at[slot]
        pltpu.make_async_copy(block, block, full.at[slot]).wait()
        slots[slot] += i
        pltpu.sync_copy(block, o_hbm.at[i])
        pl.when(i < 3)(
          lambda: pl.semaphore_signal(free, 1, device_id={"core": 0})
        )

    pl.when(core == 0)(produce)
    pl.when(core == 1)(consume)

  y = _silent(
    body,
    x,
    out=_out(*x.shape),
    scratch_types=[
      pltpu.VMEM((2, *_SLAB), np.int32),
      _REGULAR,
      _DMA,
      _DMA((2,)),
    ],
    compiler_params=_ID,
  )
  np.testing.assert_array_equal(y, x + np.arange(5)[:, None, None])


def test_a_core_that_polls_for_a_signal():
  def body(x_hbm, o_hbm, line, sem):
    core = lax.axis_index("core")
    barrier = pltpu.get_barrier_semaphore()
    pltpu.core_barrier(barrier, core_axis_name="core")

    @pl.when(core == 0)
    def _():
      pltpu.sync_copy(x_hbm, line)
      line[...] += 1
      pltpu.sync_copy(line, o_hbm)
      pl.semaphore_signal(sem, 1, device_id={"core": 1})

    @pl.when(core == 1)
    def _():
      lax.while_loop(
        lambda count: count == 0,
        lambda _: pl.semaphore_read(sem),
        pl.semaphore_read(sem),
      )
      pl.semaphore_wait(sem, 1)
      pltpu.sync_copy(o_hbm, line)
      line[...] *= 2
      pltpu.sync_copy(line, o_hbm)

  x = _ints(*_SLAB)
  y = _silent(
    body,
    x,
    out=_out(*_SLAB),
    scratch_types=[_VMEM, _REGULAR],
    compiler_params=_ID,
  )
  np.testing.assert_array_equal(y, (x + 1) * 2)


def test_a_copy_that_one_kernel_starts_and_another_waits_for():
  x = _ints(*_SLAB)
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  semaphore = pl.BlockSpec(memory_space=pltpu.SEMAPHORE)

  def start(x_ref, _, o_ref, sem):
    pltpu.make_async_copy(x_ref, o_ref, sem).start()

  def done(x_ref, o_ref, sem, _):
    pltpu.make_async_copy(x_ref, o_ref, sem).wait()

  def call(x):
    kept, y, sem = pl.pallas_call(
      start,
      (_out(*_SLAB), _out(*_SLAB), _DMA(())),
      in_specs=[anywhere],
      out_specs=(anywhere, anywhere, semaphore),
      input_output_aliases={0: 0},
    )(x)
    return pl.pallas_call(
      done,
      _out(*_SLAB),
      in_specs=[anywhere, anywhere, semaphore],
      out_specs=anywhere,
      input_output_aliases={1: 0},
    )(kept, y, sem)

  np.testing.assert_array_equal(_silent_call(call, x), x)


# --- subcores ----------------------------------------------------------------


def test_rotations_through_shared_memory_between_barriers():
  x = _ints(4, 16)

  def body(x_hbm, o_hbm, line, shared):
    subcore = lax.axis_index("subcore")
    pltpu.sync_copy(x_hbm.at[subcore], line)

    @pl.loop(0, 3)
    def _(_):
      pltpu.sync_copy(line, shared.at[subcore])
      plsc.subcore_barrier()
      pltpu.sync_copy(shared.at[lax.rem(subcore + 1, 4)], line)
      plsc.subcore_barrier()

    pltpu.sync_copy(line, o_hbm.at[subcore])

  y = _silent(
    body,
    x,
    out=_out(4, 16),
    cores=_subcores(4),
    scratch_types=[
      pltpu.VMEM((16,), np.int32),
      pltpu.VMEM_SHARED((4, 16), np.int32),
    ],
    compiler_params=_FLAT,
  )
  np.testing.assert_array_equal(y, np.roll(x, -3, axis=0))


def test_subcores_that_take_the_next_row_until_none_is_left():
  x = _ints(9, 16)

  def body(x_hbm, o_hbm, next_row, line):
    next_row[0] = 0
    plsc.subcore_barrier()
    take = lambda: plsc.fetch_and_add(next_row.at[0], 1, subcore_id=0)

    def work(row):
      pltpu.sync_copy(x_hbm.at[row], line)
      line[...] = line[...] + row
      pltpu.sync_copy(line, o_hbm.at[row])
      return take()

    lax.while_loop(lambda row: row < 9, work, take())
    plsc.subcore_barrier()  # The counter is there until all have looked.

  y = _silent(
    body,
    x,
    out=_out(9, 16),
    cores=_subcores(4),
    scratch_types=[pltpu.SMEM((1,), np.int32), pltpu.VMEM((16,), np.int32)],
    compiler_params=_FLAT,
  )
  np.testing.assert_array_equal(y, x + np.arange(9)[:, None])


def test_rows_that_are_gathered_and_added_to_shared_memory():
  index, x = _ints(4, 8, high=12), _ints(12, 16)

  def body(i_hbm, x_hbm, o_hbm, index, rows, total, sem):
    subcore = lax.axis_index("subcore")
    pltpu.sync_copy(i_hbm.at[subcore], index)
    copy = pltpu.async_copy(x_hbm.at[index], rows, sem)

    @pl.when(subcore == 0)
    def _():
      pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], total)

    copy.wait()
    plsc.subcore_barrier()
    pltpu.sync_copy(rows, total, add=True)
    plsc.subcore_barrier()
    pl.when(subcore == 1)(lambda: pltpu.sync_copy(total, o_hbm))

  y = _silent(
    body,
    index,
    x,
    out=_out(8, 16),
    cores=_subcores(4),
    scratch_types=[
      pltpu.VMEM((8,), np.int32),
      pltpu.VMEM((8, 16), np.int32),
      pltpu.VMEM_SHARED((8, 16), np.int32),
      _DMA,
    ],
    compiler_params=_FLAT,
  )
  np.testing.assert_array_equal(y, x[:8] + x[index].sum(0))


# --- several meshes ----------------------------------------------------------


def test_a_scalar_subcore_tells_vector_subcores_where_to_look():
  chip = cm.chip("v6e:1x1")
  scalars, vectors = chip.scalar_subcores("core"), chip.vector_subcores("core")
  x = _ints(32, 16)

  def scalar(x_hbm, o_hbm, told):
    core = lax.axis_index("core")

    @pl.loop(0, 16)
    def _(subcore):
      row = 31 - (core * 16 + subcore)
      pltpu.sync_copy(x_hbm.at[row], o_hbm.at[core * 16 + subcore])
      where = {"core": core, "subcore": subcore}
      pl.semaphore_signal(told, 1, device_id=where)

  def vector(x_hbm, o_hbm, told):
    row = lax.axis_index("core") * 16 + lax.axis_index("subcore")
    pl.semaphore_wait(told, 1)

    def inside(line):
      pltpu.sync_copy(o_hbm.at[row], line)
      line[...] = line[...] + row
      pltpu.sync_copy(line, o_hbm.at[row])

    pl.run_scoped(inside, pltpu.VMEM((16,), np.int32))

  y = _silent(
    [scalar, vector],
    x,
    out=_out(32, 16),
    cores=lambda _: [scalars, vectors],
    chip="v6e:1x1",
    scratch_types=[_REGULAR @ vectors],
    compiler_params=_FLAT,
  )
  np.testing.assert_array_equal(y, x[::-1] + np.arange(32)[:, None])


def test_subcores_and_a_tensor_core_work_on_one_array():
  x = _ints(8, 128)

  def sparse(x_hbm, o_hbm):
    subcore = lax.axis_index("subcore")

    def inside(line):
      pltpu.sync_copy(x_hbm.at[subcore], line)

      @pl.loop(0, 128, step=8)
      def _(i):
        line[pl.ds(i, 8)] += subcore

      pltpu.sync_copy(line, o_hbm.at[subcore])

    pl.run_scoped(inside, pltpu.VMEM((128,), np.int32))

  def dense(x_hbm, o_hbm):
    def inside(block):
      pltpu.sync_copy(x_hbm.at[pl.ds(4, 4)], block)
      block[...] *= 2
      pltpu.sync_copy(block, o_hbm.at[pl.ds(4, 4)])

    pl.run_scoped(inside, pltpu.VMEM((4, 128), np.int32))

  chip = cm.chip("v5p:1x1x1")
  sparse_cores = chip.vector_subcores(
    "sparse_core", num_cores=1, num_subcores=4
  )
  meshes = [sparse_cores, chip.tensor_cores("core", 1)]

  def call(x):
    x = pltpu.with_memory_space_constraint(x, pltpu.HBM)
    out = pltpu.HBM(x.shape, x.dtype)
    return pl.kernel([sparse, dense], out, mesh=meshes, compiler_params=_FLAT)(
      x
    )

  y = _silent_call(call, x)
  expected = np.concatenate([x[:4] + np.arange(4)[:, None], x[4:] * 2])
  np.testing.assert_array_equal(y, expected)
