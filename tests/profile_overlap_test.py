"""Tests for coremesh.profile.overlap: SparseCores beside TensorCores."""

import pytest

from coremesh.profile import hlo, overlap
from coremesh.profile.overlap import Beside

_TEXT = """
HloModule jit_f, is_scheduled=true

%body.1 (b.1: f32[8,128]) -> f32[8,128] {
  %b.1 = f32[8,128]{1,0} parameter(0)
  ROOT %inner = f32[8,128]{1,0} negate(%b.1)
}

ENTRY %main.1 (a.1: f32[8,128]) -> f32[8,128] {
  %a.1 = f32[8,128]{1,0} parameter(0)
  %s.1 = ((), (), (s32[1]{0})) call-start(), to_apply=%c.1
  %before = f32[8,128]{1,0} negate(%a.1)
  %s.2 = ((), (), (s32[1]{0})) call-start(), to_apply=%c.2
  %u.1 = ((f32[8,128]{1,0}), f32[8,128]{1,0}) call-update(%s.1, %a.1)
  %u.2 = ((f32[8,128]{1,0}), f32[8,128]{1,0}) call-update(%s.2, %a.1)
  %first = f32[8,128]{1,0} negate(%before)
  %d.1 = f32[8,128]{1,0} call-done(%u.1)
  %second = f32[8,128]{1,0} negate(%first)
  %d.2 = f32[8,128]{1,0} call-done(%u.2)
  %after = f32[8,128]{1,0} add(%d.1, %d.2)
  %s.3 = ((), (), (s32[1]{0})) call-start(), to_apply=%c.3
  %u.3 = ((f32[8,128]{1,0}), f32[8,128]{1,0}) call-update(%s.3, %after)
  ROOT %d.3 = f32[8,128]{1,0} call-done(%u.3)
}
"""
_DENSE = ("before", "first", "second", "after", "inner")
_GROUP = Beside(sparse=("s.1", "s.2"), dense=("first", "second"))


def test_what_stands_between_operands_and_the_end_of_a_wait_runs_beside_it():
  program = hlo.parse(_TEXT)
  assert overlap.groups(program, ("s.1", "s.2", "s.3"), _DENSE) == [_GROUP]


def test_an_operation_whose_time_is_not_known_hides_nothing():
  [found] = overlap.groups(hlo.parse(_TEXT), ("s.2", "s.3"), _DENSE)
  assert found == Beside(sparse=("s.2",), dense=("first", "second"))
  assert overlap.groups(hlo.parse(_TEXT), ("s.1", "s.2"), ("after",)) == []


@pytest.mark.parametrize(
  ("num_bytes", "hidden"),
  [
    (0, 5.0),  # the shorter side
    (9, 5.0),  # 36 bytes at 3 a unit of time: as long as the longer side
    (12, 1.0),  # 48 bytes take 16
    (100, 0.0),
  ],
)
def test_both_sides_take_as_long_as_the_longer_or_all_bytes(
  num_bytes: int, hidden: float
):
  times = {"s.1": 6.0, "s.2": 6.0, "first": 2.0, "second": 3.0}
  found = overlap.hidden(
    _GROUP,
    times,
    num_bytes=dict.fromkeys(times, num_bytes),
    bytes_per_time=3.0,
  )
  assert found == hidden


def test_the_longer_side_may_be_that_of_the_tensor_cores():
  times = {"s.1": 6.0, "s.2": 6.0, "first": 2.0, "second": 13.0}
  found = overlap.hidden(
    _GROUP, times, num_bytes=dict.fromkeys(times, 0), bytes_per_time=3.0
  )
  assert found == 12.0
