"""Settings of examples/add_one.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      rows_per_device=32,
      columns=256,
      block_rows=8,
      block_columns=128,
      seed=0,
    )
  )
