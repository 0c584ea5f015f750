"""Golden files: one for each program and chip, text that a review can read."""

from collections.abc import Iterator, Mapping
import dataclasses
import json
import os
import pathlib
import re
import tempfile
from typing import Any

from coremesh import errors
from coremesh.guard.figures import Figures, OperationFigures

_FORMAT = "coremesh-guard-1"
_ADVICE = "Record it again: coremesh guard record."


class GoldenError(errors.CoreMeshError, ValueError):
  """A golden file that cannot be read or is not of this program."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
  """What was recorded of a program on a chip.

  Attributes:
    target: what the program is called on the command line.
    chip: the slice, such as "v5p:2x2x1".
    versions: of jax, jaxlib and libtpu.
    figures: None if the compiler, or coremesh, refused the program.
    refusal: why; None if it compiled.
  """

  target: str
  chip: str
  versions: Mapping[str, str]
  figures: Figures | None
  refusal: str | None

  def __post_init__(self):
    if (self.figures is None) == (self.refusal is None):
      raise ValueError(
        "A golden must have either figures or a refusal; got"
        f" {self.figures} and {self.refusal!r}."
      )


def path_of(folder: pathlib.Path, target: str, chip: str) -> pathlib.Path:
  """Where the golden of a program and a chip is kept."""
  chip_folder, name = (re.sub(r"[^\w.]+", "-", t) for t in (chip, target))
  return folder / chip_folder / f"{name}.json"


def write(folder: pathlib.Path, golden: Golden) -> pathlib.Path:
  """Writes a golden beside its place and renames it into it.

  Others read the old one or the new one, whole.

  Raises:
    GoldenError: the disk does not take it.
  """
  path = path_of(folder, golden.target, golden.chip)
  text = json.dumps(_as_data(golden), indent=2, ensure_ascii=False) + "\n"
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(".part", dir=path.parent)
    try:
      with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
      os.chmod(temporary, 0o644)  # mkstemp's is the owner's alone.
      os.replace(temporary, path)
    except BaseException:
      os.unlink(temporary)
      raise
  except OSError as error:
    raise GoldenError(
      f"The golden {path} cannot be written: {error}. Choose another folder"
      " with --dir, or make room."
    ) from error
  return path


def read(folder: pathlib.Path, target: str, chip: str) -> Golden | None:
  """The golden of a program and a chip, or None if there is none.

  Raises:
    GoldenError: it is no golden, or one of another program.
  """
  path = path_of(folder, target, chip)
  if not path.exists():
    return None
  found = _read(path)
  if (found.target, found.chip) != (target, chip):
    raise GoldenError(
      f"{path} must be the golden of {target} on {chip}; it is that of"
      f" {found.target} on {found.chip}. Two targets whose names differ in"
      " punctuation alone need folders of their own, --dir."
    )
  return found


def read_all(folder: pathlib.Path) -> Iterator[Golden]:
  """All goldens of a folder, by target and chip.

  Raises:
    GoldenError: one of them cannot be read.
  """
  found = [_read(path) for path in sorted(folder.glob("*/*.json"))]
  yield from sorted(found, key=lambda g: (g.target, g.chip))


def _as_data(golden: Golden) -> dict[str, Any]:
  """Plain data, without the fields that say nothing."""
  data = dataclasses.asdict(golden)
  figures = data["figures"] or {}
  for fields in (data, figures, *figures.get("operations", ())):
    for name in [n for n, value in fields.items() if value is None]:
      del fields[name]
  return {"format": _FORMAT, **data}


def _read(path: pathlib.Path) -> Golden:
  try:
    data = json.loads(path.read_text(encoding="utf-8"))
    return _golden(data)
  except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
    what = f"{type(error).__name__}: {error}"
    raise GoldenError(
      f"{path} is no golden that this version of coremesh can read ({what})."
      f" {_ADVICE}"
    ) from error


def _golden(data: Any) -> Golden:
  fields = dict(data)
  if fields.pop("format") != _FORMAT:
    raise ValueError(f"its format must be {_FORMAT!r}")
  figures = fields.pop("figures", None)
  if figures is not None:
    operations = tuple(
      _checked(OperationFigures, {"cycles": None, **o})
      for o in figures["operations"]
    )
    figures = _checked(
      Figures, {"unpredicted": None, **figures, "operations": operations}
    )
  return _checked(Golden, {"refusal": None, **fields, "figures": figures})


def _checked(kind: type, fields: Mapping[str, Any]) -> Any:
  """A value of a dataclass, its whole numbers and texts of the right type."""
  for field in dataclasses.fields(kind):
    value = fields.get(field.name)
    wanted = {int: int, str: str, int | None: int, str | None: str}
    of_type = wanted.get(field.type)  # pyright: ignore
    if value is not None and of_type and type(value) is not of_type:
      raise ValueError(
        f"{field.name} must be of type {of_type.__name__}; got {value!r}"
      )
  return kind(**fields)
