"""Settings of examples/sum_blocks.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      terms=4,  # Summed.
      rows_per_device=16,
      columns=128,
      seed=0,
    )
  )
