"""Tests of what holds for the machine code of every kernel that is compiled."""

import dataclasses
import re

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh.compiler import aot
from tests import profiling, properties, support


def _spoiled(compiled, pattern, replacement, stage="bundles"):
  """The program, with the first match in its kernel's code replaced."""
  kernel = profiling.kernel(compiled)
  text, count = re.subn(pattern, replacement, kernel.text(stage), count=1)
  assert count == 1
  other = dataclasses.replace(kernel, texts={**kernel.texts, stage: text})
  return dataclasses.replace(compiled, operations=(other,))


@pytest.fixture(scope="module", params=support.COMPILED_CHIPS)
def compiled(request):
  fn, args = profiling.double(1024)
  return cm.compile(fn, *args, chip=request.param)


def test_code_as_the_compiler_wrote_it_is_checked(compiled):
  tally = properties.Tally()
  properties.check(compiled, tally)
  assert tally == properties.Tally(checked=1)


@pytest.mark.parametrize(
  ("pattern", "replacement"),
  [
    # A scalar that is written as another value than the one that is read.
    (r"%s\d+(_s\d+) = sadd", r"%s9999\1 = sadd"),
    # A wait for a copy that takes off less than came.
    (r"(vsyncadd .*?, )4294\d+", r"\g<1>4294967295"),
    # A check of bounds with its sign turned.
    (r"shalt\.err \(!", "shalt.err ("),
  ],
)
def test_code_with_a_fault_is_found(pattern, replacement, compiled):
  spoiled = _spoiled(compiled, pattern, replacement)
  with pytest.raises(AssertionError):
    properties.check(spoiled, properties.Tally())


def test_what_is_compiled_is_checked_once(monkeypatch):
  """As of all tests with `pytest --machine-code`."""
  monkeypatch.setattr(aot, "compile", aot.compile)  # Put back at the end.
  tally = properties.Tally()
  properties.watch(tally)

  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 1234.5

  x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
  kernel = pl.pallas_call(body, out_shape=x)
  for _ in range(2):
    aot.compile(kernel, x, chip="v5p:2x2x1")
    assert tally.checked == 1
