"""Tests for coremesh.compiler.dumps and what a `Compiled` says of them."""

import re

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh._compat import aot
from coremesh.compiler import dumps
from coremesh.errors import StageError
from tests import support

_F32 = jnp.float32
_SHAPES = ((256, 128), (64, 256), (32, 384), (128, 512))


def _double(x_ref, o_ref):
  o_ref[...] = x_ref[...] * 2


def _blocks(x, rows):
  spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
  return pl.pallas_call(
    _double,
    out_shape=x,
    grid=(x.shape[0] // rows,),
    in_specs=[spec],
    out_specs=spec,
  )(x)


def _program(*arrays):
  """Kernels of one name and several shapes, between operations of XLA's."""
  return [_blocks(_blocks(x, 16), 8) + jnp.sum(x) for x in arrays]


@pytest.fixture(scope="module", params=support.COMPILED_CHIPS)
def compiled(request):
  arrays = [jax.ShapeDtypeStruct(s, _F32) for s in _SHAPES]
  return cm.compile(_program, *arrays, chip=request.param)


def test_every_kernel_has_every_stage(compiled):
  kernels = [o for o in compiled.operations if o.kernel]
  assert len(kernels) == 2 * len(_SHAPES)
  for operation in kernels:
    assert operation.kernel == "_double"
    stages = {"mosaic", "mosaic-layouts", "llo", "bundles", "schedule"}
    assert set(operation.stages) == stages


def test_source_lines_leave_the_machine_code_as_it_is(monkeypatch):
  x = jax.ShapeDtypeStruct(_SHAPES[0], _F32)
  lines = cm.compile(_program, x, chip="v5p:2x2x1")
  flags = dumps.flags
  monkeypatch.setattr(
    dumps,
    "flags",
    lambda folder: [w for w in flags(folder) if w != dumps.SOURCE_LINES],
  )
  # Any flag of no effect: the worker must be another.
  plain = cm.compile(_program, x, chip="v5p:2x2x1", flags={"v": 0})
  kernels = [o.name for o in lines.operations if o.kernel]
  for name in kernels:
    texts = [found.text("bundles", name) for found in (lines, plain)]
    assert ["compiler_dumps_test.py" in t for t in texts] == [True, False]
    with_lines, without = (
      re.sub(r"/\*.*?\*/|\s+", "", t, flags=re.DOTALL) for t in texts
    )
    assert with_lines == without
  assert len(kernels) == 2 and lines.memory == plain.memory


def test_kernels_of_one_name_get_their_own_texts(compiled):
  """The array the machine code names is the one in the program before."""
  seen = []
  for operation in compiled.operations:
    if operation.kernel is None:
      continue
    [instruction] = [
      line
      for line in compiled.text("hlo").splitlines()
      if re.match(rf"\s+(ROOT )?%?{re.escape(operation.name)} = ", line)
      and "tpu_custom_call" in line
    ]
    rows, columns = re.findall(r"f32\[(\d+),(\d+)\]", instruction)[0]
    for shape in re.findall(r"f32\[(\d+),(\d+)\]", operation.text("bundles")):
      assert int(shape[1]) == int(columns)
    block = re.search(
      r"window_bounds = array<i64: (\d+), (\d+)>", operation.text("mosaic")
    )
    steps = re.search(
      r"iteration_bounds = array<i64: (\d+)>", operation.text("mosaic")
    )
    assert block is not None and steps is not None
    assert int(block[2]) == int(columns)
    assert int(block[1]) * int(steps[1]) == int(rows)
    assert f"{block[1]}x{block[2]}xf32" in operation.text("llo")
    seen.append((int(rows), int(columns), int(block[1])))
  assert sorted(seen) == sorted((*s, b) for s in _SHAPES for b in (8, 16))


def test_the_program_has_texts_of_its_own(compiled):
  assert "tpu_custom_call" in compiled.text("stablehlo")
  assert compiled.text("hlo").startswith("HloModule")
  assert "VMEM" in compiled.text("vmem-report")
  assert "{" in compiled.operation("TLP").text("bundles")
  xla = [o for o in compiled.operations if o.kernel is None]
  assert all(set(o.stages) <= {"bundles", "schedule"} for o in xla)


def test_memory_and_costs_are_the_compilers(compiled):
  bytes_in = sum(4 * rows * columns for rows, columns in _SHAPES)
  assert compiled.memory["argument_size_in_bytes"] == bytes_in
  assert compiled.memory["output_size_in_bytes"] >= bytes_in
  assert compiled.costs["flops"] > 0


def test_an_unknown_stage_is_an_error_that_lists_those_there(compiled):
  stages = "'stablehlo', 'hlo', 'vmem-report'.*'bundles'.*got 'assembly'"
  with pytest.raises(StageError, match=stages):
    compiled.text("assembly")
  name = next(o.name for o in compiled.operations if o.kernel)
  with pytest.raises(StageError, match="'mosaic'.*got 'sparsecore'"):
    compiled.text("sparsecore", name)


def test_a_stage_of_several_kernels_asks_which(compiled):
  with pytest.raises(StageError, match="8 operations have a stage 'bundles'"):
    compiled.text("bundles")
  with pytest.raises(StageError, match="has 8 operations '_double'; choose"):
    compiled.text("bundles", "_double")
  with pytest.raises(StageError, match="has no operation 'other'; choose"):
    compiled.text("bundles", "other")


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@pytest.mark.parametrize("subcores", ["vector_subcores", "scalar_subcores"])
def test_a_sparse_core_kernel_has_its_assembly(subcores, chip):
  def copied(x_hbm, o_hbm):
    pltpu.sync_copy(x_hbm, o_hbm)

  x = jax.ShapeDtypeStruct((64, 128), _F32)
  mesh = getattr(cm.chip(chip), subcores)()
  kernel = pl.kernel(copied, out_type=x, mesh=mesh, name="copied")
  compiled = cm.compile(lambda x: kernel(x + 1), x, chip=chip)
  operation = compiled.operation("copied")
  assert set(operation.stages) == {
    *("mosaic", "mosaic-layouts", "llo", "sparsecore")
  }
  assert re.search(r"^0x\w+: \{", compiled.text("sparsecore"), re.MULTILINE)
  assert "func.func @copied" in compiled.text("mosaic")
  core = {"vector_subcores": "tec", "scalar_subcores": "scs"}[subcores]
  assert re.search(rf"^{core}$", compiled.text("sparsecore"), re.MULTILINE)


def test_texts_that_cannot_be_told_apart_with_certainty_are_left_out(tmp_path):
  """Two kernels of a name, neither of which is the one in the program.

  What the program itself says of its kernel is certain.
  """
  for name in ("llo", "mosaic", "sparsecore"):
    (tmp_path / name).mkdir()
  (tmp_path / "llo" / "1-k.1-01-packed-bundles-post-ra.txt").write_text("b")
  for number in (1, 2):
    file = f"{number}-0001-mosaic-dump-k-original.txt"
    (tmp_path / "mosaic" / file).write_text(f"module {number}")
  hlo = '\n  %k.1 = f32[8] custom-call(), x={"custom_call_config":{"body":"aa"'
  read = lambda text: lambda body: ("k", text)
  [found] = dumps.collect(tmp_path, hlo, read("module 3"))
  assert found.kernel == "k"
  assert found.texts == {"mosaic": "module 3", "bundles": "b"}
  [found] = dumps.collect(tmp_path, hlo, read("module 2"))
  assert found.texts == {"mosaic": "module 2", "bundles": "b"}


def test_an_instruction_that_spans_lines_is_one():
  hlo = """HloModule m
%inner (p: f32[8]) -> f32[8] {
  ROOT %k.1 = f32[8] custom-call(%p), attributes={metadata={
    "a": 1
  }}, backend_config={"custom_call_config":{"body":"aa"}}
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %call.2 = f32[8] call(%p), to_apply=%inner
}
"""
  heads = [s.split()[0] for s in dumps.statements(hlo)]
  assert heads == [
    "HloModule",
    "%inner",
    "ROOT",
    "}",
    "ENTRY",
    "%p",
    "ROOT",
    "}",
  ]


def test_a_kernel_that_xla_puts_into_a_fusion_is_one():
  """Where it writes its result into a part of another array."""

  sizes = (8, 16, 32, 64, 128, 8)

  def stacked(x):
    return jnp.stack([_blocks(x, rows) for rows in sizes])

  x = jax.ShapeDtypeStruct((256, 256), _F32)
  compiled = cm.compile(stacked, x, chip="v5p:2x2x1")
  kernels = [o for o in compiled.operations if o.kernel == "_double"]
  # The last call is the first again, and XLA makes them one.
  assert len(kernels) == len(compiled.kernels) == len(compiled.ledgers) == 5
  assert compiled.dropped == ("_double",)
  hlo = compiled.text("hlo")
  found = [re.search(rf"%{o.name} = .* fusion\(", hlo) for o in kernels]
  assert any(found)
  assert all("_double" in o.text("mosaic") for o in kernels)
  for one in compiled.ledgers:
    assert one.used_vmem_bytes == one.expected_vmem_bytes


def test_a_kernel_whose_body_is_elsewhere_is_an_error(tmp_path):
  for name in ("llo", "mosaic", "sparsecore"):
    (tmp_path / name).mkdir()
  hlo = '\n  %k.1 = f32[8] call(), custom_call_target="tpu_custom_call", x={}'
  with pytest.raises(ValueError, match=r"kernel of k\.1 is not where"):
    dumps.collect(tmp_path, hlo, lambda body: None)


def test_a_kernel_with_metadata_has_every_stage():
  x = jax.ShapeDtypeStruct((8, 128), _F32)
  kernel = pl.pallas_call(_double, out_shape=x, metadata={"a": "b", "c": "d"})
  compiled = cm.compile(kernel, x, chip="v6e")
  assert "func.func @_double" in compiled.operation("_double").text("mosaic")


def test_a_body_that_is_no_kernel_has_no_name():
  assert aot.kernel_module("aGVsbG8=") is None
