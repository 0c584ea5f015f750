"""Blocks of matrix products that the predictor found fastest.

`python -m benchmarks.tune_matmul` writes BLOCKS, the end of this file.
"""

from typing import Any

from coremesh.kernels._matmul.blocks import Split

# Of the kernel that the blocks are for. A change of the kernel that makes other
# blocks the fastest raises it: no row of another version is ever found.
VERSION = 1

# Rows, columns, inner, split and part of Blocks.
type Row = tuple[int, int, int, Split, int | None]


def key(product: Any, chip: Any) -> str:
  """All that the choice of blocks depends on, but for an epilogue.

  Args:
    product: a `_matmul.blocks.Product`.
    chip: a `cm.Chip`.
  """
  p = product
  turned = "nt"[p.transpose_x] + "nt"[p.transpose_w]
  return (
    f"v{VERSION} {chip.generation}/{chip.tensor_cores_per_device}"
    f" {p.batch}x{p.rows}x{p.columns}x{p.inner} {p.num_weights}{turned}"
    f" {p.dtype}>{p.out_dtype}"
  )


# fmt: off
BLOCKS: dict[str, Row] = {
  "v1 tpu7x/1 1x1000x3000x777 1tn bfloat16>bfloat16":
    (1024, 3072, 896, "rows", 1024),
  "v1 tpu7x/1 1x1024x1024x1024 1nn bfloat16>bfloat16":
    (1024, 512, 1024, "rows", None),
  "v1 tpu7x/1 1x2048x2048x2048 1nn bfloat16>bfloat16":
    (1024, 2048, 2048, "rows", 1024),
  "v1 tpu7x/1 1x256x256x65536 1nn bfloat16>bfloat16":
    (256, 256, 2048, "columns", None),
  "v1 tpu7x/1 1x4096x4096x4096 1nn bfloat16>bfloat16":
    (1024, 1024, 4096, "rows", 512),
  "v1 tpu7x/1 1x4096x4096x4096 1nn float32>float32":
    (1024, 256, 4096, "rows", None),
  "v1 tpu7x/1 1x4096x4096x4096 1nn int8>int32":
    (1024, 2048, 4096, "rows", 1024),
  "v1 tpu7x/1 1x512x4096x4096 1nn bfloat16>bfloat16":
    (512, 256, 4096, "rows", None),
  "v1 tpu7x/1 1x8192x14336x4096 1nn bfloat16>bfloat16":
    (1024, 1024, 4096, "rows", 512),
  "v1 tpu7x/1 1x8x28672x8192 1nn bfloat16>bfloat16":
    (16, 2048, 512, "rows", 1024),
  "v1 v5p/2 1x1000x3000x777 1tn bfloat16>bfloat16":
    (1024, 512, 896, "columns", 512),
  "v1 v5p/2 1x1024x1024x1024 1nn bfloat16>bfloat16":
    (1024, 512, 1024, "columns", None),
  "v1 v5p/2 1x2048x2048x2048 1nn bfloat16>bfloat16":
    (1024, 512, 2048, "rows", None),
  "v1 v5p/2 1x4096x4096x4096 1nn bfloat16>bfloat16":
    (1024, 512, 4096, "rows", None),
  "v1 v5p/2 1x4096x4096x4096 1nn float32>float32":
    (512, 512, 4096, "rows", None),
  "v1 v5p/2 1x4096x4096x4096 1nn int8>int32":
    (1024, 1024, 4096, "rows", 512),
  "v1 v5p/2 1x512x4096x4096 1nn bfloat16>bfloat16":
    (512, 2048, 4096, "columns", 1024),
  "v1 v5p/2 1x8192x14336x4096 1nn bfloat16>bfloat16":
    (1024, 1024, 4096, "columns", 512),
  "v1 v5p/2 1x8x28672x8192 1nn bfloat16>bfloat16":
    (16, 2048, 512, "columns", 1024),
  "v1 v6e/1 1x1000x3000x777 1tn bfloat16>bfloat16":
    (1024, 1536, 896, "columns", 512),
  "v1 v6e/1 1x1024x1024x1024 1nn bfloat16>bfloat16":
    (1024, 512, 1024, "columns", None),
  "v1 v6e/1 1x2048x2048x2048 1nn bfloat16>bfloat16":
    (2048, 1024, 2048, "rows", 512),
  "v1 v6e/1 1x256x256x65536 1nn bfloat16>bfloat16":
    (256, 256, 1024, "rows", None),
  "v1 v6e/1 1x4096x4096x4096 1nn bfloat16>bfloat16":
    (2048, 2048, 4096, "columns", 1024),
  "v1 v6e/1 1x4096x4096x4096 1nn float32>float32":
    (2048, 512, 4096, "columns", 256),
  "v1 v6e/1 1x512x4096x4096 1nn bfloat16>bfloat16":
    (512, 2048, 4096, "columns", 1024),
  "v1 v6e/1 1x8x28672x8192 1nn bfloat16>bfloat16":
    (16, 2048, 256, "rows", 1024),
}
