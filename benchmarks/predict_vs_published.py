r"""cm.predict against the times that tokamax publishes for TPU v5p.

The wheel of tokamax holds, for many shapes, the configuration of a kernel that
was fastest on a TPU and the times of five runs of the whole module. Each kernel
is compiled here for v5p with that configuration and predicted; nothing runs and
nothing is fitted here. The constants of `coremesh.profile.rates` were
calibrated on times of the same wheel, so that this is no independent test of
them: bandwidth and latency on five of its grouped matmuls, the clock on the
peak of JAX's table and seven of its cross-entropy kernels.

Entries are spread evenly over each family, sorted by time. What cannot be
compiled or predicted is listed with the reason and counts as not predicted.

To run, with tokamax in an environment of its own or beside coremesh:
  pip install tokamax
  python -m benchmarks.predict_vs_published --entries=12
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.resources
import json
import pathlib
import statistics
import time
from typing import Any

from absl import app, flags
import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import coremesh as cm

_ENTRIES = flags.DEFINE_integer(
  "entries", 8, "Entries of each family.", lower_bound=2
)
_MOST_MS = flags.DEFINE_float("most_ms", 60.0, "Leave out longer ones.")
_FAMILIES = flags.DEFINE_list("families", None, "Only these.")
_OUT = flags.DEFINE_string(
  "out", "benchmarks/out/predict_vs_published.json", "Where figures go."
)

_CHIP, _FOLDER = "v5p:2x2x1", "tpu_v5"
_OPS = "tokamax._src.ops"
_MADE = {
  "cross entropy": (
    f"{_OPS}.linear_softmax_cross_entropy_loss.pallas_mosaic_tpu",
    "PallasMosaicTpuLinearSoftmaxCrossEntropyLoss",
  ),
  "flash attention": (
    f"{_OPS}.attention.pallas_mosaic_tpu",
    "PallasMosaicTpuFlashAttention",
  ),
  "ragged dot v2": (
    f"{_OPS}.ragged_dot.pallas_mosaic_tpu_v2",
    "PallasMosaicTpuV2RaggedDot",
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One published time and what is predicted.

  Attributes:
    family: which kernel.
    what: its operands.
    measured_us: median of the published runs.
    low_us: predicted at the least.
    central_us: predicted.
    high_us: predicted at the most.
    limit: of the longest operation.
    assumed: what was assumed or left out.
    error: why there is no prediction.
    compile_seconds: wall time of tracing and compiling.
    predict_seconds: wall time of the prediction.
  """

  family: str
  what: str
  measured_us: float
  low_us: float | None = None
  central_us: float | None = None
  high_us: float | None = None
  limit: str = ""
  assumed: tuple[str, ...] = ()
  error: str = ""
  compile_seconds: float = 0.0
  predict_seconds: float = 0.0

  @property
  def ratio(self) -> float:
    """Predicted over measured."""
    assert self.central_us is not None
    return self.central_us / self.measured_us


def _entries(family: str) -> Iterator[tuple[str, float, Callable, list[Any]]]:
  """Operands, published time, function and arguments of each entry."""
  module, name = _MADE[family]
  op = getattr(importlib.import_module(module), name)(bypass_device_check=True)
  cache = importlib.import_module("tokamax._src.autotuning.cache")
  snake = cache._CAMEL_TO_SNAKE_PATTERN.sub(r"_\1", name).lower()
  root = importlib.resources.files("tokamax")
  text = root.joinpath(f"data/autotuning/{_FOLDER}/{snake}.json").read_text()
  adapter = cache._get_cache_adapter(op)
  found = []
  for key, data in json.loads(text).items():
    if not data or json.loads(key).get("return_residuals"):
      continue
    # One at a time, so that one which cannot be read spoils no other.
    [(spec, configs)] = adapter.validate_json(json.dumps({key: data})).items()
    config, result = min(configs.items(), key=lambda c: _median(c[1]))
    made = functools.partial(_function, op.replace(config=config), spec)
    found.append((_what(key), _median(result), made))
  found = sorted(
    (e for e in found if e[1] < _MOST_MS.value), key=lambda e: e[1]
  )
  places = np.linspace(0, len(found) - 1, min(_ENTRIES.value, len(found)))
  for place in sorted({int(p) for p in places}):
    what, measured, made = found[place]
    yield what, measured, *made()


def _median(result: Any) -> float:
  return statistics.median(result.evaluation_times_ms)


def _what(key: str) -> str:
  spec = json.loads(key)
  shapes = [v for v in spec.values() if isinstance(v, str) and "[" in v]
  mask = spec.get("mask") or {}
  return " ".join(shapes[:3]) + (" causal" if mask.get("causal_mask") else "")


