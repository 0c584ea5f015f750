"""The kernel of a matrix product: its blocks, and what a step does."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from coremesh.kernels.matmul_call import Call, sum_dtype

TILE = 128


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
  """How a product is computed.

  Attributes:
    call: what is asked for.
    rank: of the output.
    grid: steps along the leading axes, M, N and K.
    blocks: sizes of the blocks along "m", "n" and "k".
    split: the axis that the cores share.
    inner: the size of K.
  """

  call: Call
  rank: int
  grid: tuple[int, ...]
  blocks: Mapping[str, int]
  split: str
  inner: int

  @property
  def num_steps(self) -> int:
    """Blocks of K."""
    return self.grid[-1]

  @property
  def x_axes(self) -> str:
    """The last two axes of x."""
    return "km" if self.call.transpose_x else "mk"

  @property
  def w_axes(self) -> str:
    """The last two axes of a weight."""
    return "nk" if self.call.transpose_w else "kn"

  def spec(self, ref: Any, axes: str) -> pl.BlockSpec:
    """The blocks of an array whose last two axes are `axes`.

    Axes of size 1 that the output does not have broadcast.
    """
    lead = len(ref.shape) - 2
    sizes = [
      1 if size == 1 else self.blocks[axis]
      for size, axis in zip(ref.shape[lead:], axes, strict=True)
    ]

    def index_map(*indices):
      at = dict(zip("mnk", indices[-3:], strict=True))
      outer = indices[: self.rank - 2][self.rank - 2 - lead :]
      return (
        *(0 if s == 1 else i for s, i in zip(ref.shape, outer, strict=False)),
        *(
          0 if s == 1 else at[a]
          for s, a in zip(ref.shape[lead:], axes, strict=True)
        ),
      )

    return pl.BlockSpec((*(None,) * lead, *sizes), index_map)

  @property
  def semantics(self) -> tuple[Any, ...]:
    """Which axis of the grid the cores share."""
    shared = len(self.grid) - (3 if self.split == "m" else 2)
    return tuple(
      pltpu.PARALLEL if i == shared else pltpu.ARBITRARY
      for i in range(len(self.grid))
    )


def product(plan: Plan, *refs: Any, num_operands: int) -> None:
  """The body of the kernel: all steps of a core."""
  count = 1 + plan.call.num_weights + num_operands
  x, *rest = refs[:count]
  weights = rest[: plan.call.num_weights]
  operands = rest[plan.call.num_weights :]
  out, *sums = refs[count:]
  pltpu.emit_pipeline(
    functools.partial(_step, plan, sums),
    grid=plan.grid,
    in_specs=[
      plan.spec(x, plan.x_axes),
      *(plan.spec(w, plan.w_axes) for w in weights),
      *(plan.spec(o, "mn") for o in operands),
    ],
    out_specs=[plan.spec(out, "mn")],
    core_axis_name="core",
    dimension_semantics=plan.semantics,
  )(*refs[: count + 1])


def _step(plan: Plan, sums: Sequence[Any], x, *refs: Any) -> None:
  """Adds a block of each product to its sum; at the last ends the output."""
  count = plan.call.num_weights
  weights, operands, out = refs[:count], refs[count:-1], refs[-1]
  step, last = pl.program_id(len(plan.grid) - 1), plan.num_steps - 1
  inner = plan.blocks["k"]

  def start():
    for total, w in zip(sums, weights, strict=True):
      total[...] = _dot(plan, x, w, inner)

  def add():
    for total, w in zip(sums, weights, strict=True):
      total[...] += _dot(plan, x, w, inner)

  def finish():
    totals = [_dot(plan, x, w, plan.inner - last * inner) for w in weights]
    if last:
      totals = [s[...] + t for s, t in zip(sums, totals, strict=True)]
    if plan.call.epilogue is not None:
      totals = [plan.call.epilogue(*totals, *(o[...] for o in operands))]
    out[...] = jnp.broadcast_to(totals[0], out.shape).astype(out.dtype)

  if last == 0:
    finish()
    return
  pl.when(step == 0)(start)
  if last > 1:
    pl.when((step > 0) & (step < last))(add)
  pl.when(step == last)(finish)


def _dot(plan: Plan, x: Any, w: Any, size: int) -> jax.Array:
  """The product of blocks of which `size` along K are inside the arrays."""
  x_axis, w_axis = plan.x_axes.index("k"), plan.w_axes.index("k")
  return jax.lax.dot_general(
    _inside(x, x_axis, size),
    _inside(w, w_axis, size),
    (((x_axis,), (w_axis,)), ((), ())),
    precision=plan.call.precision,
    preferred_element_type=sum_dtype(x.dtype),
  )


def _inside(ref: Any, axis: int, size: int) -> jax.Array:
  """What of a block is inside its array, followed by zeros up to a tile."""
  if size == ref.shape[axis]:
    return ref[...]
  whole = size // TILE * TILE

  def part(start, stop):
    return ref[
      tuple(
        pl.ds(start, stop - start) if i == axis else slice(None)
        for i in range(2)
      )
    ]

  if whole == size:
    return part(0, size)
  tail = part(whole, whole + TILE)
  position = jax.lax.broadcasted_iota(jnp.int32, tail.shape, axis)
  tail = jnp.where(position < size - whole, tail, jnp.zeros_like(tail))
  return jnp.concatenate([part(0, whole), tail], axis) if whole else tail
