"""Tests for coremesh.launch: what a kernel is as a JAX function."""

import contextlib
import dataclasses
import functools
import re
import time

import jax
from jax._src.pallas import core as pallas_core  # noqa: TID251
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh import _compat, topology
from coremesh.errors import (
  AxisError,
  ChipError,
  CollectiveError,
  DTypeError,
  ShapeError,
  UnsupportedError,
)
from coremesh.simulate import params
from coremesh.simulate.findings import SimulationError
from tests import support

_F32 = jnp.float32
_ROUTES = ("kernel", "core_map")
every_route = pytest.mark.parametrize("route", _ROUTES)
checked_or_not = pytest.mark.parametrize("check_vma", [True, False])

_CORES = cm.chip("v5p").tensor_cores()
_ONE_CORE = cm.chip("v5p").tensor_cores(num_cores=1)
_OF_JAX = pltpu.InterpretParams(random_seed=3)
_TWO_CORES = dict(num_cores_or_threads=2)
_SHAPE = (64, 128)  # of four devices
_X = jax.ShapeDtypeStruct(_SHAPE, _F32)


def _mesh(on="simulator", axes="device", shape=None, chip="v5p"):
  return cm.chip(chip).device_mesh(axes, shape, on=on)


def _array(shape=_SHAPE, dtype=_F32):
  return (
    jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape).astype(dtype)
  )


def _double_body(x_hbm, o_hbm, *, mine):
  rows = cm.slab(x_hbm)
  cm.copy(x_hbm.at[rows], mine)
  cm.core_barrier()
  mine[...] = mine[...] + mine[...]
  cm.copy(mine, o_hbm.at[rows])


def _double(body=_double_body, **options):
  defaults = dict(
    mesh=_CORES, out=cm.like(0), scratch=dict(mine=cm.vmem_slab(0))
  )
  return cm.kernel(body, **{**defaults, **options})


def _copy_body(x_hbm, o_hbm):
  cm.copy(x_hbm, o_hbm)


def _copying(body=_copy_body, **options):
  # On one core, because two that write one place race.
  return cm.kernel(body, **{"mesh": _ONE_CORE, "out": cm.like(0), **options})


def _simulated(kernel, **options):
  return support.over_devices(kernel, _mesh(), **options)


def _launches(kernel, *args, mesh=None, **options):
  """The parameters of each launch in the traced program."""
  mesh = _mesh("compiler") if mesh is None else mesh
  fn = support.over_devices(kernel, mesh, **options)
  program = fn.trace(*args).jaxpr.jaxpr
  return [
    eqn.params
    for eqn in _compat.walk(program)
    if eqn.primitive.name == _compat.KERNEL_PRIMITIVE
  ]


def _compile(kernel, *args, mesh=None, **options):
  mesh = _mesh("compiler") if mesh is None else mesh
  return cm.compile(support.over_devices(kernel, mesh, **options), *args)


# --- routes ----------------------------------------------------------------


def _swap_and_add_body(x_hbm, y_hbm, o_hbm, *, mine, other):
  rows = cm.slab(x_hbm)
  cm.copy(x_hbm.at[rows], mine)
  cm.swap(mine, other)
  cm.copy(y_hbm.at[rows], mine)
  mine[...] = mine[...] + other[...]
  cm.copy(mine, o_hbm.at[rows])


@every_route
@pytest.mark.parametrize("dtype", [_F32, jnp.bfloat16, jnp.int32])
def test_both_routes_give_the_bits_of_the_reference(route, dtype):
  kernel = cm.kernel(
    _swap_and_add_body,
    mesh=_CORES,
    out=cm.like(0),
    scratch=dict(mine=cm.vmem_slab(0), other=cm.vmem_slab(0)),
    route=route,
  )
  x, y = _array(dtype=dtype), _array(dtype=dtype)[::-1]
  swapped = x.reshape(4, 2, 8, 128)[:, ::-1].reshape(_SHAPE)
  np.testing.assert_array_equal(_simulated(kernel)(x, y), swapped + y)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@every_route
def test_both_routes_compile(route, chip):
  mesh = _mesh("compiler", chip=chip)
  kernel = _double(mesh=cm.chip(chip).tensor_cores(), route=route)
  x = jax.ShapeDtypeStruct((16 * mesh.size, 128), _F32)
  assert _compile(kernel, x, mesh=mesh).kernels[0].name == "_double_body"


def _hlo(fn, *args):
  """The lowered program, without the kernel's own and the function's name."""
  mesh = _mesh("compiler")
  whole = dict(in_specs=P(), out_specs=P(), check_vma=False)
  text = support.over_devices(fn, mesh, **whole).trace(*args).lower().as_text()
  text = re.sub(r'backend_config = "(?:[^"\\]|\\.)*"', "", text)
  return re.sub(r"@jit_\w+", "@jit", text)


def test_the_core_map_route_is_a_core_map_over_refs():
  memory = dict(
    a=pltpu.VMEM(_SHAPE, _F32),
    b=pltpu.VMEM((256,), jnp.int32),
  )

  def body(x_hbm, y_hbm, o_hbm, p_hbm, *, a, b):
    pltpu.sync_copy(x_hbm, a)
    pltpu.sync_copy(y_hbm, b)
    barrier = pltpu.get_barrier_semaphore()
    pltpu.core_barrier(barrier, core_axis_name="core")
    pltpu.sync_copy(a, o_hbm)
    pltpu.sync_copy(b, p_hbm)

  ours = cm.kernel(
    body,
    mesh=_CORES,
    out=(cm.like(0), cm.like(1)),
    scratch=memory,
    route="core_map",
    name="by_hand",
  )

  def by_hand(x, y):
    outs = [jax.new_ref(jax.lax.empty(a.shape, a.dtype)) for a in (x, y)]
    refs = [jax.new_ref(x), jax.new_ref(y), *outs]

    @pallas_core.core_map(
      _CORES,
      compiler_params=pltpu.CompilerParams(collective_id=0),
      scratch_shapes=memory,
      name="by_hand",
    )
    def _(**scratch):
      body(*refs, **scratch)

    return tuple(jax.freeze(ref) for ref in outs)

  args = _X, jax.ShapeDtypeStruct((256,), jnp.int32)
  found = _hlo(ours, *args)
  assert "output_operand_aliases" in found
  assert found == _hlo(by_hand, *args)


def test_the_kernel_route_is_a_plain_pallas_kernel():
  def body(x_hbm, o_hbm, buffer):
    pltpu.sync_copy(x_hbm, buffer)
    pltpu.sync_copy(buffer, o_hbm)

  memory = [pltpu.VMEM(_SHAPE, _F32)]
  ours = cm.kernel(body, mesh=_ONE_CORE, out=cm.like(0), scratch=memory)
  plain = pl.kernel(body, out_type=_X, mesh=_ONE_CORE, scratch_types=memory)
  named = pl.kernel(
    body, out_type=_X, mesh=_ONE_CORE, scratch_types=memory, name="body"
  )
  found = _hlo(ours, _X)
  assert "output_operand_aliases" not in found
  assert found == _hlo(named, _X)
  assert found == _hlo(plain, _X)


