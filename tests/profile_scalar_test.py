"""Tests for coremesh.profile.scalar: what runs, how often, on what grounds."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from coremesh.errors import UnsupportedError
from coremesh.profile import bundles, scalar, values
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


def _trace(*lines: str, **options) -> scalar.Trace:
  options = {"core": 0, "delay_slots": 1} | options
  return scalar.trace(_program(*lines), **options)


def _seen(*lines: str, read: str, **options) -> int:
  """What a register holds after some bundles: the amount of a delay."""
  trace = _trace(*lines, f"%99 = vdelay {read}", **options)
  [event] = [e for e in trace.events if e.kind == "delay"]
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
  assert trace.cycles == 2 + 4 * scalar.ASSUMED_TRIPS
  [text] = trace.assumed
  assert "the branch at bundle 0x3 depends on operand 0 (s32[1])" in text


def test_a_loop_whose_end_is_given_is_exact():
  words = {0: np.array([23], np.uint32)}
  trace = _trace(*_loop("%s9_s5"), operands=words)
  assert trace.cycles == 2 + 4 * 23
  assert not trace.assumed


def test_a_program_that_never_ends_is_an_error(monkeypatch):
  monkeypatch.setattr(scalar, "_MOST_STRETCHES", 1000)
  with pytest.raises(UnsupportedError, match="does not end within 1,000"):
    _trace("%1 = sbr.rel target bundleno = 0 (0x0)", "%2 = sfence")


def test_a_core_reads_its_own_number():
  line = "%s1_s0 = sld [smem:[#allocation0]] /* megacore core id :: core id */"
  assert [_seen(line, read="%s1_s0", core=c) for c in (0, 1)] == [0, 1]


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
    ("%1 = vsyncadd.remote %s1_s0, 1", "copy or signal to another core"),
    ("%1 = vwait.ge.trace [#allocation2], 0", "a wait for another core"),
    ("%1 = dma.general /*src=*/%s1_s0", "copy or signal to another core"),
    ("%1 = inlined_call", "an instruction that is not modelled"),
  ],
)
def test_what_cores_do_to_each_other_is_refused(line, expected):
  with pytest.raises(UnsupportedError, match=expected):
    _trace("%s1_s0 = smov 1", line)


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
    blocks = [e for e in trace.events if e.kind == "read" and e.amount > 1000]
    return len(blocks)

  assert reads(range(16)) == 16
  assert reads([5] * 16) == 1
  assert reads([0, 0, 1, 1] * 4) == 8
  assert scalar.trace(program, core=0, delay_slots=4).assumed


def test_both_cores_of_a_device_share_the_blocks():
  program = bundles.parse(profiling.recorded("v5p-double"))
  for core in (0, 1):
    trace = scalar.trace(program, core=core, delay_slots=4)
    reads = [e.amount for e in trace.events if e.kind == "read"]
    assert reads == [8 * 1024 * 4 // scalar.GRANULE_BYTES] * 4
    assert not trace.assumed
