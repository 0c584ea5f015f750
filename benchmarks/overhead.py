r"""What coremesh costs before a kernel runs: import, tracing and lowering.

Each kernel is written twice, with coremesh and by hand on `pl.kernel`, and
both are traced and lowered for a v5p in turn, A B B A, in one process, at many
depths of the call stack; CPU time without garbage collection. Nothing is
compiled or run. The import is timed in fresh processes, `import jax, coremesh`
against `import jax` in turn.

To run:
  python -m benchmarks.overhead --pairs=60
"""

from collections.abc import Callable, Sequence
import gc
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

from absl import app, flags
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import coremesh as cm
from examples import add_one, indexed_add_one, swap_cores

_PAIRS = flags.DEFINE_integer(
  "pairs", 107, "Pairs to time for each kernel.", lower_bound=3
)
_OUT = flags.DEFINE_string(
  "out", "benchmarks/out/overhead.json", "Where to write the figures."
)


# The depths of the call stack at which one pair each is timed: one period, for
# a chunk of Python's frame memory (16 KiB) holds 107 frames of `_seconds` (19
# words), and more would count some depths twice.
_FRAMES = 107

# JAX keeps what it has traced for a function. So bodies are made anew, as the
# examples make theirs, or by-hand would be timed with a warm cache.


def _swap_by_hand():
  def swap(x_hbm, o_hbm, mine, theirs, sem, send_sem, recv_sem):
    core = jax.lax.axis_index("core")
    columns = pl.ds(core * mine.shape[1], mine.shape[1])
    pltpu.async_copy(x_hbm.at[:, columns], mine, sem).wait()
    other = (core + 1) % jax.lax.axis_size("core")
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, 1, device_id={"core": other})
    pl.semaphore_wait(barrier, 1)
    pltpu.async_remote_copy(
      mine, theirs, send_sem, recv_sem, device_id={"core": other}
    ).wait()
    mine[...] = theirs[...] * 2
    pltpu.async_copy(mine, o_hbm.at[:, columns], sem).wait()

  return swap