@pytest.mark.parametrize("route", ["mpmd", None, "Kernel"])
def test_rejects_a_route_that_does_not_exist(route):
  with pytest.raises(UnsupportedError, match="'kernel' or 'core_map'; got"):
    _double(route=route)


# --- outputs ---------------------------------------------------------------

_PART = (16, 128)  # of one device


def _first(tree):
  return jax.tree.leaves(tree)[0]


@every_route
@pytest.mark.parametrize(
  "out",
  [
    cm.like(0),
    jax.ShapeDtypeStruct(_PART, _F32),
    np.zeros(_PART, np.float32),
    lambda x: x,
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    lambda x: [cm.like(0)],
    [cm.like(0)],
    (cm.like(0),),
    {"y": cm.like(0)},
    ({"y": [cm.like(0)]},),
    pltpu.HBM(_PART, _F32),
  ],
)
def test_an_output_has_the_structure_asked_for(out, route):
  @functools.partial(_copying, out=out, route=route)
  def kernel(x_hbm, o_hbm):
    cm.copy(x_hbm, _first(o_hbm))

  found = _simulated(kernel)(_array())
  asked = out(jax.typeof(_array(_PART))) if callable(out) else out
  is_leaf = lambda leaf: hasattr(leaf, "dtype")
  assert jax.tree.structure(found) == jax.tree.structure(asked, is_leaf=is_leaf)
  np.testing.assert_array_equal(_first(found), _array())


@every_route
def test_several_outputs_of_several_types(route):
  out = (cm.like(1), {"a": cm.like(0)}, jax.ShapeDtypeStruct((8, 128), _F32))

  @functools.partial(_copying, out=out, route=route)
  def kernel(x_hbm, y_hbm, p_hbm, q_hbm, r_hbm):
    cm.copy(y_hbm, p_hbm)
    cm.copy(x_hbm, q_hbm["a"])
    cm.copy(x_hbm.at[pl.ds(8, 8)], r_hbm)

  x, y = _array(), _array((8, 256), jnp.int8)
  p, q, r = _simulated(kernel)(x, y)
  np.testing.assert_array_equal(p, y)
  np.testing.assert_array_equal(q["a"], x)
  second_rows = x.reshape(4, 2, 8, 128)[:, 1].reshape(32, 128)
  np.testing.assert_array_equal(r, second_rows)


@every_route
def test_arguments_may_be_trees(route):
  @functools.partial(_copying, route=route)
  def kernel(tree_hbm, y_hbm, o_hbm):
    cm.copy(tree_hbm["a"], o_hbm["b"][0])
    cm.copy(tree_hbm["b"][0], o_hbm["a"])
    cm.copy(y_hbm, o_hbm["b"][1])

  x, y = _array(), _array()[::-1]
  found = _simulated(kernel)({"a": x, "b": [y, x]}, x)
  np.testing.assert_array_equal(found["a"], y)
  np.testing.assert_array_equal(found["b"][0], x)


@every_route
def test_a_kernel_without_outputs_returns_none_of_them(route):
  kernel = cm.kernel(lambda x_hbm: None, mesh=_CORES, route=route)
  assert _simulated(kernel)(_array()) == ()


def test_a_kernel_without_arguments():
  @functools.partial(_copying, out=jax.ShapeDtypeStruct((8, 128), _F32))
  def kernel(o_hbm):
    @functools.partial(pl.run_scoped, buffer=pltpu.VMEM((8, 128), _F32))
    def _(buffer):
      buffer[...] = jnp.full((8, 128), 3.0)
      pltpu.sync_copy(buffer, o_hbm)

  np.testing.assert_array_equal(kernel(), jnp.full((8, 128), 3.0))


def test_rejects_a_body_that_returns_a_value():
  with pytest.raises(ValueError, match="should return None"):
    _simulated(_copying(lambda x_hbm, o_hbm: 3))(_array())


# --- scratch ---------------------------------------------------------------


