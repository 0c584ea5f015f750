r"""Two layers, gelu(x @ w + bias) @ v, over a grid of devices.

Shows: an epilogue of kernels.matmul, so that bias and GELU cost no trip through
HBM; data parallel along one axis of the devices and tensor parallel along the
other, where jax.lax.psum adds the products of some hidden columns each.

To run:
  python -m examples.fused_mlp --config.hidden_per_column=1000 --compile
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from coremesh import kernels
from coremesh.kernels import epilogues
from examples import common

_HIDDEN = epilogues.chain(epilogues.bias, epilogues.gelu_tanh)


def build(chip: cm.Chip, mesh: jax.sharding.Mesh):
  """The layers of x [rows, features], w, bias and v."""
  grid = common.grid(chip, mesh, ("data", "model"))

  def layers(x, w, bias, v):
    return jax.lax.psum(mlp(x, w, bias, v), "model")

  specs = (P("data"), P(None, "model"), P("model"), P("model"))
  mapped = jax.shard_map(layers, mesh=grid, in_specs=specs, out_specs=P("data"))
  return jax.jit(mapped)


def mlp(x, w, bias, v):
  """The layers on one device."""
  return kernels.matmul(kernels.matmul(x, w, bias, epilogue=_HIDDEN), v)


def mlp_reference(x, w, bias, v):
  """What `mlp` computes, in plain jnp."""
  hidden = jnp.dot(x, w, preferred_element_type=jnp.float32)
  hidden = jax.nn.gelu(hidden + bias[None].astype(jnp.float32))
  return hidden.astype(x.dtype) @ v


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh simulate`."""
  num_rows, num_columns = common.grid_shape(chip.num_devices)
  hidden = config.hidden_per_column * num_columns
  return build, _arrays(config, config.rows_per_row * num_rows, hidden)


def _arrays(config: Any, rows: int, hidden: int) -> tuple[np.ndarray, ...]:
  features = config.features
  shapes = [(rows, features), (features, hidden), (hidden,), (hidden, features)]
  return tuple(
    common.random_floats(shape, config.seed + i) / math.sqrt(shape[0])
    for i, shape in enumerate(shapes)
  )


def expected(x, w, bias, v) -> np.ndarray:
  """The same in float64."""
  x, w, bias, v = (a.astype(np.float64) for a in (x, w, bias, v))
  t = x @ w + bias
  inner = np.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))
  return 0.5 * t * (1 + inner) @ v


def main(config: Any) -> None:
  chip = common.chip()
  _, arrays = case(chip, config)

  # Sums of float32 products: a few roundings of 24 bits each.
  common.check_on_grid(chip, build, arrays, expected(*arrays), most=1e-5)
  common.compile_if_asked(build, *arrays)
  if common.is_compiling():
    m, n, k = (config[f"predicted_{s}"] for s in ("rows", "hidden", "features"))
    shapes = [(m, k), (k, n), (n,), (n, k)]
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    common.print_times(chip, {"coremesh": mlp, "XLA": mlp_reference}, *types)


if __name__ == "__main__":
  common.run(main, config="configs/fused_mlp.py")
