"""The forward kernel of attention: its blocks, and what a step does."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import place
from coremesh.kernels import batching
from coremesh.kernels._attention import blocks as attention_blocks
from coremesh.kernels._attention import (
  few_forward,
  few_rows,
  launches,
  masks,
  scalars,
)
from coremesh.kernels._attention import turns as attention_turns
from coremesh.kernels._attention.blocks import Blocks
from coremesh.kernels._attention.call import (
  Call,
  Operands,
  Problem,
  in_blocks,
  problem_of,
)
from coremesh.kernels._attention.masks import Span
from coremesh.kernels._attention.scalars import quotient, when
from coremesh.kernels._attention.tiles import Scratch, Tiles, scratch_types
from coremesh.kernels._attention.turns import Turns
from coremesh.kernels._attention.units import Unit, Units
from coremesh.kernels.blocks import copied_rows


def forward(
  call: Call, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array]:
  """The output [..., heads, q_len, d_v] and the LSE [..., heads, q_len]."""
  given = operands.given

  def run(q, k, v, *arrays):
    operands = Operands(**dict(zip(given, arrays, strict=True)))
    return _run(call, q, k, v, operands)

  out, lse = batching.one_launch(run, q, k, v, *given.values(), repeats=False)
  return out, lse


def _run(call, q, k, v, operands) -> list[jax.Array]:
  problem = problem_of(call, q, k, v, operands)
  if few_rows.are_few(problem):
    return few_forward.forward(problem, q, k, v, operands)
  lead = q.shape[:-3]
  chip = place.current_chip()
  blocks = attention_blocks.chosen(
    problem,
    num_mxu_columns=chip.mxu_columns,
    vmem_bytes=chip.vmem_bytes_per_tensor_core,
  )
  plan = Plan(
    problem=problem, blocks=blocks, num_cores=chip.tensor_cores_per_device
  )
  heads = problem.batch, problem.heads
  out_rows = copied_rows(problem.q_len, problem.d_v)
  kernel = launches.kernel(
    functools.partial(_body, plan),
    out=(
      jax.ShapeDtypeStruct((*heads, out_rows, problem.d_v), q.dtype),
      jax.ShapeDtypeStruct((*heads, 1, problem.q_len), jnp.float32),
    ),
    scratch=scratch_types(problem, blocks)._asdict(),
    name="attention",
  )
  named = dict(q=q, k=k, v=v) | operands.given
  arrays = [in_blocks(name, array, lead) for name, array in named.items()]
  out, lse = kernel(*arrays)
  out = out[..., : problem.q_len, :]
  return [
    out.reshape(*lead, *out.shape[1:]),
    lse.reshape(*lead, problem.heads, problem.q_len),
  ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
  """How the forward pass is computed.

  Attributes:
    problem: what is asked for.
    blocks: sizes.
    num_cores: of a device.
  """

  problem: Problem
  blocks: Blocks
  num_cores: int

  @property
  def units(self) -> Units:
    """The blocks of rows of all cores."""
    return Units(
      problem=self.problem,
      blocks=pl.cdiv(self.problem.q_len, self.blocks.rows),
      num_cores=self.num_cores,
    )

  @property
  def steps(self) -> int:
    """Blocks of keys."""
    return pl.cdiv(self.problem.kv_len, self.blocks.keys)

  @property
  def has_edges(self) -> bool:
    """Whether what counts is between diagonals that meet corners of blocks.

    So that it is known before which tiles they cut.
    """
    band, blocks = masks.band(self.problem), self.blocks
    if band.last is None or set(self.problem.operands) - {"bias"}:
      return False
    # The keys at an edge must not reach from one block to the next.
    whole = blocks.part if self.steps == 1 else blocks.rows
    ends = (
      band.last >= 0
      and band.last % whole == 0
      and band.last + self.problem.q_len == self.problem.kv_len
    )
    starts = band.first is None or (
      (band.first - 1) % blocks.rows == 0 and band.first - 1 < band.last
    )
    return (
      ends
      and starts
      and blocks.rows % blocks.part == 0
      and blocks.keys % whole == 0
      and self.problem.q_len % blocks.rows == 0
      and self.problem.kv_len % blocks.part == 0
    )

  @property
  def has_masked(self) -> bool:
    """Whether there are turns in which some scores may not count."""
    band = masks.band(self.problem)
    if self.has_edges:
      return False
    is_whole = self.problem.kv_len % self.blocks.part == 0
    has_band = (band.first, band.last) != (None, None)
    return (
      has_band or not is_whole or bool(set(self.problem.operands) - {"bias"})
    )

  def keys_of(self, unit: Unit, num_keys: Any) -> Span:
    """The keys that its rows may count."""
    return self._valid(
      masks.band(self.problem).some_keys(self._rows(unit)), num_keys
    )

  def clear_keys_of(self, unit: Unit, num_keys: Any) -> Span:
    """The keys that every one of its rows counts."""
    if "row_segments" in self.problem.operands:
      return Span(0, 0)
    return self._valid(
      masks.band(self.problem).all_keys(self._rows(unit)), num_keys
    )

  def _rows(self, unit: Unit) -> Span:
    start = unit.block * self.blocks.rows
    return Span(
      start, masks.smaller(start + self.blocks.rows, self.problem.q_len)
    )

  def _valid(self, keys: Span, num_keys: Any) -> Span:
    return keys if num_keys is None else keys.cut(Span(0, num_keys))


def _body(plan: Plan, *refs: Any, **scratch: Any) -> None:
  """All units of a core."""
  count = 3 + len(plan.problem.operands)
  inputs, outs = refs[:count], refs[count:]
  run = functools.partial(_pipeline, plan, Scratch(**scratch), outs)
  scalars.with_num_keys(plan.problem, inputs, run)


def _pipeline(
  plan: Plan, scratch: Scratch, outs, inputs, num_keys_smem
) -> None:
  """Copies blocks in and out, for each unit and block of keys."""
  core = jax.lax.axis_index("core")
  units = plan.units
  names = (
    "q",
    "k",
    "v",
    *(n for n in plan.problem.operands if n != "num_keys"),
    "out",
    "lse",
  )

  def num_keys_of(unit: Unit) -> Any:
    return scalars.num_keys_of(plan.problem, num_keys_smem, unit.batch)

  def place_of(index: Any, step: Any) -> Place:
    unit = units.unit(core, index)
    keys = plan.keys_of(unit, num_keys_of(unit))
    return Place(unit=unit, keys=_nearest_block(keys, step, plan))

  def step(*blocks):
    unit = units.unit(core, pl.program_id(0))
    block = 0 if plan.steps == 1 else pl.program_id(1)
    here = Tiles(
      problem=plan.problem,
      blocks=plan.blocks,
      refs=dict(zip(names, blocks, strict=True)),
      scratch=scratch,
      first_row=unit.block * plan.blocks.rows,
      first_key=block * plan.blocks.keys,
      num_keys=num_keys_of(unit),
    )
    _step(plan, here, unit)

  specs = [
    _spec(plan, name, ref.shape, place_of)
    for name, ref in zip(names, (*inputs, *outs), strict=True)
  ]
  pltpu.emit_pipeline(
    step,
    grid=(units.count(core), plan.steps),
    in_specs=specs[:-2],
    out_specs=specs[-2:],
  )(*inputs, *outs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
  """Which blocks a step needs: of a unit, and of keys."""

  unit: Unit
  keys: Any


def _nearest_block(keys: Span, step: Any, plan: Plan) -> Any:
  """The block of keys of a step, or if none of it counts, one that is there."""
  if plan.steps == 1:
    return 0
  last = masks.greater(quotient(keys.stop - 1, plan.blocks.keys), 0)
  first = masks.smaller(quotient(keys.start, plan.blocks.keys), last)
  return masks.greater(masks.smaller(step, last), first)


# Which axis of an array, in four axes, holds rows, and which keys.
_ROWS_AXIS = {"q": 2, "out": 2, "lse": 3, "bias": 2, "row_segments": 3}
_KEYS_AXIS = {"k": 2, "v": 2, "bias": 3, "key_segments": 3}


def _spec(
  plan: Plan,
  name: str,
  shape: Sequence[int],
  place_of: Callable[[Any, Any], Place],
) -> pl.BlockSpec:
  """The blocks of an array, which may be broadcast along axes of size 1."""
  lengths = {2: shape[2], 3: shape[3]}
  rows, keys = _ROWS_AXIS.get(name), _KEYS_AXIS.get(name)
  if name == "bias":
    rows = None if shape[2] == 1 else rows
    keys = None if shape[3] == 1 else keys
  if rows:
    lengths[rows] = plan.blocks.rows
  if keys:
    lengths[keys] = plan.blocks.keys

  def index_map(index, step):
    place = place_of(index, step)
    unit = place.unit
    head = unit.kv_head if name in ("k", "v") else unit.head
    at = {rows: unit.block, keys: place.keys}
    return (
      0 if shape[0] == 1 else unit.batch,
      0 if shape[1] == 1 else head,
      at.get(2, 0),
      at.get(3, 0),
    )

  return pl.BlockSpec((None, None, lengths[2], lengths[3]), index_map)


def _step(plan: Plan, here: Tiles, unit: Unit) -> None:
  """The scores of a unit with a block of keys."""
  step = pl.program_id(1)
  turns = attention_turns.turns(
    plan.blocks,
    first_key=here.first_key,
    some=plan.keys_of(unit, here.num_keys),
    every=plan.clear_keys_of(unit, here.num_keys),
    has_masked=plan.has_masked,
  )

  def sweep():
    _start(plan, here, turns)
    turns.sweep(here)
    if plan.has_edges:
      is_here = plan.steps == 1 or turns.stop > turns.clear_stop
      when(is_here, lambda: here.last_edge(turns.clear_stop))
    here.finish()

  pl.when(step == 0)(here.clear)
  when(turns.any, sweep)
  pl.when(step == plan.steps - 1)(here.write)


def _start(plan: Plan, here: Tiles, turns: Turns) -> None:
  """Begins a block of keys, with those that start at a diagonal, if any."""
  first = masks.band(plan.problem).first
  if first is None or not plan.has_edges:
    here.start(turns.first)
    return
  key = here.first_row + first - 1 - here.first_key
  is_here = (key >= 0) & (key < plan.blocks.keys)
  tile = jax.lax.div(key, np.int32(plan.blocks.tile_keys))
  jax.lax.cond(
    is_here,
    lambda: here.first_edge(tile, after=turns.first),
    lambda: here.start(turns.first),
  )