@every_route
@pytest.mark.parametrize("num_links", [0, 4])
@pytest.mark.parametrize(
  "scratch",
  [
    [cm.vmem_slab(0), pltpu.SMEM((4,), jnp.int32)],
    (cm.vmem_slab(0), pltpu.SMEM((4,), jnp.int32)),
    dict(mine=cm.vmem_slab(0), count=pltpu.SMEM((4,), jnp.int32)),
    lambda x: [cm.vmem_slab(0), pltpu.SMEM((4,), jnp.int32)],
    lambda x: dict(
      mine=pltpu.VMEM((x.shape[0] // 2, 128), x.dtype),
      count=pltpu.SMEM((4,), jnp.int32),
    ),
  ],
)
def test_scratch_goes_by_name_or_by_place(scratch, num_links, route):
  def body(x_hbm, o_hbm, mine, count):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    count[0] = jnp.int32(5)
    mine[...] = mine[...] + count[0].astype(_F32)
    cm.copy(mine, o_hbm.at[rows])

  kernel = _double(body, scratch=scratch, num_links=num_links, route=route)
  x = _array()
  np.testing.assert_array_equal(_simulated(kernel)(x), x + 5.0)


@every_route
def test_scratch_may_be_a_tree(route):
  def body(x_hbm, o_hbm, tree):
    cm.copy(x_hbm, tree["a"][0])
    cm.copy(tree["a"][0], o_hbm)

  scratch = [dict(a=[pltpu.VMEM(_PART, _F32)])]
  kernel = _copying(body, scratch=scratch, route=route)
  np.testing.assert_array_equal(_simulated(kernel)(_array()), _array())


@pytest.mark.parametrize(
  ("scratch", "message"),
  [
    (cm.vmem_slab(0), "must be a dict or a sequence of memory types"),
    (None, "must be a dict or a sequence of memory types; got None"),
    ([cm.like(0)], r"cm\.like is for out"),
    (dict(coremesh_links=cm.vmem_slab(0)), "must not be named"),
    ([cm.vmem_slab(0, axis=1, over="core")], "must divide by the 2 workers"),
    ([pltpu.VMEM((0, 128), _F32)], r"must not be empty; got shape \(0, 128\)"),
  ],
)
def test_rejects_scratch_that_is_no_memory(scratch, message):
  kernel = _double(scratch=scratch)
  with pytest.raises(ShapeError, match=message):
    _simulated(kernel)(_array((64, 129)))


# --- the arguments of pl.kernel --------------------------------------------


def test_every_argument_reaches_pallas():
  cost = pl.CostEstimate(flops=1, bytes_accessed=2, transcendentals=3)
  [found] = _launches(
    _double(
      compiler_params=dict(vmem_limit_bytes=2**20, has_side_effects=True),
      cost_estimate=cost,
      name="my_kernel",
      metadata={"why": "a test"},
    ),
    _X,
  )
  assert found["compiler_params"].vmem_limit_bytes == 2**20
  assert found["compiler_params"].has_side_effects
  assert found["cost_estimate"] == cost
  assert found["name"] == "my_kernel"
  assert dict(found["metadata"]) == {"why": "a test"}
  assert found["debug"] is False and found["interpret"] is False


def test_compiler_params_may_be_an_object_or_a_dict():
  params = pltpu.CompilerParams(vmem_limit_bytes=12345)
  [of_object] = _launches(_copying(compiler_params=params), _X)
  [of_dict] = _launches(
    _copying(compiler_params=dict(vmem_limit_bytes=12345)), _X
  )
  assert of_object["compiler_params"] == params == of_dict["compiler_params"]
  with pytest.raises(TypeError, match="vmem_limit'"):
    _copying(compiler_params=dict(vmem_limit=1))


def test_debug_prints_the_kernels_program(capsys):
  [found] = _launches(_double(debug=True), _X)
  assert found["debug"] and "get_barrier_semaphore" in capsys.readouterr().out
  _launches(_double(), _X)
  assert not capsys.readouterr().out


@pytest.mark.parametrize(
  ("interpret", "on", "expected"),
  [
    (None, "simulator", cm.SimulatorParams()),
    (True, "compiler", cm.SimulatorParams()),
    (cm.SimulatorParams(seed=3), "simulator", cm.SimulatorParams(seed=3)),
    (_OF_JAX, "simulator", dataclasses.replace(_OF_JAX, **_TWO_CORES)),
    (_OF_JAX, "compiler", dataclasses.replace(_OF_JAX, **_TWO_CORES)),
  ],
)
def test_interpret_chooses_the_interpreter(interpret, on, expected):
  [found] = _launches(_double(interpret=interpret), _X, mesh=_mesh(on))
  assert found["interpret"] == expected
  assert type(found["interpret"]) is type(expected)


@pytest.mark.parametrize(("interpret", "on"), [(False, "simulator"), (None, 0)])
def test_interpret_chooses_the_compiler(interpret, on):
  mesh = _mesh(on or "compiler")
  [found] = _launches(_double(interpret=interpret), _X, mesh=mesh)
  assert found["interpret"] is False


def test_the_name_is_that_of_the_body():
  def body(*_):
    pass

  class Body:
    def __call__(self, *_):
      pass

  partial = functools.partial(functools.partial(body, 1), 2)
  names = [cm.kernel(b, mesh=_CORES).name for b in (body, partial, Body())]
  assert names == ["body", "body", "Body"]
  assert cm.kernel(body, mesh=_CORES, name="other").__name__ == "other"


def test_a_decorator_makes_the_same_kernel():
  options = dict(
    mesh=_CORES,
    out=cm.like(0),
    scratch=dict(mine=cm.vmem_slab(0)),
    route="core_map",
    collective_id=5,
    num_links=2,
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=2**20),
    interpret=False,
    cost_estimate=pl.CostEstimate(flops=1, bytes_accessed=2, transcendentals=3),
    debug=True,
    name="name",
    metadata={"a": "b"},
  )
  made = vars(cm.kernel(_double_body, **options))
  assert vars(cm.kernel(**options)(_double_body)) == made
  # Each argument was one that its default would not have given.
  default = vars(cm.kernel(_double_body, mesh=_CORES))
  differing = {k for k in made if made[k] != default[k]}
  assert differing == set(made) - {"bodies", "meshes"}


def test_a_kernel_is_a_function_that_jax_can_cache():
  kernel = _double()
  assert hash(kernel) == hash(kernel) and kernel == kernel
  assert kernel != _double()
  np.testing.assert_array_equal(jax.jit(kernel)(_array()), _array() + _array())


# --- several bodies --------------------------------------------------------


def _check_copies(kernel, x, chip):
  """Checks that a kernel, simulated, copies an array of this type."""
  values = _array(x.shape, x.dtype)
  with cm.simulation() as run:
    y = support.over_devices(kernel, _mesh(chip=chip))(values)
  np.testing.assert_array_equal(y, values)
  assert run.runs and not run.findings


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@pytest.mark.parametrize("by_name", [True, False])
def test_several_bodies_on_several_meshes_run_and_compile(by_name, chip):
  mesh = _mesh("compiler", chip=chip)
  scalar = cm.chip(chip).scalar_subcores()
  vector = cm.chip(chip).vector_subcores()

  def scalar_body(x_hbm, o_hbm, counts, rows):
    counts[0] = jnp.int32(1)

  def vector_body(x_hbm, o_hbm, counts, rows):
    mine = cm.slab(x_hbm, over=("core", "subcore"))
    pltpu.sync_copy(x_hbm.at[mine], rows)
    pltpu.sync_copy(rows, o_hbm.at[mine])

  memory = dict(
    counts=pltpu.SMEM((8,), jnp.int32) @ scalar,
    rows=pltpu.VMEM((8, 128), _F32) @ vector,
  )
  kernel = cm.kernel(
    [scalar_body, vector_body],
    mesh=[scalar, vector],
    out=cm.like(0),
    scratch=memory if by_name else list(memory.values()),
  )
  workers = vector.num_cores * vector.num_subcores
  x = jax.ShapeDtypeStruct((mesh.size * workers * 8, 128), _F32)
  [found] = _compile(kernel, x, mesh=mesh).kernels
  assert found.meshes == (scalar, vector)
  _check_copies(kernel, x, chip)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_a_body_on_the_vector_subcores_runs_and_compiles(chip):
  mesh = _mesh("compiler", chip=chip)
  vector = cm.chip(chip).vector_subcores()

  def body(x_hbm, o_hbm, *, rows):
    mine = cm.slab(x_hbm, over=("core", "subcore"))
    cm.copy(x_hbm.at[mine], rows)
    cm.subcore_barrier()
    cm.copy(rows, o_hbm.at[mine])

  slab = cm.vmem_slab(0, over=("core", "subcore"))
  kernel = cm.kernel(body, mesh=vector, out=cm.like(0), scratch=dict(rows=slab))
  workers = vector.num_cores * vector.num_subcores
  x = jax.ShapeDtypeStruct((mesh.size * workers * 8, 128), _F32)
  assert _compile(kernel, x, mesh=mesh).kernels[0].meshes == (vector,)
  _check_copies(kernel, x, chip)


@pytest.mark.parametrize(
  ("bodies", "meshes", "error", "message"),
  [
    ([_copy_body], [_CORES, _CORES], ChipError, "got 1 bodies and 2 meshes"),
    ([_copy_body] * 2, _CORES, ChipError, "got 2 bodies and 1 meshes"),
    ([], [], ChipError, "got 0 bodies and 0 meshes"),
  ],
)
def test_bodies_and_meshes_go_in_pairs(bodies, meshes, error, message):
  with pytest.raises(error, match=message):
    cm.kernel(bodies, mesh=meshes)


def test_the_core_map_route_has_one_body():
  with pytest.raises(UnsupportedError, match="one body on one mesh; use"):
    cm.kernel([_copy_body] * 2, mesh=[_CORES] * 2, route="core_map")


# --- collective ids --------------------------------------------------------

_BARRIERS = dict(
  core=lambda: cm.core_barrier(),
  x=lambda: cm.barrier("x"),
  y=lambda: cm.barrier("y"),
  both=lambda: cm.device_barrier(("x", "y")),
  all=lambda: cm.global_barrier(),
  ring=lambda: cm.neighbour_barrier("x"),
  line=lambda: cm.neighbour_barrier("x", wrap=False),
)


def _waiting(wait, **options):
  def body(x_hbm, o_hbm):
    wait()
    cm.copy(x_hbm, o_hbm)

  return _copying(body, **{"mesh": _CORES, **options})


def _ids(*kernels, mesh=None):
  """The collective id of each of the kernels, called one after the other."""
  mesh = _mesh("compiler", ("x", "y"), (2, 2)) if mesh is None else mesh

  def program(x):
    for kernel in kernels:
      x = kernel(x)
    return x

  found = _launches(program, _X, mesh=mesh)
  return [launch["compiler_params"].collective_id for launch in found]


def test_barriers_of_different_patterns_get_different_ids():
  mesh = _mesh("compiler", ("x", "y"), (4, 2), chip="v5p:2x2x2")
  kernels = [_waiting(wait) for wait in _BARRIERS.values()]
  ids = _ids(*kernels, mesh=mesh)
  assert len(set(ids)) == len(_BARRIERS)
  assert all(2**30 <= i < 2**31 for i in ids)


def test_an_id_does_not_depend_on_the_order_of_tracing():
  first = _ids(*(_waiting(wait) for wait in _BARRIERS.values()))
  jax.clear_caches()
  reverse = _ids(*(_waiting(wait) for wait in reversed(_BARRIERS.values())))
  assert reverse[::-1] == first
  assert _ids(_waiting(_BARRIERS["ring"])) == [first[5]]


@pytest.mark.parametrize(
  "within",
  [
    lambda wait: pl.when(jax.lax.axis_index("core") >= 0)(wait),
    lambda wait: pl.loop(0, 2)(lambda _: wait()),
    lambda wait: pl.run_scoped(lambda _: wait(), pltpu.SMEM((1,), jnp.int32)),
    lambda wait: jax.lax.while_loop(
      lambda i: i < 2, lambda i: (wait(), i + 1)[1], 0
    ),
    lambda wait: jax.jit(wait)(),
    lambda wait: pltpu.emit_pipeline(wait, grid=(2,))(),
  ],
)
def test_a_barrier_is_found_wherever_the_body_has_it(within):
  inside = _waiting(lambda: within(lambda: cm.core_barrier()))
  assert _ids(inside) == _ids(_waiting(_BARRIERS["core"]))


def test_one_pattern_has_one_id_whatever_the_kernel():
  kernels = [_waiting(_BARRIERS["core"]), _double(name="other")]
  assert len(set(_ids(*kernels))) == 1


def test_ids_differ_for_other_axes_and_sizes():
  kernel = _waiting(lambda: cm.device_barrier())
  meshes = [
    _mesh("compiler", "x"),
    _mesh("compiler", "y"),
    _mesh("compiler", ("x", "y"), (2, 2)),
    _mesh("compiler", ("x", "y"), (4, 1)),
    _mesh("compiler", "x", chip="v5p:2x2x2"),
  ]
  assert len({_ids(kernel, mesh=mesh)[0] for mesh in meshes}) == len(meshes)


def _by_hand(times):
  def wait():
    for _ in range(times):
      barrier = pltpu.get_barrier_semaphore()
      pltpu.core_barrier(barrier, core_axis_name="core")

  return wait


def test_barriers_by_hand_share_an_id_only_if_their_programs_are_one():
  mixed = _waiting(lambda: [cm.core_barrier(), _by_hand(1)()])
  kernels = [_waiting(_by_hand(1)), _waiting(_by_hand(1)), mixed]
  first, same, other = _ids(*kernels)
  assert first == same != other
  assert _ids(_waiting(_by_hand(2))) != [first]
  assert not {first, other} & set(_ids(_waiting(_BARRIERS["core"])))


def test_a_kernel_without_a_barrier_has_no_id():
  assert _ids(_copying(), _copying(collective_id=5)) == [None, None]


@pytest.mark.parametrize("own_id", [0, 7, 2**31 - 1, np.int32(9)])
def test_an_id_of_the_users_is_kept(own_id):
  by_argument = _double(collective_id=own_id)
  by_params = _double(compiler_params=dict(collective_id=own_id))
  assert _ids(by_argument, by_params) == [own_id, own_id]


@pytest.mark.parametrize("own_id", [-1, 2**31, True, 1.0, "1"])
def test_rejects_an_id_out_of_range(own_id):
  message = rf"in \[0, 2147483647\]; got {own_id!r}\. Leave it out"
  with pytest.raises(CollectiveError, match=message):
    _double(collective_id=own_id)
  with pytest.raises(CollectiveError, match=message):
    _double(compiler_params=dict(collective_id=own_id))


def test_rejects_an_id_given_twice():
  with pytest.raises(CollectiveError, match="given twice.*Give it once"):
    _double(collective_id=1, compiler_params=dict(collective_id=1))


def test_libtpu_takes_the_largest_id():
  assert _compile(_double(collective_id=2**31 - 1), _X).code_bytes


@pytest.mark.parametrize("num_links", [0, 1, 5])
def test_a_kernel_has_the_number_of_links_asked_for(num_links):
  def make(num_puts):
    def body(x_hbm, o_hbm, mine, theirs):
      cm.core_barrier()
      for _ in range(num_puts):
        cm.put(mine, theirs, to={"core": cm.next_core()}).wait()

    slabs = [cm.vmem_slab(0)] * 2
    return _double(body, scratch=slabs, num_links=num_links)

  assert _launches(make(num_links), _X)
  with pytest.raises(CollectiveError, match=f"more than num_links={num_links}"):
    _launches(make(num_links + 1), _X)


@pytest.mark.parametrize("num_links", [-1, 1.5, True, None])
def test_rejects_a_number_of_links_that_is_none(num_links):
  with pytest.raises(CollectiveError, match="num_links must be an int of at"):
    _double(num_links=num_links)


# --- shard_map -------------------------------------------------------------


@checked_or_not
@every_route
def test_runs_in_shard_map_checked_or_not(route, check_vma):
  fn = _simulated(_double(route=route), check_vma=check_vma)
  np.testing.assert_array_equal(fn(_array()), _array() + _array())


@every_route
@pytest.mark.parametrize(
  "out",
  [
    cm.like(0),
    jax.ShapeDtypeStruct(_PART, _F32),
    np.zeros(_PART, np.float32),
    lambda x, y: x,
    pltpu.HBM(_PART, _F32),
  ],
)
def test_an_output_varies_over_what_an_argument_varies_over(out, route):
  mesh = _mesh("compiler", ("x", "y"), (2, 2))
  kernel = _copying(lambda x_hbm, y_hbm, o_hbm: None, out=out, route=route)
  seen = []

  def fn(x, y):
    seen.append(jax.typeof(kernel(x, y)).manual_axis_type.varying)
    return kernel(x, y)

  def trace(x_spec, y_spec, out_spec):
    rows = 64 if x_spec == P(("x", "y")) else 32
    shapes = [jax.ShapeDtypeStruct((n, 128), _F32) for n in (rows, 32)]
    options = dict(in_specs=(x_spec, y_spec), out_specs=out_spec)
    support.over_devices(fn, mesh, **options).trace(*shapes)
    return seen.pop()

  assert trace(P("x"), P(), P("x")) == {"x"}
  assert trace(P(("x", "y")), P("y"), P(("x", "y"))) == {"x", "y"}
  # What varies must not be passed off as replicated.
  with pytest.raises(ValueError, match="require replication"):
    trace(P("x"), P(), P())


@checked_or_not
@every_route
def test_an_output_of_replicated_arguments_is_replicated(route, check_vma):
  options = dict(in_specs=P(), out_specs=P(), check_vma=check_vma)
  x = _array(_PART)
  found = _simulated(_double(route=route), **options)(x)
  np.testing.assert_array_equal(found, x + x)


@every_route
def test_an_output_may_state_that_it_is_replicated(route):
  # Each device writes what it got from the first; here just a constant.
  def body(x_hbm, o_hbm, buffer):
    buffer[...] = jnp.full(_PART, 3.0)
    cm.copy(buffer, o_hbm)

  kernel = _copying(
    body,
    out=jax.ShapeDtypeStruct(
      _PART, _F32, manual_axis_type=jax.sharding.ManualAxisType()
    ),
    scratch=[pltpu.VMEM(_PART, _F32)],
    route=route,
  )
  found = _simulated(kernel, out_specs=P())(_array())
  np.testing.assert_array_equal(found, jnp.full(_PART, 3.0))


def test_an_unchecked_output_may_be_replicated():
  kernel = _copying(lambda x_hbm, y_hbm, o_hbm: cm.copy(y_hbm, o_hbm))
  options = dict(in_specs=(P("device"), P()), out_specs=P(), check_vma=False)
  found = _simulated(kernel, **options)(_array(), _array(_PART))
  np.testing.assert_array_equal(found, _array(_PART))


@every_route
def test_runs_on_one_device_outside_shard_map(route):
  kernel = _double(route=route)
  np.testing.assert_array_equal(kernel(_array()), _array() + _array())


@pytest.mark.parametrize(
  ("body", "message"),
  [
    (
      lambda x_hbm, o_hbm: cm.put(x_hbm, o_hbm, to={"device": 1}).wait(),
      r"'device'\] are not.*jax\.shard_map",
    ),
    (
      lambda x_hbm, o_hbm: cm.device_barrier(),
      r"needs device axes: call the kernel inside jax\.shard_map",
    ),
    (
      lambda x_hbm, o_hbm: cm.copy(
        x_hbm.at[pl.ds(jax.lax.axis_index("device"), 8)],
        o_hbm.at[pl.ds(0, 8)],
      ),
      r"'<lambda>' uses an axis that is not in scope: .*device axes \[\], core"
      r" axes \['core'\]\. .*inside jax\.shard_map",
    ),
  ],
)
def test_addressing_devices_outside_shard_map_is_an_error(body, message):
  with pytest.raises(AxisError, match=message):
    _copying(body)(_array())


@pytest.mark.parametrize("on", ["simulator", "compiler"])
def test_rejects_core_axes_named_like_device_axes(on):
  kernel = _double(mesh=cm.chip("v5p").tensor_cores("device"))
  message = r"'_double_body' must not .*both have \['device'\]\. Rename one"
  with pytest.raises(AxisError, match=message):
    support.over_devices(kernel, _mesh(on)).trace(_X)


@checked_or_not
def test_a_plain_mesh_of_cpu_devices_is_a_simulator_too(check_vma):
  mesh = jax.make_mesh(
    (4,),
    ("d",),
    devices=jax.devices()[:4],
    axis_types=(jax.sharding.AxisType.Auto,),
  )
  fn = support.over_devices(_double(), mesh, check_vma=check_vma)
  np.testing.assert_array_equal(fn(_array()), _array() + _array())

  def asks_for_the_chip(x_hbm, o_hbm):
    pltpu.get_tpu_info()

  message = r"plain CPU devices does not say\. Make the mesh with chip\.device"
  with pytest.raises(UnsupportedError, match=message):
    support.over_devices(_copying(asks_for_the_chip), mesh)(_array())


# --- cores that are not there ----------------------------------------------


@pytest.mark.parametrize("kind", ["vector_subcores", "scalar_subcores"])
def test_jaxs_interpreter_is_refused_on_sparse_cores_with_the_way_out(kind):
  kernel = _copying(mesh=getattr(cm.chip("v5p"), kind)(), interpret=_OF_JAX)
  message = r"'_copy_body' runs on SparseCore subcores.*coremesh's simulator"
  with pytest.raises(UnsupportedError, match=message):
    _simulated(kernel)(_array())
  with pltpu.force_tpu_interpret_mode(_OF_JAX):
    kernel = dataclasses.replace(kernel, interpret=None)
    with pytest.raises(UnsupportedError, match=message):
      _simulated(kernel)(_array())


@pytest.mark.parametrize("mesh", [None, "core", 2, _double_body])
def test_rejects_what_is_no_mesh(mesh):
  with pytest.raises(ChipError, match=r"mesh of kernel '_copy_body' must be a"):
    _simulated(_copying(mesh=mesh))(_array())


def test_rejects_a_device_mesh_for_a_core_mesh():
  with pytest.raises(ChipError, match=r"Make one with chip\.tensor_cores\(\)"):
    _simulated(_copying(mesh=_mesh()))(_array())


@pytest.mark.parametrize("on", ["simulator", "compiler"])
@pytest.mark.parametrize(
  ("chip", "num_cores"), [("v6e", 2), ("tpu7x", 2), ("v5p", 3)]
)
def test_rejects_more_cores_than_the_chip_has(chip, num_cores, on):
  # libtpu compiles such a mesh without a word.
  cores = pltpu.TensorCoreMesh(axis_name="core", num_cores=num_cores)
  fn = support.over_devices(_double(mesh=cores), _mesh(on, chip=chip))
  with pytest.raises(ChipError, match=f"of {chip} has {num_cores - 1} Tensor"):
    fn.trace(jax.ShapeDtypeStruct((96, 128), _F32))


# --- dtypes ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64])
@pytest.mark.parametrize("where", ["argument", "out", "scratch"])
def test_64_bits_are_refused_at_once(where, dtype):
  def body(*refs):
    raise AssertionError("The body was traced.")

  start = time.perf_counter()
  with jax.enable_x64(True):
    wide, narrow = np.ones((8, 128), dtype), np.ones((8, 128), np.float32)
    kernel = _copying(
      body,
      out=cm.like(0, dtype=dtype if where == "out" else None),
      scratch=[pltpu.VMEM((8, 128), dtype)] if where == "scratch" else [],
    )
    what = r"Argument \[0\] of kernel 'body'" if where == "argument" else where
    with pytest.raises(DTypeError, match=f"{what} has dtype .*most 32 bits"):
      kernel(wide if where == "argument" else narrow)
  assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
  ("value", "message"),
  [
    (np.ones((8,), np.complex64), r"\[1\]\[0\]\['a'\] .*has dtype complex64"),
    (1j, "has dtype complex64"),
    ("text", r"Argument \[1\]\[0\]\['a'\] .* must be an array; got str"),
    (object(), r"must be an array; got object\. .*functools\.partial"),
    (_double_body, "must be an array; got function"),
  ],
)
def test_rejects_what_is_no_array_a_tpu_holds(value, message):
  with pytest.raises(DTypeError, match=message):
    _copying(lambda *_: None)(_array(), [{"a": value}])


