"""Work on rows: sweeps that fold a row into a few numbers, then one to write.

A softmax folds a row into its maximum and its sum, a norm into its mean and its
variance. A `RowOperation` holds what differs between such kernels, as functions
of chunks of rows; `coremesh.kernels._rows.rows` runs it.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from coremesh.kernels import blocks

type Numbers = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
  """Some columns of some rows, in registers.

  Attributes:
    values: of each input, [rows, columns], 1 for an axis along which it is
      broadcast; float32 of floating-point inputs, int32 of others.
    in_row: which columns are in the array, [1, columns]; None: all.
    in_array: which rows are, [rows, 1]; None: all.
  """

  values: Numbers
  in_row: jax.Array | None
  in_array: jax.Array | None

  def keep(self, value: jax.Array, fill: float = 0.0) -> jax.Array:
    """The value, with `fill` in what is beyond the row."""
    return value if self.in_row is None else jnp.where(self.in_row, value, fill)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
  """Folds a row into numbers: lane by lane, and at its end over the lanes.

  Attributes:
    start: what each accumulator, float32[rows, 128], holds at first.
    fold: from a chunk, the numbers of the sweeps before and the accumulators
      to the accumulators.
    finish: from the numbers of the sweeps before and the accumulators to the
      numbers of this one, each float32[rows, 1].
  """

  start: tuple[float, ...]
  fold: Callable[[Chunk, Numbers, Numbers], Numbers]
  finish: Callable[[Numbers, Numbers], Numbers]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowOperation:
  """What differs between kernels on rows.

  Attributes:
    name: the kernel's.
    sweeps: what folds a row, in turn; at least one.
    write: from a chunk and the numbers of all sweeps to the outputs, and to
      what is summed over all rows; each float32[rows, columns].
    num_sums: how many are summed.
  """

  name: str
  sweeps: tuple[Sweep, ...]
  write: Callable[[Chunk, Numbers], tuple[Numbers, Numbers]]
  num_sums: int = 0


def sum_sweep(
  terms: Callable[[Chunk, Numbers], Numbers],
  finish: Callable[[Numbers, Numbers], Numbers] = lambda _, sums: sums,
  *,
  num_sums: int = 1,
) -> Sweep:
  """A sweep that adds terms up: pairwise in a chunk, then chunk by chunk.

  A sum of n terms is off by at most (n / 512 + 9) roundings of the sum of
  their absolute values.

  Args:
    terms: from a chunk and the numbers known to terms [rows, columns].
    finish: from the numbers known and the sums [rows, 1] to those to keep.
    num_sums: how many terms there are.
  """

  def fold(chunk, known, sums):
    return tuple(
      total + over_lanes(jnp.add, chunk.keep(term))
      for total, term in zip(sums, terms(chunk, known), strict=True)
    )

  def finish_lanes(known, sums):
    return finish(known, tuple(jnp.sum(s, 1, keepdims=True) for s in sums))

  return Sweep(start=(0.0,) * num_sums, fold=fold, finish=finish_lanes)


def over_lanes(combine: blocks.Combine, values: jax.Array) -> jax.Array:
  """[rows, 128 * n] to [rows, 128], combined pairwise."""
  return blocks.pairwise(combine, values, size=blocks.LANES, axis=1)


def repeated(lanes: jax.Array, columns: int) -> jax.Array:
  """[rows, 128] to [rows, columns], once for every 128 columns."""
  return jnp.concatenate([lanes] * (columns // blocks.LANES), axis=1)
