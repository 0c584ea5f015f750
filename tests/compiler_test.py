"""Tests for coremesh.compiler: libtpu compiles, no TPU runs."""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh.compiler import usage
from coremesh.errors import ChipError, CompileError, UnsupportedError
from tests import support

every_chip = pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
_F32 = jnp.float32


def _over(kernel, chip, on="compiler"):
  """The kernel on every device of a chip, all arguments replicated."""
  return jax.shard_map(
    kernel,
    mesh=cm.chip(chip).device_mesh(on=on),
    in_specs=P(),
    out_specs=P(),
    check_vma=False,
  )


def _double(chip, **options):
  @cm.kernel(
    mesh=cm.chip(chip).tensor_cores(),
    out=cm.like(0),
    scratch=dict(mine=cm.vmem_slab(0)),
    num_links=0,
    **options,
  )
  def double(x_hbm, o_hbm, *, mine):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    mine[...] = mine[...] * 2
    cm.copy(mine, o_hbm.at[rows])

  return double


def _kernels(fn, *args):
  """What the kernels of a program hold, counted without compiling it."""
  return usage.of_program(jax.jit(fn).trace(*args).jaxpr.jaxpr)


# --- compile ---------------------------------------------------------------


@every_chip
def test_compiles_a_kernel_for_a_tpu_that_is_not_there(chip):
  mesh = cm.chip(chip).device_mesh("device", on="compiler")
  fn = support.over_devices(_double(chip), mesh)
  rows = 16 * mesh.size
  compiled = cm.compile(fn, jax.ShapeDtypeStruct((rows, 256), _F32))
  assert "tpu_custom_call" in compiled.text("hlo")
  assert 1000 < compiled.code_bytes < 10_000_000
  assert compiled.temporary_bytes_per_device >= 0
  assert 0 < compiled.compile_seconds < 60
  [kernel] = compiled.kernels
  assert kernel == usage.KernelUsage(
    name="double",
    meshes=(cm.chip(chip).tensor_cores(),),
    usage=usage.Usage(
      vmem_bytes_per_core=16 // kernel.meshes[0].num_cores * 1024,
      semaphores_per_core=1,  # that of a copy at a time
    ),
    uses_barrier=False,
    collective_id=None,
    is_simulated=False,
  )


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(
  "x",
  [jax.ShapeDtypeStruct((16, 128), _F32), np.ones((16, 128), np.float32)],
)
def test_takes_functions_jitted_or_not_and_arrays_or_their_types(x, jitted):
  fn = _over(_double("v6e"), "v6e")
  compiled = cm.compile(jax.jit(fn) if jitted else fn, x)
  assert compiled.kernels[0].usage.vmem_bytes_per_core == 16 * 128 * 4


def test_takes_trees_and_python_numbers():
  kernel = _double("v6e")

  def fn(tree, factor):
    return kernel(tree["x"] * factor)

  x = jax.ShapeDtypeStruct((16, 128), _F32)
  assert cm.compile(_over(fn, "v6e"), {"x": x}, 3.0).code_bytes


def test_keeps_the_sharding_of_an_argument():
  mesh = cm.chip("v6e").device_mesh(on="compiler")
  sharding = jax.sharding.NamedSharding(mesh, P("device"))
  x = jax.ShapeDtypeStruct((16, 128), _F32, sharding=sharding)
  compiled = cm.compile(lambda x: x + 1, x)
  assert compiled.num_devices == 4
  assert "f32[4,128]" in compiled.text("hlo")  # a device's share


def test_takes_a_function_without_arguments():
  kernel = _double("v6e")
  fn = _over(lambda: kernel(jnp.ones((16, 128))), "v6e")
  assert cm.compile(fn).code_bytes


def test_takes_a_plain_pallas_kernel():
  def body(x_hbm, o_hbm, buffer):
    pltpu.sync_copy(x_hbm, buffer)
    pltpu.sync_copy(buffer, o_hbm)

  x = jax.ShapeDtypeStruct((16, 128), _F32)
  kernel = pl.kernel(
    body,
    out_type=x,
    mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=2),
    scratch_types=[pltpu.VMEM(x.shape, x.dtype)],
    name="plain",
  )
  [found] = cm.compile(_over(kernel, "v5p"), x).kernels
  assert found.name == "plain"
  assert found.usage.vmem_bytes_per_core == 16 * 128 * 4


def _twice(x_ref, o_ref):
  o_ref[...] = x_ref[...] * 2