def _function(op: Any, spec: Any) -> tuple[Callable, list[Any]]:
  """A function of the arrays of an entry; the rest is fixed."""
  is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
  leaves, tree = jax.tree.flatten(dict(spec))
  leaves = [
    # Group sizes are data; tokamax times the array this gives.
    np.asarray(x.representative_value, np.int32)
    if hasattr(x, "representative_value")
    else x
    for x in leaves
  ]
  # Numbers steer the kernel, so that they stay in the program.
  places = [
    i
    for i, x in enumerate(leaves)
    if is_array(x) and not isinstance(x, np.ndarray)
  ]
  shapes = [
    jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in places
  ]

  def fn(*arrays):
    filled = list(leaves)
    for i, array in zip(places, arrays, strict=True):
      filled[i] = array
    return op(**jax.tree.unflatten(tree, filled))

  return fn, shapes


def _row(family: str, what: str, measured_ms: float, fn, args) -> Row:
  row = Row(family=family, what=what, measured_us=measured_ms * 1e3)
  start = time.perf_counter()
  try:
    compiled = cm.compile(fn, *args, chip=_CHIP)
    seconds = time.perf_counter() - start
    found = cm.predict(compiled)
  except Exception as error:  # It is counted and shown.
    text = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return dataclasses.replace(row, error=text)
  longest = max(found.operations, key=lambda o: o.cycles.central)
  return dataclasses.replace(
    row,
    low_us=found.microseconds.low,
    central_us=found.microseconds.central,
    high_us=found.microseconds.high,
    limit=longest.limit,
    assumed=(*found.assumed, *found.left_out),
    compile_seconds=seconds,
    predict_seconds=found.predict_seconds,
  )


def _score(rows: Sequence[Row]) -> dict[str, float]:
  """Errors over the rows that have a prediction."""
  done = [r for r in rows if r.central_us is not None]
  off = [abs(r.ratio - 1) for r in done]
  inside = [r.low_us <= r.measured_us <= r.high_us for r in done]  # pyright: ignore
  measured, predicted = (
    np.argsort(np.argsort([getattr(r, n) for r in done]))
    for n in ("measured_us", "central_us")
  )
  return {
    "entries": len(rows),
    "predicted": len(done),
    "median_error": statistics.median(off) if off else float("nan"),
    "largest_error": max(off, default=float("nan")),
    "within_4_percent": sum(e <= 0.04 for e in off) / max(1, len(off)),
    "inside_range": sum(inside) / max(1, len(done)),
    "spearman": float(np.corrcoef(measured, predicted)[0, 1])
    if len(done) > 2
    else 1.0,
  }


def _show(rows: Sequence[Row], scores: dict[str, dict[str, float]]) -> None:
  table = Table(title=f"{_CHIP}: predicted against published, µs")
  for name in ("family", "operands", "measured", "predicted", "range"):
    table.add_column(name)
  table.add_column("ratio")
  table.add_column("limit, or why not")
  for r in rows:
    cells = [r.family, r.what, f"{r.measured_us:,.0f}"]
    if r.central_us is None:
      table.add_row(*cells, "", "", "", r.error)
    else:
      span = f"{r.low_us:,.0f}..{r.high_us:,.0f}"
      mark = " *" if r.assumed else ""
      predicted = f"{r.central_us:,.0f}{mark}"
      table.add_row(*cells, predicted, span, f"{r.ratio:.3f}", r.limit)
  console = Console()
  console.print(table, "* something was assumed or left out; see the JSON.")
  for family, score in scores.items():
    texts = [f"{n} {v:.4g}" for n, v in score.items()]
    console.print(f"{family}: {', '.join(texts)}", highlight=False)


def _plot(rows: Sequence[Row], path: pathlib.Path) -> None:
  pyplot = importlib.import_module("matplotlib.pyplot")
  figure, axes = pyplot.subplots(figsize=(6, 6))
  done = [r for r in rows if r.central_us is not None]
  for family in dict.fromkeys(r.family for r in done):
    mine = [r for r in done if r.family == family]
    axes.scatter(
      [r.measured_us for r in mine],
      [r.central_us for r in mine],
      label=family,
      s=14,
    )
  ends = [f(r.measured_us for r in done) for f in (min, max)]
  axes.plot(ends, ends, color="grey", linewidth=0.7)
  axes.set(xscale="log", yscale="log", xlabel="published µs")
  axes.set(ylabel="predicted µs", title=f"cm.predict, {_CHIP}")
  axes.legend()
  figure.savefig(path, dpi=120)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  try:
    version = importlib.metadata.version("tokamax")
  except importlib.metadata.PackageNotFoundError:
    print("Skipped: this benchmark needs the published times; see its head.")
    return
  rows = []
  for family in _FAMILIES.value or _MADE:
    for entry in track(list(_entries(family)), description=family):
      rows.append(_row(family, *entry))
  scores = {
    f: _score([r for r in rows if r.family == f])
    for f in dict.fromkeys(r.family for r in rows)
  }
  scores["all"] = _score(rows)
  _show(rows, scores)
  out = pathlib.Path(_OUT.value)
  out.parent.mkdir(parents=True, exist_ok=True)
  figures = {
    "chip": _CHIP,
    "tokamax": version,
    "scores": scores,
    "rows": [dataclasses.asdict(r) for r in rows],
  }
  out.write_text(json.dumps(figures, indent=1))
  if any(r.central_us is not None for r in rows):
    _plot(rows, out.with_suffix(".png"))


if __name__ == "__main__":
  app.run(main)
