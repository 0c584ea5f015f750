"""Settings of examples/indexed_add_one.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      rows_per_device=32,
      columns=512,  # Half of them come out.
      first_block=1,  # In blocks of 128 columns.
      seed=0,
    )
  )
