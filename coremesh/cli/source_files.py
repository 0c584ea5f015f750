"""Modules that are named by their files, wherever these are."""

from collections.abc import Iterator
import contextlib
import importlib.util
import pathlib
import sys
from typing import Any

from coremesh import errors


def load(path: str) -> Any:
  """The module in a file, which may import its neighbours and its project.

  A file of a package, a folder with `__init__.py`, is loaded as a part of it.

  Raises:
    UnsupportedError: there is no such file.
  """
  file = pathlib.Path(path).resolve()
  if not file.is_file():
    raise errors.UnsupportedError(f"TARGET: there is no file {path!r}.")
  root = _project(file)
  name = ".".join(file.relative_to(root).with_suffix("").parts)
  found = importlib.util.spec_from_file_location(name, file)
  assert found is not None and found.loader is not None  # It ends in .py.
  module = importlib.util.module_from_spec(found)
  with importable(module):
    found.loader.exec_module(module)
  return module


@contextlib.contextmanager
def importable(module: Any) -> Iterator[None]:
  """The neighbours and the project of a module can be imported meanwhile."""
  file = pathlib.Path(module.__file__)
  folders = [str(file.parent), str(_project(file))]
  sys.path[:0] = folders
  try:
    yield
  finally:
    for folder in folders:
      sys.path.remove(folder)


def _project(file: pathlib.Path) -> pathlib.Path:
  """The folder of the outermost package that a file is in, or its own."""
  folder = file.parent
  while (folder / "__init__.py").is_file():
    folder = folder.parent
  return folder
