"""The files of an explanation: a report, its pictures, data and a trace."""

import json
import pathlib
import re

from coremesh import errors, perfetto
from coremesh.explanation import record, report, trace
from coremesh.explanation.findings import Findings
from coremesh.explanation.pictures import (
  hot_lines,
  ledgers,
  roofline,
  style,
  timeline,
  utilisation,
)


def save(found: Findings, folder: pathlib.Path) -> tuple[pathlib.Path, ...]:
  """Writes them all; see `Explanation.save`."""
  data = record.of(found)
  pictures = draw(found)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.html"]
    paths[0].write_text(report.html(data, pictures), encoding="utf-8")
    for name, png in pictures.items():
      paths.append(folder / name)
      paths[-1].write_bytes(png)
    paths.append(folder / "explanation.json")
    paths[-1].write_text(json.dumps(data, indent=1))
    paths.append(perfetto.save(trace.as_dict(found), folder / "trace.json"))
  except OSError as error:
    raise errors.UnsupportedError(
      f"{str(folder)!r} must be a folder that can be written to: {error}"
    ) from error
  return tuple(paths)


def draw(found: Findings) -> dict[str, bytes]:
  """PNGs by the names of their files.

  "ledger.png" and "roofline.png" are of the whole program; of each kernel there
  are "utilisation-", "timeline-" and "lines-" with its name.
  """
  made = {}
  if found.ledgers:
    made["ledger.png"] = ledgers.draw(found.ledgers)
  if found.rooflines:
    made["roofline.png"] = roofline.draw(found.rooflines, found.chip)
  for operation in found.prediction.kernels:
    name = re.sub(r"[^\w.\-]", "_", operation.name)
    activities = found.activities.get(operation.name)
    if activities:
      made[f"utilisation-{name}.png"] = utilisation.draw(operation, activities)
      made[f"timeline-{name}.png"] = timeline.draw(operation, activities)
    if lines := found.hot_lines.get(operation.name):
      made[f"lines-{name}.png"] = hot_lines.draw(operation.label, lines)
  return {name: style.png(figure) for name, figure in made.items()}
