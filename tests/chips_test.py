"""Tests for coremesh.chips."""

import copy
import dataclasses
import doctest
import inspect
import io
import math
import pickle

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import numpy as np
import pytest

import coremesh as cm
from coremesh import chips, topology
from coremesh.errors import AxisError, ChipError, UnsupportedError

_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
every_generation = pytest.mark.parametrize("generation", _GENERATIONS)

# Each property of a chip, from JAX's table entry for one of its TensorCores.
_FROM_TABLE = dict(
  tensor_cores_per_device=lambda t: t.num_cores,
  lanes=lambda t: t.num_lanes,
  sublanes=lambda t: t.num_sublanes,
  mxus_per_tensor_core=lambda t: t.num_mxus,
  mxu_columns=lambda t: t.mxu_column_size,
  hbm_bytes_per_device=lambda t: t.hbm_capacity_bytes * t.num_cores,
  vmem_bytes_per_tensor_core=lambda t: t.vmem_capacity_bytes,
  smem_bytes_per_tensor_core=lambda t: t.smem_capacity_bytes,
  hbm_bytes_per_second_per_device=lambda t: (
    t.mem_bw_bytes_per_second * t.num_cores
  ),
  bf16_flops_per_second_per_tensor_core=lambda t: t.bf16_ops_per_second or None,
  int8_ops_per_second_per_tensor_core=lambda t: t.int8_ops_per_second or None,
  fp8_flops_per_second_per_tensor_core=lambda t: t.fp8_ops_per_second or None,
  int4_ops_per_second_per_tensor_core=lambda t: t.int4_ops_per_second or None,
  sparse_cores_per_device=lambda t: _sparse(t, "num_cores"),
  vector_subcores_per_sparse_core=lambda t: _sparse(t, "num_subcores"),
  sparse_core_lanes=lambda t: _sparse(t, "num_lanes"),
  vmem_bytes_per_vector_subcore=lambda t: _sparse(t, "vmem_capacity_bytes"),
  shared_vmem_bytes_per_sparse_core=lambda t: (
    _sparse(t, "vmem_capacity_bytes") * _sparse(t, "num_subcores")
  ),
  sparse_core_dma_granule_bytes=lambda t: _sparse(t, "dma_granule_size_bytes"),
)
_IDENTITY = {"name", "version", "device_kind", "info"}
_COUNTS = {"num_chips", "devices_per_chip", "num_devices"}


def _sparse(table: pltpu.TpuInfo, field: str) -> int:
  return getattr(table.sparse_core, field, 0)


def _table(chip: cm.Chip) -> pltpu.TpuInfo:
  return pltpu.get_tpu_info_for_chip(
    chip.version, 2 if chip.version.supports_megacore else 1
  )


# --- facts -----------------------------------------------------------------


@every_generation
def test_numbers_are_those_of_jaxs_table(generation):
  chip = cm.chip(generation)
  assert chip.info == _table(chip)
  found = {name: getattr(chip, name) for name in _FROM_TABLE}
  assert found == {name: of(_table(chip)) for name, of in _FROM_TABLE.items()}


def test_every_property_is_checked_here():
  properties = {
    name
    for name, value in inspect.getmembers(cm.Chip)
    if isinstance(value, property)
  }
  assert properties == set(_FROM_TABLE) | _IDENTITY | _COUNTS


