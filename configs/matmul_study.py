"""Settings of examples/matmul_study.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      size=256,  # M = N = K of the check, a multiple of 128.
      seed=0,
      # What --compile predicts, on one device.
      predicted_sizes=(1024, 2048, 4096),
      predicted_block=256,  # Rows, columns and K of a block before the search.
      searched_blocks=((512, 512, 512), (512, 1024, 1024), (1024, 1024, 512)),
      plot="benchmarks/out/matmul_study.png",
    )
  )
