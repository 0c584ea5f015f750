"""Kernels of plain Pallas in `cm.simulation`, made without coremesh."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh.errors import ChipError

_X = np.arange(1024, dtype=np.int32)
_TABLE = np.arange(16 * 128, dtype=np.float32).reshape(16, 128)
_EAGER_OR_JITTED = pytest.mark.parametrize(
  "how", [lambda f: f, jax.jit], ids=["eager", "jit"]
)


def _add_one_on_subcores(x):
  mesh = plsc.VectorSubcoreMesh(
    core_axis_name="c", subcore_axis_name="s", num_cores=4, num_subcores=16
  )

  def body(x_hbm, o_hbm, buf):
    worker = jax.lax.axis_index("c") * 16 + jax.lax.axis_index("s")
    mine = pl.ds(worker * 16, 16)
    pltpu.sync_copy(x_hbm.at[mine], buf)
    buf[...] += 1
    pltpu.sync_copy(buf, o_hbm.at[mine])

  out = jax.ShapeDtypeStruct(x.shape, x.dtype)
  scratch = [pltpu.VMEM((16,), np.int32)]
  return pl.kernel(body, out_type=out, mesh=mesh, scratch_types=scratch)(x)


def _double_on_tensor_cores(x):
  mesh = pltpu.TensorCoreMesh(axis_name="core")
  rows = x.shape[0] // mesh.num_cores

  def body(x_hbm, o_hbm, buf):
    mine = pl.ds(jax.lax.axis_index("core") * rows, rows)
    pltpu.sync_copy(x_hbm.at[mine], buf)
    buf[...] *= 2
    pltpu.sync_copy(buf, o_hbm.at[mine])

  out = jax.ShapeDtypeStruct(x.shape, x.dtype)
  scratch = [pltpu.VMEM((rows, 128), np.float32)]
  return pl.kernel(body, out_type=out, mesh=mesh, scratch_types=scratch)(x)


@_EAGER_OR_JITTED
def test_vector_subcores(how):
  with cm.simulation() as run:
    y = how(_add_one_on_subcores)(_X)
  np.testing.assert_array_equal(y, _X + 1)
  assert [r.num_workers for r in run.runs] == [64]


@_EAGER_OR_JITTED
def test_tensor_cores(how):
  with cm.simulation() as run:
    y = how(_double_on_tensor_cores)(_TABLE)
  np.testing.assert_array_equal(y, _TABLE * 2)
  assert [r.num_workers for r in run.runs] == [2]


def test_the_chip_may_be_chosen():
  with cm.simulation(chip=cm.chip("v6e")) as run:
    np.testing.assert_array_equal(_double_on_tensor_cores(_TABLE), _TABLE * 2)
    with pytest.raises(ValueError, match="only 2"):
      _add_one_on_subcores(_X)
  assert [r.num_workers for r in run.runs] == [1]
  with pytest.raises(ChipError, match="chip must be what cm.chip"):
    with cm.simulation(chip="v6e"):  # pyright: ignore[reportArgumentType]
      pass


def test_the_chip_is_known_inside_only():
  jitted = jax.jit(_add_one_on_subcores)
  with cm.simulation():
    jitted(_X)
  with pytest.raises(ValueError, match="Unsupported TPU device kind: cpu"):
    jitted(_X)


@_EAGER_OR_JITTED
def test_a_device_mesh_says_itself_what_it_is_of(how):
  chip = cm.chip("v6e:2x2")
  fn = jax.shard_map(
    _double_on_tensor_cores,
    mesh=chip.device_mesh("device"),
    in_specs=P("device"),
    out_specs=P("device"),
    check_vma=False,
  )
  x = np.concatenate([_TABLE] * 4)
  with cm.simulation(chip=cm.chip("v5p")) as run:
    y = how(fn)(x)
  np.testing.assert_array_equal(y, x * 2)
  assert [r.num_workers for r in run.runs] == [1, 1, 1, 1]


def test_a_mesh_that_is_set_outside_holds_inside():
  mesh = cm.chip("v6e:2x2").device_mesh("device")
  fn = jax.shard_map(
    _double_on_tensor_cores,
    in_specs=P("device"),
    out_specs=P("device"),
    check_vma=False,
  )
  x = np.concatenate([_TABLE] * 4)
  with jax.set_mesh(mesh), cm.simulation():
    np.testing.assert_array_equal(jax.jit(fn)(x), x * 2)
  with cm.simulation(), jax.set_mesh(mesh):
    np.testing.assert_array_equal(jax.jit(fn)(x), x * 2)


def test_reads_of_what_nobody_wrote_can_be_left_out():
  def call():
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)

    def body(x_hbm, o_hbm, buf):
      del x_hbm
      buf[...] = buf[...] + 1
      pltpu.sync_copy(buf, o_hbm)

    out = jax.ShapeDtypeStruct((8, 128), np.float32)
    scratch = [pltpu.VMEM((8, 128), np.float32)]
    pl.kernel(body, out_type=out, mesh=mesh, scratch_types=scratch)(_X)

  with cm.simulation(on_finding="record") as run:
    call()
  assert [f.kind for f in run.findings] == ["uninitialised"]
  with cm.simulation(uninitialised=False) as run:
    call()
  assert not run.findings