def test_rejects_a_random_key():
  with pytest.raises(DTypeError, match=r"is a key .*jax\.random\.key_data"):
    _copying()(jax.random.key(0))


@pytest.mark.parametrize(
  ("value", "dtype"),
  [
    (3, jnp.int32),
    (2.5, _F32),
    (True, jnp.bool_),
    (np.int8(3), jnp.int8),
    (jnp.bfloat16(1.5), jnp.bfloat16),
  ],
)
def test_numbers_are_arrays_of_no_axes(value, dtype):
  found = _copying()(value)
  assert found.dtype == dtype and found.shape == () and found == value


@pytest.mark.parametrize(
  "dtype", [jnp.bool_, jnp.int8, jnp.uint8, jnp.int16, jnp.bfloat16, jnp.int32]
)
def test_moves_every_dtype(dtype):
  x = _array(dtype=dtype)
  found = _simulated(_copying())(x)
  assert found.dtype == dtype
  np.testing.assert_array_equal(found, x)


# --- transformations -------------------------------------------------------


@checked_or_not
@every_route
def test_vmap_runs_a_kernel_once_for_each_element(route, check_vma):
  kernel = _double(route=route)
  xs = jnp.stack([_array(), _array()[::-1], _array() + 1.0])
  options = dict(
    in_specs=P(None, "device"), out_specs=P(None, "device"), check_vma=check_vma
  )
  inside = _simulated(jax.vmap(kernel), **options)
  np.testing.assert_array_equal(inside(xs), xs + xs)
  around = jax.vmap(_simulated(kernel, check_vma=check_vma))
  np.testing.assert_array_equal(around(xs), xs + xs)


