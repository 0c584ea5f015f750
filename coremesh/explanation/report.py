"""An explanation as a page of HTML that needs no other file and no network."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from coremesh.explanation import alike, page, words
from coremesh.profile.prediction import Estimate

_ENVIRONMENT = jinja2.Environment(
  loader=jinja2.PackageLoader("coremesh.explanation", "."),
  autoescape=True,
  undefined=jinja2.StrictUndefined,
  trim_blocks=True,
  lstrip_blocks=True,
)


def html(data: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
  """The page.

  Args:
    data: what `record.of` returns.
    pictures: PNGs by the names of their files, which start with what they show.
  """
  template = _ENVIRONMENT.get_template("report.html.jinja")
  return template.render(
    data=data,
    pictures={
      name: base64.b64encode(png).decode() for name, png in pictures.items()
    },
    short=words.short,
    num_bytes=words.num_bytes,
    share=words.share,
    dropped_title=words.DROPPED,
    rate=words.rate,
    estimate=lambda found: words.estimate(Estimate(**found)),
    where=page.where,
    span=page.span,
    counted=words.counted,
    folded=_folded,
    buffer_name=words.buffer_name,
  )


def _folded(cores: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
  """Cores that differ in nothing but their number, by their numbers."""
  found: list[tuple[list[int], Any]] = []
  for core in cores:
    rest = {key: value for key, value in core.items() if key != "core"}
    same = [numbers for numbers, other in found if other == rest]
    if same:
      same[0].append(core["core"])
    else:
      found.append(([core["core"]], rest))
  return [(alike.numbered(numbers), rest) for numbers, rest in found]
