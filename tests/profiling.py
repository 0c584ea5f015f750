"""Small kernels for the tests of the predictor, and their recorded dumps.

To record the machine code in tests/dumps again, as after a change of libtpu:
  python -m tests.profiling
"""

from collections.abc import Callable
import functools
import pathlib

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import coremesh as cm
from coremesh.compiler.compiled import Operation

DUMPS = pathlib.Path(__file__).parent / "dumps"
_PARALLEL = pltpu.CompilerParams(dimension_semantics=("parallel",))


def shape(*sizes, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  """An argument of a type and no values."""
  return jax.ShapeDtypeStruct(sizes, dtype)


def double(rows: int, block_rows: int = 256):
  """x * 2 for a float32 [rows, 1024]: 8 KiB a row through HBM."""

  def body(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] * 2

  block = pl.BlockSpec((block_rows, 1024), lambda i: (i, 0))
  return pl.pallas_call(
    body,
    grid=(rows // block_rows,),
    in_specs=[block],
    out_specs=block,
    out_shape=shape(rows, 1024),
    compiler_params=_PARALLEL,
    name="double",
  ), (shape(rows, 1024),)


def matmul(size: int, block: int, dtype=jnp.bfloat16):
  """a @ b of square matrices in square blocks."""

  def body(a_vmem, b_vmem, o_vmem, sum_vmem):
    @pl.when(pl.program_id(2) == 0)
    def _():
      sum_vmem[...] = jnp.zeros_like(sum_vmem)

    sum_vmem[...] += jnp.dot(
      a_vmem[...], b_vmem[...], preferred_element_type=jnp.float32
    )

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
      o_vmem[...] = sum_vmem[...].astype(o_vmem.dtype)

  spec = functools.partial(pl.BlockSpec, (block, block))
  argument = shape(size, size, dtype=dtype)
  return pl.pallas_call(
    body,
    grid=(size // block,) * 3,
    in_specs=[spec(lambda i, j, k: (i, k)), spec(lambda i, j, k: (k, j))],
    out_specs=spec(lambda i, j, k: (i, j)),
    out_shape=argument,
    scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
    name="matmul",
  ), (argument, argument)


def gather(steps: int):
  """Blocks of x by a table of int32 [steps]: a block that stays is not read."""

  def body(table_smem, x_vmem, o_vmem):
    del table_smem
    o_vmem[...] = x_vmem[:8] * 2

  specs = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=1,
    grid=(steps,),
    in_specs=[pl.BlockSpec((512, 128), lambda i, table: (table[i], 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i, table: (0, 0)),
  )
  call = pl.pallas_call(
    body, grid_spec=specs, out_shape=shape(8, 128), name="gather"
  )
  return call, (shape(steps, dtype=jnp.int32), shape(64 * 512, 128))


def count(_: int = 0):
  """x * 2 * n by a loop of n rounds, n an int32 [1] that only data tell."""

  def body(n_smem, x_vmem, o_vmem):
    o_vmem[...] = jnp.zeros_like(o_vmem)

    @pl.loop(0, n_smem[0])
    def _(_):
      o_vmem[...] += x_vmem[...] * 2

  block = pl.BlockSpec((8, 128), lambda i, n: (0, 0))
  specs = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=1, grid=(1,), in_specs=[block], out_specs=block
  )
  call = pl.pallas_call(
    body, grid_spec=specs, out_shape=shape(8, 128), name="count"
  )
  return call, (shape(1, dtype=jnp.int32), shape(8, 128))


def swap(columns: int, chip_name: str = "v5p:2x2x1"):
  """Two cores of a device exchange halves of x, float32 [8, columns]."""
  chip = cm.chip(chip_name)

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(mine=cm.vmem_slab(0, axis=1), theirs=cm.vmem_slab(0, axis=1)),
  )
  def swap(x_hbm, o_hbm, *, mine, theirs):
    half = cm.slab(x_hbm, axis=1)
    cm.copy(x_hbm.at[:, half], mine)
    cm.core_barrier("core")
    cm.put(mine, theirs, to={"core": cm.next_core("core")}).wait()
    cm.copy(theirs, o_hbm.at[:, half])

  return swap, (shape(8, columns),)


def ring(
  rows: int,
  chip_name: str,
  *,
  steps: int = 3,
  extra: Callable[[jax.Array], jax.Array] | None = None,
):
  """Blocks of [rows, 128] float32 move round the ring of all devices.

  Args:
    rows: of the block of each core.
    chip_name: the slice.
    steps: how many places.
    extra: whether a device, by its number, waits for another copy first.
  """
  chip = cm.chip(chip_name)

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(here=cm.vmem_slab(0), arriving=cm.vmem_slab(0)),
  )
  def ring(x_hbm, o_hbm, *, here, arriving):
    block = cm.slab(x_hbm)
    cm.copy(x_hbm.at[block], here)
    if extra is not None:

      @pl.when(extra(jax.lax.axis_index("device")))
      def _():
        cm.copy(x_hbm.at[block], here)

    @pl.loop(0, steps)
    def _(_):
      cm.ring_shift(here, arriving, axis="device")
      here[...] = arriving[...]

    cm.copy(here, o_hbm.at[block])

  mesh = chip.device_mesh("device", on="compiler")
  spec = P("device")
  fn = jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec)
  total = rows * chip.num_devices * chip.tensor_cores_per_device
  return fn, (shape(total, 128),)


