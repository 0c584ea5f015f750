"""Tests of run.report, run.timeline and `coremesh simulate`."""

import collections
import dataclasses
import functools
import json
import re

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
from matplotlib import image
import numpy as np
import pytest

import coremesh as cm
from coremesh.cli import main
from coremesh.simulate import kernel_timeline, picture, picture_rows, rates
from tests import simulating, support

_PS = rates.PS_PER_SECOND
_SLAB = 8 * 128 * 4  # Bytes of what a core of `_swap` moves.
_LEGEND_PIXELS = 500  # More than one entry of a legend has.
_X = np.arange(4 * 8 * 256, dtype=np.float32).reshape(32, 256)


@functools.cache
def _swap():
  """The cores of a device exchange halves; each then goes to a neighbour."""
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(
      mine=cm.vmem_slab(0, axis=1),
      theirs=cm.vmem_slab(0, axis=1),
      sem=pltpu.SemaphoreType.REGULAR,
    ),
  )
  def swap(x_hbm, o_hbm, *, mine, theirs, sem):
    columns = cm.slab(x_hbm, axis=1)
    cm.copy(x_hbm.at[:, columns], mine)
    cm.global_barrier()
    cm.put(mine, theirs, to={"core": cm.next_core("core")}).wait()
    cm.ring_shift(theirs, mine, axis="device", sem=sem)
    mine[...] = mine[...] * 2
    cm.copy(mine, o_hbm.at[:, columns])

  return support.over_devices(swap, mesh)


def _run(fn=None, *args, **options):
  with cm.simulation(timeline=True, **options) as run:
    (fn or _swap())(*(args or [_X]))
  return run


@functools.cache
def _swapped():
  """One run that several tests look at."""
  return _run()


def _timeline(made: simulating.Kernel, *args, **options):
  """The only kernel of a run, in model time."""
  session = cm.Simulation()
  made.findings(*args, session=session, timeline=True, **options)
  [(_, found)] = session.timeline.runs
  return found


def _times(found: kernel_timeline.KernelTimeline):
  """All that a timeline says of time."""
  return [
    (
      track.name,
      [(i.kind, i.start_ps, i.end_ps, i.what) for i in track.intervals],
      [(c.start_ps, c.end_ps, c.what, c.num_bytes) for c in track.copies],
    )
    for track in found.tracks
  ]


# --- bytes -------------------------------------------------------------------


def test_bytes_moved_are_counted_by_memory_and_by_link():
  [run] = _swapped().report.as_dict()["runs"]
  moved = collections.Counter()
  for entry in run["bytes_moved"]:
    way = (entry["from"], entry["to"], entry["from_device"])
    moved[(*way, entry["to_device"])] += entry["bytes"]
  expected = {}
  for device in range(4):
    expected |= {
      ("hbm", "vmem", device, device): 2 * _SLAB,
      ("vmem", "hbm", device, device): 2 * _SLAB,
      ("vmem", "vmem", device, device): 2 * _SLAB,
      ("vmem", "vmem", device, (device + 1) % 4): 2 * _SLAB,
    }
  assert moved == expected


def test_blocks_of_a_grid_are_counted_once_for_each_place_they_take():
  def body(x_ref, row_ref, o_ref):
    o_ref[...] = x_ref[...] + row_ref[...]

  def call(x, row):
    return pl.pallas_call(
      body,
      jax.ShapeDtypeStruct((32, 128), jnp.float32),
      grid=(4,),
      in_specs=[
        pl.BlockSpec((8, 128), lambda i: (i, 0)),
        pl.BlockSpec((8, 128), lambda i: (0, 0)),
      ],
      out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
    )(x, row)

  x, row = np.ones((32, 128), np.float32), np.ones((8, 128), np.float32)
  made = simulating.traced(call, x, row, chip="v5p:2x2x1", devices=1)
  session = cm.Simulation()
  made.findings(x, row, session=session, timeline=True)
  [run] = session.runs
  assert run.bytes_moved == {
    ("hbm", 0, "vmem", 0): 4 * _SLAB + _SLAB,  # The row stays where it is.
    ("vmem", 0, "hbm", 0): 4 * _SLAB,
  }
  [(_, found)] = session.timeline.runs
  copies = found.tracks[0].copies
  assert sum(c.num_bytes for c in copies) == 9 * _SLAB
  # A block comes in while the one before is worked on.
  assert copies[2].start_ps < copies[1].end_ps + found.chip_rates.issue_ps()


