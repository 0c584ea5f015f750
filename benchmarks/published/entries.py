"""What tokamax publishes: kernels, their configurations and their times.

The wheel of tokamax holds, for many shapes, the configuration of a kernel that
was fastest on a TPU, the times of five runs of the whole program and the memory
it took. Nothing of it is copied here; tokamax is imported when it is asked.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import json
import statistics
from typing import Any

import jax
import numpy as np

from benchmarks.published import tiles
from coremesh import errors

_OPS = "tokamax._src.ops"
# Chip to compile for, by its generation, and folder of its published times.
CHIPS = {
  "v5p": ("v5p:2x2x1", "tpu_v5"),
  "tpu7x": ("tpu7x:2x2x1", "tpu7x"),
  "v6e": ("v6e:2x2", "tpu_v6_lite"),
  "v5e": ("v5e:2x2", "tpu_v5_lite"),
}
# Module, class and file of each kernel.
FAMILIES = {
  "flash attention": (
    f"{_OPS}.attention.pallas_mosaic_tpu",
    "PallasMosaicTpuFlashAttention",
    "pallas_mosaic_tpu_flash_attention",
  ),
  "ragged dot v1": (
    f"{_OPS}.ragged_dot.pallas_mosaic_tpu",
    "PallasMosaicTpuRaggedDot",
    "pallas_mosaic_tpu_ragged_dot",
  ),
  "ragged dot v2": (
    f"{_OPS}.ragged_dot.pallas_mosaic_tpu_v2",
    "PallasMosaicTpuV2RaggedDot",
    "pallas_mosaic_tpu_v2_ragged_dot",
  ),
  "cross entropy": (
    f"{_OPS}.linear_softmax_cross_entropy_loss.pallas_mosaic_tpu",
    "PallasMosaicTpuLinearSoftmaxCrossEntropyLoss",
    "pallas_mosaic_tpu_linear_softmax_cross_entropy_loss",
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """One published time.

  Attributes:
    name: of the entry, unique and the same in every run.
    chip: generation of the chip, such as "v5p".
    family: which kernel.
    operands: types and shapes, and what else tells it from others.
    config: the configuration that was fastest, as tokamax takes it today.
    times_ms: of each published run of the program.
    peak_bytes: memory the published program took on a device.
    unusable: why it cannot be held against a prediction; "" if it can.
    key: the arguments, as tokamax writes them.
  """

  name: str
  chip: str
  family: str
  operands: str
  config: str
  times_ms: tuple[float, ...]
  peak_bytes: float
  unusable: str
  key: str = dataclasses.field(repr=False)

  @property
  def measured_us(self) -> float:
    """The median of the published runs."""
    return statistics.median(self.times_ms) * 1e3


def tokamax_version() -> str:
  """The version of tokamax.

  Raises:
    UnsupportedError: it is not installed.
  """
  try:
    return importlib.metadata.version("tokamax")
  except importlib.metadata.PackageNotFoundError as error:
    raise errors.UnsupportedError(
      "This benchmark needs tokamax, whose wheel holds the published times:"
      " pip install tokamax, in an environment beside coremesh."
    ) from error


def choose(name: str, given: str, among: Collection[str]) -> list[str]:
  """The words of a comma-separated list, all of them if it is empty.

  Raises:
    ValueError: one of them is not among those there are.
  """
  words = [w.strip() for w in given.split(",") if w.strip()]
  unknown = [w for w in words if w not in among]
  if unknown:
    raise ValueError(
      f"{name} must be of {', '.join(among)}; got {', '.join(unknown)}."
    )
  return words or list(among)


def published(chip: str, family: str) -> list[Entry]:
  """All entries of a kernel on a chip, fastest first; those without time last.

  Raises:
    UnsupportedError: tokamax is not installed.
  """
  tokamax_version()
  file = f"data/autotuning/{CHIPS[chip][1]}/{FAMILIES[family][2]}.json"
  path = importlib.resources.files("tokamax").joinpath(file)
  if not path.is_file():
    return []
  texts = json.loads(path.read_text())
  made = [_entry(chip, family, key, texts[key]) for key in texts]
  if family == "ragged dot v1":
    made = _of_today(made)
  return sorted(made, key=lambda e: (e.times_ms or (np.inf,), e.name))


def _of_today(made: Sequence[Entry]) -> list[Entry]:
  """Entries of a chip, with the tiles an older version took another way."""
  is_turned = lambda e: e.config and "dlhs" in e.operands.split()
  if not tiles.are_older((e.operands, e.config) for e in made if is_turned(e)):
    return list(made)
  return [
    dataclasses.replace(e, config=tiles.turned(e.config)) if is_turned(e) else e
    for e in made
  ]


def _entry(chip: str, family: str, key: str, configs: Mapping) -> Entry:
  spec = json.loads(key)
  times = lambda c: tuple(configs[c]["evaluation_times_ms"])
  best = min(configs, key=lambda c: statistics.median(times(c)), default="")
  digest = hashlib.sha256(f"{chip} {family} {key}".encode()).hexdigest()[:12]
  return Entry(
    name=digest,
    chip=chip,
    family=family,
    operands=operands(spec),
    config=best,
    times_ms=times(best) if best else (),
    peak_bytes=configs[best]["peak_memory_mb"] * 1e6 if best else 0.0,
    unusable=_unusable(spec, best),
    key=key,
  )


def _unusable(spec: Mapping[str, Any], config: str) -> str:
  if not config:
    return "no time is published"
  if spec.get("return_residuals"):
    return "residuals too: the same shape without them is taken"
  return ""


def operands(spec: Mapping[str, Any]) -> str:
  """Types and shapes of an entry, and what else tells it from others."""
  words = [w for name in spec for w in _arrays(name, spec[name])]
  if (spec.get("mask") or {}).get("causal_mask"):
    words.append("causal")
  dims = spec.get("ragged_dot_dimension_numbers")
  if dims:
    contracted = dims["dot_dimension_numbers"][0]
    kinds = {"[[1], [1]]": "", "[[1], [2]]": "dlhs", "[[0], [0]]": "drhs"}
    words.append(kinds.get(str(contracted), str(contracted)))
  words.append(spec.get("reduction") or "")
  return " ".join(w for w in words if w)


def _arrays(name: str, value: Any) -> Iterator[str]:
  if isinstance(value, str) and "[" in value and name != "labels":
    yield value
  elif isinstance(value, Mapping):
    for inner in value:
      yield from _arrays(inner, value[inner])


def program(entry: Entry) -> tuple[Callable, list[Any]]:
  """The function tokamax timed, and its arguments.

  As when tokamax timed it, all arrays are arguments. Group sizes have their
  values, which steer the kernel; the others are `jax.ShapeDtypeStruct`s.
  """
  made, spec = _bound(entry)
  leaves, tree = jax.tree.flatten(dict(spec))
  is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct | np.ndarray)
  places = [i for i, x in enumerate(leaves) if is_array(x)]
  arguments = [_argument(leaves[i]) for i in places]

  def fn(*arrays):
    filled = list(leaves)
    for i, array in zip(places, arrays, strict=True):
      filled[i] = array
    return made(**jax.tree.unflatten(tree, filled))

  return fn, arguments


def _argument(leaf: Any) -> Any:
  if isinstance(leaf, np.ndarray):
    return leaf
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _bound(entry: Entry) -> tuple[Any, Mapping[str, Any]]:
  """The operation with its configuration, and its arguments."""
  op, adapter = _operation(entry.family)
  text = json.dumps({entry.key: {entry.config: _no_result()}})
  [(spec, configs)] = adapter.validate_json(text).items()
  [config] = configs
  return op.replace(config=config), spec


def _no_result() -> dict[str, Any]:
  return {
    "compile_time_ms": 0.0,
    "lower_time_ms": 0.0,
    "evaluation_times_ms": [1.0],
    "metadata": {},
    "peak_memory_mb": 0.0,
  }


@functools.lru_cache
def _operation(family: str) -> tuple[Any, Any]:
  module, name, _ = FAMILIES[family]
  op = getattr(importlib.import_module(module), name)(bypass_device_check=True)
  cache = importlib.import_module("tokamax._src.autotuning.cache")
  return op, cache._get_cache_adapter(op)
