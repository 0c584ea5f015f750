"""Settings of examples/fused_mlp.py."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    dict(
      rows_per_row=24,  # Of x, a row of devices.
      hidden_per_column=200,  # A column of devices.
      features=130,
      seed=0,
      # The size that --compile predicts the time of, on one device.
      predicted_rows=4096,
      predicted_hidden=4096,
      predicted_features=4096,
    )
  )
