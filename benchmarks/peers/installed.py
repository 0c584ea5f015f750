"""Optional packages whose kernels are compared with coremesh's."""

from collections.abc import Callable, Sequence
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import types
from typing import Any

type Call = Callable[..., Any]


def settings(call: Call, each: Sequence[Any]) -> list[Call]:
  """One function for each setting, of which the fastest counts."""
  return [
    lambda *args, setting=setting, **options: call(setting, *args, **options)
    for setting in each
  ]


def tokamax(module: str) -> Any | None:
  """A module of tokamax, or None if tokamax is not installed."""
  if importlib.util.find_spec("tokamax") is None:
    return None
  return importlib.import_module(f"tokamax.{module}")


def tpu_inference(module: str) -> Any | None:
  """A module of tpu-inference's kernels, or None if it is not installed.

  tpu-inference itself imports vLLM and PyTorch, its kernels do not: they are
  loaded without the package around them, of which they use a logger and one
  function of integers.
  """
  try:
    found = importlib.metadata.distribution("tpu-inference")
  except importlib.metadata.PackageNotFoundError:
    return None
  folder = str(found.locate_file("tpu_inference"))
  _stand_in("tpu_inference", __path__=[folder])
  _stand_in("tpu_inference.logger", init_logger=_logger)
  _stand_in("tpu_inference.utils", align_to=lambda n, to: -(-n // to) * to)
  return importlib.import_module(f"tpu_inference.{module}")


def _stand_in(name: str, **attributes: Any) -> None:
  if name not in sys.modules:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def _logger(name: str) -> Any:
  logger = logging.getLogger(name)
  logger.warning_once = logger.debug  # type: ignore[attr-defined]
  return logger
