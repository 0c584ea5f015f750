r"""A matrix product in seven steps, from naive to the library's.

Shows: what each step buys, written with cm.pipeline: blocks of the output on
one core; rows of blocks shared by the cores; columns shared; a grid of three
axes that sums over blocks of K; the fastest blocks of a few; bfloat16; and
kernels.matmul. With --compile, a table and a plot of the TFLOP/s that
cm.predict gives each step at each size, beside XLA's.

To run:
  python -m examples.matmul_study --config.size=512 --compile
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import matplotlib.pyplot as plt
import numpy as np

import coremesh as cm
from coremesh import kernels
from examples import common

type Product = Callable[[jax.Array, jax.Array], jax.Array]

_VMEM = pltpu.CompilerParams(vmem_limit_bytes=56 * 2**20)


def whole_k(chip: cm.Chip, block: int, *, shared: int | None) -> Product:
  """Blocks of the output, each of all of K; the cores share a grid axis."""

  def step(x, w, o):
    o[...] = jnp.dot(x[...], w[...], preferred_element_type=o.dtype)

  def body(x, w, o):
    (m, k), n = x.shape, w.shape[1]
    cm.pipeline(
      step,
      grid=(m // block, n // block),
      in_specs=[
        cm.block((block, k), lambda i, j: (i, 0)),
        cm.block((k, block), lambda i, j: (0, j)),
      ],
      out_specs=[cm.block((block, block), lambda i, j: (i, j))],
      over=None if shared is None else "core",
      parallel=None if shared is None else [shared],
    )(x, w, o)

  mesh = chip.tensor_cores("core", 1 if shared is None else None)
  return cm.kernel(body, mesh=mesh, out=_out, compiler_params=_VMEM)


def summed(chip: cm.Chip, blocks: Sequence[int]) -> Product:
  """Blocks along all three axes; their sums stay in VMEM, in float32."""
  bm, bn, bk = blocks

  def step(x, w, total):
    total[...] += jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

  def body(x, w, o):
    (m, k), n = x.shape, w.shape[1]
    cm.pipeline(
      step,
      grid=(m // bm, n // bn, k // bk),
      in_specs=[
        cm.block((bm, bk), lambda i, j, k: (i, k)),
        cm.block((bk, bn), lambda i, j, k: (k, j)),
      ],
      out_specs=[
        cm.accumulator((bm, bn), lambda i, j, k: (i, j), dtype=jnp.float32)
      ],
      over="core",
      parallel=[0],
    )(x, w, o)

  cores = chip.tensor_cores("core")
  return cm.kernel(body, mesh=cores, out=_out, compiler_params=_VMEM)


def _out(x: Any, w: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)


def steps(
  chip: cm.Chip, block: int, best: Sequence[int]
) -> Mapping[str, tuple[Product, Any]]:
  """Each step: the product, and the dtype that it takes and gives."""
  single, half = jnp.float32, jnp.bfloat16
  return {
    "naive, one core": (whole_k(chip, block, shared=None), single),
    "rows shared": (whole_k(chip, block, shared=0), single),
    "columns shared": (whole_k(chip, block, shared=1), single),
    "summed over K": (summed(chip, (block,) * 3), single),
    "best blocks": (summed(chip, best), single),
    "bfloat16": (summed(chip, best), half),
    "kernels.matmul": (kernels.matmul, half),
  }


def checked_steps(chip: cm.Chip, size: int) -> Mapping[str, Any]:
  """The steps with blocks for small matrices."""
  return steps(chip, 128, (size, size, 128))


def build(chip: cm.Chip, mesh: jax.sharding.Mesh):
  """The products of the float32 steps, [steps, m, n], each device's rows."""

  def products(x, w):
    made = checked_steps(chip, w.shape[0]).values()
    return jnp.stack([fn(x, w) for fn, dtype in made if dtype == x.dtype])

  return jax.jit(
    jax.shard_map(
      products,
      mesh=mesh,
      in_specs=(P("device"), P()),
      out_specs=P(None, "device"),
    )
  )


def case(chip: cm.Chip, config: Any):
  """The maker of the function, and its arguments, for `coremesh simulate`."""
  size, scale = config.size, np.float32(config.size**-0.5)
  x = common.random_floats((size * chip.num_devices, size), config.seed)
  return build, (x, common.random_floats((size, size), config.seed + 1) * scale)


def expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
  """The same in float64, for all float32 steps."""
  return np.stack([x.astype(np.float64) @ w.astype(np.float64)] * 5)


def main(config: Any) -> None:
  chip = common.chip()
  mesh = common.first_device(chip, chip.device_mesh("device"))
  x, w = (common.random_floats((config.size,) * 2, s) for s in range(2))
  for name, (fn, dtype) in checked_steps(chip, config.size).items():
    run = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P("device"))
    y = jax.jit(run)(*(jnp.asarray(a, dtype) for a in (x, w)))
    want = x.astype(np.float64) @ w
    off = np.asarray(y, np.float64) - want
    error = np.linalg.norm(off) / np.linalg.norm(want)
    # x, w and y are each rounded to 8 bits, or sums to 24.
    most = 2.0**-7 if dtype == jnp.bfloat16 else 2.0**-20
    assert error < most, (name, error)
    where = f"{common.ran_on(mesh)} on {chip.name}"
    print(f"{where}: {name}, relative Frobenius error {error:.1e}")
  common.compile_if_asked(build, *case(chip, config)[1])
  if common.is_compiling():
    _report(chip, config)


def _report(chip: cm.Chip, config: Any) -> None:
  """Prints the table of predicted TFLOP/s, and saves the plot."""

  def us(fn: Product, dtype: Any, size: int) -> float:
    type_ = jax.ShapeDtypeStruct((size, size), dtype)
    found = cm.predict(jax.jit(fn), type_, type_, chip=chip)
    return found.microseconds.central

  sizes, searched = tuple(config.predicted_sizes), config.searched_blocks
  for block in (config.predicted_block, *sum(searched, ())):
    if any(size % block for size in sizes):
      raise ValueError(
        f"Each of predicted_sizes={sizes} must be a multiple of {block}, of"
        " predicted_block and searched_blocks."
      )
  best = min(
    map(tuple, searched),
    key=lambda blocks: us(summed(chip, blocks), jnp.float32, sizes[-1]),
  )
  print(f"Of {len(searched)} the best blocks are {best}.")
  rows = dict(steps(chip, config.predicted_block, best))
  rows["XLA, bfloat16"] = jnp.dot, jnp.bfloat16
  print(f"{'predicted TFLOP/s':20}" + "".join(f"{n:>8}" for n in sizes))
  figure, axes = plt.subplots(layout="constrained")
  for name, (fn, dtype) in rows.items():
    print(f"{name:20}", end="", flush=True)
    rates = []
    for n in sizes:
      rates.append(2 * n**3 / us(fn, dtype, n) * 1e-6)
      print(f"{rates[-1]:8.1f}", end="", flush=True)  # Each takes seconds.
    print()
    axes.plot(sizes, rates, marker="o", label=name)
  axes.set(xlabel="M = N = K", ylabel="predicted TFLOP/s", title=chip.name)
  axes.legend()
  pathlib.Path(config.plot).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(config.plot, dpi=120)
  plt.close(figure)
  print(f"Saved {config.plot}. Predicted from machine code, not measured.")


if __name__ == "__main__":
  common.run(main, config="configs/matmul_study.py")