def test_vmap_takes_any_axis_and_arguments_that_have_none():
  def body(x_hbm, y_hbm, o_hbm, mine, other):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    cm.copy(y_hbm.at[rows], other)
    mine[...] = mine[...] - other[...]
    cm.copy(mine, o_hbm.at[rows])

  subtract = _double(body, scratch=[cm.vmem_slab(0), cm.vmem_slab(1)])
  xs = jnp.stack([_array(_PART), _array(_PART) + 1.0, _array(_PART) * 3.0])
  y = _array(_PART)[::-1]
  found = jax.vmap(subtract, in_axes=(1, None), out_axes=2)(
    jnp.moveaxis(xs, 0, 1), y
  )
  np.testing.assert_array_equal(jnp.moveaxis(found, 2, 0), xs - y[None])
  nested = jax.vmap(jax.vmap(subtract, (0, None)), (None, 0))
  both = nested(xs, xs)
  np.testing.assert_array_equal(both, xs[None] - xs[:, None])
  assert jax.vmap(subtract)(xs[:0], xs[:0]).shape == (0, *_PART)


def test_vmap_compiles():
  spec = P(None, "device")
  xs = jax.ShapeDtypeStruct((3, *_SHAPE), _F32)
  compiled = _compile(jax.vmap(_double()), xs, in_specs=spec, out_specs=spec)
  assert compiled.kernels[0].uses_barrier


