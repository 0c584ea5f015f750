"""Tests for benchmarks.predict_vs_published; they need no tokamax."""

import dataclasses
import io
import json
import math
import sys

import numpy as np
from PIL import Image
import pytest
from rich.console import Console

from benchmarks import predict_vs_published as benchmark
from benchmarks.published import entries, record, score, show, tiles
from benchmarks.published.record import Record, Records
from benchmarks.published.score import Constants
from coremesh.errors import UnsupportedError

_TABLE = 2.46e12
_TRUE = Constants(
  bytes_per_second=2.3e12, latency_seconds=700e-9, clock_hz=1.76e9
)
_GRID_HZ = 1.75e9


def _cycles(num_bytes, copies, issued, *, bytes_per_second, latency, clock_hz):
  """A program that moves bytes, then waits for copies, then computes."""
  moved = num_bytes / bytes_per_second * clock_hz
  return moved + copies * latency * clock_hz + issued


def _record(name, num_bytes, copies, issued, *, noise=0.0, **changes) -> Record:
  grid = tuple(
    tuple(
      _cycles(
        *(num_bytes, copies, issued),
        bytes_per_second=b * _TABLE,
        latency=latency,
        clock_hz=_GRID_HZ,
      )
      for latency in record.LATENCIES_SECONDS
    )
    for b in record.BANDWIDTHS
  )
  true = _cycles(
    *(num_bytes, copies, issued),
    bytes_per_second=_TRUE.bytes_per_second,
    latency=_TRUE.latency_seconds,
    clock_hz=_TRUE.clock_hz,
  )
  fields = {
    "chip": "v5p",
    "family": "ragged dot v1",
    "operands": f"bf16[{name}]",
    "config": "{}",
    "measured_us": true / _TRUE.clock_hz * 1e6 * (1 + noise),
    "spread": 0.0,
    "central_us": 1.0,
    "grid_cycles": grid,
    "grid_hz": _GRID_HZ,
    "table_bytes_per_second": _TABLE,
    "limit": "MXU",
    "cores": 1,
    "peak_ratio": 1.0,
  }
  return Record(name=name, **(fields | changes))


def _records(count=24, noise=0.0) -> list[Record]:
  random = np.random.default_rng(0)
  return [
    _record(
      f"{i}",
      num_bytes=int(random.integers(1, 100)) << 20,
      copies=int(random.integers(1, 200)),
      issued=int(random.integers(1, 400)) * 1000,
      noise=noise * float(random.normal()),
    )
    for i in range(count)
  ]


# --- the split ---------------------------------------------------------------


def test_the_halves_are_every_other_entry_of_each_family_by_time():
  records = [
    _record(f"{family[-2:]}{i}", 1 << 20, 1, 1000 * i, family=family)
    for family in ("ragged dot v1", "ragged dot v2")
    for i in (3, 1, 2, 4)
  ]
  fit, test = score.halves(records)
  assert [r.name for r in fit] == ["v11", "v13", "v21", "v23"]
  assert [r.name for r in test] == ["v12", "v14", "v22", "v24"]
  assert score.halves(records[::-1]) == (fit[2:] + fit[:2], test[2:] + test[:2])


def test_entries_of_one_shape_are_in_one_half():
  records = [
    _record("a", 1 << 20, 1, 1000, operands="bf16[8] mean"),
    _record("b", 1 << 20, 1, 1001, operands="bf16[8] sum"),
    _record("c", 1 << 20, 1, 2000, operands="bf16[16] sum"),
  ]
  fit, test = score.halves(records)
  assert [[r.name for r in half] for half in (fit, test)] == [["a", "b"], ["c"]]


# --- constants ---------------------------------------------------------------


def test_the_grid_gives_the_time_at_other_constants():
  # Linear in the time of a byte and in the latency, as the grid is read, so
  # that only rounding is left.
  for one in _records():
    found = score.predicted_us(one, _TRUE)
    assert found == pytest.approx(one.measured_us, rel=1e-9)


def _steady(count=5) -> list[Record]:
  """Programs that compute and hardly move anything."""
  return [
    _record(f"steady{i}", 1 << 20, 1, (i + 1) * 10_000_000)
    for i in range(count)
  ]


_START = Constants(
  bytes_per_second=_TABLE, latency_seconds=400e-9, clock_hz=_GRID_HZ
)


def test_known_constants_are_found_again():
  found = score.fitted([*_records(), *_steady()], _START)
  # The last step is 1.5 % of the range of a constant, over 6.
  for field in dataclasses.fields(Constants):
    true = getattr(_TRUE, field.name)
    assert getattr(found, field.name) == pytest.approx(true, rel=0.01)


def test_a_clock_that_no_program_tells_is_kept():
  assert score.fitted(_records(), _START).clock_hz == _START.clock_hz
  assert score.fitted(_steady(2), _START).clock_hz == _START.clock_hz


def test_one_entry_of_another_program_does_not_move_the_constants():
  other = _record("twice", 64 << 20, 9, 90000, noise=1.0)
  found = score.fitted([*_records(), *_steady(), other], _START)
  for field in dataclasses.fields(Constants):
    true = getattr(_TRUE, field.name)
    assert getattr(found, field.name) == pytest.approx(true, rel=0.01)


