"""Settings of examples/softmax_rows.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      rows_per_device=20,
      columns=300,
      masked_share=0.3,  # Of the scores; those of one row are all masked.
      seed=0,
      # The size that --compile predicts the time of, on one device.
      predicted_rows=8192,
      predicted_columns=8192,
    )
  )