def test_the_printed_report_names_kernels_bytes_and_links(monkeypatch):
  monkeypatch.setenv("COLUMNS", "40")  # It does not depend on the terminal.
  text = str(_swapped().report)
  [row] = [r for r in text.splitlines() if "VMEM to VMEM" in r and "one d" in r]
  assert "32,768" in row
  [row] = [r for r in text.splitlines() if "device 3 -> device 0" in r]
  assert "8,192" in row
  assert "Findings: 0 errors, 0 warnings." in text
  assert "Modelled, not measured" in text
  assert re.search(r"TensorCores: device 0-3, core ", text)
  assert "\x1b" not in text


def test_the_report_of_a_fault_says_it_in_full():
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(sem=pltpu.SemaphoreType.REGULAR),
  )
  def stuck(x_hbm, o_hbm, *, sem):
    cm.wait(sem)
    cm.copy(x_hbm, o_hbm)

  with pytest.raises(cm.DeadlockError):
    with cm.simulation(timeline=True) as run:
      support.over_devices(stuck, mesh)(_X)
  text = str(run.report)
  for finding in run.findings:
    assert str(finding).splitlines()[-1].strip() in " ".join(text.split())
  assert "Findings: 4 errors" in text or "Findings: 1 error" in text
  assert "for ever" in text
  assert json.loads(json.dumps(run.report.as_dict()))["runs"][0]["findings"]
  for _, found in run.timeline.runs:
    last = [track.intervals[-1] for track in found.tracks]
    assert not any(interval.ends for interval in last)


def test_a_report_of_nothing_says_so():
  with cm.simulation() as run:
    pass
  assert "No kernel ran" in str(run.report)
  assert run.report.as_dict() == {"runs": []}


# --- model time --------------------------------------------------------------


def test_a_wait_ends_with_the_last_of_what_it_took_and_not_before():
  [(_, found)] = _swapped().timeline.runs
  num_waits = 0
  for track in found.tracks:
    for interval in track.intervals:
      if interval.kind == "wait":
        num_waits += 1
        last = max(cause.arrives_ps for cause in interval.causes)
        assert interval.end_ps == max(interval.start_ps, last)
        assert all(c.sent_ps < c.arrives_ps for c in interval.causes)
  assert num_waits >= 8 * 5


def test_a_worker_does_one_thing_after_another():
  [(_, found)] = _swapped().timeline.runs
  for track in found.tracks:
    pairs = zip(track.intervals, track.intervals[1:], strict=False)
    assert track.intervals[0].start_ps == 0
    assert all(a.end_ps == b.start_ps for a, b in pairs)
    assert track.compute_ps() + track.waiting_ps() <= found.end_ps
    assert 0 < track.copying_ps() <= found.end_ps


@pytest.mark.parametrize("dma", ["late", "early", "random"])
def test_neither_seed_nor_dma_mode_changes_the_times(dma):
  [(_, expected)] = _swapped().timeline.runs
  for seed in (1, 2):
    [(_, found)] = _run(seed=seed, dma=dma).timeline.runs
    assert _times(found) == _times(expected)


def test_a_signal_that_the_scheduler_runs_late_is_not_late():
  # Each subcore signals the first after copies that take longer for each.
  def body(x_ref, o_ref, vmem, sem):
    subcore = jax.lax.axis_index("subcore")

    @pl.when(subcore > 0)
    def _():
      @pl.loop(0, 1 + subcore % 4)
      def _(_):
        pltpu.sync_copy(x_ref, vmem)

      pl.semaphore_signal(sem, 1, device_id={"core": 0, "subcore": 0})

    @pl.when(subcore == 0)
    def _():
      @pl.loop(0, 15)
      def _(_):
        pl.semaphore_wait(sem, 1)

      pltpu.sync_copy(x_ref, o_ref)

  x = np.zeros((128,), np.int32)
  made = simulating.kernel(
    body,
    x,
    out=jax.ShapeDtypeStruct((128,), jnp.int32),
    cores=lambda chip: chip.vector_subcores(num_cores=1),
    scratch_types=[
      pltpu.VMEM((128,), jnp.int32),
      pltpu.SemaphoreType.REGULAR,
    ],
  )
  found = _timeline(made, x)
  causes = [c for i in found.tracks[0].intervals for c in i.causes]
  copies = [1 + c.worker % 4 for c in causes if c.kind == "signal"]
  assert copies == sorted(copies)
  assert len(copies) == 15
  for seed in range(1, 10):
    dma = ("late", "early", "random")[seed % 3]
    again = _timeline(made, x, seed=seed, dma=dma)
    assert _times(again) == _times(found)


