r"""Adds one on every vector subcore of every SparseCore.

Shows: chip.vector_subcores, a pipeline shared over cores and subcores, and
register-sized steps whose width is the chip's lane count.

To run:
  python -m examples.sc_add_one --chip=v6e:2x2 --compile
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from examples import common

_BLOCK = (8, 128)


def build(chip: cm.Chip, mesh: jax.sharding.Mesh, route: cm.Route = "kernel"):
  """x + 1 for an int32 array whose rows are shared over devices."""
  lanes = chip.sparse_core_lanes
  subcores = chip.vector_subcores("core", "subcore")

  def add_one_block(x_vmem, o_vmem):
    @pl.loop(0, _BLOCK[0])
    def _(row):
      @pl.loop(0, _BLOCK[1], step=lanes)
      def _(column):
        register = (row, pl.ds(column, lanes))
        o_vmem[register] = x_vmem[register] + 1

  @cm.kernel(mesh=subcores, out=cm.like(0), route=route)
  def sc_add_one(x_hbm, o_hbm):
    spec = cm.block(_BLOCK, lambda i, j: (i, j))
    cm.pipeline(
      add_one_block,
      grid=list(map(cm.num_blocks, x_hbm.shape, _BLOCK)),
      in_specs=[spec],
      out_specs=[spec],
      over=("core", "subcore"),
    )(x_hbm, o_hbm)

  return jax.jit(
    jax.shard_map(
      sc_add_one, mesh=mesh, in_specs=P("device"), out_specs=P("device")
    )
  )


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh mutate`."""
  shape = (config.rows_per_device * chip.num_devices, config.columns)
  rng = np.random.default_rng(config.seed)
  make = functools.partial(build, route=config.route)
  return make, (rng.integers(0, 64, shape, np.int32),)


def main(config: Any) -> None:
  chip = common.chip()
  mesh = chip.device_mesh("device")
  _, (x,) = case(chip, config)

  y = build(chip, mesh)(x)
  np.testing.assert_array_equal(y, x + 1)
  print(
    f"{common.ran_on(mesh)} on {chip.name}: {x.shape} + 1, equal to NumPy bit"
    f" for bit, on {chip.num_devices} devices x"
    f" {chip.sparse_cores_per_device} SparseCores x"
    f" {chip.vector_subcores_per_sparse_core} subcores."
  )
  common.compile_if_asked(build, x)


if __name__ == "__main__":
  common.run(main, config="configs/sc_add_one.py")
