"""Tests for coremesh.profile.bundles: dumps of libtpu and what is not one."""

import pytest

from coremesh.errors import UnsupportedError
from coremesh.profile import bundles
from tests import profiling

_HEAD = "= control target key start\n= control target key end\n\n"


def _program(*lines: str) -> str:
  return _HEAD + "".join(
    f"{hex(i) if i else '0'}   : {line}\n" for i, line in enumerate(lines)
  )


def _slot(text: str) -> bundles.Slot:
  [bundle] = bundles.parse(_program(f"{{ {text} }}")).bundles
  [slot] = bundle.slots
  return slot


_TENSOR_CORE = sorted(n for n in profiling.RECORDED if "subcores" not in n)


@pytest.mark.parametrize("name", _TENSOR_CORE)
def test_every_bundle_of_a_recorded_dump_is_read(name):
  text = profiling.recorded(name)
  program = bundles.parse(text)
  last = program.bundles[-1].index
  assert f"{last:#x}" in text and f"{last + 1:#x}   :" not in text
  assert sum(not b.slots for b in program.bundles) == text.count(":  {}") + (
    text.count("> {}")
  )
  branches = [s for s in program.slots if s.target is not None]
  assert len(branches) == text.count(" sbr.rel ")


def test_a_loop_its_depth_and_its_branch_are_read():
  program = bundles.parse(profiling.recorded("v5p-count"))
  [start] = [b.index for b in program.bundles if b.label == "LB"]
  assert program.bundles[start].depth == 1
  assert start in {s.target for s in program.slots}


def test_source_lines_are_read():
  program = bundles.parse(profiling.recorded("v5p-count"))
  found = {s.source for s in program.slots if s.source}
  assert all(line.startswith("tests/profiling.py:") for line in found)
  assert len(found) >= 3


def test_operands_registers_and_predicates_are_read():
  slot = _slot("%s12_s3 = smov (%p4_p1, %s11_s3), 7 /* a note */")
  assert (slot.opcode, slot.operands, slot.notes) == ("smov", (7,), ("a note",))
  assert str(slot.result) == "%s12_s3"
  assert str(slot.predicate) == "%p4_p1"
  assert str(slot.otherwise) == "%s11_s3"


def test_a_negated_predicate_is_read():
  slot = _slot("%81 = shalt.err (!%p78_p3)")
  assert slot.token == 81
  assert slot.predicate is not None and slot.predicate.is_negated


def test_a_slot_that_never_takes_effect_is_left_out():
  never = "%24 = dma.hbm_to_vmem [thread:$0]  (!1), /*hbm=*/%s7_s1"
  text = _program(f"{{ {never} ;;  %81 = shalt.err (!%p78_p3) }}")
  [bundle] = bundles.parse(text).bundles
  assert [slot.opcode for slot in bundle.slots] == ["shalt.err"]


def test_named_operands_of_a_copy_are_read():
  slot = _slot(
    "%24 = dma.hbm_to_vmem [thread:$0]  (!%p1_p2), /*hbm=*/%s7_s1,"
    " /*size_in_granules=*/128, /*vmem=*/%s2_s1,"
    " /*dst_syncflagno=*/[#allocation5 + $0x1] /* \nstrides: (1)\n */"
  )
  assert slot.operand("size_in_granules") == 128
  assert str(slot.operand("hbm")) == "%s7_s1"
  flag = slot.operand("dst_syncflagno")
  assert flag == bundles.Address(space=None, terms=("#allocation5", 1))


def test_a_comment_that_names_operands_does_not_end_there():
  slot = _slot(
    "%31 = dma.hbm_to_vmem [thread:$0]  (%p1_p2), /*hbm=*/%s7_s1,"
    " /*size_in_granules=*/16, /*vmem=*/%s2_s1, /*dst_syncflagno=*/"
    "[#allocation1] /* \ndynamic_base_bounds: (%s8 = scalar_select"
    " /*predicate=*/%p7, /*on_true=*/0, /*on_false=*/1)\nstrides: (1) */"
  )
  flag = slot.operand("dst_syncflagno")
  assert flag == bundles.Address(space=None, terms=("#allocation1",))
  assert len(slot.operands) == 4


def test_a_store_has_two_operands():
  slot = _slot("%1 = sst [smem:[#allocation3 + %s4_s2]] %s5_s6")
  where, what = slot.operands
  assert isinstance(where, bundles.Address) and where.space == "smem"
  assert str(what) == "%s5_s6"


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("module @kernel {\n}", "Expected a line '= control target key start'"),
    (_HEAD, "Expected lines such as"),
    (_program("{ %1 = sbr.rel target = $region4 }"), "target bundleno = N"),
    (_program("{ %1 = sbr.rel target bundleno = 9 }"), "one of 1 bundles"),
    (_program("{}").replace("0   :", "0 XX:"), "a label of LH, LB"),
    (_program("{}", "{}", "{}").replace("0x2", "0x5"), "bundle 0x2 to come"),
    (_program("{ %1 = sfence", "{}"), "that begin so and"),
    (_program("{ 17 }"), "'%result = opcode operands'"),
  ],
)
def test_a_dump_of_another_form_is_an_error_that_says_what_was_expected(
  text, expected
):
  with pytest.raises(UnsupportedError, match="packed-bundles-post-ra") as error:
    bundles.parse(text)
  assert expected in str(error.value)