@pytest.mark.parametrize(
  "differentiate",
  [
    lambda fn, x: jax.grad(lambda x: fn(x).sum())(x),
    lambda fn, x: jax.jvp(fn, (x,), (x,)),
    lambda fn, x: jax.linearize(fn, x),
    lambda fn, x: jax.grad(lambda x: _simulated(fn)(x).sum())(x),
    lambda fn, x: jax.grad(lambda x: jax.vmap(fn)(x[None]).sum())(x),
  ],
)
def test_a_derivative_is_refused_with_the_way_out(differentiate):
  message = "'_double_body' has no derivative: wrap .* jax.custom_vjp"
  with pytest.raises(UnsupportedError, match=message):
    differentiate(_double(), _array())


def _with_derivative(kernel):
  fn = jax.custom_vjp(lambda x: kernel(x))
  fn.defvjp(lambda x: (kernel(x), None), lambda _, g: (kernel(g),))
  return fn


@every_route
def test_a_kernel_in_a_custom_vjp_has_a_derivative(route):
  fn = _with_derivative(_double(route=route))
  weights = _array()[::-1]
  loss = lambda fn, x: (fn(x) * weights).sum()
  expected = weights + weights
  outside = jax.grad(functools.partial(loss, fn))(_array())
  np.testing.assert_array_equal(outside, expected)
  inside = jax.grad(functools.partial(loss, _simulated(fn)))(_array())
  np.testing.assert_array_equal(inside, expected)


def test_a_stopped_gradient_needs_no_derivative():
  kernel = _double()
  fn = _simulated(lambda x: kernel(jax.lax.stop_gradient(x)) * x)
  found = jax.grad(lambda x: fn(x).sum())(_array())
  np.testing.assert_array_equal(found, _array() + _array())


def test_rematerialized_and_scanned_kernels_compile():
  fn = _with_derivative(_double())

  def step(x, _):
    return jax.checkpoint(lambda x: fn(jnp.sin(x)))(x), None

  def scanned(x):
    return jax.lax.scan(step, x, None, length=3)[0]

  over = support.over_devices(scanned, _mesh("compiler"))
  compiled = cm.compile(jax.grad(lambda x: over(x).sum()), _X)
  assert len(compiled.kernels) >= 2  # forward and backward


