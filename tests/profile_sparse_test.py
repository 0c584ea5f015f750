"""Tests for coremesh.profile.sparse_cores: kernels of vector subcores.

The recorded programs add one to 8 x 128 words at a time, in 4 rounds.
"""

import functools
import importlib
import math
import re

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh.compiler.compiled import Operation
from coremesh.errors import UnsupportedError
from coremesh.profile import (
  effects,
  rates,
  scalar,
  sparse_assembly,
  sparse_cores,
  translate,
)
from coremesh.profile.events import Trace
from coremesh.profile.sparse_effects import SparseEffects
from tests import profiling, support

_RECORDED = {"v5p-subcores": "v5p:2x2x1", "tpu7x-subcores": "tpu7x:2x2x1"}
_FLAT = pltpu.CompilerParams(
  use_tc_tiling_on_sc=False, needs_layout_passes=False
)
_BLOCK_WORDS = 8 * 128
_ROUNDS = 4

recorded = pytest.mark.parametrize(("name", "chip"), [*_RECORDED.items()])
every_chip = pytest.mark.parametrize("chip", support.COMPILED_CHIPS)


def _trace(text: str, **where) -> Trace:
  [function] = [
    f for f in sparse_assembly.functions(text) if f.name.startswith("execute")
  ]
  code = translate.Code(function.program, delay_slots=0)
  place = effects.Place(core=0, **where)
  return scalar.run(code, SparseEffects(code, place), place)


def _timed(text: str, chip: str):
  operation = Operation(name="k", kernel="k", texts={"sparsecore": text})
  return sparse_cores.timed(operation, cm.chip(chip), hlo="")


@recorded
def test_every_round_copies_a_block_in_and_out(name, chip):
  trace, *_ = _timed(profiling.recorded(name), chip).traces
  moved = {k: 0 for k in ("read", "write")}
  for event in trace.each_event():
    if event.kind in moved:
      assert event.amount == _BLOCK_WORDS
      moved[event.kind] += 1
  assert moved == {"read": _ROUNDS, "write": _ROUNDS}
  assert not trace.assumed


@recorded
def test_bundles_are_issued_so_often_that_each_register_is_stored_once(
  name, chip
):
  """Which is so with the right number of delay slots alone."""
  text = profiling.recorded(name)
  lanes = cm.chip(chip).sparse_core_lanes

  def stores() -> int:
    trace = _trace(text)
    functions = sparse_assembly.functions(text)
    program = functions[-1].program
    executions = trace.executions(len(program.bundles))
    return sum(
      int(executions[b.index]) * [s.opcode for s in b.slots].count("vst")
      for b in program.bundles
    )

  copies = 2 * _ROUNDS  # Beside each stands a store of nothing.
  expected = _ROUNDS * _BLOCK_WORDS // lanes + copies
  assert stores() == expected
  if "$4" in text:  # It says how many itself.
    return
  for wrong in (1, 3):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(sparse_assembly, "_DELAY_SLOTS", wrong)
      try:
        assert stores() != expected
      except UnsupportedError as error:  # Its counter does not change.
        assert "has no end" in str(error)


@recorded
def test_all_subcores_of_a_device_run_and_share_its_hbm(name, chip):
  found = _timed(profiling.recorded(name), chip)
  device = cm.chip(chip)
  subcores = device.vector_subcores_per_sparse_core
  count = device.sparse_cores_per_device * subcores
  scalar_subcores = device.sparse_cores_per_device
  assert [t.core for t in found.traces] == list(range(count + scalar_subcores))
  assert found.num_starters == scalar_subcores
  read = sum(t.read_bytes for t in found.timings["central"])
  assert read == count * _ROUNDS * _BLOCK_WORDS * 4
  for which, cores in found.timings.items():
    assert all(not core.left_over for core in cores)
    rate = found.rates.hbm(which)
    assert max(c.cycles for c in cores) >= 2 * read / rate.bytes_per_cycle