# --- scores ------------------------------------------------------------------


def test_a_score_says_how_near_predictions_are():
  found = score.score([100, 200, 300, 400], [101, 200, 330, 396])
  assert found.entries == 4
  assert found.median == pytest.approx(0.01)
  assert found.within == 0.75
  assert found.largest == pytest.approx(0.1)
  assert found.bias == pytest.approx(0.005)
  assert found.spearman == pytest.approx(1)


def test_spearman_is_of_ranks_and_equal_times_share_theirs():
  assert score.score([1, 2, 3, 4], [1, 10, 9, 100]).spearman == pytest.approx(
    0.8
  )
  # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
  assert score.score([1, 2, 2, 3], [1, 2, 3, 4]).spearman == pytest.approx(
    4.5 / math.sqrt(4.5 * 5)
  )


def test_no_entries_have_no_score():
  found = score.score([], [])
  assert found.entries == 0
  assert math.isnan(found.median) and math.isnan(found.spearman)


# --- what is kept and shown --------------------------------------------------


def test_records_are_kept_and_an_interrupted_line_is_left_out(tmp_path):
  kept = Records(tmp_path / "deep" / "records.jsonl")
  assert kept.read() == {}
  first, second = _records(2)
  kept.add(first)
  kept.add(dataclasses.replace(second, assumed=("a", "b")))
  with kept.path.open("a") as file:
    file.write('{"name": "half')
  found = kept.read()
  assert found["0"] == first
  assert found["1"].assumed == ("a", "b")


def test_records_of_another_form_are_made_again(tmp_path):
  kept = Records(tmp_path / "records.jsonl")
  fields = dataclasses.asdict(_records(1)[0])
  kept.path.write_text(json.dumps(fields | {"new": 1}) + "\n")
  assert kept.read() == {}


def _shown(table) -> str:
  console = Console(width=200, file=io.StringIO())
  console.print(table)
  return console.file.getvalue()  # pyright: ignore


def test_outliers_are_named_with_what_is_known_of_them():
  near = _record("near", 1 << 20, 1, 1000)
  far = _record(
    "far",
    *(1 << 20, 1, 1000),
    central_us=100.0,
    copies_us=30.0,
    kernel_us=60.0,
    left_out=3,
    peak_ratio=1.14,
    spread=0.02,
    cores=2,
    config='{"tile_m":null}',
  )
  text = _shown(show.outliers([near, far], {"near": 1.039, "far": 0.9}))
  assert "bf16[near]" not in text
  assert "bf16[far]" in text and "0.900" in text
  for fact in (
    "limit MXU, cores at work 2",
    "30% copies of XLA's",
    "10% other operations of XLA's",
    "3 operations left out",
    "1.140 of the published memory",
    "runs differ by 2.0%",
    "tile sizes are not published",
  ):
    assert fact in " ".join(text.split())


def test_entries_without_a_prediction_are_named_with_the_reason():
  one = _record("bad", 1, 1, 1, error="CompileError: no room")
  text = _shown(show.failures([one]))
  assert "bf16[bad]" in text and "CompileError: no room" in text


def test_the_picture_shows_entries_within_and_beyond_its_edges(tmp_path):
  records = [
    _record(f"{chip}{family}{i}", 1 << 20, i, 1000, chip=chip, family=family)
    for chip in ("v5p", "tpu7x")
    for family in ("flash attention", "cross entropy")
    for i in (1, 40)
  ]
  ratios = {r.name: 1.0 for r in records}
  path = tmp_path / "new" / "picture.png"
  show.plot(records, ratios, path, dpi=50)
  with Image.open(path) as picture:
    assert picture.size == (350, 300)
    before = np.asarray(picture).copy()
  show.plot(records, ratios | {records[0].name: 0.5}, path, dpi=50)
  with Image.open(path) as picture:
    assert (np.asarray(picture) != before).any()


# --- the command -------------------------------------------------------------


def _entry(name, ms, **changes) -> entries.Entry:
  fields = {
    "chip": "v5p",
    "family": "cross entropy",
    "operands": f"bf16[{name}]",
    "config": "{}",
    "times_ms": (ms, ms),
    "peak_bytes": 1.0,
    "unusable": "",
    "key": "{}",
  }
  return entries.Entry(name=name, **(fields | changes))


def test_a_quick_choice_lies_evenly_over_the_usable_entries():
  found = [_entry(f"{i}", float(i)) for i in range(9)]
  found.append(_entry("no", 9.0, unusable="no time is published"))
  assert [e.name for e in benchmark.chosen(found, 3)] == ["0", "4", "8"]
  assert len(benchmark.chosen(found, None)) == 9
  assert len(benchmark.chosen(found, 100)) == 9


def test_what_is_done_first_lies_evenly_over_all():
  found = [_entry(f"{i}", float(i)) for i in range(8)]
  order = [e.name for e in benchmark.spread(found)]
  assert order == ["0", "4", "2", "6", "1", "5", "3", "7"]
  assert benchmark.spread([]) == []