def test_time_is_no_less_than_the_bytes_take():
  chip = cm.chip("v5p:2x2x1")
  rows = 4096  # 2 MiB in and out for each of two cores of a device.

  def body(x_ref, o_ref, sems):
    core = jax.lax.axis_index("core")
    copies = [
      pltpu.async_copy(
        x_ref.at[pl.ds(part * 512, 512)],
        o_ref.at[core, pl.ds(part * 512, 512)],
        sems.at[part],
      )
      for part in range(8)
    ]
    for copy in copies:
      copy.wait()

  x = np.zeros((rows, 128), np.float32)
  made = simulating.kernel(
    body,
    x,
    out=jax.ShapeDtypeStruct((2, rows, 128), jnp.float32),
    scratch_types=[pltpu.SemaphoreType.DMA((8,))],
  )
  found = _timeline(made, x)
  moved = 2 * 2 * x.nbytes  # HBM is read and written.
  floor = moved / chip.hbm_bytes_per_second_per_device
  latency = rates.COPY_LATENCY_PS / _PS
  assert floor + latency <= found.seconds <= 1.1 * floor + 2 * latency
  # The copies share the memory: one alone would be a sixteenth of it.
  [shortest, *_] = sorted(
    c.end_ps - c.start_ps for track in found.tracks for c in track.copies
  )
  assert shortest / _PS < floor / 8 + 2 * latency


def test_a_link_is_slower_than_the_memories_at_its_ends():
  [(_, found)] = _swapped().timeline.runs
  durations = {True: set(), False: set()}
  for track in found.tracks:
    for copy in track.copies:
      durations[copy.link is not None].add(copy.end_ps - copy.start_ps)
  assert min(durations[True]) > max(durations[False])
  floor = _SLAB / found.chip_rates.bytes_per_second(("link", 0, 1))
  assert min(durations[True]) / _PS >= floor


def _multiply(size: int):
  def body(x_ref, o_ref, x_vmem, o_vmem):
    pltpu.sync_copy(x_ref, x_vmem)
    o_vmem[...] = jnp.dot(
      x_vmem[...], x_vmem[...], preferred_element_type=jnp.float32
    )
    pltpu.sync_copy(o_vmem, o_ref)

  x = np.zeros((size, size), jnp.bfloat16)
  made = simulating.kernel(
    body,
    x,
    out=jax.ShapeDtypeStruct((size, size), jnp.float32),
    cores=lambda chip: chip.tensor_cores("core", num_cores=1),
    scratch_types=[
      pltpu.VMEM((size, size), jnp.bfloat16),
      pltpu.VMEM((size, size), jnp.float32),
    ],
  )
  return _timeline(made, x)


def test_a_matrix_product_takes_its_flops_at_the_chips_peak():
  found = _multiply(512)
  rate = cm.chip("v5p").bf16_flops_per_second_per_tensor_core
  compute = max(
    i.end_ps - i.start_ps
    for i in found.tracks[0].intervals
    if i.kind == "compute"
  )
  assert rate is not None
  assert compute / _PS == pytest.approx(2 * 512**3 / rate, rel=0.01)


