"""Accumulators: sums set at the first step of a block, stored at the last."""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from coremesh import errors
from coremesh.pipelines.blocks import Grid, Operand, parts
from coremesh.pipelines.visits import Visits

type Body = Callable[..., None]


def with_sums(
  body: Body,
  accumulators: Mapping[int, Visits],
  grid: Grid,
  use: Callable[[Body], None],
) -> None:
  """Calls `use` with a body in which every accumulator starts from `init`.

  Sums of another dtype than their output are in VMEM that `use` runs within.

  Args:
    body: what to call at each step.
    accumulators: which of its arguments are accumulators, and how the
      pipeline visits them.
    grid: the pipeline's grid.
    use: called once.
  """
  converted = {
    i: seen.operand.block_type
    for i, seen in accumulators.items()
    if seen.operand.dtype != seen.operand.ref.dtype
  }

  def scoped(*sums):
    totals = dict(zip(converted, sums, strict=True))
    use(functools.partial(_accumulating, body, accumulators, grid, totals))

  if accumulators:
    pl.run_scoped(scoped, *converted.values())
  else:
    use(body)


def fill(operand: Operand, ref: Any) -> None:
  """Sets a block to the `init` of its accumulator."""
  assert operand.accumulator is not None
  ref[...] = jnp.full(ref.shape, operand.accumulator.init, ref.dtype)


def check_init(operand: Operand) -> None:
  """Checks that an accumulator's dtype holds its `init`.

  Raises:
    DTypeError: a fraction or an infinity for an integer output.
  """
  init = operand.accumulator.init if operand.accumulator else 0
  is_whole = not isinstance(init, float | np.floating) or init.is_integer()
  if operand.dtype.kind in "iu" and not is_whole:
    raise errors.DTypeError(
      f"{operand.label} is accumulated in {operand.dtype}, which cannot hold"
      f" init={init}. For a running minimum or maximum start from"
      f" jnp.iinfo(jnp.{operand.dtype}).max or .min."
    )


def _accumulating(body, accumulators, grid, converted, *refs) -> None:
  totals = [converted.get(i, ref) for i, ref in enumerate(refs)]
  for i, seen in accumulators.items():
    start = functools.partial(fill, seen.operand, totals[i])
    pl.when(_changes(seen, grid, -1))(start)
  body(*totals)
  for i, total in converted.items():
    store = functools.partial(_store, total, refs[i])
    pl.when(_changes(accumulators[i], grid, 1))(store)


def _store(total, ref) -> None:
  ref[...] = total[...].astype(ref.dtype)


def _changes(seen: Visits, grid: Grid, step: int) -> Any:
  """Whether the step before (-1) or after (1) this one is of another block."""
  here = tuple(pl.program_id(a) for a in range(len(grid)))
  if seen.is_aligned:  # Then this says the same in fewer instructions.
    at_ends = (
      here[a] == (0 if step < 0 else grid[a] - 1) for a in sorted(seen.kept)
    )
    return functools.reduce(jnp.logical_and, at_ends, jnp.bool_(True))
  there, changes = _neighbour(here, grid, step)
  index_at = seen.operand.index_at
  for a, b in zip(parts(index_at(here)), parts(index_at(there)), strict=True):
    changes = jnp.logical_or(changes, a != b)
  return changes


def _neighbour(here: Sequence[Any], grid: Grid, step: int) -> tuple[Any, Any]:
  """The grid point a step away, and whether there is none."""
  there: list[Any] = []
  wraps = jnp.bool_(True)
  for i, size in reversed(list(zip(here, grid, strict=True))):
    moved = jnp.where(wraps, i + step, i)
    wraps = jnp.logical_or(moved == size, moved == -1)
    there.append(jnp.where(wraps, 0 if step > 0 else size - 1, moved))
  return tuple(reversed(there)), wraps
