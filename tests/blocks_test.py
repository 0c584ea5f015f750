"""Tests for coremesh.blocks."""

import dataclasses

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.pipelines import blocks


@dataclasses.dataclass(frozen=True)
class _Ref:
  """What a block needs to know of a ref."""

  shape: tuple[int, ...]
  dtype: np.dtype = np.dtype(np.float32)
  transforms: tuple[str, ...] = ()


def _operand(declared, ref, *, is_output=True):
  return blocks.operand("output 0", ref, declared, is_output=is_output)


def _rows(i):
  return i, 0


# --- cm.block and cm.accumulator -------------------------------------------


def test_a_block_is_a_plain_block_spec():
  spec = cm.block((8, 128), _rows)
  assert spec == pl.BlockSpec((8, 128), _rows)


def test_buffers_and_lookahead_become_a_pipeline_mode():
  spec = cm.block((8, 128), _rows, buffers=3, lookahead=True)
  assert spec.pipeline_mode == pl.Buffered(3, use_lookahead=True)
  assert cm.block((8, 128), _rows, buffers=1).pipeline_mode == pl.Buffered(1)


def test_a_block_is_seen_in_the_memory_it_names():
  spec = cm.block((1, 1), _rows, memory_space=pltpu.SMEM)
  assert spec.memory_space is pltpu.SMEM


@pytest.mark.parametrize("buffers", [0, -1, 2.0, True, None])
def test_a_block_needs_a_whole_number_of_buffers(buffers):
  with pytest.raises(cm.PipelineError, match="buffers must be an int of at le"):
    cm.block((8, 128), _rows, buffers=buffers)


def test_lookahead_needs_a_second_buffer():
  with pytest.raises(cm.PipelineError, match="at least 2 buffers; got buf.*=1"):
    cm.block((8, 128), _rows, buffers=1, lookahead=True)


def test_an_accumulator_keeps_what_it_was_given():
  sums = cm.accumulator(
    (8, 128), _rows, init=-jnp.inf, dtype=jnp.float32, buffers=1
  )
  assert sums.init == -jnp.inf
  assert sums.dtype == jnp.float32
  assert sums.spec == cm.block((8, 128), _rows, buffers=1)


def test_an_accumulator_starts_from_a_scalar():
  with pytest.raises(cm.PipelineError, match=r"scalar; got one of shape \(8,"):
    cm.accumulator((8, 128), _rows, init=np.zeros((8, 128)))


def test_an_accumulator_takes_a_scalar_array():
  assert cm.accumulator((8, 128), _rows, init=jnp.float32(2)).init == 2


# --- operands --------------------------------------------------------------


def test_a_spec_without_a_shape_is_one_block_of_all():
  operand = _operand(pl.BlockSpec(), _Ref((16, 128)))
  assert operand.sizes == (16, 128)
  assert operand.index_at((5,)) == (0, 0)
  assert operand.has_blocks and operand.is_copied


def test_a_spec_without_an_index_map_is_the_first_block():
  operand = _operand(pl.BlockSpec((8, 128)), _Ref((16, 128)))
  assert operand.index_at((5,)) == (0, 0)


@pytest.mark.parametrize("space", [pl.ANY, pltpu.HBM])
def test_a_ref_left_in_hbm_has_no_blocks_and_no_copies(space):
  operand = _operand(pl.BlockSpec(memory_space=space), _Ref((16, 128)))
  assert not operand.has_blocks
  assert not operand.is_copied
  assert operand.spec.memory_space is pltpu.HBM
  assert operand.block_type == pltpu.HBM((16, 128), jnp.float32)


def test_the_body_does_not_see_squeezed_axes():
  operand = _operand(
    cm.block((None, pl.Squeezed(), 8, pl.BoundedSlice(128)), lambda i: i),
    _Ref((2, 3, 16, 128)),
  )
  assert operand.block_type == pltpu.VMEM((8, 128), jnp.float32)


def test_the_body_sees_an_accumulator_in_its_own_dtype():
  sums = cm.accumulator((8, 128), _rows, dtype=jnp.float32)
  operand = _operand(sums, _Ref((16, 128), np.dtype(jnp.bfloat16)))
  assert operand.block_type == pltpu.VMEM((8, 128), jnp.float32)


def test_indices_count_blocks_and_elements_where_there_are_no_blocks():
  sizes = (8, pl.Blocked(8), None, pl.Element(8), pl.BoundedSlice(8))
  operand = _operand(cm.block(sizes, lambda i: i), _Ref((20, 16, 5, 20, 20)))
  assert operand.num_indices == (3, 2, 5, 20, 20)


def test_one_index_need_not_be_a_tuple():
  operand = _operand(cm.block((128,), lambda i: i), _Ref((256,)))
  assert operand.index_at((1,)) == (1,)


def test_an_index_map_returns_an_index_for_each_axis():
  operand = _operand(cm.block((8, 128), lambda i: i), _Ref((16, 128)))
  with pytest.raises(
    cm.PipelineError, match=r"output 0 .* each axis .*\(8, 128\); got \(1,\)"
  ):
    operand.index_at((1,))


def test_parts_tell_slices_by_start_and_size():
  assert blocks.parts((3, pl.ds(8, 16), 0)) == (3, 8, 16, 0)


def test_a_block_has_the_rank_of_its_array():
  operand = _operand(cm.block((8, 128), _rows), _Ref((2, 16, 128)))
  with pytest.raises(
    cm.ShapeError, match=r"output 0 must have one size .*\(8, 128\).*\(2, 16,"
  ):
    operand.check()


def test_an_output_cannot_look_ahead():
  spec = cm.block((8, 128), _rows, lookahead=True)
  with pytest.raises(cm.PipelineError, match="output 0 has lookahead"):
    _operand(spec, _Ref((16, 128))).check()
  _operand(spec, _Ref((16, 128)), is_output=False).check()


@pytest.mark.parametrize(
  "block_shape, shape, tile",
  [
    ((8, 128), (20, 128), "axis 0 ends within a tile of 8"),
    ((8, 128), (16, 130), "axis 1 ends within a tile of 128"),
    ((256,), (300,), "axis 0 ends within a tile of 128"),
  ],
)
def test_blocks_of_a_part_of_an_array_do_not_overwrite_the_rest(
  block_shape, shape, tile
):
  spec = cm.block(block_shape, lambda *i: i)
  part = _Ref(shape, transforms=("a slice",))
  with pytest.raises(cm.ShapeError, match=tile):
    _operand(spec, part).check()
  _operand(spec, part, is_output=False).check()
  _operand(spec, _Ref(shape)).check()


def test_blocks_of_a_part_of_an_array_may_end_with_a_tile():
  part = _Ref((3, 24, 256), transforms=("a slice",))
  _operand(cm.block((2, 16, 128), lambda *i: i), part).check()
  _operand(cm.block((2, 3, 128), lambda *i: i), part).check()


def test_a_tile_of_a_vector_holds_as_many_bits_in_any_dtype():
  assert blocks.tiles(_Ref((300,))) == (128,)
  assert blocks.tiles(_Ref((300,), np.dtype(np.int8))) == (512,)
  assert blocks.tiles(_Ref((2, 20, 130))) == (1, 8, 128)
