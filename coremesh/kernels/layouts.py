"""How XLA lays out the arguments and results of a jitted function."""

import jax

from coremesh import tiles


def lies_transposed(shape: tuple[int, ...]) -> bool:
  """Whether XLA puts the first axis of a matrix along the lanes.

  It takes the order of axes that pads less to whole tiles of 8 x 128, and the
  usual one of two that pad alike: bf16[1000, 777] is laid out {0, 1} and
  bf16[1000, 3000] {1, 0}. So libtpu 0.0.50 does for arguments and results
  alike, of any dtype; what lies between operations is laid out as these ask.

  Args:
    shape: of an array. One that is no matrix is said not to lie transposed:
      of more axes XLA may also exchange the leading ones.
  """
  if len(shape) != 2:
    return False
  rows, columns = shape
  return _padded(columns, rows) < _padded(rows, columns)


def transposed(array: jax.Array) -> jax.Array:
  """The array with its last two axes exchanged; a view if it lies so."""
  return array.swapaxes(-1, -2)


def _padded(rows: int, columns: int) -> int:
  """Elements of a matrix in whole tiles."""
  full_rows = tiles.rounded_up(rows, tiles.SUBLANES)
  return full_rows * tiles.rounded_up(columns, tiles.LANES)
