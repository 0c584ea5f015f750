"""Tests that docs/simulator.md says what the simulator does."""

import pathlib
import re
from typing import get_args

from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import pytest

from coremesh._compat import kernel_ir
from coremesh.simulate import findings, program

_TEXT = (
  pathlib.Path(__file__).parents[1].joinpath("docs/simulator.md").read_text()
)
_TYPES = {"CMEM", "HBM", "SEMAPHORE", "SMEM", "VMEM", "VMEM_SHARED"}

# Primitives without a rule of their own, and why.
_WITHOUT_RULE = {
  "checkify.call_hi_primitive": "of checkify's own transformation",
  "debugging.debug_callback": "not in TPU kernels",
  "debugging.inspect_sharding": "outside kernels",
  "state.create_linear": "outside kernels",
  "state.pin": "outside kernels",
  "state.unpin": "outside kernels",
}


def _functions(module, prefix):
  for name in sorted(dir(module)):
    value = getattr(module, name)
    is_function = callable(value) and not isinstance(value, type)
    if is_function and not name.startswith("_") and name not in _TYPES:
      yield f"{prefix}.{name}"


def test_every_public_function_is_in_the_table():
  names = {*_functions(pltpu, "pltpu"), *_functions(plsc, "plsc")}
  table = set(re.findall(r"`(pl(?:tpu|sc)\.\w+)`", _TEXT.split("## Limits")[0]))
  assert names <= table, sorted(names - table)
  gone = {n for n in table - names if not n.endswith("InterpretParams")}
  assert not gone


def test_every_primitive_has_a_rule_or_a_reason():
  rules = {*program.RULES, *program.VALUE_RULES}
  lacking = {n for n in kernel_ir.primitive_names() if n not in rules}
  known = {n for n in lacking if not n.startswith("random.")}
  assert known == set(_WITHOUT_RULE)


def test_every_kind_of_finding_is_explained():
  rows = set(re.findall(r"^\| ([a-z ]+) \| ", _TEXT, re.MULTILINE))
  kinds = set(get_args(findings.Kind.__value__))
  assert kinds <= rows, sorted(kinds - rows)


@pytest.mark.parametrize(
  "code", re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL)
)
def test_its_programs_run(code):
  exec(compile(code, "docs/simulator.md", "exec"), {})
