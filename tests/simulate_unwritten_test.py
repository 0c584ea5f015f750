"""Reads of memory that nobody has written: found where they matter, only."""

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
from tests import simulating

_SLAB = (8, 128)
_VMEM = pltpu.VMEM(_SLAB, np.float32)
_SMEM = pltpu.SMEM((4,), np.int32)
_OUT: Any = jax.ShapeDtypeStruct(_SLAB, np.float32)
_X: Any = np.arange(32 * 128, dtype=np.float32).reshape(32, 128)
_RIGHT_OR_WRONG = pytest.mark.parametrize("wrong", [False, True])


def _made(body, *scratch, out=_OUT):
  return simulating.kernel(
    body,
    _X,
    out=out,
    cores=lambda chip: chip.tensor_cores("core", 1),
    scratch_types=scratch,
  )


def _check(made, wrong, expected, *, text="'acc'", x=_X):
  if wrong:
    found = simulating.caught(made, "uninitialised", x, seeds=range(3))
    assert text in found
    assert "simulate_unwritten_test.py" in found
    assert "nobody has written what it reads" in found
    assert not made.findings(x, detect_uninitialised=False)
  else:
    (y,) = simulating.silent(made, x, seeds=range(6))
    np.testing.assert_array_equal(y, expected)


@_RIGHT_OR_WRONG
def test_a_sum_that_starts_at_nothing(wrong):
  def body(x_hbm, o_hbm, part, acc):
    if not wrong:
      acc[...] = jnp.zeros(_SLAB)

    def add(i, _):
      pltpu.sync_copy(x_hbm.at[pl.ds(i * 8, 8)], part)
      acc[...] += part[...]

    lax.fori_loop(0, 4, add, None)
    pltpu.sync_copy(acc, o_hbm)

  made = _made(body, _VMEM, _VMEM)
  _check(made, wrong, _X.reshape(4, *_SLAB).sum(0))


@_RIGHT_OR_WRONG
def test_what_is_copied_from_memory_nobody_wrote_is_as_good_as_unwritten(wrong):
  def body(x_hbm, o_hbm, first, acc):
    if not wrong:
      pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], first)
    pltpu.sync_copy(first, acc)
    acc[...] = acc[...] + 1
    pltpu.sync_copy(acc, o_hbm)

  _check(_made(body, _VMEM, _VMEM), wrong, _X[:8] + 1)


@_RIGHT_OR_WRONG
def test_a_number_that_nobody_wrote_as_an_index(wrong):
  def body(x_hbm, o_hbm, starts):
    starts[0] = 1  # Another element is of no help.
    starts[1] = 2
    start = starts[2 if wrong else 1]
    pltpu.sync_copy(x_hbm.at[pl.ds(jnp.clip(start, 0, 3) * 8, 8)], o_hbm)

  _check(_made(body, _SMEM), wrong, _X[16:24], text="'starts'")


@_RIGHT_OR_WRONG
def test_an_addition_by_dma_to_memory_nobody_wrote(wrong):
  def body(x_hbm, o_hbm, line, acc):
    pltpu.sync_copy(x_hbm.at[0, pl.ds(0, 16)], line)
    if not wrong:
      pltpu.sync_copy(x_hbm.at[1, pl.ds(0, 16)], acc)
    pltpu.sync_copy(line, acc, add=True)
    pltpu.sync_copy(acc, o_hbm)

  made = simulating.kernel(
    body,
    _X,
    out=jax.ShapeDtypeStruct((16,), np.float32),
    cores=lambda chip: chip.vector_subcores(num_cores=1, num_subcores=1),
    scratch_types=[
      pltpu.VMEM((16,), np.float32),
      pltpu.VMEM_SHARED((16,), np.float32),
    ],
    compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False),
  )
  _check(made, wrong, _X[0, :16] + _X[1, :16])


