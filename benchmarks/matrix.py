r"""Compiles every example for every chip with libtpu and prints what came out.

Each cell is the size of the machine code, or why the chip cannot run the
example. The chips are one host of each generation, and a pod of 512 v5p.

To run:
  python -m benchmarks.matrix
"""

import functools
import json
import pathlib

from absl import app, flags
import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import coremesh as cm
from examples import (
  add_one,
  indexed_add_one,
  ring_shift,
  sc_add_one,
  sum_blocks,
  swap_cores,
)

_CHIPS = (
  "v4:2x2x1",
  "v5e:2x2",
  "v5p:2x2x1",
  "v6e:2x2",
  "tpu7x:2x2x1",
  "v5p:8x8x8",
)
_OUT = flags.DEFINE_string(
  "out", "benchmarks/out/matrix.json", "Where to write the figures."
)


def programs(chip: cm.Chip):
  """By example: its maker, and the shapes of its arguments on a chip."""
  devices, cores = chip.num_devices, chip.tensor_cores_per_device
  wide = jax.ShapeDtypeStruct((32 * devices, 512), np.float32)
  words = jax.ShapeDtypeStruct((1024 * devices, 128), np.int32)
  blocks = jax.ShapeDtypeStruct((devices * cores, 8, 128), np.float32)
  terms = jax.ShapeDtypeStruct((4, 16 * devices, 128), np.int32)
  first = jax.ShapeDtypeStruct((1,), np.int32)
  return {
    "swap_cores": (swap_cores.build, [wide]),
    "swap_cores, core_map": (
      functools.partial(swap_cores.build, route="core_map"),
      [wide],
    ),
    "add_one": (functools.partial(add_one.build, block=(8, 128)), [wide]),
    "indexed_add_one": (indexed_add_one.build, [wide, first]),
    "sum_blocks": (sum_blocks.build, [terms]),
    "ring_shift": (functools.partial(ring_shift.build, steps=3), [blocks]),
    "sc_add_one": (sc_add_one.build, [words]),
  }


def outcome(name: str, chip: cm.Chip) -> str:
  """The size of the example's code on a chip, or why it has none."""
  build, shapes = programs(chip)[name]
  mesh = chip.device_mesh("device", on="compiler")
  try:
    return f"{cm.compile(build(chip, mesh), *shapes).code_bytes} B"
  except cm.CoreMeshError as error:
    return f"refused: {error}"


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  chips = [cm.chip(name) for name in _CHIPS]
  names = list(programs(chips[0]))
  cells = {
    name: {chip.name: outcome(name, chip) for chip in chips}
    for name in track(names, "compiling", transient=True)
  }
  reasons = sorted(
    {c for row in cells.values() for c in row.values() if c[-1] != "B"}
  )
  table = Table("code a program", *_CHIPS)
  for name, row in cells.items():
    texts = [
      f"[{reasons.index(c) + 1}]".replace("[", r"\[") if c in reasons else c
      for c in row.values()
    ]
    table.add_row(name, *texts)
  console = Console(width=100)
  console.print(table)
  for number, reason in enumerate(reasons, start=1):
    console.print(f"[{number}] {reason}", markup=False, highlight=False)
  path = pathlib.Path(_OUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(cells, indent=2))


if __name__ == "__main__":
  app.run(main)
