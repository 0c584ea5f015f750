"""Tests for coremesh.profile.around: operations without code of their own."""

import dataclasses

import pytest

import coremesh as cm
from coremesh.compiler.compiled import Compiled, Operation
from coremesh.profile import around, hlo, loops, rates
from coremesh.profile.prediction import Estimate, OperationPrediction

_TEXT = """
HloModule jit_f

ENTRY %main.1 (a.1: f32[64,128], n.1: s32[]) -> f32[64,128] {
  %a.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %n.1 = s32[]{:T(128)} parameter(1)
  %m.1 = s32[]{:T(128)} negate(%n.1)
  %copy-start = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a.1)
  %copy-done = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %x.1 = f32[64,128]{1,0:T(8,128)} negate(%a.1)
  %x.2 = f32[64,128]{1,0:T(8,128)} negate(%a.1)
  ROOT %y.1 = f32[64,128]{1,0:T(8,128)} custom-call(%x.1, %x.2)
}
"""  # noqa: E501
_CHIP = cm.chip("v5p:2x2x1")
_TIME = Estimate(low=1.0, central=2.0, high=3.0)
_NEGATE = OperationPrediction(
  name="x.1",
  kernel=None,
  cycles=_TIME,
  microseconds=_TIME,
  floor_microseconds=0.5,
  limit="VPU",
  shares={},
  cores=(),
  hottest=(),
  assumed=(),
)


def _around(predicted):
  names = [p.name for p in predicted] + ["y.1"]
  compiled = Compiled(
    chip=_CHIP.name,
    num_devices=1,
    kernels=(),
    ledgers=(),
    operations=tuple(Operation(name=n, kernel=None, texts={}) for n in names),
    texts={"hlo": _TEXT},
    memory={},
    costs={},
    compile_seconds=0.0,
    from_cache=False,
  )
  return around.of_program(
    hlo.parse(_TEXT),
    compiled,
    predicted,
    chip=_CHIP,
    counts=loops.executions(_TEXT),
  )


def test_an_operation_without_code_runs_that_of_its_equal():
  found, left_out = _around([_NEGATE])
  [twin] = [o for o in found if o.name == "x.2"]
  assert twin.cycles == _NEGATE.cycles
  assert twin.assumed == (
    "it has no code of its own; assumed to run that of x.1",
  )
  assert left_out == ["m.1: negate of XLA's, without machine code of its own"]


def test_one_that_has_no_equal_is_left_out():
  _, left_out = _around([dataclasses.replace(_NEGATE, name="other")])
  assert [text.split(":")[0] for text in left_out] == ["m.1", "x.1", "x.2"]


def test_a_copy_started_ahead_takes_its_bytes_and_the_latency():
  found, _ = _around([_NEGATE])
  [copy] = [o for o in found if o.name == "copy-start"]
  rate = rates.rates(_CHIP)
  seconds = (
    64 * 128 * 4 / rate.hbm_bytes_per_second_per_device.central
    + rate.hbm_latency_seconds.central
  )
  assert copy.microseconds.central == pytest.approx(seconds * 1e6)
  assert copy.limit == "DMA"