@pytest.mark.parametrize(
  ("options", "name"), [({}, "_twice"), ({"name": "other"}, "other")]
)
def test_a_pallas_call_is_a_kernel_by_one_name_everywhere(options, name):
  x = jax.ShapeDtypeStruct((32, 128), _F32)
  spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
  specs = dict(in_specs=[spec], out_specs=spec)
  fn = lambda x: pl.pallas_call(
    _twice, out_shape=x, grid=(4,), **specs, **options
  )(x)
  compiled = cm.compile(fn, x, chip="v5p")
  [kernel] = compiled.kernels
  assert kernel.usage.vmem_bytes_per_core == 2 * 2 * 8 * 128 * 4
  assert kernel.meshes == () and not kernel.is_simulated
  [predicted] = cm.predict(compiled).kernels
  [ledger] = compiled.ledgers
  with cm.simulation() as run:
    np.asarray(fn(jnp.ones(x.shape)))
  names = [kernel.name, predicted.kernel, ledger.kernel, run.runs[0].kernel]
  assert names == [name] * 4


def test_a_pallas_call_that_is_interpreted_is_no_kernel_of_the_tpu():
  x = jax.ShapeDtypeStruct((8, 128), _F32)
  fn = pl.pallas_call(_twice, out_shape=x, interpret=True)
  compiled = cm.compile(fn, x, chip="v5p")
  assert compiled.kernels == () and compiled.code_bytes


def test_takes_a_program_without_a_kernel():
  x = jax.ShapeDtypeStruct((16, 128), _F32)
  compiled = cm.compile(_over(lambda x: x + 1, "v5p"), x)
  assert compiled.kernels == () and compiled.code_bytes


@pytest.mark.parametrize("kind", ["simulated", "plain", "none"])
def test_refuses_a_mesh_of_cpu_devices(kind):
  kernel = _double("v5p")
  plain = jax.make_mesh((4,), ("device",), devices=jax.devices()[:4])
  fn = dict(
    simulated=_over(kernel, "v5p", on="simulator"),
    plain=jax.shard_map(
      kernel, mesh=plain, in_specs=P(), out_specs=P(), check_vma=False
    ),
    none=kernel,
  )[kind]
  message = r"compiled for \['cpu'\] devices\. Make it .*on=\"compiler\""
  with pytest.raises(UnsupportedError, match=message):
    cm.compile(fn, jax.ShapeDtypeStruct((16, 128), _F32))


def test_a_kernel_that_cannot_be_traced_raises_the_error_of_the_tracer():
  kernel = cm.kernel(
    lambda x, o, buffer: pltpu.sync_copy(buffer, o),
    mesh=cm.chip("v5p").tensor_cores(),
    out=cm.like(0),
    scratch=[cm.vmem_slab(0)],
  )
  x = jax.ShapeDtypeStruct((1000, 128), _F32)
  with pytest.raises(Exception, match="source and target shape mismatch"):
    cm.compile(_over(kernel, "v5p"), x)


_X = jax.ShapeDtypeStruct((16, 128), _F32)


def _block_kernel(x_ref, o_ref):
  o_ref[...] = x_ref[...] * 2


def _plain(x):
  """Kernels that know nothing of coremesh, and operations of XLA's."""
  return pl.pallas_call(_block_kernel, out_shape=_X)(jnp.sin(x)) + 1


@every_chip
@pytest.mark.parametrize("wrap", [jax.jit, lambda fn: fn])
def test_a_chip_is_enough_for_a_function_of_one_device(wrap, chip):
  for target in (chip, cm.chip(chip)):
    compiled = cm.compile(wrap(_plain), _X, chip=target)
    assert compiled.chip == cm.chip(chip).name and compiled.num_devices == 1
    assert "func.func @_block_kernel" in compiled.text("mosaic")
    assert "sine" in compiled.text("hlo")


def test_a_kernel_of_coremeshs_takes_a_chip_too():
  [kernel] = cm.compile(_double("v5p"), _X, chip="v5p").kernels
  assert kernel.name == "double" and not kernel.is_simulated


def test_an_abstract_mesh_is_refused():
  mesh = jax.sharding.AbstractMesh(
    (4,),
    ("device",),
    axis_types=(jax.sharding.AxisType.Auto,),
    abstract_device=cm.chip("v5p").abstract_device(platform="tpu"),
  )
  fn = jax.shard_map(
    _double("v5p"), mesh=mesh, in_specs=P("device"), out_specs=P("device")
  )
  x = jax.ShapeDtypeStruct((64, 128), _F32)
  with pytest.raises(
    UnsupportedError, match="several devices that do not compile"
  ):
    cm.compile(fn, x, chip="v5p:2x2x1")


