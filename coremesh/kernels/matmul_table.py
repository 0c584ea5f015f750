"""Blocks of matrix products that the predictor found fastest.

`python -m benchmarks.tune_matmul` writes BLOCKS.
"""

from typing import Any, Literal

# Of the kernel that the blocks were found for: a change of the kernel that
# makes other blocks fastest raises it, and the table is empty until it is made
# again.
KERNEL = 1


def key(product: Any, chip: Any) -> tuple[Any, ...]:
  """All that the choice of blocks depends on, but for an epilogue."""
  return (
    KERNEL,
    chip.generation,
    chip.tensor_cores_per_device,
    product.dtype,
    product.out_dtype,
    product.batch,
    product.rows,
    product.columns,
    product.inner,
    product.num_weights,
    product.transpose_x,
    product.transpose_w,
  )


# Rows, columns, inner, split and part of Blocks.
type Row = tuple[int, int, int, Literal["rows", "columns"], int | None]

BLOCKS: dict[tuple[Any, ...], Row] = {}
