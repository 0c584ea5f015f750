"""Tests for cm.explain: what is sent to other cores, and names of kernels."""

import importlib
import re

import jax
from jax.experimental import pallas as pl
import numpy as np
import pytest

import coremesh as cm
from coremesh.cli import targets
from coremesh.explanation.pictures import roofline
from coremesh.profile import rates, sending
from coremesh.profile.events import Event, Repeat, Target, Trace, Way
from coremesh.profile.prediction import label
from tests import profiling

_STEPS, _BLOCK_BYTES = 3, 8 * 128 * 4  # of ring_shift, its rows padded to 8


def _example(name, chip):
  found = cm.chip(chip)
  fn, args = targets.maker(name)(found)
  return cm.explain(fn, *args, chip=found)


def _kernel(found):
  [operation] = found.prediction.kernels
  return operation, found.rooflines[operation.name]


def _drawn(found):
  """The words in the picture, and its dashed lines."""
  figure = roofline.draw(found.rooflines, found.chip)
  [axes] = figure.axes
  words = [text.get_text() for text in (*axes.texts, *figure.texts)]
  dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
  return "\n".join(words), dashed


# --- what is sent -----------------------------------------------------------


def test_what_goes_over_ici_has_a_roof_on_the_page_in_the_data_and_drawn():
  found = _example("ring_shift", "v5p:2x2x1")
  operation, roof = _kernel(found)
  # Of the two cores of a device one sends to its neighbour, the other on.
  ici, between = roof.sendings
  assert (ici.way, between.way) == ("ICI", "core to core")
  assert ici.sent_bytes == between.sent_bytes == _STEPS * _BLOCK_BYTES
  assert ici.busiest_bytes == ici.sent_bytes
  assert ici.sent_bytes == sum(core.sent_bytes for core in operation.cores)
  assert ici.assumed_bytes_per_second == 90e9  # The prediction's central rate.
  # All else of it needs less at its peak.
  assert roof.roof == "ICI" and roof.is_roof_assumed
  microseconds = ici.sent_bytes / 90e9 * 1e6
  assert roof.floor_microseconds == pytest.approx(microseconds)
  share = microseconds / operation.microseconds.central
  assert roof.share_of_way(ici) == roof.share_of_roof == pytest.approx(share)
  assert operation.shares["ICI"] == pytest.approx(share)

  text = str(found)
  assert "by the assumed rate of ICI" in text
  row = rf"ICI, assumed +12 KiB +\d+ MB/s +90 GB/s +{share:.1%}"
  assert re.search(row, text), text
  assert re.search(r"core to core, assumed +12 KiB", text)

  kept = next(o for o in found.as_dict()["operations"] if o["kernel"])
  first, second = kept["roofline"]["sendings"]
  assert first["way"] == "ICI" and first["sent_bytes"] == ici.sent_bytes
  assert first["share_of_way"] == pytest.approx(share)
  assert first["is_assumed"] is second["is_assumed"] is True

  report = importlib.import_module("coremesh.explanation.report")
  html = " ".join(report.html(found.as_dict(), {}).split())
  assert "ICI, assumed: 12 KiB of 12 KiB sent go to the receiver" in html
  assert f"carries 90 GB/s; it is busy {share * 100:.2g}% of the time" in html

  words, [line] = _drawn(found)
  assert "ICI, assumed: 90 GB/s" in words
  assert "ICI: 12 KiB sent, 0.8" in words and "% of its assumed rate" in words
  xs, ys = map(np.asarray, line.get_data())
  np.testing.assert_allclose(ys[0] / xs[0], 90e9)


def test_the_way_to_the_other_device_of_a_chip_has_a_roof_of_its_own():
  found = _example("ring_shift", "tpu7x:2x2x1")
  operation, roof = _kernel(found)
  total = sum(core.sent_bytes for core in operation.cores)
  assert total == sum(sent.sent_bytes for sent in roof.sendings) > 0
  rate = {"ICI": 90e9, "die to die": 6 * 90e9}
  for sent in roof.sendings:
    assert sent.assumed_bytes_per_second == rate[sent.way]
    assert f"{sent.way}, assumed" in str(found)


