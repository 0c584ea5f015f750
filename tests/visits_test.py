"""Tests for coremesh.visits."""

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.pipelines import blocks, visits


@dataclasses.dataclass(frozen=True)
class _Ref:
  """What the walk needs to know of a ref."""

  shape: tuple[int, ...]
  dtype: np.dtype = np.dtype(np.float32)


def _walk(index_map, grid, *, shape=(64, 1024), block=(8, 128), **options):
  declared = cm.block(block, index_map)
  if options.get("accumulated"):
    declared = cm.accumulator(block, index_map)
  operand = blocks.operand(
    "output 0",
    _Ref(shape),
    declared,
    is_output=options.get("is_output", True),
  )
  return blocks.in_throwaway_trace(lambda: visits.walk(operand, grid))


def _walk_traced(make_index_map, grid, **options):
  """The walk of an index map that uses a number known at run time only."""
  found = []

  def program(number):
    found.append(_walk(make_index_map(number), grid, **options))

  jax.make_jaxpr(program)(jnp.int32(0))
  return found[0]


def _dynamic(check):
  """Calls `check` with a grid size known at run time only."""
  jax.make_jaxpr(lambda n: [check(n), ()][1])(jnp.int32(0))


# --- which axes share a block ----------------------------------------------


@pytest.mark.parametrize(
  "index_map, grid, kept",
  [
    (lambda i, j: (i, j), (4, 4), set()),
    (lambda i, j: (i, 0), (4, 4), {1}),
    (lambda i, j: (0, j), (1, 4), set()),
    (lambda i, j: (0, 0), (4, 4), {0, 1}),
    (lambda i, j: (0, 0), (4, 1), {0}),
    (lambda i: (i // 4, 0), (8,), {0}),
    (lambda i: (i // 7, 0), (8,), {0}),
    (lambda i: (i // 4, i % 4), (8,), set()),
    (lambda i, j: (2 * i + j, 0), (4, 2), set()),
    (lambda: (0, 0), (), set()),
  ],
)
def test_an_axis_is_kept_if_some_steps_along_it_share_a_block(
  index_map, grid, kept
):
  seen = _walk(index_map, grid)
  assert seen.kept == kept
  assert seen.shared == kept
  assert seen.is_known
  assert seen.revisited is None


@pytest.mark.parametrize(
  "index_map, is_aligned",
  [
    (lambda i, k: (i, 0), True),
    (lambda i, k: (0, 0), True),
    (lambda i, k: (i, k), True),
    (lambda i, k: (i // 2, 0), False),
    (lambda i, k: (i, k // 2), False),
    (lambda i, k: (0 * i, 0), False),
  ],
)
def test_a_block_is_sure_to_stay_along_an_axis_that_is_not_used(
  index_map, is_aligned
):
  assert _walk(index_map, (4, 4)).is_aligned == is_aligned


def test_index_maps_in_jax_numpy_are_evaluated_too():
  seen = _walk(lambda i: (lax.div(i, 4), jnp.where(i > 9, i, 0)), (8,))
  assert seen.is_known
  assert seen.kept == {0}


def test_evaluating_an_index_map_leaves_nothing_in_the_program():
  def program():
    _walk(lambda i: (lax.div(i, 4), 0), (8,))

  assert not jax.make_jaxpr(program)().eqns


@settings(max_examples=25)
@given(
  st.permutations(range(3)),
  st.tuples(*[st.integers(1, 4)] * 3),
  st.sets(st.integers(0, 2)),
)
def test_a_walk_agrees_with_the_definition(order, grid, used):
  """Kept: two steps of one block differ there. Revisited: in two runs."""

  def index_map(*point):
    return tuple(point[a] if a in used else 0 for a in order)

  seen = _walk(index_map, grid, shape=(4, 4, 4), block=(1, 1, 1))
  steps = list(itertools.product(*map(range, grid)))
  sequence = [index_map(*p) for p in steps]
  kept = {
    a
    for p, q in itertools.combinations(steps, 2)
    for a in range(3)
    if index_map(*p) == index_map(*q) and p[a] != q[a]
  }
  runs = [index for index, _ in itertools.groupby(sequence)]
  assert seen.kept == kept
  assert (seen.revisited is not None) == (len(runs) > len(set(runs)))


@pytest.mark.parametrize("grid", [(5000,), (100, 100), (20, 20, 20)])
def test_a_large_grid_is_walked_at_its_corners(grid):
  inner_kept = _walk(
    lambda *p: p[:-1], grid, shape=grid[:-1], block=(1,) * (len(grid) - 1)
  )
  assert inner_kept.kept == {len(grid) - 1}
  with pytest.raises(cm.PipelineError, match="has 4 blocks"):
    _walk(lambda *p: (p[-1],), grid, shape=(4,), block=(1,))
  last = grid[-1] - 1
  with pytest.raises(cm.PipelineError, match=f"has {last} blocks"):
    _walk(lambda *p: (p[-1],), grid, shape=(last,), block=(1,))
  assert len(list(visits._points(grid))) <= visits._MAX_STEPS


# --- index maps that cannot be evaluated -----------------------------------


def test_a_run_time_number_leaves_which_axes_are_used():
  seen = _walk_traced(lambda n: lambda i, j: (n + i, 0), (4, 4))
  assert not seen.is_known
  assert not seen.is_aligned
  assert seen.kept == {1}
  assert seen.shared == {1}
  assert seen.revisited is None


def test_a_single_step_is_never_shared():
  seen = _walk_traced(lambda n: lambda i, j: (n + i, 0), (4, 1))
  assert seen.kept == set()


def test_a_run_time_number_leaves_that_an_axis_is_not_innermost():
  seen = _walk_traced(lambda n: lambda k, j: (n + j, 0), (4, 4))
  assert seen.revisited == 0
  seen = _walk_traced(lambda n: lambda k, j: (n + j, 0), (4, 1))
  assert seen.revisited is None


def test_which_steps_add_to_a_block_chosen_at_run_time_is_not_known():
  seen = _walk_traced(
    lambda n: lambda i, j: (n * i, 0), (4, 4), accumulated=True
  )
  assert seen.shared is None


@pytest.mark.parametrize(
  "make_index_map",
  [
    lambda n: lambda i, j: (n + i, 8 - j),
    lambda n: lambda i, j: (n, j // 2),
    lambda n: lambda i, j: ((i - n) % 4, 1),
    lambda n: lambda i, j: (4 * (n * j) + i, True),
  ],
)
def test_arithmetic_with_a_run_time_number_is_read_as_a_trace_reads_it(
  make_index_map,
):
  def program(number):
    spec = cm.block((8, 128), make_index_map(number))
    operand = blocks.operand("input 0", _Ref((64, 1024)), spec, is_output=False)
    read = visits._read(operand, (4, 4))
    assert read == blocks.in_throwaway_trace(
      lambda: visits._walk(operand, (4, 4))
    )

  jax.make_jaxpr(program)(jnp.int32(0))


@pytest.mark.parametrize(
  "index_map",
  [
    lambda i, j: (i // 2, j),
    lambda i, j: (i if i else j, 0),
    lambda i, j: (0.5 * i, 0),
    lambda i, j: (np.int32(1) + i, 0),
    lambda i, j: (lax.add(i, j), 0),
    lambda i, j: (range(4)[i], 0),
    lambda i, j: (pl.ds(i, 8), 0),
    lambda i, j: (i,),
  ],
)
def test_an_index_map_that_does_more_is_not_read(index_map):
  spec = cm.block((8, 128), index_map)
  operand = blocks.operand("input 0", _Ref((64, 1024)), spec, is_output=False)
  assert visits._read(operand, (4, 4)) is None


def test_reading_an_index_map_leaves_nothing_in_the_program():
  def program(number):
    spec = cm.block((8, 128), lambda i: (number + i, 0))
    operand = blocks.operand("input 0", _Ref((64, 1024)), spec, is_output=False)
    visits.walk(operand, (4,))

  assert not jax.make_jaxpr(program)(jnp.int32(0)).eqns


def test_the_index_of_a_core_is_a_run_time_number():
  mesh = jax.make_mesh(
    (2,), ("core",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  found = []

  def program(x):
    found.append(_walk(lambda i: (jax.lax.axis_index("core") + i, 0), (4,)))
    return x

  spec = jax.sharding.PartitionSpec("core")
  jax.make_jaxpr(
    jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec)
  )(np.zeros(2, np.float32))
  assert not found[0].is_known
  assert found[0].kept == set()


def test_a_misspelt_name_in_an_index_map_is_not_swallowed():
  with pytest.raises(NameError, match="row_count"):
    _walk(lambda i: (row_count, 0), (4,))  # noqa: F821


# --- grids of run-time size ------------------------------------------------


def test_a_grid_axis_of_run_time_size_is_walked_for_some_steps():
  def check(n):
    assert _walk(lambda i, k: (i, 0), (2, n)).kept == {1}
    assert _walk(lambda k, j: (j, 0), (n, 2)).revisited == 0
    assert _walk_traced(lambda m: lambda i, k: (m + i, 0), (2, n)).kept == {1}

  _dynamic(check)


def test_a_run_time_size_may_be_less_than_what_is_walked():
  _dynamic(lambda n: _walk(lambda i: (i, 0), (n,), shape=(16, 128)))


def test_blocks_outside_the_array_are_found_with_a_run_time_size():
  with pytest.raises(
    cm.PipelineError, match=r"\([23], 0\) at grid point \(0, [23]\)"
  ):
    _dynamic(lambda n: _walk(lambda i, j: (j, 0), (n, 4), shape=(16, 128)))


def test_an_axis_without_steps_is_walked_but_not_checked():
  assert _walk(lambda i, k: (k, 0), (2, 0), shape=(8, 128)).kept == {0}


# --- blocks outside the array ----------------------------------------------


def test_an_index_map_in_elements_is_an_error():
  with pytest.raises(
    cm.PipelineError,
    match=r"output 0 returns \(8, 0\) at grid point \(1,\), but axis 0 of shape"
    r" \(64, 1024\) has 8 blocks of 8. .* not elements",
  ):
    _walk(lambda i: (i * 8, 0), (8,))


def test_a_block_before_the_array_is_an_error():
  with pytest.raises(cm.PipelineError, match=r"\(-1, 0\) at .* in \[0, 8\)"):
    _walk(lambda i: (i - 1, 0), (8,))


def test_a_block_in_the_middle_of_the_grid_may_be_outside():
  with pytest.raises(cm.PipelineError, match=r"grid point \(3,\)"):
    _walk(lambda i: (99 if i == 3 else 0, 0), (8,))


def test_the_last_block_may_be_partial():
  _walk(lambda i, j: (i, j), (3, 2), shape=(20, 130))


@pytest.mark.parametrize(
  "start, size",
  [(-8, 8), (72, 0), (0, -8), (0, 17)],
)
def test_a_slice_is_within_the_array_and_its_bound(start, size):
  with pytest.raises(
    cm.PipelineError,
    match=rf"pl.ds\({start}, {size}\) along axis 0 .* \[0, 64\] .*\(16\) long",
  ):
    _walk(
      lambda i: (pl.ds(start, size), 0),
      (1,),
      block=(pl.BoundedSlice(16), 128),
      is_output=False,
    )


@pytest.mark.parametrize("start, size", [(4, 8), (0, 13)])
def test_a_slice_of_an_output_is_whole_tiles(start, size):
  def walk(block, shape, index, **options):
    _walk(lambda i: index, (1,), block=block, shape=shape, **options)

  ragged = pl.ds(start, size)
  rows = (pl.BoundedSlice(16), 128), (64, 128), (ragged, 0)
  with pytest.raises(cm.PipelineError, match="whole tiles of 8 there"):
    walk(*rows)
  walk(*rows, is_output=False)
  # Before the last two axes there are no tiles.
  walk((pl.BoundedSlice(16), 8, 128), (64, 8, 128), (ragged, 0, 0))


def test_a_slice_of_an_output_may_end_with_the_array():
  _walk(
    lambda i: (pl.ds(16 * i, jnp.where(i == 0, 16, 4)), 0),
    (2,),
    block=(pl.BoundedSlice(16), 128),
    shape=(20, 128),
  )


# --- what an output must not do --------------------------------------------


def test_a_block_of_its_own_for_each_step_may_be_split():
  visits.check_output(_walk(lambda i, j: (i, j), (4, 4)), [0, 1])


def test_an_accumulated_axis_must_not_be_parallel():
  seen = _walk(lambda i, k: (i, 0), (4, 4), accumulated=True)
  visits.check_output(seen, [0])
  with pytest.raises(
    cm.PipelineError,
    match=r"output 0 is accumulated along grid axis 1, which is parallel: two"
    r" cores would write the same block.*parallel=\(0, 1\)",
  ):
    visits.check_output(seen, [0, 1])


def test_steps_that_share_a_block_now_and_then_must_not_be_parallel():
  seen = _walk(lambda i: (i // 8, 0), (16,), accumulated=True)
  with pytest.raises(cm.PipelineError, match="grid axis 0, which is parallel"):
    visits.check_output(seen, [0])


def test_the_accumulated_axis_must_be_innermost():
  seen = _walk(lambda k, j: (0, j), (4, 2), accumulated=True)
  with pytest.raises(
    cm.PipelineError,
    match=r"output 0 is left and revisited: steps along grid axis 0 .* block"
    r" \(0, 0\) at grid points \(0, 0\) and \(1, 0\).*innermost",
  ):
    visits.check_output(seen, [])


def test_a_block_must_not_be_left_and_revisited():
  seen = _walk(lambda i: (i % 2, 0), (4,))
  with pytest.raises(
    cm.PipelineError, match=r"left and revisited.* points \(0,\) and \(2,\)"
  ):
    visits.check_output(seen, [])


def test_a_block_chosen_at_run_time_must_not_be_left_and_revisited():
  seen = _walk_traced(lambda n: lambda k, j: (n, j), (4, 2), accumulated=True)
  with pytest.raises(cm.PipelineError, match="left and rev.*along grid axis 0"):
    visits.check_output(seen, [])


def test_an_output_that_steps_share_must_be_declared():
  seen = _walk(lambda i, k: (i, 0), (4, 4))
  with pytest.raises(
    cm.PipelineError,
    match=r"output 0 keeps its block along grid axis 1: .*cm.accumulator\(",
  ):
    visits.check_output(seen, [0])