def _sums(steps: int):
  """A vector subcore adds one, some times, to 128 words."""

  def body(x_ref, o_ref, vmem):
    pltpu.sync_copy(x_ref, vmem)

    @pl.loop(0, steps)
    def _(_):
      @pl.loop(0, 128, step=8)
      def _(column):
        vmem[pl.ds(column, 8)] = vmem[pl.ds(column, 8)] + 1

    pltpu.sync_copy(vmem, o_ref)

  x = np.zeros((128,), np.int32)
  made = simulating.kernel(
    body,
    x,
    out=jax.ShapeDtypeStruct((128,), jnp.int32),
    cores=lambda chip: chip.vector_subcores(num_cores=1, num_subcores=1),
    scratch_types=[pltpu.VMEM((128,), jnp.int32)],
  )
  return _timeline(made, x)


def test_loops_cost_in_proportion_to_their_rounds():
  costs = [_sums(steps).tracks[0].compute_ps() for steps in (1, 2, 5)]
  assert costs[1] > costs[0]
  per_round = costs[1] - costs[0]
  assert costs[2] - costs[1] == pytest.approx(3 * per_round, rel=0.01)
  # 16 registers: each is loaded, added to and stored.
  assert per_round >= _cycles_ps(16)


def _cycles_ps(count: int) -> int:
  """Picoseconds of some cycles of a v5p."""
  return rates.Rates(cm.chip("v5p:2x2x1")).cycles_ps(count)


def test_subcores_that_meet_leave_together_after_the_last():
  def body(x_ref, o_ref, vmem):
    subcore = jax.lax.axis_index("subcore")

    @pl.when(subcore == 3)
    def _():
      pltpu.sync_copy(x_ref, vmem)

    plsc.subcore_barrier()

    @pl.when(subcore == 0)
    def _():
      pltpu.sync_copy(x_ref, o_ref)

  x = np.zeros((128,), np.int32)
  made = simulating.kernel(
    body,
    x,
    out=jax.ShapeDtypeStruct((128,), jnp.int32),
    cores=lambda chip: chip.vector_subcores(num_cores=1),
    scratch_types=[pltpu.VMEM((128,), jnp.int32)],
  )
  found = _timeline(made, x)
  waits = [
    next(i for i in track.intervals if "subcore_barrier" in i.on)
    for track in found.tracks
  ]
  assert len({w.end_ps for w in waits}) == 1
  assert max(w.start_ps for w in waits) == waits[3].start_ps
  assert waits[3].end_ps - waits[3].start_ps == rates.MEETING_PS
  assert {w.causes[0].worker for w in waits} == {3}
  first = found.waits[0]
  assert (first.by, first.seconds) == (
    found.tracks[3].name,
    max(w.end_ps - w.start_ps for w in waits) / _PS,
  )


def test_a_timeline_costs_nothing_when_it_is_not_asked_for():
  seen = []

  class Params(cm.SimulatorParams):
    def compile_kernel(self, program):
      made = super().compile_kernel(program)
      seen.append(made._program.parts[0].source)
      return made

  for is_timed in (False, True):
    fresh = lambda x: _swap()(x)  # JAX keeps what it traced.
    with pltpu.force_tpu_interpret_mode(Params(timeline=is_timed)):
      jax.jit(fresh).lower(_X)
  plain, timed = seen
  assert "busy_ps" not in plain
  assert "w.busy_ps += " in timed
  kept = [li for li in timed.splitlines() if "busy_ps" not in li]
  assert len(kept) == len(plain.splitlines())


def test_every_chip_has_rates():
  for generation in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
    found = rates.Rates(cm.chip(generation))
    assert 0.9e9 < found.clock_hz < 2.5e9
    assert found.bytes_per_second(("link", 0, 1)) > 0
    assert found.product_ps(1e9, "float8_e4m3fn", "DEFAULT") > 0
    once = found.product_ps(1e12, "float32", "DEFAULT")
    assert found.product_ps(1e12, "float32", "HIGHEST") == pytest.approx(
      6 * once, rel=1e-6
    )


def test_kernels_follow_one_another_on_a_device():
  chip, mesh = support.simulated()
  del chip
  run = _run(lambda x: _swap()(_swap()(x)), _X)
  (first, a), (second, b) = run.timeline.runs
  assert (first, second) == (0, a.end_ps)
  assert run.timeline.seconds == (a.end_ps + b.end_ps) / _PS
  assert mesh.size == 4


# --- files -------------------------------------------------------------------


