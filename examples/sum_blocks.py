r"""Sums an array over its first axis, block by block, and two wrong ways to.

Shows: cm.accumulator, which holds a sum while the innermost grid axis goes by;
--wrong=outer, the error of a reduction over an axis that is not the innermost;
--wrong=garbage, the error of adding to an output that nothing has set.

To run:
  python -m examples.sum_blocks --config.terms=5 --config.columns=200
"""

from typing import Any

from absl import flags
import jax
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from examples import common

_WRONG = flags.DEFINE_enum("wrong", None, ["outer", "garbage"], "Mistake.")
_BLOCK, _IN = (8, 128), P(None, "device")


def build(chip: cm.Chip, mesh: jax.sharding.Mesh, wrong: str | None = None):
  """x.sum(0) for an array whose rows (axis 1) are shared over devices."""

  def add_block(x_vmem, o_vmem):
    o_vmem[...] += x_vmem[...]

  def total(x):
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

  @cm.kernel(mesh=chip.tensor_cores("core"), out=total)
  def sum_blocks(x_hbm, o_hbm):
    rows, columns = map(cm.num_blocks, o_hbm.shape, _BLOCK)
    grid = (rows, columns, x_hbm.shape[0])
    x_map, o_map = (lambda i, j, k: (k, i, j)), (lambda i, j, k: (i, j))
    if wrong == "outer":
      grid = (x_hbm.shape[0], rows, columns)
      x_map, o_map = (lambda k, i, j: (k, i, j)), (lambda k, i, j: (i, j))
    out = cm.block if wrong == "garbage" else cm.accumulator
    cm.pipeline(
      add_block,
      grid=grid,
      in_specs=[cm.block((None, *_BLOCK), x_map)],
      out_specs=[out(_BLOCK, o_map)],
      over="core",
    )(x_hbm, o_hbm)

  return jax.jit(
    jax.shard_map(sum_blocks, mesh=mesh, in_specs=_IN, out_specs=P("device"))
  )


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh mutate`."""
  rows = config.rows_per_device * chip.num_devices
  shape = (config.terms, rows, config.columns)
  rng = np.random.default_rng(config.seed)
  return build, (rng.integers(-9, 9, shape, np.int32),)


def main(config: Any) -> None:
  chip = common.chip()
  mesh = chip.device_mesh("device")
  _, (x,) = case(chip, config)
  try:
    y = build(chip, mesh, _WRONG.value)(x)
  except cm.PipelineError as error:
    print(f"--wrong={_WRONG.value} is refused:\n{error}")
    return
  np.testing.assert_array_equal(y, x.sum(axis=0))
  where = f"{common.ran_on(mesh)} on {chip.name}"
  print(f"{where}: {x.shape} summed over its first axis, bit for bit.")
  common.compile_if_asked(build, x)


if __name__ == "__main__":
  common.run(main, config="configs/sum_blocks.py")