def test_a_block_of_double_the_words_takes_longer_by_their_transfer():
  text = profiling.recorded("v5p-subcores")
  double = text.replace("$0x400, $0x38", "$0x800, $0x38")
  double = re.sub(r"(swait\.ge \[sflag:s\d+\], )\$0x400", r"\1$0x800", double)
  double = double.replace("0xFFFFFC00", "0xFFFFF800")
  assert double != text
  one, two = (_timed(t, "v5p:2x2x1") for t in (text, double))
  ends = [max(c.cycles for c in f.timings["central"]) for f in (one, two)]
  moved = sum(c.read_bytes + c.written_bytes for c in one.timings["central"])
  rate = one.rates.hbm("central").bytes_per_cycle
  # What is moved more holds HBM for longer; latencies stay.
  assert 0.5 * moved / rate <= ends[1] - ends[0] <= 1.5 * moved / rate


def test_without_its_copy_the_deadlock_names_the_wait():
  text = profiling.recorded("v5p-subcores")
  cut = re.sub(
    r"\[tilespmem:\w+\], \[sflag:[^=]*= stream\.linear\.gather[^;]*;",
    "",
    text.replace("\t", " "),
  )
  with pytest.raises(UnsupportedError) as error:
    _timed(cut, "v5p:2x2x1")
  assert "core 0 of device 0 waits at bundle" in str(error.value)
  assert "to hold 1024, where all that is sent to it makes 0" in str(
    error.value
  )


def test_a_stream_of_a_form_that_is_not_known_is_named():
  text = profiling.recorded("v5p-subcores")
  other = text.replace("stream.linear.gather", "stream.folded.gather")
  with pytest.raises(UnsupportedError, match="stream.folded.gather: a copy of"):
    _timed(other, "v5p:2x2x1")


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("tec\nexecute0:\n0x0: { _ = snop  }\n.Lfunc_end0:\n", "that halts"),
    ("tec\nexecute0:\n0x0: { nonsense  }\n0x1: { _ = shalt }\n.Lfunc_end0:\n",
     "'result = opcode operands'"),
    ("tec\nexecute0:\n0x0: { (pc) = sbr.rel .L1-.L2 }\n0x1: { _ = shalt }\n"
     ".Lfunc_end0:\n", "a label of their function"),
  ],
)  # fmt: skip
def test_text_of_another_form_is_an_error_that_says_so(text, expected):
  with pytest.raises(UnsupportedError, match=expected):
    sparse_assembly.functions(text)


def test_a_delay_is_so_many_empty_bundles():
  text = (
    "tec\nexecute0:\n0x0: { s1 = simm.s32 $0x3; _ = sdelay $0x4  }\n"
    "0x1: { _ = sdelay $0x1 }\n0x2: { _ = shalt }\n.Lfunc_end0:\n"
  )
  assert _trace(text).cycles == 5 + 2 + 1


def test_a_stream_by_indices_is_so_many_words_for_each():
  text = (
    "tec\nexecute0:\n0x0: { s1 = simm.s32 $0x7  }\n"
    "0x1: { [tilespmem:s1], [sflag:$0x2] = stream.indirect.gather"
    " [hbm4b:s1+s1], $0x80, s1, s1, $0xb8  }\n0x2: { _ = shalt }\n"
    ".Lfunc_end0:\n"
  )
  [event] = _trace(text).each_event()
  assert (event.kind, event.flag, event.amount) == ("read", 2, 7 * 0x80)
  assert event.unit_bytes == 4


def _shared(member: int) -> str:
  """A copy of 3 granules into shared memory that signals a subcore."""
  return (
    "tec\nexecute0:\n"
    f"0x0: {{ s1 = simm.s32 ${0x1C00 | member << 6 | 2:#x}  }}\n"
    "0x1: { [spmem:s1], [sflag:s1] = dma.local [hbm:s1], $0x3  }\n"
    "0x2: { _ = swait.ge [sflag:$0x2], $0x3  }\n0x3: { _ = shalt }\n"
    ".Lfunc_end0:\n"
  )


def test_a_copy_into_shared_memory_counts_granules():
  copy, wait = _trace(_shared(5), member=5).each_event()
  assert (copy.kind, copy.flag, copy.amount * copy.unit_bytes) == (
    "read",
    2,
    96,
  )
  assert (wait.flag, wait.amount) == (2, 3)


def test_a_copy_that_signals_another_subcore_is_an_error():
  with pytest.raises(UnsupportedError, match="it signals another subcore"):
    _trace(_shared(4), member=5)


