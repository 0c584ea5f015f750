"""Settings of examples/sc_add_one.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      rows_per_device=1024,
      columns=128,
      route="kernel",  # Of the commands; "core_map" is the other.
      seed=0,
    )
  )