def test_the_trace_is_of_the_format_and_its_arrows_have_two_ends(tmp_path):
  found = _swapped().timeline
  path = found.save_trace(tmp_path / "run.json")
  trace = json.loads(path.read_text())
  assert trace["otherData"]["time"] == "modelled, not measured"
  events = trace["traceEvents"]
  assert {e["ph"] for e in events} == {"M", "X", "s", "f", "b", "e"}
  for event in events:
    assert isinstance(event["name"], str)
    assert isinstance(event["pid"], int)
    if event["ph"] != "M":
      assert event["ts"] >= 0
      assert isinstance(event["tid"], int)
  by_id = collections.defaultdict(list)
  for event in events:
    if event["ph"] in "sfbe":
      by_id[(event["cat"], event["id"])].append(event)
  assert len(by_id) > 100
  for first, second in by_id.values():  # Two each.
    assert first["ph"] + second["ph"] in ("sf", "be")
    assert first["ts"] <= second["ts"]
  _check_arrows_are_in_slices(events)
  names = {
    (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"
  }
  assert names == {
    (d, f"TensorCore core {c}") for d in range(4) for c in range(2)
  }


def _check_arrows_are_in_slices(events) -> None:
  slices = collections.defaultdict(list)
  for event in events:
    if event["ph"] == "X":
      assert event["dur"] > 0
      span = (event["ts"], event["ts"] + event["dur"])
      slices[event["pid"], event["tid"]].append(span)
  for event in events:
    if event["ph"] in "sf":
      spans = slices[event["pid"], event["tid"]]
      assert any(a - 1e-9 <= event["ts"] < b for a, b in spans), event
  for spans in slices.values():  # Nothing on a thread overlaps.
    spans.sort()
    for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
      assert end <= start + 1e-9


def _colours(path) -> set[str]:
  pixels = (image.imread(path)[..., :3] * 255).round().astype(np.int32)
  packed = (pixels[..., 0] << 16) + (pixels[..., 1] << 8) + pixels[..., 2]
  counts = np.bincount(packed.reshape(-1), minlength=1 << 24)
  return {
    f"#{colour:06x}" for colour in np.flatnonzero(counts > _LEGEND_PIXELS)
  }


def test_the_picture_shows_work_waits_and_copies(tmp_path):
  [path] = _swapped().timeline.save_png(tmp_path / "run.png")
  found = _colours(path)
  # Work, both kinds of waiting, and one copy at a time: no mixed colours.
  assert {"#0b5cad", "#f7dc9a", "#e8912d", "#9ed9c5", "#d0a9cd"} <= found
  assert found.isdisjoint({"#2c8468", "#7a3578"})
  height, width, _ = image.imread(path).shape
  assert 300 < height < 1000 < width


def _with_copies(*spans):
  """The rows of one worker with copies: start, end, and whether by a link."""
  [(_, found)] = _swapped().timeline.runs
  first = found.tracks[0].copies[0]
  copies = tuple(
    dataclasses.replace(
      first, start_ps=a, end_ps=b, link=(0, 1) if by_link else None
    )
    for a, b, by_link in spans
  )
  track = dataclasses.replace(found.tracks[0], copies=copies)
  run = dataclasses.replace(found, tracks=(track,))
  return picture_rows.rows(kernel_timeline.in_sequence([run]))


def test_each_kind_of_copy_has_its_own_bars_and_several_at_once_too():
  [row] = _with_copies((0, 30, False), (10, 20, False), (15, 40, True))
  assert row.bars["copy"] == [(0, 10), (20, 30)]
  assert row.bars["copies"] == [(10, 20)]
  assert (row.bars["link"], row.bars["links"]) == ([(15, 40)], [])


def test_many_workers_that_do_the_same_share_a_row_or_take_pages(tmp_path):
  [(_, found)] = _swapped().timeline.runs
  track = found.tracks[0]

  def many(count, delay_ps):
    tracks = []
    for i in range(count):
      end = track.intervals[0].end_ps + i * delay_ps
      first = type(track.intervals[0])("compute", 0, end)
      tracks.append(
        kernel_timeline.Track(
          index=i,
          device=i // 64,
          kind="vector subcore",
          coords=(("core", i // 16 % 4), ("subcore", i % 16)),
          intervals=(first,),
          copies=(),
        )
      )
    run = kernel_timeline.KernelTimeline(
      kernel="many",
      tracks=tuple(tracks),
      end_ps=2 * track.intervals[0].end_ps,
      chip_rates=found.chip_rates,
    )
    return kernel_timeline.in_sequence([run])

  [row] = picture_rows.rows(many(256, 0))
  assert row.label == "device 0-3, core 0-3, subcore 0-15  (x256)"
  [row] = picture_rows.rows(many(250, 0))
  assert row.label == "250 of device 0-3, core 0-3, subcore 0-15"
  # All end within the tolerance of the first, or none of the one before.
  end_ps = many(1, 0)[0][1].end_ps
  most_ps = int(end_ps * picture_rows.TOLERANCE)
  assert len(picture_rows.rows(many(2, most_ps))) == 1
  assert len(picture_rows.rows(many(256, most_ps + 1))) == 256
  pages = picture.save(many(66, most_ps + 1), tmp_path / "many.png")
  assert [p.name for p in pages] == ["many.png", "many-2.png"]
  assert all("#0b5cad" in _colours(page) for page in pages)


# --- requests that cannot be met ---------------------------------------------


def test_a_timeline_must_be_asked_for():
  with cm.simulation() as run:
    _swap()(_X)
  with pytest.raises(cm.UnsupportedError, match=r"simulation\(timeline=True\)"):
    run.timeline  # noqa: B018
  assert "modelled" not in str(run.report).lower()
  [entry] = run.report.as_dict()["runs"]
  assert entry["timeline"] is None


def test_a_simulation_without_kernels_has_no_timeline():
  with pytest.raises(cm.UnsupportedError, match="has run no kernel"):
    cm.Simulation().timeline  # noqa: B018


def test_a_timeline_is_asked_for_with_true_or_false():
  with pytest.raises(cm.UnsupportedError, match="timeline must be True or"):
    cm.SimulatorParams(timeline="out.png")  # type: ignore[arg-type]


def test_a_picture_is_a_png(tmp_path):
  with pytest.raises(cm.UnsupportedError, match="must end in '.png'"):
    _swapped().timeline.save_png(tmp_path / "run.pdf")


# --- the command -------------------------------------------------------------


def stuck_function():
  """What the command is asked to run: each core waits for ever."""
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(sem=pltpu.SemaphoreType.REGULAR),
  )
  def stuck(x_hbm, o_hbm, *, sem):
    cm.wait(sem)
    cm.copy(x_hbm, o_hbm)

  return support.over_devices(stuck, mesh)(_X)


def nothing():
  """What the command is asked to run: no kernel."""


def test_the_command_prints_the_report_and_writes_files(tmp_path, capsys):
  png, trace = tmp_path / "run.png", tmp_path / "run.json"
  words = ["simulate", "swap_cores", "--seed", "3", "--dma", "random"]
  words += ["--timeline", str(png), "--trace", str(trace)]
  assert main.main(words) == 0
  printed = capsys.readouterr().out
  [row] = [r for r in printed.splitlines() if "│ swap_cores │ 0-3" in r]
  assert row.replace("│", "").split()[2:5] == ["8", "3", "random"]
  assert "modelled time" in printed
  assert png.read_bytes().startswith(b"\x89PNG")
  assert json.loads(trace.read_text())["traceEvents"]


def test_the_command_exits_with_1_if_a_kernel_is_wrong(capsys):
  assert main.main(["simulate", f"{__name__}:stuck_function"]) == 1
  printed = capsys.readouterr().out
  assert "wait for ever" in printed
  assert "modelled" not in printed


@pytest.mark.parametrize(
  ("words", "reason"),
  [
    (["swap_cores", "--timeline", "run.pdf"], "must end in '.png'"),
    (["swap_core"], "no module 'examples.swap_core'"),
    ([f"{__name__}:nothing"], "ran no kernel"),
  ],
)
def test_the_command_says_why_a_request_cannot_be_met(words, reason, capsys):
  assert main.main(["simulate", *words]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert reason in err