def test_options_of_jit_are_heeded():
  def transposed(x_ref, o_ref):
    o_ref[...] = x_ref[...] + x_ref[...].T

  x = jax.ShapeDtypeStruct((512, 512), _F32)
  kernel = pl.pallas_call(transposed, out_shape=x)
  options = {"xla_tpu_scoped_vmem_limit_kib": "1024"}
  assert cm.compile(jax.jit(kernel), x, chip="v5p")
  with pytest.raises(CompileError, match="1.00M are allowed"):
    fn = jax.jit(kernel, compiler_options=options)
    cm.compile(fn, x, chip="v5p")


def test_a_chip_that_is_not_that_of_the_mesh_is_refused():
  fn = _over(_double("v5p"), "v5p")
  with pytest.raises(
    ChipError, match="chip is v6e:2x2, but the mesh .* 'TPU v5'"
  ):
    cm.compile(fn, _X, chip="v6e")


@pytest.mark.parametrize("chip", ["v9", "v6e:3x5x7"])
def test_a_chip_that_is_not_there_is_refused(chip):
  with pytest.raises(ChipError):
    cm.compile(_plain, _X, chip=chip)


def test_a_program_that_calls_back_is_refused():
  def fn(x):
    jax.debug.print("{}", x[0, 0])
    return x

  with pytest.raises(UnsupportedError, match="calls back to Python"):
    cm.compile(fn, _X, chip="v6e")


def test_a_kernel_may_print():
  def body(x_ref, o_ref):
    pl.debug_print("here")
    o_ref[...] = x_ref[...]

  kernel = pl.pallas_call(body, out_shape=_X)
  assert cm.compile(kernel, _X, chip="v6e").code_bytes


def test_a_missing_compiler_is_said(monkeypatch):
  none = lambda: {"jax": "0.12", "jaxlib": "0.12", "libtpu": "none"}
  monkeypatch.setattr("coremesh._compat.aot.versions", none)
  with pytest.raises(UnsupportedError, match="libtpu, .* is not installed"):
    cm.compile(_plain, _X, chip="v6e")


# --- usage against libtpu --------------------------------------------------


def _through(space, shape, dtype, *, chip="v5p", limit=None):
  """A program whose kernel copies its argument through one buffer."""

  def body(x_hbm, o_hbm, buffer):
    pltpu.sync_copy(x_hbm, buffer)
    pltpu.sync_copy(buffer, o_hbm)

  kernel = cm.kernel(
    body,
    mesh=cm.chip(chip).tensor_cores(num_cores=1),
    out=cm.like(0),
    scratch=[space(shape, dtype)],
    num_links=0,
    compiler_params=dict(vmem_limit_bytes=limit),
  )
  return _over(kernel, chip), jax.ShapeDtypeStruct(shape, dtype)


_BUFFERS = [
  # Whole tiles, then fewer rows than a tile, then more.
  ((16, 128), _F32),
  ((1, 128), _F32),
  ((2, 100), _F32),
  ((3, 128), _F32),
  ((17, 129), _F32),
  ((5, 3, 128), _F32),
  ((3,), _F32),
  ((1000,), _F32),
  ((1, 256), jnp.bfloat16),
  ((17, 128), jnp.bfloat16),
  ((5, 3, 128), jnp.bfloat16),
  ((1000,), jnp.bfloat16),
  ((7, 128), jnp.int8),
  ((17, 300), jnp.int8),
  ((5, 2, 128), jnp.int8),
  ((1025,), jnp.int8),
  ((33, 300), jnp.int4),
  ((1, 128), jnp.int4),
  ((3, 128), jnp.bool_),
  ((300,), jnp.bool_),
]


@pytest.mark.parametrize(("shape", "dtype"), _BUFFERS)
def test_a_buffer_is_counted_as_libtpu_pads_it(shape, dtype):
  fn, x = _through(pltpu.VMEM, shape, dtype)
  [kernel] = _kernels(fn, x)
  counted = kernel.usage.vmem_bytes_per_core
  fits, _ = _through(pltpu.VMEM, shape, dtype, limit=counted)
  assert cm.compile(fits, x).kernels[0].usage == kernel.usage
  too_small, _ = _through(pltpu.VMEM, shape, dtype, limit=counted - 1)
  with pytest.raises(CompileError, match="vmem"):
    cm.compile(too_small, x)


