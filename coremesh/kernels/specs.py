"""The specs of all ready kernels."""

import importlib
import pkgutil

from coremesh import kernels, spec


def by_place() -> dict[str, spec.KernelSpec]:
  """Each kernel's spec, by "module:name" of where it stands."""
  found: dict[str, tuple[str, spec.KernelSpec]] = {}
  for module in pkgutil.iter_modules(kernels.__path__):
    place = f"{kernels.__name__}.{module.name}"
    for name, value in vars(importlib.import_module(place)).items():
      if isinstance(value, spec.KernelSpec):
        found.setdefault(value.name, (f"{place}:{name}", value))
  return dict(found.values())