# Google's published figures for a whole chip (cloud.google.com/tpu/docs): peak
# bf16 TFLOP/s, HBM GiB and HBM GB/s. They show that no number was multiplied
# by the wrong count of cores or devices.
@pytest.mark.parametrize(
  ("generation", "teraflops", "hbm_gib", "hbm_gb_per_second"),
  [
    ("v4", 275, 32, 1228),
    ("v5e", 197, 16, 819),
    ("v5p", 459, 95, 2765),
    ("v6e", 918, 32, 1638),
    ("tpu7x", 2307, 192, 7380),
  ],
)
def test_numbers_of_a_chip_agree_with_the_published_ones(
  generation, teraflops, hbm_gib, hbm_gb_per_second
):
  chip = cm.chip(generation)
  cores = chip.tensor_cores_per_device * chip.devices_per_chip
  assert chip.bf16_flops_per_second_per_tensor_core is not None
  flops = chip.bf16_flops_per_second_per_tensor_core * cores
  assert flops == pytest.approx(teraflops * 1e12, rel=0.01)
  hbm_bytes = chip.hbm_bytes_per_device * chip.devices_per_chip
  assert hbm_bytes == pytest.approx(hbm_gib * 2**30, rel=0.01)
  rate = chip.hbm_bytes_per_second_per_device * chip.devices_per_chip
  # JAX's table has 2460 GB/s for v5p.
  assert rate == pytest.approx(hbm_gb_per_second * 1e9, rel=0.12)


@pytest.mark.parametrize(
  ("name", "num_chips", "devices_per_chip"),
  [
    ("v4:2x2x1", 4, 1),
    ("v5e:2x4", 8, 1),
    ("v5p:2x2x1", 4, 1),
    ("v5p:3x3x3", 27, 1),
    ("v6e:1x1", 1, 1),
    ("tpu7x:2x2x1", 4, 2),
  ],
)
def test_counts_chips_and_devices(name, num_chips, devices_per_chip):
  chip = cm.chip(name)
  assert chip.name == name
  assert chip.num_chips == num_chips
  assert chip.devices_per_chip == devices_per_chip
  assert chip.num_devices == num_chips * devices_per_chip


@every_generation
def test_facts_agree_with_libtpus_own_devices(generation):
  chip = cm.chip(generation)
  devices = list(chip.device_mesh(on="compiler").devices.flat)
  assert len(devices) == chip.num_devices
  assert {d.device_kind for d in devices} == {chip.device_kind}
  assert {d.num_cores for d in devices} == {chip.tensor_cores_per_device}
  assert {d.platform for d in devices} == {"tpu"}
  assert len({d.id for d in devices}) == chip.num_devices


# --- names -----------------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("v4", "v4:2x2x1"),
    ("v5e", "v5e:2x2"),
    ("v5p", "v5p:2x2x1"),
    ("v6e", "v6e:2x2"),
    ("tpu7x", "tpu7x:2x2x1"),
    ("7x", "tpu7x:2x2x1"),
    ("v7x:4x4x4", "tpu7x:4x4x4"),
    ("V5P:2X2X1", "v5p:2x2x1"),
    ("  v5p:2x2x1\n", "v5p:2x2x1"),
    ("v5p:2x4", "v5p:2x4x1"),
    ("v6e:4", "v6e:4x1"),
    ("v5p:16x16x16", "v5p:16x16x16"),
  ],
)
def test_a_name_is_a_generation_and_its_chips(name, expected):
  assert cm.chip(name).name == expected
  assert cm.chip(expected) == cm.chip(name)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("v5", r"no chip 'v5'; coremesh knows v4:2x2x1, .*Did you mean 'v5p'\?"),
    ("V6:2x2", r"no chip 'V6:2x2'; .*Did you mean 'v6e'\?"),
    ("v5p-8", r"Did you mean 'v5p'\?"),
    ("tpu7", r"Did you mean 'tpu7x'\?"),
    ("h100", r"no chip 'h100'; .*tpu7x:2x2x1, .* along each axis\.$"),
    ("", r"no chip ''"),
    (5, r"name must be a string such as 'v5p:2x2x1'; got 5"),
    ("v5p:", r"must be chips along each axis, such as v5p:2x2x1; got ''"),
    ("v5p:2x", r"such as v5p:2x2x1; got '2x'"),
    ("v6e:2*2", r"such as v6e:2x2; got '2\*2'"),
    ("v5p:-2x2x1", r"got '-2x2x1'"),
    ("v5p: 2x2x1", r"got ' 2x2x1'"),
    ("v5p:0x2x1", r"3 positive numbers of chips, .*got \(0, 2, 1\)"),
    ("v6e:2x2x1", r"2 positive numbers of chips, .*got \(2, 2, 1\)"),
    ("v5p:2x2x1x1", r"3 positive numbers of chips"),
  ],
)
def test_rejects_a_name_that_is_no_chip(name, message):
  with pytest.raises(ChipError, match=message):
    cm.chip(name)