def _add_one_by_hand():
  def add_one_block(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] + 1

  def add_one(x_hbm, o_hbm):
    spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    pltpu.emit_pipeline(
      add_one_block,
      grid=(x_hbm.shape[0] // 8, x_hbm.shape[1] // 128),
      in_specs=[spec],
      out_specs=[spec],
      core_axis_name="core",
      dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
    )(x_hbm, o_hbm)

  return add_one


def _indexed_by_hand():
  def add_one_block(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] + 1

  def indexed_add_one(x_hbm, first_hbm, o_hbm, first_smem):
    pltpu.sync_copy(first_hbm, first_smem)
    core = jax.lax.axis_index("core")
    rows = x_hbm.shape[0] // jax.lax.axis_size("core") // 8
    last = x_hbm.shape[1] // 128 - 1

    def x_map(i, j):  # Stays in the array whatever the table holds.
      return core * rows + i, jnp.clip(first_smem[0] + j, 0, last)

    x_spec = pl.BlockSpec((8, 128), x_map)
    pltpu.emit_pipeline(
      add_one_block,
      grid=(rows, o_hbm.shape[1] // 128),
      in_specs=[x_spec],
      out_specs=[pl.BlockSpec((8, 128), lambda i, j: (core * rows + i, j))],
    )(x_hbm, o_hbm)

  return indexed_add_one


type Program = tuple[Any, Sequence[jax.ShapeDtypeStruct]]


def _by_hand(make_body, mesh, cores, *, in_specs, out_columns, **options):
  """A kernel on `pl.kernel`, jitted over the device mesh."""
  body = make_body()

  def call(x, *rest):
    out = jax.ShapeDtypeStruct(
      (x.shape[0], out_columns),
      x.dtype,
      manual_axis_type=jax.typeof(x).manual_axis_type,
    )
    return pl.kernel(body, out_type=out, mesh=cores, **options)(x, *rest)

  # JAX cannot lower a hand-written signal to {"core": i} under check_vma.
  return jax.jit(
    jax.shard_map(
      call,
      mesh=mesh,
      in_specs=in_specs,
      out_specs=P("device"),
      check_vma=make_body is not _swap_by_hand,
    )
  )


def _programs(chip: cm.Chip, mesh: jax.sharding.Mesh):
  """By kernel: makers of fresh programs, coremesh's and by hand."""
  cores = chip.tensor_cores("core")
  device = P("device")
  small = jax.ShapeDtypeStruct((32, 256), np.float32)
  large = jax.ShapeDtypeStruct((1024, 1024), np.float32)
  first = jax.ShapeDtypeStruct((1,), np.int32)
  slab = pltpu.VMEM((8, 128), np.float32)
  return {
    "swap_cores": (
      lambda: (swap_cores.build(chip, mesh), [small]),
      lambda: (
        _by_hand(
          _swap_by_hand,
          mesh,
          cores,
          in_specs=device,
          out_columns=256,
          scratch_types=[slab, slab] + [pltpu.SemaphoreType.DMA] * 3,
          compiler_params=pltpu.CompilerParams(collective_id=0),
        ),
        [small],
      ),
    ),
    "add_one": (
      lambda: (add_one.build(chip, mesh, block=(8, 128)), [large]),
      lambda: (
        _by_hand(
          _add_one_by_hand, mesh, cores, in_specs=device, out_columns=1024
        ),
        [large],
      ),
    ),
    "indexed_add_one": (
      lambda: (indexed_add_one.build(chip, mesh), [large, first]),
      lambda: (
        _by_hand(
          _indexed_by_hand,
          mesh,
          cores,
          in_specs=(device, P()),
          out_columns=512,
          scratch_types=[pltpu.SMEM((1,), np.int32)],
        ),
        [large, first],
      ),
    ),
  }


def _seconds(make: Callable[[], Program], depth: int) -> float:
  """CPU time of tracing and lowering, `depth` Python frames further down.

  Python keeps its frames in chunks of memory, and code whose calls straddle
  the end of one is up to 1.7 times slower. Which code does is luck.
  """
  if depth:
    return _seconds(make, depth - 1)
  function, shapes = make()
  gc.collect()
  gc.disable()  # As timeit does: whose turn a collection falls into is luck.
  try:
    start = time.process_time()
    function.trace(*shapes).lower()
    return time.process_time() - start
  finally:
    gc.enable()


def _compare(ours: Callable, by_hand: Callable, label: str) -> dict[str, Any]:
  """Times both in turn; medians, and the median and range of the ratios."""
  pairs = []
  for make in (ours, by_hand):
    _seconds(make, 0)  # Whatever is loaded on first use.
  for i in track(range(_PAIRS.value), label, transient=True):
    order = (ours, by_hand) if i % 2 == 0 else (by_hand, ours)
    depth = i * _FRAMES // _PAIRS.value
    times = {make: _seconds(make, depth) for make in order}
    pairs.append((times[ours], times[by_hand]))
  ratios = sorted(a / b for a, b in pairs)
  ours_ms, by_hand_ms = (
    1e3 * statistics.mean(t) for t in zip(*pairs, strict=True)
  )
  return {
    "kernel": label,
    "coremesh_ms": ours_ms,
    "by_hand_ms": by_hand_ms,
    "ratio_of_means": ours_ms / by_hand_ms,
    "ratio_median": statistics.median(ratios),
    "ratio_quartiles": (ratios[len(ratios) // 4], ratios[-len(ratios) // 4]),
  }


_IMPORTS = """
import time
start = time.perf_counter()
import jax
after_jax = time.perf_counter()
import coremesh
after_coremesh = time.perf_counter()
[getattr(coremesh, name) for name in coremesh.__all__]
print(after_jax - start, after_coremesh - after_jax,
      time.perf_counter() - after_coremesh)
"""


def _compare_imports() -> dict[str, float]:
  """What importing takes, one thing after the other in one fresh process.

  coremesh loads a module when a name of it is first used, so what its import
  adds and what loading all of it takes are two figures.
  """
  command = [sys.executable, "-c", _IMPORTS]
  seconds = []
  for _ in track(range(7), "import", transient=True):
    done = subprocess.run(command, check=True, capture_output=True)
    seconds.append([float(word) for word in done.stdout.split()])
  names = ("import_jax_ms", "coremesh_adds_ms", "all_names_ms")
  medians = (1e3 * statistics.median(t) for t in zip(*seconds, strict=True))
  return dict(zip(names, medians, strict=True))


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  chip = cm.chip("v5p:2x2x1")
  mesh = chip.device_mesh("device", on="compiler")
  rows = [
    _compare(ours, by_hand, name)
    for name, (ours, by_hand) in _programs(chip, mesh).items()
  ]
  imports = _compare_imports()
  table = Table(
    "kernel", "coremesh, ms", "pl.kernel, ms", "ratio", "median [quartiles]",
    title="Tracing and lowering for v5p:2x2x1",
  )  # fmt: skip
  for row in rows:
    low, high = row["ratio_quartiles"]
    table.add_row(
      row["kernel"],
      f"{row['coremesh_ms']:.1f}",
      f"{row['by_hand_ms']:.1f}",
      f"{row['ratio_of_means']:.3f}",
      f"{row['ratio_median']:.3f} [{low:.3f}, {high:.3f}]",
    )
  console = Console(width=80)
  console.print(table)
  console.print(
    f"{_PAIRS.value} pairs each, means of CPU time; {platform.machine()},"
    f" jax {jax.__version__}. import jax: {imports['import_jax_ms']:.0f} ms;"
    f" import coremesh adds {imports['coremesh_adds_ms']:.1f} ms, and using"
    f" every public name once {imports['all_names_ms']:.0f} ms (medians of 7"
    " fresh processes)."
  )
  path = pathlib.Path(_OUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps({"kernels": rows, **imports}, indent=2))


if __name__ == "__main__":
  app.run(main)
