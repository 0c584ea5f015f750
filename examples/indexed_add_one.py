r"""Adds one to the columns that start at an index known only at run time.

Shows: num_prefetch of cm.pipeline, whose table index maps read, and a split of
the work by hand: each core's index map starts at the first block it owns.

To run:
  python -m examples.indexed_add_one --config.first_block=3
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from examples import common

_BLOCK = (8, 128)


def build(chip: cm.Chip, mesh: jax.sharding.Mesh):
  """x[:, 128 * first :][:, : half] + 1, rows shared over devices."""

  def add_one_block(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] + 1

  def half(x, _):
    return jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2), x.dtype)

  @cm.kernel(mesh=chip.tensor_cores("core"), out=half)
  def indexed_add_one(x_hbm, first_hbm, o_hbm):
    rows, columns = map(cm.num_blocks, o_hbm.shape, _BLOCK)
    mine = cm.split(rows, cm.num_workers("core"))
    core = cm.worker_index("core")
    start = mine.start(core)
    cm.pipeline(
      add_one_block,
      grid=(mine.size(core), columns),
      in_specs=[
        cm.block(_BLOCK, lambda i, j, first: (start + i, first[0] + j))
      ],
      out_specs=[cm.block(_BLOCK, lambda i, j: (start + i, j))],
      num_prefetch=1,
    )(first_hbm, x_hbm, o_hbm)

  specs = (P("device"), P())
  return jax.jit(
    jax.shard_map(
      indexed_add_one, mesh=mesh, in_specs=specs, out_specs=P("device")
    )
  )


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh mutate`."""
  shape = (config.rows_per_device * chip.num_devices, config.columns)
  first = np.array([config.first_block], np.int32)
  return build, (common.random_floats(shape, config.seed), first)


def main(config: Any) -> None:
  chip = common.chip()
  mesh = chip.device_mesh("device")
  _, (x, first) = case(chip, config)

  y = build(chip, mesh)(x, first)
  start = config.first_block * _BLOCK[1]
  expected = x[:, start : start + y.shape[1]] + np.float32(1)
  np.testing.assert_array_equal(y, expected)
  print(
    f"{common.ran_on(mesh)} on {chip.name}: columns {start} to"
    f" {start + y.shape[1]} of {x.shape} + 1, equal to NumPy bit for bit."
  )
  common.compile_if_asked(build, x, first)


if __name__ == "__main__":
  common.run(main, config="configs/indexed_add_one.py")