@pytest.mark.parametrize("topology", [(2, 2), [2, 2, 1], (2, 2.0, 1), 4])
def test_rejects_a_topology_that_is_not_a_tuple_of_counts(topology):
  with pytest.raises(ChipError, match="a tuple of 3 positive numbers"):
    cm.Chip(generation="v5p", topology=topology)


def test_rejects_a_generation_that_does_not_exist():
  with pytest.raises(ChipError, match="Did you mean 'v5p'"):
    cm.Chip(generation="v5pp", topology=(2, 2, 1))


def test_a_chip_is_a_frozen_hashable_value():
  chip, other = cm.chip("v5p:2x2x1"), cm.chip("v5p:2x2x2")
  assert chip == cm.chip("v5p") and hash(chip) == hash(cm.chip("v5p"))
  assert chip != other and len({chip, other, cm.chip("v5p")}) == 2
  assert pickle.loads(pickle.dumps(chip)) == chip
  with pytest.raises(dataclasses.FrozenInstanceError):
    chip.generation = "v6e"  # pyright: ignore[reportAttributeAccessIssue]


def test_the_environment_names_the_chip_of_a_program(monkeypatch):
  monkeypatch.delenv("COREMESH_CHIP", raising=False)
  assert cm.chip().name == "v5p:2x2x1"
  monkeypatch.setenv("COREMESH_CHIP", "v6e:2x4")
  assert cm.chip().name == "v6e:2x4"
  assert cm.chip("v5e").name == "v5e:2x2"
  monkeypatch.setenv("COREMESH_CHIP", "v9")
  with pytest.raises(ChipError, match="no chip 'v9'"):
    cm.chip()


@every_generation
def test_a_device_kind_names_its_chip(generation):
  chip = cm.chip(generation)
  assert chips.chip_of_device_kind(chip.device_kind) == chip
  assert chips.chip_of_device_kind("cpu") is None
  # A TPU that JAX knows and coremesh does not.
  assert chips.chip_of_device_kind("TPU v3") is None


def test_the_example_of_cm_chip_is_right():
  found = doctest.testmod(chips, extraglobs={"cm": cm})
  assert found.attempted and not found.failed


# --- attached chips, played by compile-only devices ------------------------


