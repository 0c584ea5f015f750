r"""Passes blocks round the ring of all cores of all devices.

Shows: cm.ring_shift over a ring of device x core, which waits for the receiver
and for the arrival, so that it can be called in a loop.

To run:
  python -m examples.ring_shift --config.steps=3 --config.rows=5
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from examples import common


def build(chip: cm.Chip, mesh: jax.sharding.Mesh, *, steps: int):
  """Moves the block of each core, x[core], `steps` places round the ring."""
  ring = ("device", "core")

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(
      here=cm.vmem_slab(0),
      arriving=cm.vmem_slab(0),
    ),
  )
  def ring_shift(x_hbm, o_hbm, *, here, arriving):
    block = cm.slab(x_hbm)
    cm.copy(x_hbm.at[block], here)

    @pl.loop(0, steps)
    def _(_):
      cm.ring_shift(here, arriving, axis=ring)
      here[...] = arriving[...]

    cm.copy(here, o_hbm.at[block])

  return jax.jit(
    jax.shard_map(
      ring_shift, mesh=mesh, in_specs=P("device"), out_specs=P("device")
    )
  )


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh mutate`."""
  cores = chip.num_devices * chip.tensor_cores_per_device
  shape = (cores, config.rows, config.columns)
  make = functools.partial(build, steps=config.steps)
  return make, (common.random_floats(shape, config.seed),)


def main(config: Any) -> None:
  chip = common.chip()
  mesh = chip.device_mesh("device")
  make, (x,) = case(chip, config)

  y = make(chip, mesh)(x)
  np.testing.assert_array_equal(y, np.roll(x, config.steps, axis=0))
  print(
    f"{common.ran_on(mesh)} on {chip.name}: blocks of {x.shape[1:]} moved"
    f" {config.steps} places round {len(x)} cores, bit for bit."
  )
  common.compile_if_asked(make, x)


if __name__ == "__main__":
  common.run(main, config="configs/ring_shift.py")
