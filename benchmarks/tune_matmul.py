r"""Writes the table of blocks of kernels.matmul, by predicted time.

For each case of the kernel and each chip, the blocks of its search space that
its model takes for the fastest are compiled, and predicted as whole modules;
the fastest are put into coremesh/kernels/_matmul/table.py. Rows of other cases
and chips stay; those of another version of the kernel go. Nothing is measured
on a device.

To run:
  python -m benchmarks.tune_matmul --case=2048^3 --chip=v5p:2x2x1 --trials=4
"""

from collections.abc import Iterator, Sequence
import functools
import pathlib

from absl import app, flags
import jax

import coremesh as cm
from coremesh import spec
from coremesh.kernels._matmul import choice, launch, memory
from coremesh.kernels._matmul import table as matmul_table
from coremesh.kernels._matmul.blocks import Blocks, Product
from coremesh.kernels.matmul import SPEC

_CHIPS = flags.DEFINE_multi_string(
  "chip", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"], "Chips to predict for."
)
_CASES = flags.DEFINE_multi_string("case", None, "Only these cases.")
_TRIALS = flags.DEFINE_integer("trials", 4, "Blocks to compile for a case.")


def candidates(product: Product, chip: cm.Chip, count: int) -> list[Blocks]:
  """The blocks of the search space that the model takes for the fastest."""
  space = [b for b in SPEC.search_space["blocks"] if b is not None]
  space += choice.best(product, chip, count=count)
  space = [b for b in space if b.split in choice.splits(chip)]
  clipped = {choice.clipped(product, b) for b in space}
  fitting = [b for b in clipped if memory.fits(product, b, chip)]
  return sorted(fitting, key=lambda b: choice.seconds(product, b, chip))[:count]


def trials(
  chip: cm.Chip, product: Product, case: spec.Case
) -> Iterator[tuple[float, Blocks]]:
  """Predicted microseconds of each candidate, and the candidate."""
  for blocks in candidates(product, chip, _TRIALS.value):
    call = functools.partial(SPEC.function, blocks=blocks, **case.options)
    try:
      time = cm.predict(jax.jit(call), *case.args, chip=chip).microseconds
    except cm.CoreMeshError as error:
      print(f"  {blocks}: {str(error).splitlines()[0]}", flush=True)
      continue
    print(f"  {time.central:.1f} us: {blocks}", flush=True)
    yield time.central, blocks


def write(table: dict[str, matmul_table.Row]) -> None:
  """Makes these the rows, but for those of other versions of the kernel."""
  path = pathlib.Path(matmul_table.__file__)
  head, start, _ = path.read_text().partition("\nBLOCKS: dict[str, Row] = {\n")
  lines = []
  for key, (rows, columns, inner, split, part) in sorted(table.items()):
    if key.startswith(f"v{matmul_table.VERSION} "):
      lines.append(f'  "{key}":')
      lines.append(f'    ({rows}, {columns}, {inner}, "{split}", {part}),')
  path.write_text(head + start + "\n".join([*lines, "}"]) + "\n")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  for name in _CHIPS.value:
    chip = cm.chip(name)
    for label, case in SPEC.cases.items():
      if _CASES.value and label not in _CASES.value:
        continue
      print(f"{name} {label}", flush=True)
      product = launch.product_of_types(*case.args, **case.options)
      tried = dict(trials(chip, product, case))
      if tried:
        b = tried[min(tried)]
        row = (b.rows, b.columns, b.inner, b.split, b.part)
        matmul_table.BLOCKS[matmul_table.key(product, chip)] = row
        write(matmul_table.BLOCKS)


if __name__ == "__main__":
  app.run(main)
