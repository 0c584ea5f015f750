"""Settings of examples/flash_attention.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      batch_per_row=1,  # Of devices.
      heads=4,
      kv_heads=2,  # Each serves heads / kv_heads heads of queries.
      length=70,
      head_dim=64,
      features=128,  # Of the output.
      seed=0,
      # The size that --compile predicts the time of, on one device.
      predicted_batch=4,
      predicted_heads=16,
      predicted_length=4096,
      predicted_head_dim=128,
    )
  )
