"""Tests for benchmarks.kernels_plot."""

from matplotlib import figure
from PIL import Image
import pytest

from benchmarks import kernels_plot
import coremesh as cm


def _row(work, contender, microseconds=None):
  row = dict(chip="v5p", work=work, contender=contender)
  if microseconds is None:
    return row | dict(failure="CompileError: no")
  return row | dict(microseconds=microseconds)


_ROWS = [
  _row("matmul", "coremesh", 10.0),
  _row("matmul", "XLA", 12.0),
  _row("matmul", "tokamax"),
  _row("attention", "coremesh"),
  _row("attention", "XLA", 7.0),
]


def test_what_has_no_point_in_the_plot_is_named():
  assert kernels_plot.left_out(_ROWS) == [
    "Left out, as coremesh has no time: attention.",
    "tokamax has no time for matmul.",
  ]
  assert not kernels_plot.left_out(_ROWS[:2])


@pytest.mark.parametrize("rows", [_ROWS, _ROWS[3:]], ids=["some", "none"])
def test_the_plot_says_what_it_leaves_out(rows, tmp_path, monkeypatch):
  said = []
  below = figure.Figure.supxlabel

  def kept(self, text, **options):
    said.append(text)
    return below(self, text, **options)

  monkeypatch.setattr(figure.Figure, "supxlabel", kept)
  path = tmp_path / "plot.png"
  kernels_plot.save(cm.chip("v5p"), rows, path)
  assert said == ["\n".join(kernels_plot.left_out(rows))]
  with Image.open(path) as image:
    assert image.width == 800
