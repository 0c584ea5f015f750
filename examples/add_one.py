r"""Adds one to an array of any size, its blocks shared by the cores.

Shows: cm.pipeline with over=: a grid axis is split over the cores of a device,
blocks are copied while others are computed, and the last ones may be partial.

To run:
  python -m examples.add_one --config.rows_per_device=25
"""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from examples import common


def build(chip: cm.Chip, mesh: jax.sharding.Mesh, *, block: tuple[int, int]):
  """x + 1 for an array whose rows are shared over devices."""

  def add_one_block(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] + 1

  @cm.kernel(mesh=chip.tensor_cores("core"), out=cm.like(0))
  def add_one(x_hbm, o_hbm):
    spec = cm.block(block, lambda i, j: (i, j))
    cm.pipeline(
      add_one_block,
      grid=list(map(cm.num_blocks, x_hbm.shape, block)),
      in_specs=[spec],
      out_specs=[spec],
      over="core",
    )(x_hbm, o_hbm)

  return jax.jit(
    jax.shard_map(
      add_one, mesh=mesh, in_specs=P("device"), out_specs=P("device")
    )
  )


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh mutate`."""
  shape = (config.rows_per_device * chip.num_devices, config.columns)
  block = (config.block_rows, config.block_columns)
  make = functools.partial(build, block=block)
  return make, (common.random_floats(shape, config.seed),)


def main(config: Any) -> None:
  chip = common.chip()
  mesh = chip.device_mesh("device")
  make, (x,) = case(chip, config)

  y = make(chip, mesh)(x)
  np.testing.assert_array_equal(y, x + np.float32(1))
  blocks = cm.num_blocks(config.rows_per_device, config.block_rows)
  print(
    f"{common.ran_on(mesh)} on {chip.name}: {x.shape} + 1, equal to NumPy bit"
    " for bit. Blocks of rows of each device over its cores:"
  )
  print(cm.split(blocks, chip.tensor_cores_per_device).plan())
  common.compile_if_asked(make, x)


if __name__ == "__main__":
  common.run(main, config="configs/add_one.py")
