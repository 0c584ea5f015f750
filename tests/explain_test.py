"""Tests for cm.explain: one program with two kernels, compiled once."""

import copy
import dataclasses
import importlib
import json
import re

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from matplotlib import image
import numpy as np
import pytest
from rich.console import Console

import coremesh as cm
from coremesh.errors import ChipError, UnsupportedError
from coremesh.explanation import alike, life, page, record, trace, words
from coremesh.profile import rates
from tests import profiling

_SIZE, _ROWS = 1024, 2048


def _program():
  """Two kernels, one of which goes round and round, and XLA's operations."""
  matmul, (a, b) = profiling.matmul(_SIZE, 512)
  double, (x,) = profiling.double(_ROWS, block_rows=8)

  @jax.jit
  def two_kernels(a, b, x):
    return matmul(a, b), jnp.exp(double(x)).sum(axis=0)

  return two_kernels, (a, b, x)


@pytest.fixture(scope="module")
def compiled():
  fn, args = _program()
  return cm.compile(fn, *args, chip="v5p:2x2x1")


@pytest.fixture(scope="module")
def explained(compiled):
  return cm.explain(compiled)


@pytest.fixture(scope="module")
def saved(explained, tmp_path_factory):
  folder = tmp_path_factory.mktemp("explained") / "new" / "folder"
  return {path.name: path for path in explained.save(folder)}


def _kernel(explained, name):
  [found] = [o for o in explained.prediction.kernels if o.kernel == name]
  return found


# --- what it says -----------------------------------------------------------


def test_a_page_says_memory_time_limit_and_lines(explained):
  text = str(explained)
  assert text.startswith("matmul, double on v5p:2x2x1: ") or text.startswith(
    "double, matmul on v5p:2x2x1: "
  )
  assert "predicted from compiled bundles, not measured" in text
  assert re.search(r"VMEM +a_vmem +bfloat16\[512,512\] x2 +1 MiB", text)
  for one in explained.ledgers:
    numbers = [one.predicted("VMEM"), one.used("VMEM"), one.limit("VMEM")]
    row = " +".join(map(re.escape, map(words.num_bytes, numbers)))
    assert re.search(rf"VMEM +in all .*{row} +\d+\.\d%", text)
  for operation in explained.prediction.operations:
    kind = "kernel" if operation.kernel else "XLA"
    assert f"{operation.label}, {kind}" in text
  assert "tests/profiling.py" in text
  assert "sum_vmem[...] += jnp.dot(" in text
  assert all(f"{n} {v}" in text for n, v in explained.versions.items())
  assert max(map(len, text.splitlines())) <= 110


def test_a_page_fits_a_narrow_terminal_and_loses_no_number(explained):
  console = Console(width=80, record=True, file=open("/dev/null", "w"))
  with console.file:
    console.print(explained)
  text = console.export_text()
  for operation in explained.prediction.operations:
    assert str(operation.microseconds) in text


def test_shares_over_a_life_add_up_to_those_of_the_whole(explained):
  for operation in explained.prediction.kernels:
    activities = explained.activities[operation.name]
    edges = life.edges(activities, 97)
    for core, activity in zip(operation.cores, activities, strict=True):
      found = activity.shares(edges)
      held = {u: float(s @ np.diff(edges)) for u, s in found.items()}
      for unit, share in core.shares.items():
        # Sums of some 10,000 floating-point numbers.
        wanted = share * core.cycles.central
        assert held[unit] == pytest.approx(wanted, rel=1e-9, abs=1e-6)
      assert all((s > -1e-9).all() for s in found.values())


def test_copies_and_waits_over_a_life_are_those_of_the_whole(explained):
  for operation in explained.prediction.kernels:
    activities = explained.activities[operation.name]
    for core, activity in zip(operation.cores, activities, strict=True):
      assert activity.spans("read").num_bytes.sum() == core.read_bytes
      assert activity.spans("write").num_bytes.sum() == core.written_bytes
      waits = activity.spans("wait", "delay")
      waited = (waits.end_cycles - waits.start_cycles).sum()
      assert waited == pytest.approx(core.waiting_cycles)
      # A core waits for one thing at a time.
      assert (waits.start_cycles[1:] >= waits.end_cycles[:-1]).all()
      assert waits.end_cycles.max() <= activity.cycles + 1e-6


