r"""What `cm.predict` costs after compilation: every example, and matmuls.

Each program is compiled first, or taken from the disk cache. Then `cm.predict`
of what was compiled is timed: CPU seconds of this process, the median of
`--repeats` runs one after the other, each of which parses the machine code
anew. The matmuls are bfloat16, of square matrices in square blocks, on v5p.

To run:
  python -m benchmarks.predict_cost --repeats=3
"""

from collections.abc import Iterator, Sequence
import functools
import importlib
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
from rich.console import Console
from rich.progress import track
from rich.table import Table

import coremesh as cm

_REPEATS = flags.DEFINE_integer(
  "repeats", 3, "Runs to take the median of.", lower_bound=1
)
_OUT = flags.DEFINE_string(
  "out", "benchmarks/out/predict_cost.json", "Where to write the figures."
)
_EXAMPLES = (
  *("add_one", "indexed_add_one", "ring_shift"),
  *("sc_add_one", "sum_blocks", "swap_cores"),
)
_CHIPS = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1", "v5p:8x8x8")
_SIZES = (1024, 2048, 4096)
_BLOCKS = (128, 256, 512)


def matmul(size: int, block: int):
  """a @ b of bfloat16 [size, size], in blocks of [block, block]."""

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
  x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
  call = pl.pallas_call(
    body,
    grid=(size // block,) * 3,
    in_specs=[spec(lambda i, j, k: (i, k)), spec(lambda i, j, k: (k, j))],
    out_specs=spec(lambda i, j, k: (i, j)),
    out_shape=x,
    scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary")
    ),
    name="matmul",
  )
  return call, (x, x)


def _compiled() -> Iterator[tuple[str, cm.Compiled, Sequence[Any]]]:
  """What is predicted: its name, what was compiled, and its arguments."""
  for size in _SIZES:
    for block in _BLOCKS:
      fn, args = matmul(size, block)
      name = f"matmul {size}^3 in {block}^3"
      yield name, cm.compile(fn, *args, chip="v5p:2x2x1"), args
  for chip_name in _CHIPS:
    chip = cm.chip(chip_name)
    mesh = chip.device_mesh("device", on="compiler")
    for name in _EXAMPLES:
      example = importlib.import_module(f"examples.{name}")
      config = importlib.import_module(f"configs.{name}").get_config()
      make, args = example.case(chip, config)
      try:
        compiled = cm.compile(make(chip, mesh), *args, chip=chip)
      except (cm.ChipError, cm.CollectiveError):
        continue  # Not for this chip: coremesh matrix says why.
      yield f"{name}, {chip_name}", compiled, args


def _row(
  name: str, compiled: cm.Compiled, args: Sequence[Any]
) -> dict[str, Any]:
  runs = [_timed(compiled, args) for _ in range(_REPEATS.value)]
  found = runs[0][1]
  slowest = max(found.operations, key=lambda o: o.microseconds.central)
  return {
    "program": name,
    "cpu_seconds": statistics.median(seconds for seconds, _ in runs),
    "cpu_seconds_runs": [seconds for seconds, _ in runs],
    "predicted_microseconds": found.microseconds.central,
    "limit": slowest.limit,
  }


def _timed(
  compiled: cm.Compiled, args: Sequence[Any]
) -> tuple[float, cm.Prediction]:
  start = time.process_time()
  found = cm.predict(compiled, *args)
  return time.process_time() - start, found


def _table(rows: list[dict[str, Any]]) -> Table:
  table = Table(title="cm.predict after compilation")
  for i, column in enumerate(
    ("program", "CPU seconds", "predicted µs", "limit")
  ):
    table.add_column(column, justify="left" if i == 0 else "right")
  for row in rows:
    table.add_row(
      row["program"],
      f"{row['cpu_seconds']:.2f}",
      f"{row['predicted_microseconds']:,.1f}",
      row["limit"],
    )
  return table


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  rows = [_row(*each) for each in track(list(_compiled()), "predicting")]
  Console().print(_table(rows))
  method = " ".join((__doc__ or "").split("\n\n")[1].split())
  out = pathlib.Path(_OUT.value)
  out.parent.mkdir(parents=True, exist_ok=True)
  figures = {
    "method": method,
    "python": platform.python_version(),
    "machine": platform.machine(),
    "repeats": _REPEATS.value,
    "programs": rows,
  }
  out.write_text(json.dumps(figures, indent=2) + "\n")
  print(f"Figures: {out}")


if __name__ == "__main__":
  app.run(main)
