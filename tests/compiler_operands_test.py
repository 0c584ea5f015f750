"""Tests for coremesh.compiler.operands: what XLA works out for kernels."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm
from coremesh.compiler import operands
from tests import profiling

_ROWS = 8


def _copy_tiles(places, x):
  """Copies tiles of x [n * 8, 128] from places [n] int32."""

  def body(places_smem, x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...]

  grid_spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=1,
    grid=places.shape,
    in_specs=[pl.BlockSpec((_ROWS, 128), lambda i, p: (p[i], 0))],
    out_specs=pl.BlockSpec((_ROWS, 128), lambda i, p: (i, 0)),
  )
  return pl.pallas_call(
    body,
    grid_spec=grid_spec,
    out_shape=jax.ShapeDtypeStruct((places.size * _ROWS, 128), x.dtype),
    name="copy_tiles",
  )(places, x)


def _by_group(sizes, x):
  """Copies the first tile of each group."""
  starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)[:-1]])
  return _copy_tiles(starts // _ROWS, x)


_SIZES = np.array([16, 0, 24, 8], np.int32)
_X = profiling.shape(48, 128)


def _known(fn, *args):
  jaxpr = jax.jit(fn).trace(*args).jaxpr.jaxpr
  return operands.of_kernels(jaxpr, jax.tree.leaves(args))


def test_what_follows_from_an_argument_is_worked_out():
  [kernel] = _known(_by_group, _SIZES, _X)
  assert kernel.kernel == "copy_tiles"
  assert {i: v.tolist() for i, v in kernel.values.items()} == {0: [0, 2, 2, 5]}


def test_a_function_that_is_jitted_inside_is_followed():
  [kernel] = _known(lambda s, x: jax.jit(_by_group)(s * 2, x), _SIZES, _X)
  assert kernel.values[0].tolist() == [0, 4, 4, 10]


def test_what_follows_from_data_that_are_not_given_is_not_known():
  sizes = jax.ShapeDtypeStruct(_SIZES.shape, jnp.int32)
  assert _known(_by_group, sizes, _X) == ()
  mixed = lambda n, s, x: _by_group(s + n, x)
  [kernel] = _known(mixed, np.int32(8), sizes, _X)
  assert kernel.values == {}


def test_a_kernel_in_a_loop_is_not_worked_out():
  def fn(sizes, x):
    step = lambda i, x: _by_group(sizes, x)[:48].repeat(2, 0)[:48]
    return jax.lax.fori_loop(0, 2, step, jnp.tile(x, (1, 1)))

  assert _known(fn, _SIZES, _X) == ()


def _on_devices(spec):
  mesh = cm.chip("v5p:2x2x1").device_mesh("device", on="compiler")
  return jax.shard_map(
    lambda sizes, x: _copy_tiles(jnp.cumsum(sizes), x),
    mesh=mesh,
    in_specs=(spec, P()),
    out_specs=P("device"),
    check_vma=False,
  )


def test_what_all_devices_are_given_alike_is_worked_out():
  [kernel] = _known(_on_devices(P()), _SIZES, _X)
  assert kernel.values[0].tolist() == [16, 16, 40, 48]


def test_what_devices_are_given_a_share_of_is_not_known():
  [kernel] = _known(_on_devices(P("device")), _SIZES, _X)
  assert kernel.values == {}


def test_what_depends_on_the_device_is_not_known():
  def by_device(sizes, x):
    return _copy_tiles(sizes + jax.lax.axis_index("device"), x)

  mesh = cm.chip("v5p:2x2x1").device_mesh("device", on="compiler")
  mapped = jax.shard_map(
    by_device, mesh=mesh, in_specs=P(), out_specs=P("device"), check_vma=False
  )
  [kernel] = _known(mapped, _SIZES, _X)
  assert kernel.values == {}


def test_a_kernel_that_group_sizes_steer_has_a_time_of_its_own():
  compiled = cm.compile(_by_group, _SIZES, _X, chip="v5p:2x2x1")
  known = cm.predict(compiled, _SIZES, _X)
  sizes = jax.ShapeDtypeStruct(_SIZES.shape, jnp.int32)
  unknown = cm.compile(_by_group, sizes, _X, chip="v5p:2x2x1")
  assert unknown.from_cache  # values do not change the program
  assumed = cm.predict(unknown, sizes, _X)
  [kernel] = known.kernels
  [guess] = assumed.kernels
  assert not kernel.is_assumed
  assert guess.is_assumed