def test_a_loop_that_repeats_is_kept_once_and_written_out(explained):
  [activity, _] = explained.activities[_kernel(explained, "double").name]
  reads = activity.spans("read")
  assert len(reads) == _ROWS // 8 // 2
  assert len(activity.log.items) < 4 * len(reads)
  assert (np.diff(reads.start_cycles) > 0).all()


def test_the_work_of_a_matmul_is_that_of_its_shape(explained):
  found = explained.rooflines[_kernel(explained, "matmul").name]
  assert found.matmul_flops == pytest.approx(2 * _SIZE**3)
  assert found.hbm_bytes >= _SIZE**2 * 2  # XLA may keep the rest in VMEM.
  chip = cm.chip("v5p")
  assert chip.bf16_flops_per_second_per_tensor_core is not None
  peak = 2 * chip.bf16_flops_per_second_per_tensor_core
  assert found.peak_matmul_flops_per_second == peak
  assert 0 < found.share_of_roof <= 1
  assert found.floor_microseconds <= found.microseconds.central
  double = explained.rooflines[_kernel(explained, "double").name]
  assert double.matmul_flops == 0
  # A multiplication for each element; not all vector slots are arithmetic.
  assert double.vector_ops >= _ROWS * 1024
  assert double.hbm_bytes == 2 * _ROWS * 1024 * 4
  assert double.roof == "HBM"


def test_hot_lines_are_those_of_the_kernel_and_take_all_of_its_time(explained):
  kernel = _kernel(explained, "matmul")
  lines = explained.hot_lines[kernel.name]
  [dot] = [line for line in lines if "jnp.dot" in line.code]
  assert dot.limit == "MXU"
  assert any(op.startswith("vmatmul") for b in dot.bundles for op in b.opcodes)
  assert sum(line.share for line in lines) == pytest.approx(1, abs=0.01)
  assert list(lines) == sorted(lines, key=lambda line: -line.cycles)
  for line in lines:
    assert 0 <= line.waiting_cycles <= line.cycles
    for bundle in line.bundles:
      assert bundle.executions > 0


def test_what_is_no_function_or_has_no_kernel_is_refused(compiled):
  with pytest.raises(UnsupportedError, match="must be a function or .* got 3"):
    cm.explain(3, chip="v5p")
  with pytest.raises(UnsupportedError, match="add_up holds no Pallas kernel"):
    cm.explain(add_up, profiling.shape(8, 128), chip="v5p")
  with pytest.raises(ChipError, match="There is no chip 'v9'"):
    cm.explain(add_up, profiling.shape(8, 128), chip="v9")
  with pytest.raises(ChipError, match="chip is v6e:2x2, but the program"):
    cm.explain(compiled, chip="v6e")
  with pytest.raises(UnsupportedError, match="progress must be True, False"):
    cm.explain(compiled, progress="yes")  # pyright: ignore[reportArgumentType]


def add_up(x):
  return x + x


def test_a_kernel_that_the_program_does_without_is_named():
  double, (x,) = profiling.double(1024)

  def program(x):
    double(x + 1)  # Nothing needs it.
    return double(x)

  found = cm.explain(program, x, chip="v5p:2x2x1")
  assert len(found.ledgers) == len(found.prediction.kernels) == 1
  assert "as no result needs it or another call is the same:\n* double" in str(
    found
  )
  assert found.as_dict()["dropped"] == ["double"]


def test_a_kernel_that_cannot_be_predicted_has_a_ledger_and_a_reason():
  def body(x_vmem, o_vmem, sem):
    pl.semaphore_wait(sem, 1)  # Nobody signals it.
    o_vmem[...] = x_vmem[...]

  x = profiling.shape(8, 128)
  waits_for_ever = pl.pallas_call(
    body,
    out_shape=x,
    scratch_shapes=[pltpu.SemaphoreType.REGULAR],
    name="waits_for_ever",
  )
  found = cm.explain(waits_for_ever, x, chip="v5p:2x2x1")
  [[name, reason]] = found.unpredicted.items()
  text = str(found)
  called = f"waits_for_ever ({name})"
  assert f"no time for {called}" in text
  assert f"* {called}: {' '.join(reason.split()[:4])}" in text
  assert re.search(r"VMEM +x_vmem +float32\[8,128\]", text)
  kept = found.as_dict()
  assert kept["unpredicted"] == [
    {"operation": name, "label": called, "reason": reason}
  ]
  assert kept["ledgers"][0]["memories"]["VMEM"]["predicted_per_core"] == 8192
  assert "for the rest" not in text
  times = [d for d in found.compare(kept).differences if "time," in d.quantity]
  assert [(d.before, d.after) for d in times] == [(None, None)] * 3