@pytest.fixture
def attach(monkeypatch):
  """Makes the compile-only devices of a slice look attached."""

  def attach(name):
    devices = list(cm.chip(name).device_mesh(on="compiler").devices.flat)
    monkeypatch.setattr(topology, "tpu_is_attached", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    return devices

  return attach


@pytest.mark.parametrize(
  "name", ["v4:2x2x2", "v5e:2x4", "v5p:2x2x4", "v6e:1x1", "tpu7x:2x2x1"]
)
def test_the_attached_slice_is_the_default_chip(name, attach, monkeypatch):
  monkeypatch.setenv("COREMESH_CHIP", "v5e:16x16")
  devices = attach(name)
  assert cm.chip().name == name
  mesh = cm.chip().device_mesh()
  assert set(mesh.devices.flat) == set(devices)


def test_rejects_a_slice_that_is_not_the_attached_one(attach):
  attach("v5p:2x2x1")
  with pytest.raises(ChipError, match="computes on .'TPU v5'., not on v6e:2x2"):
    cm.chip("v6e").device_mesh()
  with pytest.raises(ChipError, match="has 16 devices, but 4 are attached"):
    cm.chip("v5p:2x2x4").device_mesh()


def test_rejects_an_attached_chip_that_coremesh_does_not_know(monkeypatch):
  class Old:
    device_kind = "TPU v3"

  monkeypatch.setattr(topology, "tpu_is_attached", lambda: True)
  monkeypatch.setattr(jax, "devices", lambda *_: [Old()])
  with pytest.raises(ChipError, match="'TPU v3', which coremesh does not know"):
    cm.chip()


def test_without_a_tpu_there_is_no_tpu_mesh():
  with pytest.raises(ChipError, match="computes on .'cpu'., not on v5p:2x2x1"):
    cm.chip("v5p").device_mesh(on="tpu")


# --- device meshes ---------------------------------------------------------


@pytest.mark.parametrize("on", ["simulator", "compiler"])
@every_generation
def test_a_mesh_holds_the_devices_of_the_slice(generation, on):
  chip = cm.chip(generation)
  mesh = chip.device_mesh("d", on=on)
  assert dict(mesh.shape) == {"d": chip.num_devices}
  assert mesh.axis_types == (jax.sharding.AxisType.Auto,)
  assert mesh.abstract_mesh.abstract_device.device_kind == chip.device_kind
  cores = mesh.abstract_mesh.abstract_device.num_cores
  assert cores == chip.tensor_cores_per_device
  two = chip.device_mesh(("a", "b"), (2, chip.num_devices // 2), on=on)
  assert dict(two.shape) == {"a": 2, "b": chip.num_devices // 2}
  assert set(two.devices.flat) == set(mesh.devices.flat)


def test_the_default_place_without_a_tpu_is_the_simulator():
  mesh = cm.chip("v5p").device_mesh()
  assert list(mesh.devices.flat) == jax.devices("cpu")[:4]
  assert mesh is cm.chip("v5p").device_mesh(on="simulator")


@pytest.mark.parametrize(
  ("name", "shape"),
  [
    ("v5p:16x16x16", (4096,)),
    ("v5p:16x16x16", (16, 256)),
    ("v5p:3x3x3", (27,)),
    ("v5p:1x1x1", (1,)),
    ("v5e:3x3", (9,)),
    ("v6e:1x3", (3,)),
    ("v6e:16x16", (256,)),
    ("tpu7x:3x1x1", (6,)),
    # Axes that are no product of axes of the slice.
    ("v5p:4x4x4", (2, 32)),
    ("v6e:4x4", (2, 8)),
    ("v4:4x4x4", (8, 8)),
    ("tpu7x:4x4x4", (2, 2, 32)),
  ],
)
def test_the_compiler_has_slices_of_every_size(name, shape):
  mesh = cm.chip(name).device_mesh(
    tuple("abc"[: len(shape)]), shape, on="compiler"
  )
  assert mesh.devices.shape == shape
  assert len(set(mesh.devices.flat)) == math.prod(shape)


def test_neighbours_of_a_compiled_mesh_are_neighbours_of_the_slice():
  mesh = cm.chip("v5p:4x4x4").device_mesh(
    tuple("abc"), (4, 4, 4), on="compiler"
  )
  coords = np.array([d.coords for d in mesh.devices.flat]).reshape(4, 4, 4, 3)
  for axis in range(3):
    steps = np.abs(np.diff(coords, axis=axis)).sum(axis=-1)
    assert (steps == 1).all()


@pytest.mark.parametrize("on", ["simulator", "compiler"])
def test_two_calls_give_one_mesh_object(on):
  # JAX's caches compare meshes by identity.
  chip = cm.chip("v5p")
  mesh = chip.device_mesh(("x", "y"), (2, 2), on=on)
  assert chip.device_mesh(["x", "y"], [2, 2], on=on) is mesh
  assert chip.device_mesh(("x", "y"), (4, 1), on=on) is not mesh
  assert chip.device_mesh(("y", "x"), (2, 2), on=on) is not mesh


def test_simulated_meshes_of_two_chips_differ():
  meshes = {cm.chip(g).device_mesh(on="simulator") for g in ("v5p", "v4")}
  assert len(meshes) == 2


@pytest.mark.parametrize("on", ["simulator", "compiler"])
def test_given_devices_keep_their_order(on):
  chip = cm.chip("v5p")
  devices = list(chip.device_mesh(on=on).devices.flat)
  order = [devices[i] for i in (3, 1, 0, 2)]
  mesh = chip.device_mesh("d", devices=order, on=on)
  assert list(mesh.devices.flat) == order
  assert mesh is chip.device_mesh("d", devices=np.array(order), on=on)
  assert mesh is not chip.device_mesh("d", on=on)
  some = chip.device_mesh(("x", "y"), (2, 1), devices=order[:2], on=on)
  assert some.devices.tolist() == [[order[0]], [order[1]]]


def _devices(name):
  if name == "cpu":
    return jax.devices("cpu")[:4]
  return list(cm.chip(name).device_mesh(on="compiler").devices.flat)


@pytest.mark.parametrize(
  ("on", "given", "message"),
  [
    ("compiler", "cpu", r"must be v5p devices for on='compiler'; .*'cpu'"),
    ("compiler", "v6e", r"must be v5p devices .*got \['TPU v6 lite'\]"),
    ("tpu", "cpu", r"must be v5p devices for on='tpu'"),
    ("simulator", "v5p", r"must be CPU devices .*got \['TPU v5'\]"),
    (None, "v5p", r"must be CPU devices for on='simulator'"),
  ],
)
def test_rejects_given_devices_of_another_kind(on, given, message):
  with pytest.raises(ChipError, match=message):
    cm.chip("v5p").device_mesh(devices=_devices(given), on=on)


def test_rejects_an_empty_list_of_devices():
  with pytest.raises(ChipError, match=r"must be CPU devices .*got \[\]"):
    cm.chip("v5p").device_mesh(devices=[])


@pytest.mark.parametrize(
  ("axes", "shape", "error", "message"),
  [
    (("x", "y"), None, ChipError, r"shape is needed for the axes .*product 4"),
    (("x", "y"), (2, 3), ChipError, r"hold the 4 devices .*got \(2, 3\)"),
    ("x", (2, 2), ChipError, r"one size for each axis of \('x',\)"),
    (("x", "y"), (-2, -2), ChipError, r"got \(-2, -2\)"),
    ("x", (4.0,), ChipError, r"got \(4.0,\)"),
    (("x", "x"), (2, 2), AxisError, "must be one or more different names"),
    ((), (), AxisError, "must be one or more different names"),
  ],
)
@pytest.mark.parametrize("on", ["simulator", "compiler"])
def test_rejects_axes_that_do_not_hold_the_devices(
  axes, shape, error, message, on
):
  with pytest.raises(error, match=message):
    cm.chip("v5p").device_mesh(axes, shape, on=on)


def test_rejects_a_place_that_does_not_exist():
  with pytest.raises(ChipError, match="'simulator', 'compiler' or None; got"):
    cm.chip("v5p").device_mesh(on="cpu")  # pyright: ignore[reportArgumentType]


def test_too_few_cpu_devices_is_an_error_with_the_remedy():
  # tests/topology_test.py follows it.
  message = (
    r"Simulating 16 devices needs 16 CPU devices, but JAX has already started"
    r" with 8\..*jax\.config\.update\(\"jax_num_cpu_devices\", 64\)"
  )
  with pytest.raises(ChipError, match=message):
    cm.chip("v5p:2x2x4").device_mesh(on="simulator")


def test_axis_types_are_those_asked_for():
  explicit, auto = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
  chip = cm.chip("v5p")
  mesh = chip.device_mesh(
    ("x", "y"), (2, 2), on="compiler", axis_types=(explicit, auto)
  )
  assert mesh.axis_types == (explicit, auto)
  mesh = chip.device_mesh("x", on="simulator", axis_types=[auto])
  assert mesh is chip.device_mesh("x", on="simulator")


@pytest.mark.parametrize("kinds", [["Explicit"], ["Auto", "Auto"], ["Manual"]])
def test_the_simulator_rejects_axes_that_are_not_auto(kinds):
  types = [jax.sharding.AxisType[k] for k in kinds]
  with pytest.raises(UnsupportedError, match="must be all Auto"):
    cm.chip("v5p").device_mesh(on="simulator", axis_types=types)


class _Pickler(pickle.Pickler):
  """Pickles devices by their number, as jax's serialize_executable does."""

  def persistent_id(self, obj):
    return obj.id if isinstance(obj, jax.Device) else None


class _Unpickler(pickle.Unpickler):
  def persistent_load(self, pid):
    return jax.devices()[pid]


def test_a_simulated_mesh_survives_copies_and_pickles():
  mesh = cm.chip("v6e").device_mesh(("x", "y"), (2, 2), on="simulator")
  assert copy.copy(mesh) is mesh
  buffer = io.BytesIO()
  _Pickler(buffer).dump(mesh)
  buffer.seek(0)
  assert _Unpickler(buffer).load() is mesh


# --- core meshes -----------------------------------------------------------


@every_generation
def test_core_meshes_hold_the_cores_of_a_device(generation):
  chip = cm.chip(generation)
  mesh = chip.tensor_cores("c")
  assert isinstance(mesh, pltpu.TensorCoreMesh)
  assert dict(mesh.shape) == {"c": chip.tensor_cores_per_device}
  assert chip.tensor_cores(num_cores=1).num_cores == 1
  if not chip.sparse_cores_per_device:
    return
  cores = chip.sparse_cores_per_device
  subcores = chip.vector_subcores_per_sparse_core
  vector = chip.vector_subcores("c", "s")
  assert isinstance(vector, plsc.VectorSubcoreMesh)
  assert dict(vector.shape) == {"c": cores, "s": subcores}
  few = chip.vector_subcores(num_cores=1, num_subcores=3)
  assert dict(few.shape) == {"core": 1, "subcore": 3}
  scalar = chip.scalar_subcores("c")
  assert isinstance(scalar, plsc.ScalarSubcoreMesh)
  assert dict(scalar.shape) == {"c": cores}
  assert chip.scalar_subcores(num_cores=1).num_cores == 1


def test_equal_core_meshes_are_equal_values():
  chip = cm.chip("v5p")
  for make in (chip.tensor_cores, chip.vector_subcores, chip.scalar_subcores):
    assert make() == make() and hash(make()) == hash(make())


@pytest.mark.parametrize("generation", ["v4", "v5e"])
def test_a_chip_without_sparse_cores_has_no_subcores(generation):
  chip = cm.chip(generation)
  for make in (chip.vector_subcores, chip.scalar_subcores):
    with pytest.raises(ChipError, match=f"{chip.name} has no SparseCores"):
      make()


@pytest.mark.parametrize("count", [0, -1, 5, True, 1.0, "2", np.float32(1)])
@pytest.mark.parametrize("kind", ["tensor", "vector", "subcores", "scalar"])
def test_rejects_a_number_of_cores_that_a_device_has_not(kind, count):
  chip = cm.chip("v5p")
  make = dict(
    tensor=lambda n: chip.tensor_cores(num_cores=n),
    vector=lambda n: chip.vector_subcores(num_cores=n),
    subcores=lambda n: chip.vector_subcores(
      num_subcores=17 if type(n) is int and n > 1 else n
    ),
    scalar=lambda n: chip.scalar_subcores(num_cores=n),
  )[kind]
  is_int = isinstance(count, int) and not isinstance(count, bool)
  most = dict(tensor=2, vector=4, subcores=16, scalar=4)[kind]
  message = f"must be from 1 to {most}" if is_int else "must be an int; got"
  with pytest.raises(ChipError, match=message):
    make(count)


@pytest.mark.parametrize("count", [2, 3])
def test_rejects_some_of_the_scalar_subcores(count):
  with pytest.raises(ChipError, match="must be 1 or 4 on v5p:2x2x1"):
    cm.chip("v5p").scalar_subcores(num_cores=count)
