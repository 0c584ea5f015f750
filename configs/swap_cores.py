"""Settings of examples/swap_cores.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      rows_per_device=8,
      columns=256,  # Shared by the cores of a device.
      route="kernel",  # Of the commands; the example itself runs both.
      seed=0,
    )
  )