def test_progress_says_what_is_going_on(compiled, capsys):
  cm.explain(compiled, progress=True)
  said = capsys.readouterr().err
  assert "Predicting " in said


def test_cores_that_do_the_same_are_shown_as_one(explained):
  [core, _] = explained.activities[_kernel(explained, "double").name]
  other = dataclasses.replace(core, cycles=core.cycles + 1)
  same = [dataclasses.replace(core, core=n) for n in (0, 1, 2, 5)]
  mixed = [*same, dataclasses.replace(other, core=7)]
  groups = alike.groups(mixed)
  assert [alike.name(group) for group in groups] == ["0..2, 5", "7"]
  many = [
    (dataclasses.replace(core, cycles=float(n)),) for n in range(9, 0, -1)
  ]
  ends = [group[0].cycles for group in alike.shown(many, 3)]
  assert ends == [1, 5, 9]
  assert alike.shown(many, 9) == many


def test_the_time_of_cores_alone_is_told_if_it_is_less(explained):
  kernel = _kernel(explained, "matmul")
  whole = page.time(kernel, kernel.cycles.central)
  assert whole == f"{kernel.microseconds} µs"
  half = page.time(kernel, kernel.cycles.central / 2)
  central = words.short(kernel.microseconds.central / 2)
  assert half == f"{whole}, {central} µs of it on these cores"


def test_what_runs_beside_the_tensor_cores_is_told(explained):
  assert "beside TensorCores" not in str(explained)
  beside = rates.Spread(fast=1.0, central=2.5, slow=4.0)
  other = dataclasses.replace(explained.prediction, overlap_microseconds=beside)
  found = dataclasses.replace(explained, prediction=other)
  assert "SparseCores work beside TensorCores for 2.5 µs of it" in str(found)
  assert found.as_dict()["overlap_microseconds"] == 2.5


# --- as data ----------------------------------------------------------------


def _keys(value, path=""):
  if isinstance(value, dict) and not path.endswith(("busy_shares", "versions")):
    for key, inner in value.items():
      yield f"{path}.{key}".lstrip(".")
      yield from _keys(inner, f"{path}.{key}")
  elif isinstance(value, list):
    for inner in value[:1]:
      yield from _keys(inner, f"{path}[]")


_LAYOUT = """
  format version source name chip versions compile_seconds is_from_cache
  predict_seconds memory_bytes_per_device microseconds microseconds.low
  microseconds.central microseconds.high overlap_microseconds ledgers operations
  unpredicted assumed left_out dropped ledgers[].kernel ledgers[].is_sparse
  ledgers[].buffers
  ledgers[].memories.VMEM.unit ledgers[].memories.VMEM.predicted_per_core
  ledgers[].memories.VMEM.used_per_core ledgers[].memories.VMEM.limit_per_core
  ledgers[].memories.SMEM.unit ledgers[].memories.semaphores.unit
  ledgers[].buffers[].name ledgers[].buffers[].memory ledgers[].buffers[].shape
  ledgers[].buffers[].dtype ledgers[].buffers[].copies
  ledgers[].buffers[].amount_per_core operations[].name operations[].kernel
  operations[].cycles.central operations[].microseconds.central
  operations[].floor_microseconds operations[].limit operations[].busy_shares
  operations[].cores operations[].assumed operations[].roofline
  operations[].lines operations[].life
""".split()


def test_the_layout_of_the_data_keeps_its_keys(explained):
  kept = explained.as_dict()
  assert json.loads(json.dumps(kept)) == kept
  assert (kept["format"], kept["version"]) == ("coremesh explanation", 1)
  # Who removes one of these raises record.VERSION.
  assert set(_LAYOUT) <= set(_keys(kept))
  matmul = next(o for o in kept["operations"] if o["kernel"] == "matmul")
  assert set(matmul["roofline"]) >= {"matmul_flops", "hbm_bytes", "roof"}
  assert set(matmul["lines"][0]) >= {"source", "cycles", "bundles", "share"}
  groups = matmul["life"]["groups"]
  stretches = len(matmul["life"]["edges_cycles"]) - 1
  assert [core for group in groups for core in group["cores"]] == [0, 1]
  for share in groups[0]["busy_shares"].values():
    assert len(share) == stretches
    assert all(0 <= s <= 1.0001 for s in share)


