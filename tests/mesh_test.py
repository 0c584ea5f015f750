"""Tests for coremesh.mesh."""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh import mesh
from tests import support

_ROWS = 8


def _on_every_worker(scalars, chip, device_mesh, **kwargs):
  """The int32 scalars a function gives in a kernel: [device, core, scalar]."""
  cores = chip.tensor_cores()

  @cm.kernel(
    mesh=cores, out=cm.like(0), scratch=dict(values_vmem=cm.vmem_slab(0))
  )
  def body(x_hbm, o_hbm, *, values_vmem):
    values = scalars()
    for row in range(_ROWS):
      value = values[row] if row < len(values) else 0
      values_vmem[row] = jnp.full((128,), value, jnp.int32)
    cm.copy(values_vmem, o_hbm.at[cm.slab(o_hbm)])

  count = device_mesh.size * cores.num_cores
  x = jnp.zeros((count * _ROWS, 128), jnp.int32)
  result = support.over_devices(body, device_mesh, **kwargs)(x)
  return np.asarray(result)[:, 0].reshape(device_mesh.size, -1, _ROWS)


def _in_a_kernel(function, chip="v5p:2x2x1", axes="device", shape=None):
  """Traces `function` in a kernel body on every device of a mesh."""
  chip, device_mesh = support.simulated(chip, axes, shape)

  @cm.kernel(mesh=chip.tensor_cores(), out=cm.like(0))
  def body(x_hbm, o_hbm):
    function(x_hbm)

  x = jax.ShapeDtypeStruct((device_mesh.size * _ROWS, 128), jnp.float32)
  jax.eval_shape(support.over_devices(body, device_mesh), x)


# --- who am I --------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_workers_count_the_axes_with_the_first_slowest(check_vma):
  chip, device_mesh = support.simulated(axes=("x", "y"), shape=(2, 2))

  def scalars():
    assert cm.device_axes() == ("x", "y")
    assert cm.core_axes() == ("core",)
    assert cm.axis_sizes(("core", "x")) == (2, 2)
    assert cm.num_workers(("x", "y", "core")) == 8
    return [
      cm.worker_index("core"),
      cm.worker_index(("x", "y", "core")),
      cm.worker_index(("core", "y", "x")),
      cm.worker_index(["y"]),
    ]

  found = _on_every_worker(scalars, chip, device_mesh, check_vma=check_vma)
  for device, core in np.ndindex(4, 2):
    x, y = divmod(device, 2)
    expected = [core, 4 * x + 2 * y + core, 4 * core + 2 * y + x, y]
    assert found[device, core, :4].tolist() == expected


def test_coordinates_undo_worker_index():
  chip, device_mesh = support.simulated("v5p:2x2x2", ("x", "y"), (2, 4))
  axes = ("y", "core", "x")

  def scalars():
    back = cm.coordinates(cm.worker_index(axes), axes)
    assert tuple(back) == axes
    last = cm.coordinates(15, axes)
    return [back["x"], back["y"], back["core"], *last.values()]

  found = _on_every_worker(scalars, chip, device_mesh)
  for device, core in np.ndindex(8, 2):
    x, y = divmod(device, 4)
    assert found[device, core, :6].tolist() == [x, y, core, 3, 1, 1]


@pytest.mark.parametrize("steps", [0, 1, -1, 7, -8, 19, -23])
@pytest.mark.parametrize("is_traced", [False, True])
def test_shifted_goes_any_number_of_steps_round_the_ring(steps, is_traced):
  chip, device_mesh = support.simulated()

  def scalars():
    taken = jnp.int32(steps) if is_traced else steps
    there = cm.shifted(("device", "core"), taken)
    return [there["device"], there["core"]]

  found = _on_every_worker(scalars, chip, device_mesh)
  for device, core in np.ndindex(4, 2):
    place = (2 * device + core + steps) % 8
    assert found[device, core, :2].tolist() == [place // 2, place % 2]


def test_next_and_previous_core_wrap():
  chip, device_mesh = support.simulated()
  found = _on_every_worker(
    lambda: [cm.next_core(), cm.previous_core()], chip, device_mesh
  )
  np.testing.assert_array_equal(found[:, 0, :2], 1)
  np.testing.assert_array_equal(found[:, 1, :2], 0)


def test_indices_are_int32_with_x64_on():
  chip, device_mesh = support.simulated()

  def scalars():
    ring = ("device", "core")
    far = jnp.int64(9)
    values = [
      cm.worker_index(ring),
      *cm.coordinates(far - 4, ring).values(),
      *cm.shifted(ring, far).values(),
      cm.next_core(),
    ]
    assert {v.dtype for v in values} == {jnp.dtype("int32")}
    return values

  with jax.enable_x64(True):
    found = _on_every_worker(scalars, chip, device_mesh)
  assert found[3, 1, :6].tolist() == [7, 2, 1, 0, 0, 0]


def test_a_mesh_of_one_worker_has_index_0_and_itself_as_neighbour():
  chip, device_mesh = support.simulated("v6e:1x1")

  def scalars():
    ring = ("device", "core")
    assert mesh.with_several(ring) == ()
    return [cm.worker_index(ring), *cm.shifted(ring).values(), cm.next_core()]

  assert not _on_every_worker(scalars, chip, device_mesh).any()


def test_permuted_devices_keep_their_place_in_the_mesh():
  chip, plain = support.simulated()
  devices = [plain.devices.flat[i] for i in (2, 0, 3, 1)]
  device_mesh = chip.device_mesh(
    ("x", "y"), (2, 2), on="simulator", devices=devices
  )
  found = _on_every_worker(
    lambda: [cm.worker_index(("x", "y"))], chip, device_mesh
  )
  assert found[:, 0, 0].tolist() == [0, 1, 2, 3]


# --- axes in scope ---------------------------------------------------------


def test_outside_a_kernel_there_are_device_axes_only():
  assert cm.device_axes() == () == cm.core_axes()
  _, device_mesh = support.simulated()

  def body(x):
    assert cm.device_axes() == ("device",)
    assert cm.core_axes() == ()
    return x + cm.worker_index("device").astype(x.dtype)

  y = support.over_devices(body, device_mesh)(jnp.zeros(4))
  assert y.tolist() == [0, 1, 2, 3]


def _trace_plain(body, chip, device_mesh):
  """Traces a body in a kernel that coremesh has not launched."""
  kernel = pl.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((_ROWS, 128), jnp.float32),
    mesh=chip.tensor_cores(),
  )
  fn = support.over_devices(kernel, device_mesh, check_vma=False)
  jax.eval_shape(fn, jax.ShapeDtypeStruct((4 * _ROWS, 128), jnp.float32))