def test_a_kernel_that_sends_nothing_has_no_roof_of_ici():
  found = _example("add_one", "v5p:2x2x1")
  _, roof = _kernel(found)
  assert roof.sendings == () and not roof.is_roof_assumed
  assert "ICI" not in str(found)
  kept = next(o for o in found.as_dict()["operations"] if o["kernel"])
  assert kept["roofline"]["sendings"] == []
  words, dashed = _drawn(found)
  assert "ICI" not in words and "sent" not in words and not dashed


def test_bytes_of_repetitions_and_receivers_are_told_apart():
  def send(device: int, amount: int, way: Way = "link", route: int = 0):
    to = Target(device=device, core=0, flag=0, way=way, route=route)
    return Event(0, "send", 0, -1, amount, to)

  signal = send(1, 1000)._replace(kind="signal")
  events = (
    Repeat(0, (send(1, 2), signal), times=5, period=9),
    send(2, 3),
    send(1, 4, route=1),
    send(0, 4, "core"),
  )
  trace = Trace(
    core=0, cycles=99, runs=(), events=events, assumed=(), skipped=0
  )
  chip = cm.chip("v5p:2x2x1")
  rate = rates.rates(chip)
  ici, core = sending.of_traces([trace, trace], chip=chip, rates=rate)
  assert (ici.sent_bytes, ici.busiest_bytes) == (2 * 17 * 32, 2 * 10 * 32)
  assert ici.floor_seconds == pytest.approx(2 * 10 * 32 / 90e9)
  assert (core.way, core.sent_bytes) == ("core to core", 2 * 4 * 32)
  assert core.assumed_bytes_per_second == 2.43e12  # As HBM's, central.
  assert sending.of_traces([], chip=chip, rates=rate) == ()


# --- names ------------------------------------------------------------------


def test_a_label_names_the_kernel_first_where_the_operation_hides_it():
  assert label("tpu_custom_call.1", "copy_tiles") == (
    "copy_tiles (tpu_custom_call.1)"
  )
  assert label("copy_tiles.1", "copy_tiles") == "copy_tiles.1"
  assert label("fusion.3", None) == "fusion.3"


def test_pages_and_pictures_of_a_pallas_call_are_titled_by_its_kernel(
  monkeypatch,
):
  def copy_tiles(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] + 1

  x = profiling.shape(64, 128)
  tiles = pl.BlockSpec((8, 128), lambda i: (i, 0))
  call = pl.pallas_call(
    copy_tiles, out_shape=x, grid=(8,), in_specs=[tiles], out_specs=tiles
  )
  found = cm.explain(jax.jit(lambda x: call(x)), x, chip="v5p:2x2x1")
  [operation] = found.prediction.kernels
  assert operation.name.startswith("tpu_custom_call")
  called = f"copy_tiles ({operation.name})"

  for text in (str(found), str(found.prediction)):
    assert operation.name in text
    assert operation.name not in text.replace(called, "")
  for title in ("each core", "what is busy when", "hottest lines", "no less"):
    assert f"{called}: {title}" in str(found)

  report = importlib.import_module("coremesh.explanation.report")
  html = report.html(found.as_dict(), {})
  assert f"<h2>{called}</h2>" in html
  assert operation.name not in html.replace(called, "")

  titles = []
  style = importlib.import_module("coremesh.explanation.pictures.style")
  figure = style.figure
  monkeypatch.setattr(
    style, "figure", lambda *a: titles.append(a[1]) or figure(*a)
  )
  files = importlib.import_module("coremesh.explanation.files")
  monkeypatch.setattr(style, "png", lambda made: b"")
  files.draw(found)
  assert sum(t.startswith(f"{called}: ") for t in titles) == 3
  assert not any(t.startswith(operation.name) for t in titles)
  assert called in _drawn(found)[0]