def subcores(rows: int, chip_name: str):
  """x + 1 for an int32 [rows, 128] on all vector subcores, 8 rows at a time."""
  chip = cm.chip(chip_name)
  lanes, members = chip.sparse_core_lanes, chip.vector_subcores_per_sparse_core
  blocks = rows // 8 // (chip.sparse_cores_per_device * members)

  @cm.kernel(
    mesh=chip.vector_subcores("core", "subcore"),
    out=cm.like(0),
    scratch=dict(block=pltpu.VMEM((8, 128), jnp.int32)),
  )
  def subcores(x_hbm, o_hbm, *, block):
    core, member = jax.lax.axis_index("core"), jax.lax.axis_index("subcore")
    worker = core * members + member

    @pl.loop(0, blocks)
    def _(i):
      here = pl.ds(8 * (worker * blocks + i), 8)
      pltpu.sync_copy(x_hbm.at[here], block)

      @pl.loop(0, 8)
      def _(row):
        @pl.loop(0, 128, step=lanes)
        def _(column):
          register = (row, pl.ds(column, lanes))
          block[register] = block[register] + 1

      pltpu.sync_copy(block, o_hbm.at[here])

  return subcores, (shape(rows, 128, dtype=jnp.int32),)


def kernel(compiled: cm.Compiled) -> Operation:
  """The only kernel of a program."""
  [found] = [o for o in compiled.operations if o.kernel is not None]
  return found


RECORDED = {
  "v5p-count": (count, 0, "v5p:2x2x1"),
  "v5p-double": (functools.partial(double, block_rows=8), 64, "v5p:2x2x1"),
  "v5p-gather": (gather, 16, "v5p:2x2x1"),
  "v6e-gather": (gather, 16, "v6e:2x2"),
  "tpu7x-count": (count, 0, "tpu7x:2x2x1"),
  "v5p-swap": (swap, 256, "v5p:2x2x1"),
  "v5p-subcores": (
    functools.partial(subcores, chip_name="v5p:2x2x1"),
    4 * 8 * 64,
    "v5p:2x2x1",
  ),
  "tpu7x-subcores": (
    functools.partial(subcores, chip_name="tpu7x:2x2x1"),
    4 * 8 * 32,
    "tpu7x:2x2x1",
  ),
  "v6e-ring": (functools.partial(ring, chip_name="v6e:2x2"), 8, "v6e:2x2"),
}


def recorded(name: str) -> str:
  """A recorded dump."""
  return (DUMPS / f"{name}.txt").read_text()


def _record() -> None:
  DUMPS.mkdir(exist_ok=True)
  for name, (make, size, chip) in RECORDED.items():
    fn, args = make(size)
    compiled = cm.compile(fn, *args, chip=chip)
    operation = kernel(compiled)
    stage = "bundles" if "bundles" in operation.texts else "sparsecore"
    text = operation.text(stage)
    # Where the checkout is says nothing.
    text = text.replace(f"{pathlib.Path(__file__).parents[1]}/", "")
    (DUMPS / f"{name}.txt").write_text(text)
    print(f"{name}: {len(text):,} bytes")


if __name__ == "__main__":
  _record()