@pytest.mark.parametrize("how", ["where", "select and add", "masked load"])
def test_what_a_select_leaves_out_may_be_unwritten(how):
  def body(x_hbm, o_hbm, acc, part):
    pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], part)
    for i in range(2):
      if how == "where":
        old = jnp.where(i == 0, 0.0, acc[...])
      elif how == "select and add":
        old = jnp.where(jnp.full(_SLAB, i) == 0, 0.0, acc[...] * 1)
      else:
        mask = jnp.full(_SLAB, i) > 0
        old = pltpu.load(acc, mask=mask)
        old = jnp.where(mask, old, 0.0)
      acc[...] = old + part[...]
    pltpu.sync_copy(acc, o_hbm)

  _check(_made(body, _VMEM, _VMEM), False, 2 * _X[:8])


def _stored_by_mask(how, out, at, value, mask):
  """Puts what the mask allows of a register into `out[at : at + 8]`."""
  lanes = at + lax.iota(jnp.int32, 8)
  if how == "scatter":
    plsc.store_scatter(out, [lanes], value, mask=mask)
  elif how == "scatter of additions":
    plsc.addupdate_scatter(out, [lanes], value, mask=mask)
  elif how == "scatter by what is loaded":  # It holds its own indices.
    plsc.store_scatter(out, [value], lanes, mask=mask)
  elif how == "gather by what is loaded":
    found = plsc.load_gather(out, [value], mask=mask)
    out[pl.ds(at, 8)] = jnp.where(mask, found + lanes, 0)
  else:
    plsc.store_compressed(out.at[pl.ds(at, 8)], value, mask=mask)


@pytest.mark.parametrize(
  "how",
  [
    *("scatter", "scatter of additions", "compressed store"),
    *("scatter by what is loaded", "gather by what is loaded"),
  ],
)
@_RIGHT_OR_WRONG
def test_lanes_that_a_mask_leaves_out_may_be_unwritten(how, wrong):
  x = np.arange(32, dtype=np.int32)

  def body(x_hbm, o_hbm, acc, out):
    pltpu.sync_copy(x_hbm.at[pl.ds(0, 16)], acc.at[pl.ds(0, 16)])
    for at in range(0, 32, 8):
      out[pl.ds(at, 8)] = jnp.zeros(8, jnp.int32)
    for at in range(0, 32, 8):
      value = acc[pl.ds(at, 8)]
      if wrong:  # No mask chooses of this.
        value = jnp.clip(value, 0, 31)
        out[pl.ds(at, 8)] = value
      mask = at + lax.iota(jnp.int32, 8) < 12
      _stored_by_mask(how, out, at, value, mask)
    pltpu.sync_copy(out, o_hbm)

  made = simulating.kernel(
    body,
    x,
    out=jax.ShapeDtypeStruct(x.shape, x.dtype),
    cores=lambda chip: chip.vector_subcores(num_cores=1, num_subcores=1),
    scratch_types=[pltpu.VMEM(x.shape, x.dtype)] * 2,
    compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False),
  )
  _check(made, wrong, np.where(x < 12, x, 0), x=x)


@pytest.mark.parametrize("rows", [8, 5])
def test_a_load_of_which_a_part_is_written(rows):
  def body(x_hbm, o_hbm, acc):
    pltpu.sync_copy(x_hbm.at[pl.ds(0, rows)], acc.at[pl.ds(0, rows)])
    acc[...] = acc[...] + 1
    pltpu.sync_copy(acc.at[pl.ds(0, rows)], o_hbm)

  made = _made(body, _VMEM, out=jax.ShapeDtypeStruct((rows, 128), np.float32))
  _check(made, False, _X[:rows] + 1)


def _over_the_end(x, *, slices):
  """Blocks of 24 rows over 32, of which the last reaches over the end."""

  def body(x_vmem, o_vmem):
    for i in range(0, 24, slices):
      o_vmem[i : i + slices] = x_vmem[i : i + slices] + 1

  block = pl.BlockSpec((24, 128), lambda i: (i, 0))
  return pl.pallas_call(
    body,
    jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid=(2,),
    in_specs=[block],
    out_specs=block,
  )(x)


@pytest.mark.parametrize("slices", [24, 8])
def test_a_block_over_the_end_of_an_array_may_be_read(slices):
  with cm.simulation() as run:
    y = _over_the_end(_X, slices=slices)
  assert not run.findings
  np.testing.assert_array_equal(y, _X + 1)


