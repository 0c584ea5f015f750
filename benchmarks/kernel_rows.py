"""The kernels that only move memory, as rows of benchmarks.kernels."""

from collections.abc import Callable, Iterator, Mapping
import importlib
from typing import Any

import jax

from coremesh import spec

type Contenders = Mapping[str, Callable[..., Any]]
type Row = tuple[spec.KernelSpec, str, spec.Case, Contenders]

_MODULES = ("elementwise", "norms", "reductions", "softmax")
# Beside the reference, which XLA compiles too: what JAX itself offers.
_OF_JAX: dict[str, Callable[..., Any]] = {
  "softmax": jax.nn.softmax,
  "log_softmax": jax.nn.log_softmax,
}


def rows() -> Iterator[Row]:
  """Kernel, name of the case, case, and the contenders by name."""
  for name in _MODULES:
    module = importlib.import_module(f"coremesh.kernels.{name}")
    for kernel in module.SPECS:
      others = {"XLA": _OF_JAX.get(kernel.name) or kernel.reference}
      for case_name, case in kernel.cases.items():
        yield kernel, case_name, case, others