@every_route
def test_runs_inside_control_flow(route):
  kernel = _double(route=route)

  def fn(x):
    x = jax.lax.fori_loop(0, 2, lambda _, x: kernel(x), x)
    x, _ = jax.lax.scan(lambda x, _: (kernel(x), None), x, None, length=2)
    return jax.lax.cond(x[0, 1] > 0, kernel, lambda x: x, x)

  np.testing.assert_array_equal(_simulated(fn)(_array()), 32.0 * _array())


@every_route
def test_runs_eagerly_and_jitted_alike(route):
  kernel = _double(route=route)
  eager, jitted = kernel(_array()), jax.jit(kernel)(_array())
  np.testing.assert_array_equal(eager, jitted)
  np.testing.assert_array_equal(jitted, _array() + _array())


@every_route
def test_runs_without_jit_and_with_jaxs_own_checks(route):
  kernel = _double(route=route)
  with jax.disable_jit():
    np.testing.assert_array_equal(kernel(_array()), _array() + _array())
  with jax.enable_checks(True):
    found = _simulated(jax.vmap(kernel), in_specs=P(None, "device"))
    jax.block_until_ready(found(_array()[None]))


@every_route
@pytest.mark.parametrize("out", [(), cm.like(0)])
@pytest.mark.parametrize("has_side_effects", [True, False])
def test_an_unused_kernel_stays_if_it_has_side_effects(
  has_side_effects, out, route
):
  kernel = cm.kernel(
    lambda x_hbm, *o_hbm: None,
    mesh=_CORES,
    out=out,
    route=route,
    compiler_params=dict(has_side_effects=has_side_effects),
  )
  compiled = _compile(lambda x: (kernel(x), x)[1], _X)
  kept = "tpu_custom_call" in compiled.text("hlo")
  assert kept is has_side_effects


@every_route
def test_an_argument_may_be_donated(route):
  fn = jax.jit(_simulated(_double(route=route)), donate_argnums=0)
  sharding = jax.sharding.NamedSharding(_mesh(), P("device"))
  x = jax.device_put(_array(), sharding)
  np.testing.assert_array_equal(fn(x), _array() + _array())
  assert x.is_deleted()
  over = support.over_devices(_double(route=route), _mesh("compiler"))
  compiled = jax.jit(over, donate_argnums=0).trace(_X).lower().compile()
  part_bytes = 16 * 128 * 4
  assert compiled.memory_analysis().alias_size_in_bytes == part_bytes


# --- empty arrays ----------------------------------------------------------


def _with_empties_body(x_hbm, z_hbm, o_hbm, p_hbm):
  assert z_hbm.shape == (0, 7) and p_hbm.shape == (3, 0)
  cm.copy(x_hbm, o_hbm)


@every_route
@pytest.mark.parametrize("on", ["simulator", "compiler"])
def test_empty_arguments_and_outputs(on, route):
  out = (cm.like(0), jax.ShapeDtypeStruct((3, 0), jnp.int8))
  kernel = _copying(_with_empties_body, out=out, route=route)
  options = dict(in_specs=(P("device"), P()))
  empty = jnp.zeros((0, 7), jnp.int32)
  if on == "compiler":
    assert _compile(kernel, _X, empty, **options).code_bytes
    return
  y, z = _simulated(kernel, **options)(_array(), empty)
  np.testing.assert_array_equal(y, _array())
  assert z.shape == (12, 0) and z.dtype == jnp.int8


@every_route
def test_nothing_but_empty_arrays(route):
  kernel = _copying(route=route)
  empty = jnp.zeros((0, 128))
  assert _simulated(kernel)(empty).shape == (0, 128)
  assert _compile(kernel, empty).text("hlo")
  in_hbm = _copying(
    lambda x_hbm, o_hbm: None, out=pltpu.HBM((0, 8), _F32), route=route
  )
  assert _simulated(in_hbm)(_array()).shape == (0, 8)
  assert _compile(in_hbm, _X).text("hlo")


@checked_or_not
@every_route
def test_a_kernel_with_nothing_to_write_is_not_launched(route, check_vma):
  # XLA aborts the process on scratch like the argument.
  kernel = _double(route=route)

  def fn(x):
    # The types of what is carried round must agree.
    return jax.lax.scan(lambda x, _: (kernel(x), None), x, None, length=2)[0]

  empty = jnp.zeros((0, 128))
  assert _simulated(fn, check_vma=check_vma)(empty).shape == (0, 128)
  assert _compile(fn, empty, check_vma=check_vma).kernels == ()
  with pytest.raises(DTypeError, match="complex64"):
    kernel(jnp.zeros((0, 128), jnp.complex64))


@every_route
def test_a_kernel_with_other_effects_is_launched(route):
  nothing = jax.ShapeDtypeStruct((0,), _F32)

  def fn(x):
    ref = jax.new_ref(x)
    _copying(_shift_body, out=nothing, route=route)(ref)
    return ref[...]

  x = _array(_PART)
  expected = jnp.concatenate([x[:8], x[:8]])
  np.testing.assert_array_equal(jax.jit(fn)(x), expected)
  kernel = _copying(
    lambda x_hbm, o_hbm: None,
    out=nothing,
    route=route,
    compiler_params=dict(has_side_effects=True),
  )
  assert _compile(lambda x: (kernel(x), x)[1], _X).kernels


# --- refs ------------------------------------------------------------------


def _shift_body(ref, *_):
  pltpu.sync_copy(ref.at[pl.ds(0, 8)], ref.at[pl.ds(8, 8)])


def _shift(x, route):
  ref = jax.new_ref(x)
  _copying(_shift_body, out=(), route=route)(ref)
  return ref[...]


def _closing_over(x, route):
  ref = jax.new_ref(x)
  _copying(lambda: _shift_body(ref), out=(), route=route)()
  return ref[...]


def _mixed(x, route):
  ref = jax.new_ref(x)

  def body(ref, y_hbm, o_hbm):
    _shift_body(ref)
    pltpu.sync_copy(y_hbm, o_hbm)

  y = _copying(body, out=cm.like(1), route=route)(ref, x)
  return ref[...] + y - x


@every_route
@pytest.mark.parametrize("fn", [_shift, _closing_over, _mixed])
def test_a_ref_is_changed_in_place(fn, route):
  fn = functools.partial(fn, route=route)
  x = _array(_PART)
  expected = jnp.concatenate([x[:8], x[:8]])
  np.testing.assert_array_equal(fn(x), expected)
  np.testing.assert_array_equal(jax.jit(fn)(x), expected)
  options = dict(in_specs=P(), out_specs=P(), check_vma=False)
  np.testing.assert_array_equal(_simulated(fn, **options)(x), expected)
  assert _compile(fn, x, **options).code_bytes


