"""Tests for coremesh.profile.loops: how often XLA runs what."""

import pytest

from coremesh.profile import loops

_TEXT = """
HloModule jit_f

%cond.1 (s.1: (s32[], f32[8])) -> pred[] {{
  %end.1 = s32[]{{:T(128)}} constant(10)
  %s.1 = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%s.1), index=0
  ROOT %lt.1 = pred[]{{:T(512)}} compare(%i.1, %end.1), direction={direction}
}}

%body.1 (s.2: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %step.1 = s32[]{{:T(128)}} constant({step})
  %s.2 = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %i.2 = s32[]{{:T(128)}} get-tuple-element(%s.2), index=0
  %x.2 = f32[8]{{0:T(128)}} get-tuple-element(%s.2), index=1
  %next.1 = s32[]{{:T(128)}} add({added})
  %moved.2 = s32[]{{:T(128)S(6)}} copy(%i.2)
  %neg.1 = f32[8]{{0:T(128)}} negate(%x.2)
  ROOT %t.1 = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%next.1, %neg.1)
}}

ENTRY %main.1 (x.1: f32[8], n.1: s32[]) -> f32[8] {{
  %x.1 = f32[8]{{0:T(128)}} parameter(0)
  %n.1 = s32[]{{:T(128)}} parameter(1)
  %zero.1 = s32[]{{:T(128)}} constant(1)
  %start.1 = s32[]{{:T(128)}} copy({start})
  %t.2 = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%start.1, %x.1)
  %while.1 = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) while(%t.2), condition=%cond.1, body=%body.1{config}
  ROOT %out.1 = f32[8]{{0:T(128)}} get-tuple-element(%while.1), index=1
}}
"""  # noqa: E501


def _counts(**changes):
  fields = {
    "direction": "LT",
    "step": 1,
    "added": "%i.2, %step.1",
    "start": "%zero.1",
    "config": "",
  }
  return loops.executions(_TEXT.format(**(fields | changes)))


def test_a_counter_from_constant_to_constant_says_how_often():
  found = _counts()
  assert found["x.1"] == found["while.1"] == 1
  assert found["neg.1"] == found["next.1"] == 9
  assert "lt.1" not in found  # the condition is the loop's own


def test_steps_that_do_not_reach_the_end_evenly_are_counted():
  assert _counts(step=4)["neg.1"] == 3  # 1, 5, 9
  assert _counts(step=4, added="%step.1, %i.2")["neg.1"] == 3


def test_a_counter_that_is_copied_before_it_grows_is_counted():
  """As in the loop of `jax.lax.scan`."""
  assert _counts(added="%moved.2, %step.1")["neg.1"] == 9


def test_what_xla_itself_says_comes_first():
  config = ', backend_config={"known_trip_count":{"n":"5"}}'
  assert _counts(config=config)["neg.1"] == 5


@pytest.mark.parametrize(
  "changes",
  [
    {"start": "%n.1"},
    {"direction": "NE"},
    {"step": -1},
    {"added": "%i.2, %i.2"},
  ],
)
def test_a_loop_that_data_end_is_not_counted(changes):
  found = _counts(**changes)
  assert found["neg.1"] is None
  assert found["out.1"] == 1
