r"""Predicted times of coremesh's kernels beside those of others, on each chip.

Each is compiled by the same libtpu and predicted by the same model from its
machine code, as a whole module: layout copies and XLA's operations around a
kernel count. Arrays come and go in the layout XLA gives a jitted function.
Nothing is measured on a device.

Of others' kernels the fastest of a few settings counts. Those of tokamax and
tpu-inference are compared where these are installed, in an environment beside:
  pip install -e . tokamax
  pip install --no-deps tpu-inference

To run:
  python -m benchmarks.kernels --work=matmul --chip=v5p:2x2x1
"""

from collections.abc import Callable, Sequence
import functools
import json
import pathlib
from typing import Any

from absl import app, flags
import jax
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import kernels_plot, works
from benchmarks.works import Work
import coremesh as cm

_CHIPS = flags.DEFINE_multi_string(
  "chip", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"], "Chips to predict for."
)
_WORK = flags.DEFINE_multi_string("work", None, "Only work with this in it.")
_OUT = flags.DEFINE_string(
  "out", "benchmarks/out", "Folder for kernels.json and a plot a chip."
)

_WIDTH = 140


def _predicted(chip: cm.Chip, work: Work, fn: Callable[..., Any]) -> Any:
  """The prediction, or in words why there is none."""
  call = jax.jit(functools.partial(fn, **work.options))
  try:
    return cm.predict(call, *work.args, chip=chip)
  except Exception as error:  # Of others' kernels too: it is shown.
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _fastest(chip: cm.Chip, work: Work, fns: Sequence[Callable]) -> Any:
  """The fastest prediction, or why the last has none."""
  found = [_predicted(chip, work, fn) for fn in fns]
  times = [r for r in found if not isinstance(r, str)]
  return min(times, key=lambda r: r.microseconds.central, default=found[-1])


def _row(chip: cm.Chip, work: Work, contender: str, result: Any) -> dict:
  row = dict(chip=chip.name, work=work.name, contender=contender)
  if isinstance(result, str):
    return row | dict(failure=result)
  time = result.microseconds
  seconds = time.central * 1e-6
  cores = chip.tensor_cores_per_device
  peak = (chip.bf16_flops_per_second_per_tensor_core or 1) * cores
  return row | dict(
    microseconds=time.central,
    low_microseconds=time.low,
    high_microseconds=time.high,
    share_of_bf16_peak=work.num_flops / seconds / peak,
    share_of_hbm_bandwidth=work.num_bytes
    / seconds
    / chip.hbm_bytes_per_second_per_device,
    operations=len(result.operations),
    left_out=list(result.left_out),
    assumed=list(result.assumed),
  )


def _table(chip: cm.Chip, rows: Sequence[dict]) -> Table:
  table = Table(title=f"Predicted for a device of {chip.name}", box=box.SIMPLE)
  table.add_column("work")
  table.add_column("by")
  for heading in ("µs", "range", "of bf16 peak", "of HBM", "beside coremesh"):
    table.add_column(heading, justify="right")
  ours: dict[str, float] = {
    r["work"]: r["microseconds"]
    for r in rows
    if r["contender"] == "coremesh" and "microseconds" in r
  }
  for row in rows:
    if "failure" in row:
      table.add_row(row["work"], row["contender"], row["failure"])
      continue
    beside = row["microseconds"] / ours.get(row["work"], float("nan"))
    table.add_row(
      row["work"],
      row["contender"] + _reservation(row),
      f"{row['microseconds']:.1f}",
      f"{row['low_microseconds']:.1f}..{row['high_microseconds']:.1f}",
      f"{row['share_of_bf16_peak']:.1%}",
      f"{row['share_of_hbm_bandwidth']:.1%}",
      f"{beside:.3f}",
    )
  return table


def _reservation(row: dict) -> str:
  if row["left_out"]:
    return " (part left out)"
  return " (assumed)" if row["assumed"] else ""


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  chosen = [
    w
    for w in works.works()
    if not _WORK.value or any(part in w.name for part in _WORK.value)
  ]
  if not chosen:
    names = ", ".join(w.name for w in works.works())
    raise app.UsageError(f"--work must be a part of one of: {names}.")
  console = Console(width=_WIDTH)
  written = out / "kernels.json"
  rows = []
  with Progress(console=Console(stderr=True), transient=True) as progress:
    total = len(_CHIPS.value) * sum(len(w.contenders) for w in chosen)
    task = progress.add_task("", total=total)
    for name in _CHIPS.value:
      chip = cm.chip(name)
      own = []
      for work in chosen:
        for contender, fns in work.contenders.items():
          progress.update(task, description=f"{name} {work.name}: {contender}")
          own.append(_row(chip, work, contender, _fastest(chip, work, fns)))
          # A run takes hours: what it has found is there while it goes on.
          written.write_text(json.dumps(rows + own, indent=2))
          progress.advance(task)
      console.print(_table(chip, own))
      plot = out / f"kernels-{chip.generation}.png"
      kernels_plot.save(chip, own, plot)
      for line in kernels_plot.left_out(own):
        console.print(f"{plot.name}: {line}", markup=False)
      rows += own
  console.print(
    "Predicted by cm.predict from machine code that libtpu compiled in this"
    f" run, not measured. JAX {jax.__version__}. Written to {out}."
  )


if __name__ == "__main__":
  app.run(main)
