r"""Two cores of a device exchange halves of an array, on every device.

Shows: cm.kernel, cm.slab, cm.core_barrier, cm.put, and the two routes a kernel
can be launched by, which give the same bits.

To run:
  python -m examples.swap_cores --chip=v5p:2x2x1 --compile \
    --config.rows_per_device=5 --config.columns=200
"""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from examples import common


def build(chip: cm.Chip, mesh: jax.sharding.Mesh, route: cm.Route = "kernel"):
  """The swap as a function of an array whose rows are shared over devices."""

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(mine=cm.vmem_slab(0, axis=1), theirs=cm.vmem_slab(0, axis=1)),
    route=route,
  )
  def swap_cores(x_hbm, o_hbm, *, mine, theirs):
    columns = cm.slab(x_hbm, axis=1)
    cm.copy(x_hbm.at[:, columns], mine)
    cm.core_barrier("core")  # The other core is here: its scratch exists.
    cm.put(mine, theirs, to={"core": cm.next_core("core")}).wait()
    mine[...] = theirs[...] * 2
    cm.copy(mine, o_hbm.at[:, columns])

  return jax.jit(
    jax.shard_map(
      swap_cores, mesh=mesh, in_specs=P("device"), out_specs=P("device")
    )
  )


def expected(x: np.ndarray) -> np.ndarray:
  """The halves of the columns exchanged, and doubled."""
  return np.roll(x, x.shape[1] // 2, axis=1) * 2


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh mutate`."""
  shape = (config.rows_per_device * chip.num_devices, config.columns)
  make = functools.partial(build, route=config.route)
  return make, (common.random_floats(shape, config.seed),)


def main(config: Any) -> None:
  chip = common.chip()
  mesh = chip.device_mesh("device")
  _, (x,) = case(chip, config)

  for route in ("kernel", "core_map"):
    y = build(chip, mesh, route)(x)
    np.testing.assert_array_equal(y, expected(x))
    print(
      f"route {route}: {common.ran_on(mesh)} on {chip.name}, halves of"
      f" {x.shape} exchanged and doubled, equal to NumPy bit for bit."
    )
    common.compile_if_asked(functools.partial(build, route=route), x)


if __name__ == "__main__":
  common.run(main, config="configs/swap_cores.py")
