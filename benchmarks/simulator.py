r"""coremesh's simulator against JAX's TPU interpret mode, side by side.

Every kernel is plain `pl.kernel` code, run first by the one, then by the
other, on simulated devices of a v5p in one process. The first call traces and
compiles, the others do not; of those the median counts. What took JAX longer
than a few seconds is run once more only. Wall-clock time of whole calls, which
end when the values are there. Each result is compared with NumPy's, bit for
bit where no sum is rounded.

JAX's interpreter runs each SparseCore subcore as subcore 0, so its result is
wrong there; it is timed all the same, except with --quick.

To run:
  python -m benchmarks.simulator --quick
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
import platform
import statistics
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
from rich.table import Table

import coremesh as cm

_QUICK = flags.DEFINE_bool(
  "quick", False, "Leave out what takes JAX's interpreter minutes."
)
_ONLY = flags.DEFINE_string(
  "only", None, "Only the cases with this in their name, such as subcores."
)
_JSON = flags.DEFINE_string(
  "json", "benchmarks/out/simulator.json", "Where to write the figures."
)

_RUNS = 5  # After the first.
_LONG_SECONDS = 3.0  # What takes longer is run once after the first.
_BLOCK = (8, 128)
_MATMUL_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
  """A kernel to time.

  Attributes:
    name: in the table.
    races: whether both look for races.
    make: the function to call, given `interpret`.
    args: what it is called with.
    expected: what it should return.
    rtol: how far it may be from that.
    num_cores: of each device, for JAX's interpreter.
    is_slow_in_jax: whether JAX needs minutes for it.
  """

  name: str
  races: bool
  make: Callable[[Any], Callable[..., jax.Array]]
  args: Sequence[np.ndarray]
  expected: np.ndarray
  rtol: float = 0.0
  num_cores: int = 1
  is_slow_in_jax: bool = False


# --- kernels -----------------------------------------------------------------


def _over_devices(kernel, chip: cm.Chip, num_devices: int):
  mesh = chip.device_mesh(
    "device",
    (num_devices,),
    on="simulator",
    devices=jax.devices("cpu")[:num_devices],
  )
  spec = P("device")
  return jax.jit(
    jax.shard_map(
      kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
  )


def _random(*shape: int) -> np.ndarray:
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _add(chip, *, devices: int, races: bool, rows: int = 1024) -> _Case:
  """x + y, in blocks of one tile shared by two cores."""

  def body(x_hbm, y_hbm, o_hbm):
    def add_block(x_vmem, y_vmem, o_vmem):
      o_vmem[...] = x_vmem[...] + y_vmem[...]

    spec = pl.BlockSpec(_BLOCK, lambda i, j: (i, j))
    pltpu.emit_pipeline(
      add_block,
      grid=(x_hbm.shape[0] // _BLOCK[0], x_hbm.shape[1] // _BLOCK[1]),
      in_specs=[spec, spec],
      out_specs=[spec],
      core_axis_name="core",
      dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
    )(x_hbm, y_hbm, o_hbm)

  def make(interpret):
    def call(x, y):
      out = jax.ShapeDtypeStruct(x.shape, x.dtype)
      mesh = chip.tensor_cores("core")
      kernel: Any = pl.kernel(body, out, mesh=mesh, interpret=interpret)
      return kernel(x, y)

    return _over_devices(call, chip, devices)

  x, y = _random(devices * rows, 1024), _random(devices * rows, 1024)
  return _Case(
    name=f"add {rows}x1024 a device, blocks 8x128, {devices} x 2 cores",
    races=races,
    make=make,
    args=[x, y],
    expected=x + y,
    num_cores=2,
    is_slow_in_jax=devices > 1,
  )


def _sparse_add_one(chip, *, cores: int) -> _Case:
  """x + 1 on vector subcores, a register at a time."""
  lanes, devices = chip.sparse_core_lanes, 4
  mesh = chip.vector_subcores(num_cores=cores)

  def body(x_hbm, o_hbm):
    def add_one(x_vmem, o_vmem):
      @pl.loop(0, _BLOCK[0])
      def _(row):
        @pl.loop(0, _BLOCK[1], step=lanes)
        def _(column):
          register = (row, pl.ds(column, lanes))
          o_vmem[register] = x_vmem[register] + 1

    spec = pl.BlockSpec(_BLOCK, lambda i: (i, 0))
    pltpu.emit_pipeline(
      add_one,
      grid=(x_hbm.shape[0] // _BLOCK[0],),
      in_specs=[spec],
      out_specs=[spec],
      core_axis_name=("core", "subcore"),
      dimension_semantics=(pltpu.PARALLEL,),
    )(x_hbm, o_hbm)

  def make(interpret):
    def call(x):
      out = jax.ShapeDtypeStruct(x.shape, x.dtype)
      return pl.kernel(body, out, mesh=mesh, interpret=interpret)(x)

    return _over_devices(call, chip, devices)

  x = np.arange(devices * 512 * 128, dtype=np.int32).reshape(-1, 128)
  return _Case(
    name=f"SparseCore add one, 512x128, {devices} x {16 * cores} subcores",
    races=True,
    make=make,
    args=[x],
    expected=x + 1,
    is_slow_in_jax=True,
  )


def _matmul(chip) -> _Case:
  size, block = 512, _MATMUL_BLOCK

  def body(x_hbm, y_hbm, o_hbm):
    def multiply(x_vmem, y_vmem, o_vmem):
      @pl.when(pl.program_id(2) == 0)
      def _():
        o_vmem[...] = jnp.zeros_like(o_vmem)

      o_vmem[...] += jnp.dot(
        x_vmem[...], y_vmem[...], preferred_element_type=jnp.float32
      )

    shape, steps = (block, block), size // block
    pltpu.emit_pipeline(
      multiply,
      grid=(steps, steps, steps),
      in_specs=[
        pl.BlockSpec(shape, lambda i, j, k: (i, k)),
        pl.BlockSpec(shape, lambda i, j, k: (k, j)),
      ],
      out_specs=[pl.BlockSpec(shape, lambda i, j, k: (i, j))],
      core_axis_name="core",
      dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY, pltpu.ARBITRARY),
    )(x_hbm, y_hbm, o_hbm)

  def make(interpret):
    def call(x, y):
      out = jax.ShapeDtypeStruct((size, size), np.float32)
      mesh = chip.tensor_cores("core")
      kernel: Any = pl.kernel(body, out, mesh=mesh, interpret=interpret)
      return kernel(x, y)

    return _over_devices(call, chip, 1)

  # Small integers, whose sums of products no order rounds.
  rng = np.random.default_rng(0)
  x, y = rng.integers(-4, 4, (2, size, size)).astype(np.float32)
  return _Case(
    name=f"matmul {size}^3, blocks of {block}, 2 cores",
    races=True,
    make=make,
    args=[x, y],
    expected=x @ y,
    num_cores=2,
  )


def _all_gather(chip) -> _Case:
  """A ring: what came from the left goes to the right, seven times."""
  devices, rows = 8, 8

  def body(x_hbm, o_hbm, local, send, recv):
    device = jax.lax.axis_index("device")
    right = jax.lax.rem(device + 1, devices)
    left = jax.lax.rem(device + devices - 1, devices)
    barrier = pltpu.get_barrier_semaphore()
    for other in (left, right):
      pl.semaphore_signal(barrier, 1, device_id={"device": other})
    pl.semaphore_wait(barrier, 2)
    pltpu.async_copy(x_hbm, o_hbm.at[device], local).wait()
    for step in range(devices - 1):
      slot = jax.lax.rem(device + devices - step, devices)
      pltpu.async_remote_copy(
        o_hbm.at[slot],
        o_hbm.at[slot],
        send.at[step],
        recv.at[step],
        device_id={"device": right},
      ).wait()

  def make(interpret):
    def call(x):
      return pl.kernel(
        body,
        jax.ShapeDtypeStruct((devices, rows, 128), x.dtype),
        mesh=chip.tensor_cores("core", 1),
        scratch_types=[pltpu.SemaphoreType.DMA]
        + [pltpu.SemaphoreType.DMA((devices - 1,))] * 2,
        compiler_params=pltpu.CompilerParams(collective_id=0),
        interpret=interpret,
      )(x)

    return _over_devices(call, chip, devices)

  x = _random(devices * rows, 128)
  gathered = x.reshape(1, devices, rows, 128)
  return _Case(
    name=f"ring all-gather, {devices} devices",
    races=True,
    make=make,
    args=[x],
    expected=np.tile(gathered, (devices, 1, 1, 1)).reshape(-1, rows, 128),
  )


# --- timing ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Timing:
  """Seconds of a call: the first, and the median of the others."""

  first_s: float
  steady_s: float
  runs: int
  is_right: bool


def _call(function, args) -> tuple[float, np.ndarray]:
  start = time.perf_counter()
  result = np.asarray(function(*args))
  return time.perf_counter() - start, result


def _time(case: _Case, interpret: Any) -> _Timing:
  function = case.make(interpret)
  first, result = _call(function, case.args)
  runs = 1 if first > _LONG_SECONDS else _RUNS
  times = [_call(function, case.args)[0] for _ in range(runs)]
  is_right = result.shape == case.expected.shape and np.allclose(
    result, case.expected, rtol=case.rtol, atol=0
  )
  return _Timing(first, statistics.median(times), runs, is_right)


def _compare(case: _Case, console: Console) -> dict[str, Any]:
  console.print(f"[dim]{case.name} ...")
  ours = _time(case, cm.SimulatorParams(detect_races=case.races))
  if not ours.is_right:
    raise AssertionError(f"{case.name}: the simulator's result is wrong.")
  row = dict(
    case=case.name, races=case.races, coremesh=dataclasses.asdict(ours)
  )
  if _QUICK.value and case.is_slow_in_jax:
    return row | dict(jax=None, ratio=None)
  params = pltpu.InterpretParams(
    detect_races=case.races, num_cores_or_threads=case.num_cores
  )
  theirs = _time(case, params)
  pltpu.reset_tpu_interpret_mode_state()
  ratio = theirs.steady_s / ours.steady_s
  return row | dict(jax=dataclasses.asdict(theirs), ratio=ratio)


def _linear(chip) -> list[dict[str, Any]]:
  """The same add at growing sizes, simulator only."""
  rows = []
  for size in (512, 1024, 2048, 4096):
    case = _add(chip, devices=1, races=True, rows=size)
    timing = _time(case, cm.SimulatorParams())
    assert timing.is_right
    steps = size // _BLOCK[0] * 8
    rows.append(
      dict(
        rows=size,
        seconds=timing.steady_s,
        microseconds_a_step=1e6 * timing.steady_s / steps,
      )
    )
  return rows


# --- report ------------------------------------------------------------------


def _table(rows: Sequence[dict[str, Any]]) -> Table:
  table = Table(
    "kernel", "races", "JAX first, s", "steady", "values",
    "coremesh first, s", "steady", "faster",
    title="JAX's interpret mode and coremesh's simulator",
  )  # fmt: skip
  for row in rows:
    theirs, ours = row["jax"], row["coremesh"]
    jax_cells = ["-", "-", "not run"]
    if theirs:
      values = "right" if theirs["is_right"] else "[bold]wrong"
      times = theirs["first_s"], theirs["steady_s"]
      jax_cells = [*(f"{t:.2f}" for t in times), values]
    table.add_row(
      row["case"],
      "on" if row["races"] else "off",
      *jax_cells,
      f"{ours['first_s']:.2f}",
      f"{ours['steady_s']:.3f}",
      f"{row['ratio']:.0f}x" if row["ratio"] else "-",
    )
  return table


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  console = Console(width=100)
  chip = cm.chip("v5p:2x2x2")
  chip.device_mesh("device", on="simulator")  # Eight devices, enough threads.
  cases = [
    *(
      _add(chip, devices=devices, races=races)
      for devices in (1, 4)
      for races in (True, False)
    ),
    *(_sparse_add_one(chip, cores=cores) for cores in (2, 4)),
    _matmul(chip),
    _all_gather(chip),
  ]
  if _ONLY.value is not None:
    names = ", ".join(case.name for case in cases)
    cases = [case for case in cases if _ONLY.value in case.name]
    if not cases:
      raise app.UsageError(f"--only must be a part of one of: {names}.")
  rows = [_compare(case, console) for case in cases]
  linear = _linear(chip) if _ONLY.value is None else []
  console.print(_table(rows))
  console.print(
    f"Wall-clock seconds of a call; steady is the median of {_RUNS} calls after"
    f" the first, or one if the first took over {_LONG_SECONDS:.0f} s. Values"
    " are compared with NumPy's. Races are looked for by both, or by neither."
    f" {platform.machine()}, jax {jax.__version__}."
  )
  for row in linear:
    console.print(
      f"add {row['rows']}x1024: {row['seconds']:.3f} s,"
      f" {row['microseconds_a_step']:.0f} us a step of the pipeline"
    )
  path = pathlib.Path(_JSON.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(dict(cases=rows, linear=linear), indent=2))


if __name__ == "__main__":
  app.run(main)
