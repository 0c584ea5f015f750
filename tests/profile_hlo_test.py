"""Tests for coremesh.profile.hlo: which words a kernel is given."""

import numpy as np
import pytest

from coremesh.profile import hlo

_TEXT = """
HloModule jit_f

%fused (p.1: s32[4]) -> s32[4] {
  %p.1 = s32[4]{0:T(128)} parameter(0)
  ROOT %n.1 = s32[4]{0:T(128)} negate(%p.1)
}

ENTRY %main.1 (a.1: s32[4], b.1: f32[8,128]) -> f32[8,128] {
  %a.1 = s32[4]{0:T(128)} parameter(0), metadata={op_name="a"}
  %b.1 = f32[8,128]{1,0:T(8,128)} parameter(1), metadata={op_name="b"}
  %c.1 = s32[2,3]{1,0:T(2,128)} constant({ { 1, 2, 3 }, { 4, -5, 6 } })
  %d.1 = s32[]{:T(128)} constant(7)
  %e.1 = s32[3]{0:T(128)} broadcast(%d.1), dimensions={}
  %copy.1 = s32[4]{0:T(128)S(6)} copy(%a.1)
  %f.1 = s32[4]{0:T(128)} fusion(%a.1), kind=kLoop, calls=%fused
  %copy-start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%b.1)
  %copy-done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  ROOT %k.1 = f32[8,128]{1,0:T(8,128)} custom-call(%copy.1, %copy-done, %c.1, %d.1, %e.1, /*index=5*/%f.1, %e.1), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501


def _words(leaves):
  return hlo.operand_words(hlo.parse(_TEXT), "k.1", leaves, {})


def test_operands_are_followed_through_copies_to_arguments():
  a = np.array([9, 8, 7, -6], np.int32)
  found = _words([a, object()])
  assert list(found[0][:4].view(np.int32)) == [9, 8, 7, -6]
  assert len(found[0]) == 128
  assert 1 not in found  # an argument without values
  assert 5 not in found  # computed


def test_constants_are_read_and_laid_out_in_tiles():
  found = _words([])
  tile = found[2].view(np.int32).reshape(2, 128)
  assert tile[:, :3].tolist() == [[1, 2, 3], [4, -5, 6]]
  assert found[3][0] == 7
  assert found[4][:3].tolist() == [7, 7, 7]
  assert found[6][:3].tolist() == [7, 7, 7]  # after a comment with its number


@pytest.mark.parametrize(
  "a",
  [np.zeros(5, np.int32), np.zeros(4, np.float32), np.zeros((2, 2), np.int32)],
)
def test_an_argument_of_another_type_gives_no_words(a):
  assert 0 not in _words([a, object()])
  assert 0 not in _words([a])


def test_a_program_that_dropped_an_argument_gives_no_words():
  assert 0 not in _words([np.zeros(4, np.int32)] * 3)


def test_instructions_of_the_main_computation_are_told_apart():
  program = hlo.parse(_TEXT)
  assert program["f.1"].is_entry and not program["n.1"].is_entry
  assert program["f.1"].opcode == "fusion"
  assert program["copy-start"].operands == ("b.1",)
  assert program["k.1"].operands[5:] == ("f.1", "e.1")


def test_the_first_of_a_tuple_counts():
  program = hlo.parse(_TEXT)
  assert hlo.first_bytes(program["copy-start"].shape) == 8 * 128 * 4
  assert hlo.first_bytes("bf16[3,5]{1,0}") == 30
  assert hlo.first_bytes("pred[7]") == 7


def test_twins_do_the_same_to_the_same_types():
  program = hlo.parse(_TEXT)
  assert hlo.twin(program, "copy.1", ["k.1", "copy.1"]) == "copy.1"
  assert hlo.twin(program, "copy.1", ["f.1", "e.1", "gone"]) is None


def test_rows_and_columns_are_tiled():
  words = hlo._laid_out(
    np.arange(16 * 256, dtype=np.int32).reshape(16, 256),
    "s32[16,256]{1,0:T(8,128)}",
  )
  assert words is not None
  assert words[127:130].tolist() == [127, 256, 257]
  assert words[8 * 128] == 128
  assert hlo._laid_out(np.zeros((2, 3), np.int32), "s32[2,3]{0,1}") is None


def test_narrow_integers_share_words_with_the_rows_below():
  value = np.arange(5 * 3, dtype=np.int8).reshape(5, 3)
  words = hlo._laid_out(value, "s8[5,3]{1,0:T(8,128)(4,1)}")
  assert words is not None
  rows = words.reshape(2, 128)[:, :3].copy().view(np.int8).reshape(2, 3, 4)
  assert rows[0].tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
  assert rows[1].tolist() == [[12, 0, 0, 0], [13, 0, 0, 0], [14, 0, 0, 0]]
  halves = hlo._laid_out(
    np.arange(300, dtype=np.int16), "s16[300]{0:T(1024)(128)(2,1)}"
  )
  assert halves is not None and len(halves) == 512
  assert halves[:1].view(np.int16).tolist() == [0, 128]
  assert halves[128:129].view(np.int16).tolist() == [256, 0]


def test_values_become_words_of_the_operand_they_are_for():
  program = hlo.parse(_TEXT)
  values = {0: np.array([1, 2, 3, -4], np.int32), 5: np.arange(4, dtype="i4")}
  found = hlo.words_of(program, "k.1", values)
  assert found[0][:4].view(np.int32).tolist() == [1, 2, 3, -4]
  assert len(found[0]) == 128
  assert found[5][:4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
  ("index", "value"),
  [
    (0, np.zeros(5, np.int32)),  # of another size
    (0, np.zeros(4, np.int64)),  # not of 32 bits
    (1, np.zeros((4, 2), np.int32)),  # not the size of that operand
    (9, np.zeros(4, np.int32)),  # there is none
  ],
)
def test_values_that_do_not_fit_an_operand_give_no_words(index, value):
  assert hlo.words_of(hlo.parse(_TEXT), "k.1", {index: value}) == {}
