"""What kernels cannot hold is named, with its line and what to use instead."""

import gc
import inspect

import jax
from jax import lax
from jax.experimental import checkify, io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh._compat import kernel_ir
from coremesh.simulate import program, unsupported
from tests import support

_SHAPE = (8, 128)
_X = np.arange(8 * 128, dtype=np.float32).reshape(_SHAPE)
_TYPE = jax.ShapeDtypeStruct(_SHAPE, np.float32)
_SEND = "send with pltpu.async_remote_copy"
_RETURN = "return what the function needs as an output"


def _after(effect):
  """A function of a value that does something besides."""

  def call(value):
    effect(value)
    return value

  return call


def _copy(x, o):
  o[...] = x[...]


def _inner_kernel(value):
  mesh = cm.chip("v5p:2x2x1").tensor_cores("core", 1)
  return pl.kernel(pltpu.sync_copy, _TYPE, mesh=mesh)(value)


_CASES = {
  "debugging.debug_callback": (
    _after(lambda v: jax.debug.callback(print, v)),
    "To print, use pl.debug_print; to check, pl.debug_check",
  ),
  "debugging.inspect_sharding": (
    _after(lambda v: jax.debug.inspect_array_sharding(v, callback=print)),
    "inspect its operands outside",
  ),
  "sharding_constraint": (
    lambda v: lax.with_sharding_constraint(v, jax.P()),
    "constrain its operands outside",
  ),
  "checkify.check": (
    _after(lambda v: checkify.check(v[0, 0] >= 0, "negative")),
    "Use pl.debug_check",
  ),
  "io_callback": (lambda v: io_callback(np.array, _TYPE, v), _RETURN),
  "pure_callback": (lambda v: jax.pure_callback(np.array, _TYPE, v), _RETURN),
  "ffi_call": (lambda v: jax.ffi.ffi_call("sum_up", _TYPE)(v), _RETURN),
  "psum": (lambda v: lax.psum(v, "device"), _SEND),
  "pmax": (lambda v: lax.pmax(v, "device"), _SEND),
  "pmin": (lambda v: lax.pmin(v, "device"), _SEND),
  "ppermute": (lambda v: lax.ppermute(v, "device", [(0, 1), (1, 0)]), _SEND),
  "all_gather": (lambda v: lax.all_gather(v, "device")[0], _SEND),
  "all_to_all": (lambda v: lax.all_to_all(v, "device", 0, 0), _SEND),
  "reduce_scatter": (
    lambda v: lax.psum_scatter(v, "device", tiled=True)[:1] + v,
    _SEND,
  ),
  "pallas_call": (
    lambda v: pl.pallas_call(_copy, _TYPE)(v),
    "pltpu.emit_pipeline for its grid",
  ),
  "mpmd_map": (_inner_kernel, "pltpu.emit_pipeline for its grid"),
}


def _kernel(fn):
  def body(x, o):
    o[...] = fn(x[...])

  return lambda x: pl.pallas_call(body, _TYPE)(x)


@pytest.mark.parametrize("name", _CASES)
def test_what_no_kernel_holds_is_refused_before_it_runs(name):
  fn, instead = _CASES[name]
  _, mesh = support.simulated()
  if name == "all_to_all":  # It needs a row for each device.
    mesh = cm.chip("v5p:2x2x2").device_mesh("device", on="simulator")
  many = np.tile(_X, (mesh.size, 1))
  refused = pytest.raises(cm.UnsupportedError)
  with refused as caught, cm.simulation() as run:
    support.over_devices(_kernel(fn), mesh, check_vma=False).lower(many)
  assert not run.runs
  text = str(caught.value)
  assert f"the operation {name!r} in a kernel" in text
  assert "at simulate_unsupported_test.py:" in text
  assert instead in text


def test_an_operation_that_nobody_knows_is_named_too():
  unknown = jex_core.Primitive("twist")
  unknown.def_abstract_eval(lambda x: x)
  refused = pytest.raises(cm.UnsupportedError, match=r"operation 'twist' in a")
  with refused as caught, cm.simulation():
    jax.jit(_kernel(unknown.bind)).lower(_X)
  assert "jax.numpy and jax.lax compute from values" in str(caught.value)


def test_a_line_is_that_of_the_operation():
  def body(x, o):
    first = x[...]
    second = lax.psum(first, "device")
    o[...] = second

  _, mesh = support.simulated()
  call = lambda x: pl.pallas_call(body, _TYPE)(x)
  refused = pytest.raises(cm.UnsupportedError)
  with refused as caught, cm.simulation():
    many = np.tile(_X, (mesh.size, 1))
    support.over_devices(call, mesh, check_vma=False).lower(many)
  line = inspect.getsourcelines(body)[1] + 2
  assert f"at simulate_unsupported_test.py:{line} (" in str(caught.value)


def test_the_table_holds_operations_of_jax_that_have_no_rule():
  names = {
    kernel_ir.qualified_name(p)
    for p in gc.get_objects()
    if isinstance(p, jex_core.Primitive)
  }
  known = {*program.RULES, *program.VALUE_RULES} - {"checkify.check"}
  assert set(unsupported.INSTEAD) <= names
  assert not set(unsupported.INSTEAD) & known


def test_kernels_take_the_branch_of_a_tpu():
  branches = {"cpu": lambda v: v, "tpu": lambda v: v * 2}
  with cm.simulation():
    o = _kernel(lambda v: lax.platform_dependent(v, **branches))(_X)
    default = lambda v: lax.platform_dependent(
      v, cpu=branches["cpu"], default=lambda v: v * 3
    )
    other = _kernel(default)(_X)
  np.testing.assert_array_equal(o, 2 * _X)
  np.testing.assert_array_equal(other, 3 * _X)


def test_a_branch_for_a_tpu_must_be_there():
  fn = lambda v: lax.platform_dependent(v, cpu=lambda v: v, cuda=lambda v: -v)
  refused = pytest.raises(cm.UnsupportedError, match="needs a branch for 'tpu'")
  with refused as caught, cm.simulation():
    jax.jit(_kernel(fn)).lower(_X)
  assert "at simulate_unsupported_test.py:" in str(caught.value)
  assert "['cpu', 'cuda']" in str(caught.value)


def test_block_dimensions_of_other_kinds_are_named():
  spec = pl.BlockSpec((pl.Indirect(8), 128), lambda i: (i, 0))
  refused = pytest.raises(cm.UnsupportedError, match="of kind Indirect, as in")
  with refused as caught, cm.simulation():
    call = pl.pallas_call(_copy, _TYPE, grid=(1,), in_specs=[spec])
    jax.jit(call).lower(_X)
  assert "Copy other blocks yourself" in str(caught.value)


def test_a_form_of_an_operation_that_is_lacking_is_named():
  numbers = lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
  )
  rows = lambda v: lax.gather(
    v, jnp.zeros((8, 1), np.int32), numbers, (1, 128), mode="one_hot"
  )
  refused = pytest.raises(cm.UnsupportedError, match="this form of 'gather'")
  with refused as caught, cm.simulation():
    jax.jit(_kernel(rows)).lower(_X)
  assert "at simulate_unsupported_test.py:" in str(caught.value)
  assert "in mode GatherScatterMode.ONE_HOT" in str(caught.value)