def test_a_plain_pallas_kernel_has_the_same_axes():
  seen = []

  def body(x_hbm, o_hbm):
    seen.append((cm.device_axes(), cm.core_axes(), cm.num_workers("core")))

  _trace_plain(body, *support.simulated())
  assert set(seen) == {(("device",), ("core",), 2)}


def test_only_a_mesh_of_subcores_counts_as_vector_subcores():
  chip = cm.chip("v5p:2x2x1")
  x = jax.ShapeDtypeStruct((_ROWS, 128), jnp.float32)
  seen = []

  def body(x_hbm, o_hbm):
    seen.append(mesh.on_vector_subcore())

  for cores in (
    chip.tensor_cores(),
    chip.scalar_subcores(),
    chip.vector_subcores(),
  ):
    kernel = cm.kernel(body, mesh=cores, out=cm.like(0), interpret=False)
    jax.eval_shape(kernel, x)
  assert seen == [False, False, True]


@pytest.mark.parametrize(
  ("axes", "message"),
  [
    ("cores", r"\['cores'\] are not.*device axes \['device'\], core axes"),
    (("core", "core"), "different names"),
    ((), "one or more"),
    (("device", "x"), r"\['x'\] are not"),
  ],
)
def test_axes_that_are_none_are_refused(axes, message):
  with pytest.raises(cm.AxisError, match=message):
    _in_a_kernel(lambda _: cm.worker_index(axes))
  with pytest.raises(cm.AxisError, match=message):
    _in_a_kernel(lambda _: cm.shifted(axes))
  with pytest.raises(cm.AxisError, match=message):
    _in_a_kernel(lambda _: cm.coordinates(0, axes))


def test_an_axis_of_vmap_is_no_place_for_a_kernel_to_address():
  @cm.kernel(mesh=cm.chip("v5p:2x2x1").tensor_cores(), out=cm.like(0))
  def body(x_hbm, o_hbm):
    cm.worker_index("batch")

  batched = jax.vmap(body, axis_name="batch")
  with pytest.raises(cm.AxisError, match=r"\['batch'\] are not"):
    jax.eval_shape(batched, jnp.zeros((3, _ROWS, 128)))


# --- indices ---------------------------------------------------------------


@pytest.mark.parametrize(
  ("index", "message"),
  [
    (8, r"index must be in \[0, 8\); got 8"),
    (-1, r"got -1"),
    (np.int32(9), r"got 9"),
    (1.0, "index must be an integer; got 1.0"),
    ("1", "must be an integer"),
  ],
)
def test_coordinates_of_no_worker_are_refused(index, message):
  with pytest.raises(cm.AxisError, match=message):
    _in_a_kernel(lambda _: cm.coordinates(index, ("device", "core")))


@pytest.mark.parametrize(
  ("to", "message"),
  [
    ({}, "at least one axis"),
    ({"core": 2}, r"to\['core'\] must be in \[0, 2\); got 2"),
    ({"core": 1, "device": -1}, r"to\['device'\] must be in \[0, 4\)"),
    ({"x": 0}, r"to must name axes in scope; \['x'\] are not"),
    ({"core": 0.5}, r"to\['core'\] must be an integer; got 0.5"),
    ({"core": np.int64(3)}, r"to\['core'\] must be in \[0, 2\); got 3"),
  ],
)
def test_an_address_of_no_worker_is_refused(to, message):
  with pytest.raises(cm.AxisError, match=message):
    _in_a_kernel(lambda _: mesh.device_id(to))


