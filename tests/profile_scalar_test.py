"""Tests for coremesh.profile.scalar: what runs, how often, on what grounds."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from coremesh.errors import UnsupportedError
from coremesh.profile import bundles, events, machine, scalar, values
from tests import profiling

_HEAD = "= control target key start\n"
_OPERAND = "inlined_call_operand.<no memory space> [shape: s32[1], index: 0]"


def _program(*lines: str) -> bundles.Program:
  return bundles.parse(
    _HEAD
    + "".join(
      f"{hex(i) if i else '0'}   : {{ {line} }}\n"
      for i, line in enumerate(lines)
    )
  )


def _trace(*lines: str, **options: Any) -> events.Trace:
  defaults: dict[str, Any] = {"core": 0, "delay_slots": 1}
  return scalar.trace(_program(*lines), **(defaults | options))


def _seen(*lines: str, read: str, **options) -> int:
  """What a register holds after some bundles: the amount of a delay."""
  trace = _trace(*lines, f"%99 = vdelay {read}", **options)
  [event] = [e for e in trace.each_event() if e.kind == "delay"]
  assert not trace.assumed
  return event.amount


_WORD = st.integers(0, values.MASK)


@given(_WORD, _WORD)
def test_arithmetic_is_that_of_32_bit_words(a, b):
  x, y = np.uint32(a), np.uint32(b)
  shift = b % 40
  expected = {
    ("sadd.s32", b): a + b,
    ("ssub.s32", b): a - b,
    ("smul.u32", b): a * b,
    ("smulhi.u32", b): (a * b) >> 32,
    ("sand.u32", b): x & y,
    ("sor.u32", b): x | y,
    ("sxor.u32", b): x ^ y,
    ("smin.u32", b): min(a, b),
    ("smax.s32", b): max(x.view(np.int32), y.view(np.int32)),
    ("sshll.u32", shift): a << shift if shift < 32 else 0,
    ("sshrl.u32", shift): a >> shift,
    ("sshra.s32", shift): int(x.view(np.int32)) >> min(shift, 31),
  }
  for (opcode, second), value in expected.items():
    found = _seen(
      f"%s1_s0 = smov {a}", f"%s2_s1 = {opcode} %s1_s0, {second}", read="%s2_s1"
    )
    assert found & values.MASK == int(value) & values.MASK, opcode


@given(_WORD, _WORD)
def test_comparisons_are_signed_or_not_as_they_say(a, b):
  x, y = (int(np.uint32(n).view(np.int32)) for n in (a, b))
  for opcode, holds in {
    "lt.s32": x < y,
    "lt.u32": a < b,
    "ge.s32": x >= y,
    "le.u32": a <= b,
    "eq.s32": a == b,
  }.items():
    found = _seen(
      f"%s1_s0 = smov {a}",
      f"%p2_p0 = scmp.{opcode}.totalorder %s1_s0, {b}",
      "%s3_s1 = scalar_select /*predicate=*/%p2_p0, /*on_true=*/7,"
      " /*on_false=*/3",
      read="%s3_s1",
    )
    assert found == (7 if holds else 3), opcode


def test_slots_of_a_bundle_read_what_was_before_it():
  found = _seen(
    "%s1_s0 = smov 1 ;; %s2_s1 = smov 2",
    "%s3_s0 = sadd.s32 %s2_s1, 0 ;; %s4_s1 = sadd.s32 %s1_s0, 0",
    "%s5_s2 = ssub.s32 %s3_s0, %s4_s1",
    read="%s5_s2",
  )
  assert found == 1


def test_a_pointer_conversion_reads_what_its_bundle_writes():
  lines = (
    "%s1_s0 = smov 5",
    "%s2_s0 = sshll.u32 %s1_s0, 4 ;;"
    " %s3_s0 = int_to_ptr.vmem [resolvable:$true] %s2_s0",
  )
  assert _seen(*lines, read="%s3_s0") == 80


@pytest.mark.parametrize(("n", "expected"), [(4, 9), (5, 2)])
def test_a_slot_whose_predicate_is_false_leaves_the_other_value(n, expected):
  found = _seen(
    f"%s1_s0 = smov {n} ;; %s2_s1 = smov 2",
    "%p3_p0 = scmp.eq.s32.totalorder %s1_s0, 4",
    "%s4_s1 = smov (%p3_p0, %s2_s1), 9",
    read="%s4_s1",
  )
  assert found == expected


def test_quotient_and_remainder():
  lines = ("%s1_s0 = smov 47", "%7 = sdivrem.u32 %s1_s0, 10 /* kRem */")
  assert _seen(*lines, "%s2_s1 = spop.drf %7", read="%s2_s1") == 7
  lines = ("%s1_s0 = smov 47", "%7 = sdivrem.u32 %s1_s0, 10 /* kDiv */")
  assert _seen(*lines, "%s2_s1 = spop.drf %7", read="%s2_s1") == 4


def _loop(rounds: str, first: str = "%s1_s0 = smov 0") -> tuple[str, ...]:
  """Bundles 1 to 4 as often as `rounds` says; 5 cycles around them."""
  return (
    f"%s9_s5 = {_OPERAND} ;; {first}",
    "%s2_s0 = sphi %s1_s0, %s3_s0 ;; %s3_s0 = sadd.s32 1, %s2_s0",
    f"%p4_p0 = scmp.lt.s32.totalorder %s3_s0, {rounds}",
    "%5 = sbr.rel (%p4_p0) target bundleno = 1 (0x1)",
    "%v6_v0 = vadd.f32 %v1_v1, %v2_v2",
    "%7 = sfence",
  )


@pytest.mark.parametrize("rounds", [1, 2, 7, 100_000])
def test_a_loop_runs_as_often_as_its_registers_say(rounds):
  trace = _trace(*_loop(str(rounds)))
  assert trace.cycles == 2 + 4 * rounds
  assert list(trace.executions(6)) == [1, *[rounds] * 4, 1]
  assert not trace.assumed


def test_delay_slots_are_issued_whether_or_not_the_branch_is_taken():
  trace = _trace(*_loop("3"))
  assert list(trace.executions(6))[4] == 3


def test_a_loop_whose_end_data_decide_is_assumed_and_named():
  trace = _trace(*_loop("%s9_s5"))
  assert trace.cycles == 2 + 4 * machine.ASSUMED_TRIPS
  [text] = trace.assumed
  assert "the branch at bundle 0x3 depends on operand 0 (s32[1])" in text


def test_a_loop_whose_end_is_given_is_exact():
  words = {0: np.array([23], np.uint32)}
  trace = _trace(*_loop("%s9_s5"), operands=words)
  assert trace.cycles == 2 + 4 * 23
  assert not trace.assumed


def test_a_program_that_does_not_end_is_an_error(monkeypatch):
  monkeypatch.setattr(machine, "_MOST_ROUNDS", 1000)
  with pytest.raises(UnsupportedError, match="has run 1,000 times"):
    _trace(
      "%s1_s0 = smov 1",
      "%s2_s0 = sphi %s1_s0, %s3_s0 ;; %s3_s0 = smul.u32 3, %s2_s0",
      "%1 = sbr.rel target bundleno = 1 (0x1)",
      "%2 = sfence",
    )


def test_a_core_reads_its_own_number():
  line = "%s1_s0 = sld [smem:[#allocation0]] /* megacore core id :: core id */"
  assert [_seen(line, read="%s1_s0", core=c) for c in (0, 1)] == [0, 1]


def test_a_core_reads_its_own_number_by_an_address_in_a_register():
  lines = (
    "%s1_s0 = sld [smem:[#allocation0]] /* core id */",
    "%s2_s1 = scalar_select %p0_p0, [#allocation3], [#allocation0]",
    "%s3_s2 = sld [smem:[%s2_s1]]",
  )
  lines = ("%p0_p0 = scmp.lt.s32.totalorder 2, 1", *lines)
  assert [_seen(*lines, read="%s3_s2", core=c) for c in (0, 1)] == [0, 1]


def test_what_is_stored_is_loaded_at_the_same_address_only():
  lines = (
    "%s1_s0 = smov 3",
    "%2 = sst [smem:[#allocation4 + %s1_s0]] %s1_s0",
    "%s3_s1 = sld [smem:[#allocation4 + $0x3]]",
  )
  assert _seen(*lines, read="%s3_s1") == 3
  lines = (*lines[:2], "%s3_s1 = sld [smem:[#allocation4 + $0x2]]")
  trace = _trace(*lines, "%9 = vdelay %s3_s1")
  assert "a word of SMEM that was not written" in trace.assumed[0]


def test_an_opcode_that_is_not_known_is_named_only_if_it_matters():
  lines = ("%s1_s0 = smov 1", "%s2_s1 = sfancy.u32 %s1_s0, 1")
  assert not _trace(*lines).assumed
  [text] = _trace(*lines, "%9 = vdelay %s2_s1").assumed
  assert "the opcode sfancy.u32 (bundle 0x1)" in text


def test_zero_and_anything_is_zero():
  lines = (f"%s1_s0 = {_OPERAND}", "%s2_s1 = sand.u32 0, %s1_s0")
  assert _seen(*lines, read="%s2_s1") == 0


@pytest.mark.parametrize(
  ("line", "expected"),
  [
    ("%1 = vsyncadd.remote.done %s1_s0, 1", "a signal or wait of a form"),
    ("%1 = vwait.ne [#allocation2], 0", "a signal or wait of a form"),
    ("%1 = dma.general /*src=*/%s1_s0", "a copy of a form that is not known"),
    ("%1 = inlined_call", "inlined_call: a call, which cm.predict does not"),
  ],
)
def test_what_decides_when_things_happen_must_be_known(line, expected):
  with pytest.raises(UnsupportedError, match=expected):
    _trace("%s1_s0 = smov 1", line)


def test_an_instruction_that_is_not_known_is_named_and_assumed():
  trace = _trace("%s1_s0 = smov 1", "%2 = snew.u32 %s1_s0", "%3 = sfence")
  assert trace.cycles == 3
  [found] = trace.assumed
  assert "the instruction snew.u32 at bundle 0x1 is not known" in found


def test_a_note_of_the_compiler_is_read_beside_the_line_of_the_program():
  note = '/* megacore core id :: loc("a.py":3:1 to :2) :: core id */'
  line = f"%s1_s0 = sld [smem:[#allocation0]] {note}"
  assert _seen(line, read="%s1_s0", core=1) == 1
  assert _program(line).bundles[0].slots[0].source == "a.py:3"


def test_a_check_that_fails_is_an_error():
  with pytest.raises(UnsupportedError, match="BoundsCheck 3.*halt the core"):
    _trace("%1 = shalt.err /* BoundsCheck 3 */")


def test_a_read_of_another_value_is_an_error():
  with pytest.raises(UnsupportedError, match=r"holds value 2 there"):
    _trace("%s1_s0 = smov 1", "%s2_s0 = smov 1", "%9 = vdelay %s1_s0")
  with pytest.raises(UnsupportedError, match="reads %s1_s0 and finds no value"):
    _trace("%9 = vdelay %s1_s0")


@pytest.mark.parametrize("slots", [5, 7])
def test_a_wrong_number_of_delay_slots_is_found(slots):
  with pytest.raises(UnsupportedError, match=f"{slots} delay slots"):
    program = bundles.parse(profiling.recorded("v5p-gather"))
    scalar.trace(
      program,
      core=0,
      delay_slots=slots,
      operands={0: np.arange(16, dtype=np.uint32)},
    )


@pytest.mark.parametrize("name", ["v5p-gather", "v6e-gather"])
def test_a_table_steers_which_blocks_are_copied(name):
  program = bundles.parse(profiling.recorded(name))

  def reads(table):
    words = {0: np.array(table, np.uint32)}
    trace = scalar.trace(program, core=0, delay_slots=4, operands=words)
    assert not trace.assumed
    blocks = [
      e for e in trace.each_event() if e.kind == "read" and e.amount > 1000
    ]
    return len(blocks)

  assert reads(range(16)) == 16
  assert reads([5] * 16) == 1
  assert reads([0, 0, 1, 1] * 4) == 8
  assert scalar.trace(program, core=0, delay_slots=4).assumed


def test_both_cores_of_a_device_share_the_blocks():
  program = bundles.parse(profiling.recorded("v5p-double"))
  for core in (0, 1):
    trace = scalar.trace(program, core=core, delay_slots=4)
    reads = [e.amount for e in trace.each_event() if e.kind == "read"]
    assert reads == [8 * 1024 * 4 // events.GRANULE_BYTES] * 4
    assert not trace.assumed


# --- rounds that are proven alike and skipped -------------------------------


def _nested(outer: int, inner: int, body: str) -> bundles.Program:
  """Two loops around a slot that may read the counters s3_s0 and s23_s4.

  The inner loop starts a copy whose semaphore alternates, as double buffers do.
  """
  return _program(
    "%s20_s4 = smov 0 ;; %s40_s6 = smov 1 ;; %s50_s7 = smov 0",
    "%s22_s4 = sphi %s20_s4, %s23_s4 ;; %s23_s4 = sadd.s32 1, %s22_s4 ;;"
    " %s51_s7 = sphi %s50_s7, %s59_s7 ;; %s41_s6 = sphi %s40_s6, %s49_s6",
    "%s1_s0 = smov 0",
    "%s2_s0 = sphi %s1_s0, %s3_s0 ;; %s52_s7 = sphi %s51_s7, %s59_s7 ;;"
    " %s42_s6 = sphi %s41_s6, %s49_s6 ;; %s59_s7 = sadd.s32 1, %s52_s7",
    "%s3_s0 = sadd.s32 1, %s2_s0 ;; %s60_s8 = sand.u32 1, %s59_s7",
    f"%s61_s9 = scalar_lea.sflag [#allocation5], %s60_s8 ;; {body}",
    f"%p4_p0 = scmp.lt.s32.totalorder %s3_s0, {inner}",
    "%70 = dma.hbm_to_vmem /*hbm=*/%s59_s7, /*size_in_granules=*/64,"
    " /*vmem=*/0, /*dst_syncflagno=*/%s61_s9",
    "%71 = dma.done.wait %s61_s9, 64",
    "%5 = sbr.rel (%p4_p0) target bundleno = 3 (0x3) ;;"
    " %72 = vsyncadd %s61_s9, 4294967232",
    f"%p6_p1 = scmp.lt.s32.totalorder %s23_s4, {outer}",
    "%7 = sbr.rel (%p6_p1) target bundleno = 1 (0x1)",
    "%8 = sfence",
    "%9 = vdelay %s49_s6",
  )


_BODIES = {
  "a word that stays": "%s49_s6 = sadd.s32 0, %s42_s6",
  "a word that grows": "%s49_s6 = sadd.s32 7, %s42_s6",
  "a word that wraps": "%s49_s6 = sadd.s32 1073741827, %s42_s6",
  "a word that is multiplied": "%s49_s6 = smul.u32 3, %s42_s6",
  "bits that grow": "%s49_s6 = sxor.u32 %s3_s0, %s42_s6",
  "what is smaller": "%s49_s6 = smin.s32 %s59_s7, 500",
  "a counter shifted": "%s49_s6 = sshrl.u32 %s59_s7, 3",
  "a word of SMEM": "%s49_s6 = sadd.s32 1, %s42_s6 ;;"
  " %73 = sst [smem:[#allocation6]] %s42_s6",
  "a growing address": "%s49_s6 = sadd.s32 1, %s42_s6 ;;"
  " %73 = sst [smem:[#allocation6 + %s59_s7]] %s42_s6",
  "another loop's counter": "%s49_s6 = sadd.s32 %s23_s4, %s42_s6",
}


@pytest.mark.parametrize("sizes", [(1, 3000), (5, 700), (200, 4)])
@pytest.mark.parametrize("body", _BODIES.values(), ids=_BODIES)
def test_skipping_rounds_changes_nothing(
  body, sizes: tuple[int, int], monkeypatch
):
  program = _nested(*sizes, body)
  found = scalar.trace(program, core=0, delay_slots=1)
  monkeypatch.setattr(machine, "FIRST_TRY", 1 << 60)
  expected = scalar.trace(program, core=0, delay_slots=1)
  assert expected.skipped == 0
  assert found.cycles == expected.cycles
  assert list(found.each_event()) == list(expected.each_event())
  assert found.runs == expected.runs
  assert found.assumed == expected.assumed == ()


def _grid(rows: int, columns: int) -> bundles.Program:
  """One loop over the blocks of a grid, as libtpu makes of two axes.

  Each round copies the block of a row (s11) and a column (s21), into one of two
  buffers in turn.
  """
  return _program(
    "%s10_s1 = smov 0 ;; %s20_s2 = smov 0 ;; %s30_s3 = smov 0",
    "%s11_s1 = sphi %s10_s1, %s13_s1 ;; %s21_s2 = sphi %s20_s2, %s23_s2 ;;"
    " %s31_s3 = sphi %s30_s3, %s32_s3 ;; %s40_s4 = smul.u32 1000, %s11_s1 ;;"
    " %s41_s5 = sand.u32 1, %s31_s3",
    "%s42_s4 = sadd.s32 %s40_s4, %s21_s2 ;; %s22_s6 = sadd.s32 1, %s21_s2 ;;"
    " %s12_s7 = sadd.s32 1, %s11_s1 ;; %s32_s3 = sadd.s32 1, %s31_s3 ;;"
    " %s43_s5 = scalar_lea.sflag [#allocation5], %s41_s5",
    f"%p50_p0 = scmp.ge.s32.totalorder %s22_s6, {columns} ;;"
    f" %p51_p1 = scmp.lt.s32.totalorder %s32_s3, {rows * columns}",
    "%s23_s2 = scalar_select %p50_p0, 0, %s22_s6 ;;"
    " %s13_s1 = scalar_select %p50_p0, %s12_s7, %s11_s1",
    "%60 = dma.hbm_to_vmem /*hbm=*/%s42_s4, /*size_in_granules=*/64,"
    " /*vmem=*/0, /*dst_syncflagno=*/%s43_s5",
    "%61 = dma.done.wait %s43_s5, 64",
    "%62 = sbr.rel (%p51_p1) target bundleno = 1 (0x1) ;;"
    " %63 = vsyncadd %s43_s5, 4294967232",
    "%8 = vdelay %s42_s4",
    "%9 = sfence",
  )


@pytest.mark.parametrize("columns", [64, 101])
def test_rows_of_a_grid_are_skipped_as_well_as_rounds(columns, monkeypatch):
  program = _grid(200, columns)
  found = scalar.trace(program, core=0, delay_slots=1)
  monkeypatch.setattr(machine, "FIRST_TRY", 1 << 60)
  expected = scalar.trace(program, core=0, delay_slots=1)
  assert found.cycles == expected.cycles
  assert list(found.each_event()) == list(expected.each_event())
  assert found.runs == expected.runs
  assert not found.assumed
  # Each row that is not skipped leaves what was skipped of it.
  assert sum(isinstance(e, events.Repeat) for e in found.events) < 200 / 2


def test_a_loop_of_five_million_rounds_is_not_run_round_by_round():
  body = _BODIES["a word that grows"]
  found = scalar.trace(_nested(1, 4_900_000, body), core=0, delay_slots=1)
  assert found.skipped > 0.9999 * found.cycles
  assert len(found.events) < 1000


def test_a_loop_that_is_proven_never_to_end_is_an_error():
  with pytest.raises(UnsupportedError, match="bundle 0x0 has no end"):
    _trace("%1 = sbr.rel target bundleno = 0 (0x0)", "%2 = sfence")


def _general(
  source: str, other_flag: int, overrides: str = ""
) -> tuple[str, ...]:
  """A copy by a table of strides."""
  return (
    "%s1_s0 = smov 64 ;; %s2_s1 = smov 128",
    f"%s3_s2 = scalar_lea.{source} %s1_s0, 8 ;;"
    " %s4_s3 = scalar_lea.vmem %s2_s1, 0",
    "%5 = dma.general /*src=*/%s3_s2, /*size_in_granules=*/77,"
    f" /*dst=*/%s4_s3, /*dst_syncflagno=*/9, /*src_syncflagno=*/{other_flag},"
    f" /*stridedescaddr=*/[#allocation6]{overrides}",
  )


def test_a_copy_by_a_table_of_strides_moves_its_bytes():
  [event] = _trace(*_general("hbm", 131072)).each_event()
  assert (event.kind, event.flag, event.amount) == ("read", 9, 77)


@pytest.mark.parametrize(("bits", "kind"), [(0, "local"), (1 << 14, "send")])
def test_the_overrides_of_a_copy_say_whether_it_leaves_the_core(bits, kind):
  lines = _general("vmem", 5, f", /*overrides=*/{bits}")
  [event] = _trace(*lines).each_event()
  assert (event.kind, event.amount) == (kind, 77)


@pytest.mark.parametrize(("source", "flag"), [("vmem", 131072), ("hbm", 5)])
def test_a_copy_that_may_leave_the_core_is_refused(source, flag):
  with pytest.raises(UnsupportedError, match="a copy of a form that is not"):
    _trace(*_general(source, flag))
