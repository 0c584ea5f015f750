"""Tests for coremesh.profile.units: how long instructions hold their unit."""

from collections import Counter, defaultdict
import functools
import re

import jax
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh import kernels
from coremesh.profile import bundles, rates, units
from tests import profiling

_V5P, _V6E, _TPU7X = "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"
_F8 = jnp.float8_e4m3fn
_CASES = [
  (kernels.matmul, jnp.float32, _V6E),
  (kernels.matmul, jnp.int8, _V5P),
  (kernels.matmul, _F8, _V5P),
  (kernels.matmul, _F8, _TPU7X),
  (kernels.attention, jnp.bfloat16, _V5P),
  (kernels.attention, jnp.bfloat16, _TPU7X),
]
_any_case = pytest.mark.parametrize(
  ("kernel", "dtype", "chip"),
  _CASES,
  ids=lambda x: getattr(x, "__name__", None) or str(x).partition(":")[0],
)


@functools.cache
def _compiled(kernel, dtype, chip):
  if kernel is kernels.matmul:
    args = [profiling.shape(512, 512, dtype=dtype)] * 2
  else:
    args = [profiling.shape(1, 1, 512, 128, dtype=dtype)] * 3
  return cm.compile(jax.jit(kernel), *args, chip=chip)


def _neighbours(program: bundles.Program):
  """Opcode of each `vmatmul`, and bundles to the next on its unit.

  Only of those with no label between: control flow comes in at labels.
  """
  last: dict[str, tuple[int, str]] = {}
  for bundle in program.bundles:
    if bundle.label:
      last.clear()
    for slot in bundle.slots:
      if slot.opcode.startswith("vmatmul"):
        [unit] = re.findall(r"\bmxu\d", slot.opcode)
        if unit in last:
          at, opcode = last[unit]
          yield opcode, bundle.index - at
        last[unit] = (bundle.index, slot.opcode)


@_any_case
def test_a_matrix_unit_is_held_for_as_long_as_libtpu_keeps_it_free(
  kernel, dtype, chip
):
  rate = rates.rates(cm.chip(chip))
  code = profiling.kernel(_compiled(kernel, dtype, chip)).text("bundles")
  spacing = defaultdict(Counter)
  for opcode, apart in _neighbours(bundles.parse(code)):
    held = units.cycles(opcode, rate) * rate.mxus
    kind = re.sub(r"\.(mubr|msk|vlgmr|msr\w|gmra|mr\w.*|mxu\d)", "", opcode)
    spacing[kind, held][apart] += 1
  assert spacing
  for (kind, held), found in spacing.items():
    assert min(found) >= held, kind
    # Where there are many, some follow each other as closely as they can.
    if found.total() >= 50:
      assert found.most_common(1)[0][0] == held, kind


@_any_case
def test_no_unit_is_busy_for_longer_than_its_bundles_take(kernel, dtype, chip):
  compiled = _compiled(kernel, dtype, chip)
  rate = rates.rates(cm.chip(chip))
  [found] = cm.predict(compiled).kernels
  for core in found.cores:
    assert max(core.shares[unit] for unit in units.UNITS) <= 1
  program = bundles.parse(profiling.kernel(compiled).text("bundles"))
  busy = units.busy(program, rate)
  for hot in found.hottest:
    num_bundles = hot.end - hot.start
    for name, cycles in busy.by_unit.items():
      # What is issued at the end holds its unit beyond it: 32 cycles at most.
      assert cycles[hot.start : hot.end].sum() <= num_bundles + 32, name