def test_what_a_helper_does_is_of_the_line_that_calls_it():
  chip = cm.chip("v5p:2x2x1")
  scratch = dict(held=cm.vmem_slab(0))

  @cm.kernel(mesh=chip.tensor_cores("core"), out=cm.like(0), scratch=scratch)
  def copies(x_hbm, o_hbm, *, held):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], held)
    held[...] = jax.nn.softmax(held[...], axis=-1)
    cm.copy(held, o_hbm.at[rows])

  x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
  [lines] = cm.explain(copies, x, chip=chip).hot_lines.values()
  named = [line for line in lines if line.source]
  assert all(line.source.startswith(f"{__file__}:") for line in named)
  # Waiting for the two copies takes longest, and each is told apart.
  assert {"cm.copy(x_hbm.at[rows], held)", "cm.copy(held, o_hbm.at[rows])"} == {
    line.code for line in named[:2]
  }


def test_an_explanation_is_the_same_as_itself(explained):
  found = explained.compare(explained.as_dict())
  assert len(found.differences) > 40
  assert all(d.before == d.after for d in found.differences)
  text = str(found)
  assert "same" in text and "differs" not in text


def _slower(kept, kernel, factor):
  """A record of the same program with a kernel that takes longer."""
  changed = copy.deepcopy(kept)
  for operation in changed["operations"]:
    if operation["kernel"] == kernel:
      for which in ("low", "central", "high"):
        operation["microseconds"][which] *= factor
      operation["limit"] = "the weather"
  return changed


def test_a_comparison_shows_what_differs_and_where(explained):
  kept = explained.as_dict()
  found = explained.compare(_slower(kept, "double", 4))
  differing = [d for d in found.differences if d.before != d.after]
  assert {d.kernel for d in differing} == {"double"}
  [time] = [d for d in differing if d.quantity == "time, central"]
  assert time.ratio == pytest.approx(1 / 4)
  text = str(found)
  assert "x 0.25" in text
  assert re.search(r"limited by +the weather +\w+ +differs", text)
  data = found.as_dict()
  assert json.loads(json.dumps(data)) == data
  assert data["format"] == "coremesh comparison"
  assert {d["unit"] for d in data["differences"]} >= {"µs", "cycles", "bytes"}


def test_other_times_of_the_same_code_are_those_of_another_model(explained):
  kept = explained.as_dict()
  kept["versions"]["coremesh"] = "0.0.1"
  slower = _slower(kept, "double", 4)
  found = explained.compare(slower)
  assert found.of_model == ("double",)
  text = str(found)
  assert "double (same machine code: coremesh's model changed)" in text
  assert "matmul (same" not in text
  assert "coremesh 0.0.1" in text
  assert found.as_dict()["of_model"] == ["double"]


def _other_code(record):
  for operation in record["operations"]:
    operation["code_digest"] = "another"


def _older(record):
  del record["arguments_digest"]
  for operation in record["operations"]:
    del operation["code_digest"]


@pytest.mark.parametrize(
  "change",
  [
    _other_code,
    _older,
    lambda record: record.update(chip="v5p:2x2x2"),
    lambda record: record.update(arguments_digest="another"),
  ],
)
def test_other_times_of_another_call_may_be_the_kernels_own(explained, change):
  before = _slower(explained.as_dict(), "double", 4)
  change(before)
  found = explained.compare(before)
  assert found.of_model == ()
  assert "model changed" not in str(found)


def test_kernels_are_matched_by_name_and_the_rest_stands_alone(explained):
  kept = explained.as_dict()
  for operation in kept["operations"]:
    if operation["kernel"] == "double":
      operation["kernel"] = "twice"
  for ledger in kept["ledgers"]:
    if ledger["kernel"] == "double":
      ledger["kernel"] = "twice"
  found = explained.compare(kept)
  of = lambda kernel: [d for d in found.differences if d.kernel == kernel]
  assert all(d.before == d.after for d in of("matmul"))
  assert all(d.before is None for d in of("double"))
  assert all(d.after is None for d in of("twice"))
  assert of("double") and of("twice")


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ("{", "must be a file that `coremesh explain --json` wrote"),
    ("[]", "it holds something else"),
    ('{"format": "coremesh explanation", "version": 99}', "of version 99"),
  ],
)
def test_what_is_no_record_is_refused(text, reason, tmp_path):
  path = tmp_path / "other.json"
  path.write_text(text)
  with pytest.raises(UnsupportedError, match=reason):
    record.load(path)