@pytest.mark.parametrize("chip", ["v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.int4])
def test_other_chips_pad_a_buffer_alike(dtype, chip):
  shape = (17, 300)
  fn, x = _through(pltpu.VMEM, shape, dtype, chip=chip)
  counted = _kernels(fn, x)[0].usage.vmem_bytes_per_core
  make = functools.partial(_through, pltpu.VMEM, shape, dtype, chip=chip)
  assert cm.compile(make(limit=counted)[0], x)
  with pytest.raises(CompileError, match="vmem"):
    cm.compile(make(limit=counted - 1)[0], x)


def _nested(x_hbm, o_hbm, buffer):
  def outer(first):
    pltpu.sync_copy(x_hbm, first)

    def inner(second):
      second[...] = first[...] + 1
      pltpu.sync_copy(second, o_hbm)

    pl.run_scoped(inner, buffer)

  pl.run_scoped(outer, buffer)


def _add_one(x_hbm, o_hbm, scratch):
  pltpu.sync_copy(x_hbm, scratch)
  scratch[...] = scratch[...] + 1
  pltpu.sync_copy(scratch, o_hbm)


def _one_after_the_other(x_hbm, o_hbm, buffer):
  for _ in range(3):
    pl.run_scoped(functools.partial(_add_one, x_hbm, o_hbm), buffer)


def _either(x_hbm, o_hbm, buffer):
  add_one = functools.partial(_add_one, x_hbm, o_hbm)
  for core in range(2):
    pl.when(jax.lax.axis_index("core") == core)(
      lambda: pl.run_scoped(add_one, buffer)
    )


def _in_a_loop(x_hbm, o_hbm, buffer):
  @pl.loop(0, 3)
  def _(_):
    pl.run_scoped(functools.partial(_add_one, x_hbm, o_hbm), buffer)


def _in_a_pipeline(x_hbm, o_hbm, buffer):
  rows = buffer.shape[0] // 4  # two copies of two blocks
  spec = pl.BlockSpec((rows, 128), lambda i: (i, 0))

  def step(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] + 1

  pltpu.emit_pipeline(step, grid=(4,), in_specs=[spec], out_specs=[spec])(
    x_hbm, o_hbm
  )


@pytest.mark.parametrize(
  ("body", "buffers"),
  [
    (_nested, 2),
    (_one_after_the_other, 1),
    (_either, 1),
    (_in_a_loop, 1),
    (_in_a_pipeline, 1),
  ],
)
def test_scopes_are_counted_as_libtpu_reuses_them(body, buffers):
  buffer = pltpu.VMEM((64, 128), _F32)
  x = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
  counted = buffers * 64 * 128 * 4

  def program(limit):
    kernel = cm.kernel(
      functools.partial(body, buffer=buffer),
      mesh=cm.chip("v5p").tensor_cores(),
      out=cm.like(0),
      num_links=0,
      compiler_params=dict(vmem_limit_bytes=limit),
    )
    return _over(kernel, "v5p")

  [kernel] = cm.compile(program(counted), x).kernels
  assert kernel.usage.vmem_bytes_per_core == counted
  with pytest.raises(CompileError, match="vmem"):
    cm.compile(program(counted - 1), x)


@pytest.mark.parametrize(
  ("shape", "dtype", "fits"),
  [
    # 1 MiB, of which libtpu keeps some for itself.
    ((260_000,), jnp.int32, True),
    ((262_144,), jnp.int32, False),
    ((1_000_000,), jnp.int8, True),
    ((2_000, 100), jnp.int32, True),
    ((2_100, 100), jnp.int32, False),
  ],
)
def test_scalar_memory_is_counted_as_libtpu_pads_it(shape, dtype, fits):
  fn, x = _through(pltpu.SMEM, shape, dtype)
  counted = _kernels(fn, x)[0].usage.smem_bytes_per_core
  assert (counted < cm.chip("v5p").smem_bytes_per_tensor_core) is fits
  if fits:
    assert cm.compile(fn, x)
  else:
    with pytest.raises(CompileError, match="smem|memory"):
      cm.compile(fn, x)


@pytest.mark.parametrize(
  ("rows", "fits"), [(512, True), (513, False)]
)  # 256 KiB
def test_a_subcore_holds_what_is_counted_for_it(rows, fits):
  chip = cm.chip("v6e")

  def body(x_hbm, o_hbm, buffer):
    pltpu.sync_copy(x_hbm, buffer)
    pltpu.sync_copy(buffer, o_hbm)

  kernel = cm.kernel(
    body,
    mesh=chip.vector_subcores(),
    out=cm.like(0),
    scratch=[pltpu.VMEM((rows, 128), _F32)],
    num_links=0,
  )
  fn, x = _over(kernel, "v6e"), jax.ShapeDtypeStruct((rows, 128), _F32)
  counted = _kernels(fn, x)[0].usage.vmem_bytes_per_core
  assert (counted <= chip.vmem_bytes_per_vector_subcore) is fits
  if fits:
    assert cm.compile(fn, x)
  else:
    with pytest.raises(CompileError, match="allocat"):
      cm.compile(fn, x)


# --- usage, counted --------------------------------------------------------


def test_counts_each_kind_of_semaphore():
  kinds = pltpu.SemaphoreType
  kernel = cm.kernel(
    lambda x, o, *_: cm.core_barrier(),
    mesh=cm.chip("v5p").tensor_cores(),
    out=cm.like(0),
    scratch=[kinds.DMA, kinds.DMA((3, 2)), kinds.REGULAR, kinds.REGULAR((4,))],
    num_links=5,
  )
  x = jax.ShapeDtypeStruct((8, 128), _F32)
  [found] = _kernels(_over(kernel, "v5p"), x)
  # Those of the scratch, used or not, and none of the links: no put takes one.
  assert found.usage.semaphores_per_core == 1 + 6 + 1 + 4
  assert found.uses_barrier and found.collective_id >= 2**30


def test_arrays_in_hbm_are_not_counted():
  kernel = cm.kernel(
    lambda x, y, o, p: None,
    mesh=cm.chip("v5p").tensor_cores(),
    out=(cm.like(0), cm.like(1)),
    num_links=0,
  )
  x = jax.ShapeDtypeStruct((8, 128), _F32)
  [found] = _kernels(_over(kernel, "v5p"), x, x)
  assert found.usage == usage.Usage()


def test_scratch_is_counted_for_the_mesh_it_belongs_to():
  chip = cm.chip("v5p")
  scalar, vector = chip.scalar_subcores(), chip.vector_subcores()
  kernel = cm.kernel(
    [lambda x, o, *_: None] * 2,
    mesh=[scalar, vector],
    out=cm.like(0),
    scratch=[
      pltpu.SMEM((128,), jnp.int32) @ scalar,
      pltpu.VMEM((8, 128), _F32) @ vector,
      pltpu.SMEM((256,), jnp.int32) @ vector,
    ],
  )
  x = jax.ShapeDtypeStruct((8, 128), _F32)
  [found] = _kernels(_over(kernel, "v5p"), x)
  assert found.meshes == (scalar, vector)
  assert found.usage == usage.Usage(
    vmem_bytes_per_core=8 * 128 * 4, smem_bytes_per_core=256 * 4
  )


def test_finds_every_kernel_of_a_program_in_order():
  kernels = [_double("v6e", name=f"kernel_{i}") for i in range(5)]

  def program(x):
    x = kernels[0](x)
    x = jax.lax.cond(x[0, 0] > 0, kernels[1], kernels[2], x)
    x = jax.lax.fori_loop(0, 3, lambda _, x: kernels[3](x), x)
    return jax.jit(kernels[4])(x)

  x = jax.ShapeDtypeStruct((16, 128), _F32)
  found = _kernels(_over(program, "v6e"), x)
  # JAX numbers the branches by the value: false, then true.
  order = [0, 2, 1, 3, 4]
  assert [k.name for k in found] == [f"kernel_{i}" for i in order]


def test_knows_a_kernel_that_was_traced_for_the_simulator():
  x = jax.ShapeDtypeStruct((16, 128), _F32)
  [found] = _kernels(_over(_double("v5p"), "v5p", on="simulator"), x)
  assert found.is_simulated
  [found] = _kernels(_over(_double("v5p"), "v5p"), x)
  assert not found.is_simulated


def test_usage_adds_what_is_held_together_and_takes_the_larger_of_the_rest():
  a = usage.Usage(vmem_bytes_per_core=1, smem_bytes_per_core=20)
  b = usage.Usage(vmem_bytes_per_core=10, semaphores_per_core=3)
  assert a + b == usage.Usage(
    vmem_bytes_per_core=11, smem_bytes_per_core=20, semaphores_per_core=3
  )
  assert a | b == usage.Usage(
    vmem_bytes_per_core=10, smem_bytes_per_core=20, semaphores_per_core=3
  )
