"""Settings of examples/ring_shift.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      steps=3,
      rows=8,  # Of the block that each core holds.
      columns=128,
      seed=0,
    )
  )