@every_route
def test_a_ref_that_varies_over_devices_is_refused_with_the_way_out(route):
  fn = _simulated(functools.partial(_shift, route=route))
  with pytest.raises(UnsupportedError, match="check_vma=False"):
    fn(_array())


# --- errors and the interpreter --------------------------------------------


@every_route
def test_an_error_of_the_body_passes_through(route):
  def body(x_hbm, o_hbm):
    raise ZeroDivisionError("mine")

  with pytest.raises(ZeroDivisionError, match="mine"):
    _simulated(_copying(body, route=route))(_array())
  with pytest.raises(TypeError, match="positional argument"):
    _simulated(_copying(lambda: None, route=route))(_array())
  # The next kernel is none the worse.
  found = _simulated(_double(route=route))(_array())
  np.testing.assert_array_equal(found, _array() + _array())


def _failure(fn, within=contextlib.nullcontext):
  """The error of a simulated kernel; each core and device may add its own."""
  with (
    pytest.raises((jax.errors.JaxRuntimeError, ExceptionGroup)) as caught,
    within(),
  ):
    jax.block_until_ready(fn(_array()))
  params.reset()
  found = caught.value
  return "\n".join(map(str, [found, *getattr(found, "exceptions", ())]))


def test_reading_outside_an_array_is_an_error():
  def body(x_hbm, o_hbm):
    start = (jax.lax.axis_index("core") + 1) * jnp.int32(100)
    cm.copy(x_hbm.at[pl.ds(start, 8)], o_hbm.at[pl.ds(0, 8)])

  of_core = r"elements \[100, 108\) of a dimension of 64 of 'input 0'"
  with pytest.raises(SimulationError, match=of_core) as caught, cm.simulation():
    jax.block_until_ready(_copying(body)(_array()))
  [finding] = caught.value.findings
  assert finding.kind == "out of bounds" and finding.kernel == "body"
  assert re.search(of_core, _failure(_copying(body)))  # In JAX's own error.
  of_jax = _copying(body, interpret=_OF_JAX)
  assert "Out-of-bounds read" in _failure(of_jax)


def _racy_body(x_hbm, o_hbm):
  core = jax.lax.axis_index("core")
  cm.copy(x_hbm.at[pl.ds(core * 8, 8)], o_hbm.at[pl.ds(0, 8)])
  cm.copy(x_hbm.at[pl.ds(8, 56)], o_hbm.at[pl.ds(8, 56)])  # Equal: no race.


def test_a_simulation_finds_races_of_functions_already_jitted():
  fn = jax.jit(_copying(_racy_body, mesh=_CORES))
  with cm.simulation(races=False):
    np.testing.assert_array_equal(fn(_array())[8:], _array()[8:])
  with pytest.raises(SimulationError) as caught, cm.simulation():
    jax.block_until_ready(fn(_array()))
  assert {f.kind for f in caught.value.findings} == {"race"}
  assert all("launch_test.py" in f.text for f in caught.value.findings)


def test_races_are_looked_for_without_a_simulation():
  fn = _copying(_racy_body, mesh=_CORES)
  assert "[race] kernel '_racy_body'" in _failure(fn)


def test_jaxs_interpreter_looks_for_races_if_asked():
  racy = dataclasses.replace(_OF_JAX, detect_races=True)
  fn = _copying(_racy_body, mesh=_CORES, interpret=racy)
  assert "RACE DETECTED" in _failure(fn)


def test_a_simulation_passes_a_kernel_without_races():
  fn = _simulated(_double())
  with cm.simulation():
    np.testing.assert_array_equal(fn(_array()), _array() + _array())


@pytest.mark.parametrize("interpret", [None, _OF_JAX], ids=["ours", "jax"])
def test_a_barrier_that_could_not_end_is_refused(interpret, monkeypatch):
  # Only JAX's interpreter needs a thread for each core.
  monkeypatch.setattr(topology, "num_simulation_threads", lambda: 12)
  fn = _simulated(_double(interpret=interpret))
  if interpret is None:
    np.testing.assert_array_equal(fn(_array()), _array() + _array())
  else:
    with pytest.raises(UnsupportedError, match="they would wait for ever"):
      fn(_array())
  fn = _simulated(_copying(interpret=interpret))
  np.testing.assert_array_equal(fn(_array()), _array())


@every_route
@pytest.mark.parametrize("races", [True, False])
def test_jaxs_interpreter_gives_the_same_bits(route, races):
  of_jax = dataclasses.replace(_OF_JAX, detect_races=races)
  fn = _simulated(_double(route=route, interpret=of_jax))
  np.testing.assert_array_equal(fn(_array()), _array() + _array())
  with pltpu.force_tpu_interpret_mode(of_jax):
    found = _simulated(_double(route=route))(_array())
  np.testing.assert_array_equal(found, _array() + _array())


def _reads_too_early(x_hbm, o_hbm, buffer, sem):
  copy = pltpu.make_async_copy(x_hbm, buffer, sem)
  copy.start()
  early = buffer[...]
  copy.wait()
  buffer[...] = early
  pltpu.sync_copy(buffer, o_hbm)


def _is_caught(fn):
  return bool(jnp.isnan(fn(_array())).all())


def test_a_dma_happens_as_late_or_as_early_as_asked():
  memory = [pltpu.VMEM(_PART, _F32), pltpu.SemaphoreType.DMA]
  fn = _simulated(_copying(_reads_too_early, scratch=memory))
  assert "[race]" in _failure(fn)  # whatever the values
  with cm.simulation(races=False, dma="early"):
    assert not _is_caught(fn)
  with cm.simulation(races=False, dma="late", on_finding="record") as run:
    assert _is_caught(fn)
  assert {f.kind for f in run.findings} == {"uninitialised"}
  eager = pltpu.InterpretParams(dma_execution_mode="eager")
  with pltpu.force_tpu_interpret_mode(eager):
    assert not _is_caught(fn)
  late = dataclasses.replace(eager, dma_execution_mode="on_wait")
  for of_jax, is_caught in [(eager, False), (late, True)]:
    kernel = _copying(_reads_too_early, scratch=memory, interpret=of_jax)
    assert _is_caught(_simulated(kernel)) is is_caught


def test_a_dma_is_late_unless_asked():
  memory = [pltpu.VMEM(_PART, _F32), pltpu.SemaphoreType.DMA]
  ours = cm.SimulatorParams(detect_races=False, on_finding="record")
  kernel = _copying(_reads_too_early, scratch=memory, interpret=ours)
  assert _is_caught(_simulated(kernel))


def test_the_interpreter_can_be_forced_on_devices_that_only_compile():
  with pltpu.force_tpu_interpret_mode(_OF_JAX):
    [found] = _launches(_double(), _X)
  assert found["interpret"] == dataclasses.replace(_OF_JAX, **_TWO_CORES)
  with cm.simulation(seed=3) as run:
    [found] = _launches(_double(), _X)
  assert found["interpret"] == cm.SimulatorParams(seed=3, session=run)
