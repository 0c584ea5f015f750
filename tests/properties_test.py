"""Tests of what holds for the machine code of every kernel that is compiled."""

import dataclasses
import re

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh.compiler import aot
from coremesh.compiler.compiled import Operation
from tests import profiling, properties, support


def _nothing():
  x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
  return (lambda x: x), x


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


def test_a_register_of_a_subcore_without_a_writer_is_found():
  text = profiling.recorded("v5p-subcores")
  program = cm.compile(*_nothing(), chip="v5p:2x2x1")

  def check(text):
    operation = Operation(name="k", kernel="k", texts={"sparsecore": text})
    tally = properties.Tally()
    spoiled = dataclasses.replace(program, operations=(operation,))
    properties.check(spoiled, tally)
    return tally

  assert check(text) == properties.Tally(checked=1)
  start = text.index("\ntec\n")
  [register, *_] = re.findall(r"\b(s\d+) =\tsadd", text[start:])
  changed = re.sub(rf"\b{register} =", "s63 =", text[start:])
  with pytest.raises(AssertionError, match="never written|nothing has writt"):
    check(text[:start] + changed)


def test_an_error_without_a_reason_is_a_fault(compiled, monkeypatch):
  """What the predictor does not model is named in the table, or fails."""
  for text, is_fault in (
    ("Bundle 0x3 holds dma.general: a copy of an unknown form", False),
    ("Bundle 0x3 holds stream.other: a copy of an unknown form", True),
  ):

    def refuse(*_, text=text):
      raise cm.UnsupportedError(text)

    monkeypatch.setattr(properties, "_run", refuse)
    tally = properties.Tally()
    if is_fault:
      with pytest.raises(AssertionError, match="stream.other"):
        properties.check(compiled, tally)
      continue
    properties.check(compiled, tally)
    assert tally.not_checked == {"a copy whose strides say where it goes": 1}


def test_what_is_compiled_is_checked_once(monkeypatch):
  """As of all tests, but with `pytest --no-machine-code`."""
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
