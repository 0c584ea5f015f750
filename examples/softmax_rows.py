r"""Softmax of the rows of an array, some scores masked, beside XLA's time.

Shows: a kernel of cm.kernels in jax.shard_map, with a mask and a row in which
no score counts; cm.predict, which times it beside jax.nn.softmax.

To run:
  python -m examples.softmax_rows --config.columns=1000 --compile
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from coremesh import kernels
from examples import common


def build(chip: cm.Chip, mesh: jax.sharding.Mesh):
  """Softmax of x, or of the part of it that a mask chooses, by rows."""
  del chip  # The kernel finds it in the mesh.
  spec = P("device")
  return jax.jit(
    jax.shard_map(kernels.softmax, mesh=mesh, in_specs=spec, out_specs=spec)
  )


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh mutate`."""
  shape = (config.rows_per_device * chip.num_devices, config.columns)
  scores = common.random_floats(shape, config.seed)
  shares = np.random.default_rng(config.seed).random(shape)
  mask = shares >= config.masked_share
  mask[0] = False
  return build, (scores, mask)


def expected(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """The same in float64."""
  terms = np.where(mask, np.exp(scores.astype(np.float64)), 0)
  total = terms.sum(axis=1, keepdims=True)
  return terms / np.where(total == 0, 1, total)


def main(config: Any) -> None:
  chip = common.chip()
  mesh = chip.device_mesh("device")
  _, (scores, mask) = case(chip, config)

  y = build(chip, mesh)(scores, mask)
  want = expected(scores, mask)
  error = np.linalg.norm(y - want) / np.linalg.norm(want)
  # Each element is rounded a few times to 24 bits.
  assert error < 1e-6, f"relative Frobenius error {error:.1e}"
  assert not np.asarray(y)[0].any(), "a row without scores is not 0"
  where = f"{common.ran_on(mesh)} on {chip.name}"
  print(f"{where}: {scores.shape}, relative Frobenius error {error:.1e}.")
  common.compile_if_asked(build, scores, mask)
  if common.is_compiling():
    shape = (config.predicted_rows, config.predicted_columns)
    common.print_times(
      chip,
      {"coremesh": kernels.softmax, "XLA": jax.nn.softmax},
      jax.ShapeDtypeStruct(shape, np.float32),
    )


if __name__ == "__main__":
  common.run(main, config="configs/softmax_rows.py")