def _pipelined(x_hbm, o_hbm):
  """The same by a pipeline of the kernel's own."""

  def step(x_vmem, o_vmem):
    for i in range(0, 24, 8):
      o_vmem[pl.ds(i, 8)] = x_vmem[pl.ds(i, 8)] + 1

  block = pl.BlockSpec((24, 128), lambda i: (i, 0))
  pltpu.emit_pipeline(step, grid=(2,), in_specs=[block], out_specs=[block])(
    x_hbm, o_hbm
  )


def test_a_pipelines_block_over_the_end_of_an_array_may_be_read():
  made = _made(_pipelined, out=jax.ShapeDtypeStruct(_X.shape, np.float32))
  _check(made, False, _X + 1)


def test_a_pipelines_block_may_be_read_in_a_backward_pass_too():
  mesh = cm.chip().tensor_cores("core", 1)
  backward = cm.kernel(_pipelined, mesh=mesh, out=cm.like(0))

  @jax.custom_vjp
  def forward(x):
    return x

  forward.defvjp(lambda x: (x, None), lambda _, d: (backward(d),))
  with cm.simulation() as run:
    _, pull = jax.vjp(forward, jnp.asarray(_X))
    np.testing.assert_array_equal(pull(jnp.asarray(_X))[0], _X + 1)
  assert len(run.runs) == 1


@_RIGHT_OR_WRONG
def test_an_output_block_is_not_what_was_there_before(wrong):
  def body(x_vmem, o_vmem):
    if not wrong:

      @pl.when(pl.program_id(0) == 0)
      def _():
        o_vmem[...] = jnp.zeros(_SLAB)

    o_vmem[...] += x_vmem[...]

  def call(x):
    return pl.pallas_call(
      body,
      _OUT,
      grid=(4,),
      in_specs=[pl.BlockSpec(_SLAB, lambda i: (i, 0))],
      out_specs=pl.BlockSpec(_SLAB, lambda i: (0, 0)),
    )(x)

  made = simulating.traced(call, _X, chip="v5p:2x2x1", devices=1)
  _check(made, wrong, _X.reshape(4, *_SLAB).sum(0), text="'o_vmem'")


def test_a_read_before_the_copy_that_it_should_wait_for_is_a_race():
  def body(x_hbm, o_hbm, acc, sem):
    copy = pltpu.async_copy(x_hbm.at[pl.ds(0, 8)], acc, sem)
    value = acc[...]
    copy.wait()
    acc[...] = value
    pltpu.sync_copy(acc, o_hbm)

  made = _made(body, _VMEM, pltpu.SemaphoreType.DMA)
  assert "load of 'acc'" in simulating.caught(made, "race", _X)


@pytest.mark.parametrize("rows", [8, 5])
def test_the_report_tells_of_outputs_that_hold_what_nobody_wrote(rows):
  @cm.kernel(mesh=cm.chip("v5p").tensor_cores("core", 1), out=_OUT)
  def copies(x_hbm, o_hbm):
    part = pl.ds(0, rows)
    pltpu.sync_copy(x_hbm.at[part], o_hbm.at[part])

  with cm.simulation() as run:
    copies(_X)
  assert not run.findings
  told = "HBM 'output 0' of device 0: 384 of 1024 elements, the first at [5, 0]"
  assert (told in str(run.report)) == (rows == 5)
  (noted,) = run.report.as_dict()["runs"]
  assert len(noted["unwritten_outputs"]) == (rows == 5)


def test_an_array_without_elements_holds_nothing_unwritten():
  def body(x_hbm, o_hbm, empty_hbm, empty):
    pltpu.sync_copy(empty, empty_hbm)
    pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], o_hbm)

  shape = (0, 128)
  made = _made(
    body,
    pltpu.VMEM(shape, np.float32),
    out=(_OUT, jax.ShapeDtypeStruct(shape, np.float32)),
  )
  y, nothing = simulating.silent(made, _X, seeds=range(3))
  np.testing.assert_array_equal(y, _X[:8])
  assert nothing.shape == shape