def test_where_a_subcore_is_is_what_it_reads():
  text = (
    "tec\nexecute0:\n0x0: { s1 = srdreg.scid;\n s2 = stileid.u32  }\n"
    "0x1: { s1 = sshll.u32 s1, $0x4  }\n0x2: { s1 = sor.u32 s1, s2  }\n"
    "0x3: { _ = swait.ge [sflag:$0x1], s1  }\n0x4: { _ = shalt }\n"
    ".Lfunc_end0:\n"
  )
  [event] = _trace(text, group=3, member=5).each_event()
  assert event.amount == 3 * 16 + 5


@functools.cache
def _predicted(chip: str, rows: int) -> cm.OperationPrediction:
  fn, args = profiling.subcores(rows, chip)
  [found] = cm.predict(fn, *args, chip=chip).kernels
  return found


@every_chip
def test_a_kernel_of_subcores_is_predicted_with_its_assumptions(chip):
  device = cm.chip(chip)
  workers = (
    device.sparse_cores_per_device * device.vector_subcores_per_sparse_core
  )
  small, large = (_predicted(chip, 8 * workers * n) for n in (4, 64))
  for found, rounds in ((small, 4), (large, 64)):
    num_bytes = 2 * 4 * 8 * 128 * workers * rounds
    moved = sum(c.read_bytes + c.written_bytes for c in found.cores)
    assert moved == num_bytes
    assert found.microseconds.low > found.floor_microseconds
    assert "half to all of the TensorCore's clock" in found.assumed[0]
    assert "for the scalar subcore to start the others" in found.assumed[1]
    assert found.microseconds.high > 1.5 * found.microseconds.low
  assert large.microseconds.central > 4 * small.microseconds.central


@every_chip
def test_the_example_of_subcores_is_predicted(chip):
  example = importlib.import_module("examples.sc_add_one")
  config = importlib.import_module("configs.sc_add_one").get_config()
  device = cm.chip(chip)
  make, args = example.case(device, config)
  fn = make(device, device.device_mesh("device", on="compiler"))
  [found] = cm.predict(fn, *args).kernels
  size = config.rows_per_device * config.columns * 4
  assert sum(c.read_bytes for c in found.cores) == size
  assert sum(c.written_bytes for c in found.cores) == size
  latency = rates.rates(device).hbm_latency_seconds.fast * 1e6
  assert found.microseconds.low > 2 * latency


# --- scalar subcores, and subcores that send to each other -------------------


def _scalar_and_vector(chip):
  """Scalar subcores copy a row for each vector subcore and tell it so."""
  count = chip.vector_subcores_per_sparse_core
  rows = chip.sparse_cores_per_device * count
  scalars, vectors = chip.scalar_subcores("core"), chip.vector_subcores("core")

  def scalar_body(x_hbm, o_hbm, told):
    core = lax.axis_index("core")

    @pl.loop(0, count)
    def _(subcore):
      row = core * count + subcore
      pltpu.sync_copy(x_hbm.at[rows - 1 - row], o_hbm.at[row])
      where = {"core": core, "subcore": subcore}
      pl.semaphore_signal(told, 1, device_id=where)

  def vector_body(x_hbm, o_hbm, told):
    row = lax.axis_index("core") * count + lax.axis_index("subcore")
    pl.semaphore_wait(told, 1)

    def inside(line):
      pltpu.sync_copy(o_hbm.at[row], line)
      pltpu.sync_copy(line, o_hbm.at[row])

    pl.run_scoped(inside, pltpu.VMEM((16,), jnp.int32))

  x = jax.ShapeDtypeStruct((rows, 16), jnp.int32)
  told = pltpu.SemaphoreType.REGULAR @ vectors
  kernel = pl.kernel(
    [scalar_body, vector_body],
    out_type=x,
    mesh=[scalars, vectors],
    scratch_types=[told],
    compiler_params=_FLAT,
  )
  # HBM to HBM by the scalar subcores, then in and out by the vector subcores.
  return kernel, x, 2 * rows * 64


