"""Tests for coremesh.bodies."""

import dataclasses

import jax
from jax import lax
from jax._src.pallas import core as pallas_core  # noqa: TID251  A grid.
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.pipelines import blocks, bodies

_GRID = (4,)


@dataclasses.dataclass(frozen=True)
class _Ref:
  """What a block needs to know of a ref."""

  shape: tuple[int, ...] = (32, 128)
  dtype: np.dtype = np.dtype(np.float32)


def _check(body, out=None, *, in_space=None, grid=_GRID):
  spec = cm.block((8, 128), lambda i: (i, 0))
  x = spec if in_space is None else pl.BlockSpec(memory_space=in_space)
  operands = [
    blocks.operand("input 0", _Ref(), x, is_output=False),
    blocks.operand("output 0", _Ref(), out or spec, is_output=True),
  ]
  types = [o.block_type for o in operands]
  with pallas_core.tracing_grid_env(grid, mapped_dims=()):
    jax.make_jaxpr(
      lambda: pl.run_scoped(bodies.checked(body, operands), *types)
    )()


def _reads_output(x_vmem, o_vmem):
  o_vmem[...] = o_vmem[...] + x_vmem[...]


def _adds_to_output(x_vmem, o_vmem):
  o_vmem[...] += x_vmem[...]


def _copies_output(x_vmem, o_vmem):
  def body(copy_vmem):
    pltpu.sync_copy(o_vmem, copy_vmem)
    o_vmem[...] = copy_vmem[...] + x_vmem[...]

  pl.run_scoped(body, pltpu.VMEM((8, 128), jnp.float32))


def _reads_output_at_some_steps(x_vmem, o_vmem):
  @pl.when(pl.program_id(0) == 0)
  def _():
    _reads_output(x_vmem, o_vmem)


def _reads_output_in_a_loop(x_vmem, o_vmem):
  @pl.loop(0, 8)
  def _(row):
    o_vmem[row] = o_vmem[row] + x_vmem[row]


def _reads_output_while(x_vmem, o_vmem):
  def step(row):
    o_vmem[row] = o_vmem[row] + x_vmem[row]
    return row + 1

  lax.while_loop(lambda row: row < 8, step, 0)


def _waits_for_output(x_vmem, o_vmem):
  lax.while_loop(lambda row: o_vmem[0, 0] < 8, lambda row: row + 1, 0)
  o_vmem[...] = x_vmem[...]


def _reads_output_by_way_of_scratch(x_vmem, o_vmem):
  def body(old_vmem):
    old_vmem[...] = o_vmem[...]
    o_vmem[...] = old_vmem[...] + x_vmem[...]

  pl.run_scoped(body, pltpu.VMEM((8, 128), jnp.float32))


_READS_OUTPUT = [
  _reads_output,
  _adds_to_output,
  _copies_output,
  _reads_output_at_some_steps,
  _reads_output_in_a_loop,
  _reads_output_while,
  _waits_for_output,
  _reads_output_by_way_of_scratch,
]


@pytest.mark.parametrize("body", _READS_OUTPUT, ids=lambda b: b.__name__)
def test_a_body_must_not_read_an_output_it_has_not_written(body):
  with pytest.raises(
    cm.PipelineError,
    match=r"reads output 0 before .* garbage.*cm.accumulator\(",
  ):
    _check(body)


def test_a_body_may_read_and_add_to_an_accumulator():
  sums = cm.accumulator((8, 128), lambda i: (0, 0))
  _check(_reads_output, sums)
  _check(_adds_to_output, sums)


def test_a_body_may_read_what_it_has_written():
  def body(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...]
    o_vmem[...] = o_vmem[...] * 2

  _check(body)


def test_a_body_may_read_what_it_has_written_within_a_condition():
  def body(x_vmem, o_vmem):
    @pl.when(pl.program_id(0) < pl.num_programs(0))
    def _():
      o_vmem[...] = x_vmem[...]
      o_vmem[...] = o_vmem[...] * 2

  _check(body)


def _writes_input(x_vmem, o_vmem):
  o_vmem[...] = x_vmem[...]
  x_vmem[...] = o_vmem[...]


def _copies_into_input(x_vmem, o_vmem):
  o_vmem[...] = x_vmem[...]
  pltpu.sync_copy(o_vmem, x_vmem)


def _writes_input_at_some_steps(x_vmem, o_vmem):
  @pl.when(pl.program_id(0) == 0)
  def _():
    _writes_input(x_vmem, o_vmem)


@pytest.mark.parametrize(
  "body", [_writes_input, _copies_into_input, _writes_input_at_some_steps]
)
def test_a_body_must_not_write_an_input(body):
  with pytest.raises(
    cm.PipelineError, match="The body writes input 0.*never written back"
  ):
    _check(body)


def test_a_body_may_do_what_it_likes_with_refs_left_in_hbm():
  out = pl.BlockSpec(memory_space=pl.ANY)

  def body(x_hbm, o_hbm):
    pltpu.sync_copy(o_hbm, x_hbm)
    pltpu.sync_copy(x_hbm, o_hbm)

  _check(body, out, in_space=pltpu.HBM)