@pytest.mark.parametrize(
  ("index", "message"),
  [
    (lambda: jnp.float32(1) * jax.lax.axis_index("core"), "float32"),
    (lambda: jnp.arange(2) * jax.lax.axis_index("core"), r"int32\[2\]"),
    (lambda: jax.lax.axis_index("core") > 0, "bool"),
  ],
)
def test_an_array_that_is_no_index_is_refused(index, message):
  message = r"to\['core'\] must be an integer scalar; got " + message

  def body(_):
    with jax.numpy_dtype_promotion("standard"):
      given = index()
    mesh.device_id({"core": given})

  with pytest.raises(cm.AxisError, match=message):
    _in_a_kernel(body)


def test_an_address_names_the_core():
  # JAX's interpreter counts a signal that names no core on core 0.
  chip, device_mesh = support.simulated(axes=("x", "y"), shape=(2, 2))

  def scalars():
    there, own = mesh.device_id({"y": 0}), mesh.own_device_id()
    assert sorted(there) == ["core", "y"]
    assert sorted(own) == ["core"]
    assert sorted(mesh.device_id({"core": 1})) == ["core"]
    return [there["y"], there["core"], own["core"]]

  found = _on_every_worker(scalars, chip, device_mesh)
  for device, core in np.ndindex(4, 2):
    assert found[device, core, :3].tolist() == [0, core, core]


def test_an_address_in_a_plain_pallas_kernel_names_the_device_too():
  # JAX cannot find the index on an axis that is not named under check_vma.
  chip, device_mesh = support.simulated(axes=("x", "y"), shape=(2, 2))

  def body(x_hbm, o_hbm):
    assert sorted(mesh.device_id({"y": 0})) == ["core", "x", "y"]
    assert sorted(mesh.device_id({"core": 0})) == ["core", "x", "y"]

  _trace_plain(body, chip, device_mesh)


def test_one_core_needs_no_name():
  def body(_):
    assert sorted(mesh.device_id({"device": 0})) == ["device"]
    assert mesh.own_device_id() is None

  _in_a_kernel(body, "v6e:2x2")


# --- slabs -----------------------------------------------------------------


def _slab(ref, **kwargs):
  found = cm.slab(ref, **kwargs)
  return found.start, found.size


def test_slab_is_the_share_of_this_worker():
  chip, device_mesh = support.simulated()
  ref = jax.ShapeDtypeStruct((24, 6, 128), jnp.float32)

  def scalars():
    starts, sizes = zip(
      _slab(ref),
      _slab(ref, axis=-1),
      _slab(ref, axis=1, over="core"),
      _slab(ref, axis=0, over=("device", "core")),
      strict=True,
    )
    assert sizes == (12, 64, 3, 3)
    return starts

  found = _on_every_worker(scalars, chip, device_mesh)
  for device, core in np.ndindex(4, 2):
    expected = [12 * core, 64 * core, 3 * core, 3 * (2 * device + core)]
    assert found[device, core, :4].tolist() == expected


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    (dict(axis=2), r"axis must be in \[-2, 2\).*got 2"),
    (dict(axis=-3), "got -3"),
    (dict(axis=0, over=("device", "core")), "8 workers"),
  ],
)
def test_slab_refuses_what_it_cannot_share(kwargs, message):
  share = functools.partial(cm.slab, **kwargs)
  ref = jax.ShapeDtypeStruct((12, 128), jnp.float32)
  with pytest.raises(cm.ShapeError, match=message):
    _in_a_kernel(lambda _: share(ref))


def test_slab_over_no_axis_is_refused():
  with pytest.raises(cm.AxisError, match="cores"):
    _in_a_kernel(lambda x_hbm: cm.slab(x_hbm, over="cores"))


def test_slab_takes_a_part_of_a_ref():
  def body(x_hbm):
    assert _slab(x_hbm.at[pl.ds(0, 4)])[1] == 2

  _in_a_kernel(body)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_addresses_compile(chip):
  chip = cm.chip(chip)
  device_mesh = chip.device_mesh("device", on="compiler")

  @cm.kernel(
    mesh=chip.tensor_cores(),
    out=cm.like(0),
    scratch=dict(sem=pltpu.SemaphoreType.REGULAR),
  )
  def leaves_signals(x_hbm, o_hbm, *, sem):
    cm.global_barrier()
    for to in {"device": 1}, {"core": 0}, cm.shifted(("core", "device"), 3):
      pl.semaphore_signal(sem, 1, device_id=mesh.device_id(to))

  fn = jax.shard_map(
    leaves_signals,
    mesh=device_mesh,
    in_specs=P("device"),
    out_specs=P("device"),
  )
  x = jax.ShapeDtypeStruct((chip.num_devices * _ROWS, 128), jnp.float32)
  assert cm.compile(fn, x).code_bytes > 0