def _exchange(chip, cores, axes, memory, barrier_axis):
  """Each subcore hands what it has read to the next along an axis."""

  def body(x_hbm, o_hbm, *, mine, theirs):
    own = cm.slab(x_hbm, over=axes)
    cm.copy(x_hbm.at[own], mine)
    cm.core_barrier(barrier_axis)
    cm.put(mine, theirs, to=cm.shifted(barrier_axis)).wait()
    cm.copy(theirs, o_hbm.at[own])

  rows = math.prod(cores.shape.values())
  x = jax.ShapeDtypeStruct((rows * 1024,), jnp.int32)
  block = memory((1024,), jnp.int32)
  kernel = cm.kernel(
    body,
    mesh=cores,
    out=cm.like(0),
    scratch=dict(mine=block, theirs=block),
    compiler_params=_FLAT,
  )
  return kernel, x, rows * 4096


_SENDING = {
  "scalar and vector": _scalar_and_vector,
  "between SparseCores": lambda chip: _exchange(
    chip, chip.scalar_subcores(), "core", pltpu.SMEM, "core"
  ),
  "between subcores": lambda chip: _exchange(
    chip, chip.vector_subcores(), ("core", "subcore"), pltpu.VMEM, "subcore"
  ),
}


@every_chip
@pytest.mark.parametrize("make", _SENDING.values(), ids=_SENDING)
def test_subcores_that_send_to_each_other_end_and_leave_nothing_over(
  make, chip
):
  """Which is so if each signal and copy reaches whom it is for."""
  device = cm.chip(chip)
  kernel, x, num_bytes = make(device)
  mesh = device.device_mesh("device", on="compiler")
  fn = support.over_devices(kernel, mesh, check_vma=False)
  x = jax.ShapeDtypeStruct((mesh.size * x.shape[0], *x.shape[1:]), x.dtype)
  compiled = cm.compile(fn, x)
  [operation] = [o for o in compiled.operations if o.kernel]
  found = sparse_cores.timed(
    operation, device, hlo=compiled.text("hlo"), num_devices=mesh.size
  )
  for cores in found.timings.values():
    assert not any(core.left_over for core in cores)
  central = found.timings["central"]
  assert sum(core.read_bytes for core in central) == num_bytes
  assert sum(core.written_bytes for core in central) == num_bytes
  assert not any(trace.assumed for trace in found.traces)
  [predicted] = cm.predict(compiled).kernels
  assert predicted.microseconds.low > predicted.floor_microseconds


def _scalar(text: str) -> Trace:
  """What a scalar subcore does, whose last function is given."""
  function = sparse_assembly.scalar_function(f"scs\n{text}")
  code = translate.Code(function.program, delay_slots=0)
  place = effects.Place(core=0, group=1, member=16)
  done = SparseEffects(code, place)
  done.begin_scalar(cm.chip("v6e"))
  return scalar.run(code, done, place)


def test_a_copy_inside_hbm_reads_and_writes_it():
  [_, read, write] = _scalar(
    "main:\n0x0: { [hbm:s1], [sflag:$0x9] = dma.local [hbm:s1], $0x80  }\n"
  ).each_event()
  assert (read.kind, write.kind) == ("read", "write")
  assert read.amount == write.amount == 0x80
  assert (read.flag, write.flag) == (-1, 9)


def test_a_semaphore_is_made_empty_before_its_first_use():
  [_, event] = _scalar(
    "main:\n0x0: { [sflag:$0x9] = ssyncpa.u1 $0x0  }\n"
  ).each_event()
  assert (event.kind, event.flag, event.amount) == ("set", 9, 0)


def test_what_a_task_hands_over_is_what_vector_subcores_start_with():
  text = (
    "main:\n0x0: { [dreg:$0x0] = wrdreg $0xFFFFFFFF;\n"
    " [dreg:$0x1] = wrdreg $0x60  }\n"
    "0x1: { [dreg:$0x2] = wrdreg $0x7  }\n"
    "0x2: { _ = task.clear_ibuf [dreg:s18], $0x3FFFF  }\n"
  )
  signals = [e.to for e in _scalar(text).each_event() if e.kind == "signal"]
  assert len({to.core for to in signals if to}) == len(signals) == 16
  with pytest.raises(UnsupportedError, match="starts its vector subcores ag"):
    _scalar(text + text.partition("main:\n")[2])


def test_vector_subcores_that_nobody_starts_are_an_error():
  text = profiling.recorded("v5p-subcores")
  cut = re.sub(r"_ =\s*task[^;}]*", "_ = snop", text)
  with pytest.raises(UnsupportedError, match="does not start the vector"):
    _timed(cut, "v5p:2x2x1")