def test_unknown_chips_and_families_are_named():
  with pytest.raises(ValueError, match="--chip must be of v5p, .*; got v9, x"):
    entries.choose("--chip", "v5p, v9,x", list(entries.CHIPS))
  assert entries.choose("--chip", "", ["a", "b"]) == ["a", "b"]
  assert entries.choose("--chip", "b", ["a", "b"]) == ["b"]


@pytest.fixture
def published(monkeypatch):
  """Three entries in place of those of tokamax, predicted by `_record`."""
  made = []

  def predict(entry, timeout_seconds):
    made.append(entry.name)
    number = int(entry.name)
    return _record(
      entry.name, number << 24, 5, 1000, family=entry.family, chip=entry.chip
    )

  found = [_entry(str(i), float(i)) for i in (1, 2, 3)]
  found.append(_entry("4", 4.0, unusable="no time is published"))
  is_wanted = lambda c, f: (c, f) == ("v5p", "cross entropy")
  monkeypatch.setattr(entries, "tokamax_version", lambda: "0.0.17")
  monkeypatch.setattr(
    entries, "published", lambda c, f: found if is_wanted(c, f) else []
  )
  monkeypatch.setattr(record, "made", predict)
  return made


def test_a_run_goes_on_where_it_was_interrupted(
  published, monkeypatch, tmp_path, capsys
):
  monkeypatch.setattr(show, "plot", lambda *args, **kwargs: None)
  out = f"--out={tmp_path}"
  benchmark.main([out, "--most_ms=2.5"])
  assert sorted(published) == ["1", "2"]
  assert "longer than 2.5 ms" in capsys.readouterr().out
  benchmark.main([out])
  assert sorted(published) == ["1", "2", "3"]
  text = " ".join(capsys.readouterr().out.split())
  assert "no time is published" in text
  assert "3 of 3 entries predicted, of 3 distinct shapes" in text
  result = json.loads((tmp_path / "result.json").read_text())
  assert set(result["ratios"]) == {"1", "2", "3"}
  benchmark.main([out, "--again"])
  assert sorted(published) == ["1", "1", "2", "2", "3", "3"]


def test_scoring_what_is_kept_predicts_nothing(published, tmp_path, capsys):
  Records(tmp_path / "records.jsonl").add(
    _record("2", 1 << 24, 5, 1000, family="cross entropy")
  )
  picture = tmp_path / "small.png"
  benchmark.main(["--rescore", f"--out={tmp_path}", f"--picture={picture}"])
  assert published == []
  assert "1 of 1 entries predicted" in capsys.readouterr().out
  assert (tmp_path / "predicted.png").stat().st_size > 0
  assert picture.stat().st_size > 0


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--chip=v9", "--chip must be of v5p, tpu7x, v6e, v5e; got v9"),
    ("--family=softmax", "--family must be of flash attention, .*softmax"),
    ("--quick=0", "--quick must be at least 1; got 0"),
  ],
)
def test_the_command_refuses_what_it_does_not_know(published, flag, message):
  with pytest.raises(SystemExit, match=message):
    benchmark.main([flag])
  assert published == []


def test_without_tokamax_it_says_what_to_install(monkeypatch):
  monkeypatch.setattr(sys, "path", [])
  with pytest.raises(UnsupportedError, match="pip install tokamax"):
    entries.tokamax_version()
  with pytest.raises(SystemExit, match="needs tokamax"):
    benchmark.main([])


@pytest.mark.parametrize(
  ("spec", "text"),
  [
    (
      {"q": "bf16[8,16]", "k": "bf16[4]", "mask": {"causal_mask": {"o": 0}}},
      "bf16[8,16] bf16[4] causal",
    ),
    (
      {"x": "f32[8,16]", "labels": "i32[8]", "reduction": "sum", "mask": None},
      "f32[8,16] sum",
    ),
    (
      {
        "lhs": {"qvalue": "i8[8,16]", "scale": "f32[8,1]"},
        "ragged_dot_dimension_numbers": {
          "dot_dimension_numbers": [[[0], [0]], [[], []]]
        },
      },
      "i8[8,16] f32[8,1] drhs",
    ),
  ],
)
def test_operands_tell_entries_apart(spec, text):
  assert entries.operands(spec) == text


_ROWS = "bf16[64,768] bf16[8,2048,768] dlhs"


@pytest.mark.parametrize(
  ("tile_k", "tile_n", "older"),
  [
    (2048, 768, False),
    (1024, 512, False),  # It fits both ways.
    (768, 2048, True),  # 2048 is more than the 768 that are summed over.
    (1536, 384, True),  # 1536 is no half of 2048.
  ],
)
def test_tiles_that_todays_tokamax_does_not_try_are_of_an_older_one(
  tile_k, tile_n, older
):
  config = json.dumps({"tile_m": 64, "tile_k": tile_k, "tile_n": tile_n})
  both = json.dumps({"tile_m": 64, "tile_k": 512, "tile_n": 256})
  assert tiles.are_older([(_ROWS, both), (_ROWS, config)]) is older
  turned = json.loads(tiles.turned(config))
  assert turned == {"tile_m": 64, "tile_k": tile_n, "tile_n": tile_k}