# --- as files ---------------------------------------------------------------


def test_a_report_needs_no_other_file(saved, explained):
  text = saved["report.html"].read_text()
  sources = re.findall(r'(?:src|href)="([^"]{0,40})', text)
  assert sources
  assert all(s.startswith("data:image/png;base64,") for s in sources)
  assert "@import" not in text and "url(" not in text
  for operation in explained.prediction.operations:
    assert operation.name in text
  assert "sum_vmem[...] += jnp.dot(" in text
  assert "not measured" in text


def test_names_in_a_report_are_text_and_not_html(explained):
  report = importlib.import_module("coremesh.explanation.report")
  kept = explained.as_dict() | {"name": "<script>alert(1)</script>"}
  assert "<script>" not in report.html(kept, {})


def test_a_picture_of_each_kind_is_drawn_and_wide_enough(saved, explained):
  names = [o.name for o in explained.prediction.kernels]
  wanted = {"ledger.png", "roofline.png"} | {
    f"{kind}-{name}.png"
    for kind in ("utilisation", "timeline", "lines")
    for name in names
  }
  assert {n for n in saved if n.endswith(".png")} == wanted
  for name in wanted:
    pixels = image.imread(saved[name])
    assert pixels.shape[1] >= 1200
    # White and grey alone would be an empty picture.
    colours = pixels[..., :3]
    assert (np.ptp(colours, axis=-1) > 0.2).mean() > 0.001, name


def test_the_data_in_the_folder_are_those_of_as_dict(saved, explained):
  assert record.load(saved["explanation.json"].absolute()) == (
    explained.as_dict()
  )


def test_a_trace_holds_each_operation_copy_and_wait_at_its_time(
  saved, explained
):
  events = json.loads(saved["trace.json"].read_text())["traceEvents"]
  intervals = [e for e in events if e["ph"] == "X"]
  starts = {}
  for operation in explained.prediction.operations:
    [whole] = [
      e for e in intervals if e["tid"] == 0 and e["name"] == operation.label
    ]
    assert whole["ts"] == pytest.approx(sum(starts.values()))
    assert whole["dur"] == operation.microseconds.central
    starts[operation.name] = whole["dur"]
  end = max(e["ts"] + e["dur"] for e in intervals)
  assert end == pytest.approx(explained.prediction.microseconds.central)
  begun = {e["id"]: e for e in events if e["ph"] == "b"}
  ended = {e["id"]: e for e in events if e["ph"] == "e"}
  assert set(begun) == set(ended)
  assert all(ended[i]["ts"] > e["ts"] for i, e in begun.items())
  moved = sum(
    core.read_bytes + core.written_bytes
    for operation in explained.prediction.operations
    for core in operation.cores
  )
  in_hbm = [e for e in begun.values() if e["name"].endswith("HBM")]
  assert sum(e["args"]["bytes"] for e in in_hbm) == moved
  counters = [e for e in events if e["ph"] == "C"]
  assert {"core 0 MXU, busy share"} <= {e["name"] for e in counters}
  assert all(0 <= v <= 1.001 for e in counters for v in e["args"].values())


def test_a_trace_that_would_be_too_long_says_what_is_not_in_it(
  explained, monkeypatch
):
  monkeypatch.setattr(trace, "_MOST_SPANS", 3)
  made = trace.as_dict(explained)
  name = _kernel(explained, "double").label
  assert (
    f"{name}, core 0: copies from HBM after the first 3 are not in the trace"
    in made["otherData"]["left_out"]
  )
  copies = [e for e in made["traceEvents"] if e["ph"] == "b"]
  kinds = {(e["tid"], e["name"]) for e in copies}
  operations = len(explained.activities)
  assert len(copies) <= 3 * len(kinds) * operations


def test_a_folder_that_is_a_file_is_refused(explained, tmp_path, monkeypatch):
  files = importlib.import_module("coremesh.explanation.files")
  monkeypatch.setattr(files, "draw", lambda found: {})
  (tmp_path / "file").write_text("")
  with pytest.raises(UnsupportedError, match="must be a folder that can be"):
    explained.save(tmp_path / "file")


def test_a_library_that_is_missing_is_named(explained, tmp_path, monkeypatch):
  def none(name):
    raise ModuleNotFoundError("no module", name="jinja2")

  monkeypatch.setattr(importlib, "import_module", none)
  with pytest.raises(UnsupportedError, match=r"save needs jinja2: pip install"):
    explained.save(tmp_path)
