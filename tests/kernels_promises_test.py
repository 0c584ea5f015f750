"""What every bandwidth-bound kernel promises, whichever it is."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels
from tests import support


def _mixture(x):
  return jnp.sin(x) * x


# By name: the kernel of x [rows, width], its reference, and how many vectors
# [width] it takes besides.
_KERNELS = {
  "elementwise": (
    functools.partial(kernels.elementwise, _mixture),
    _mixture,
    0,
  ),
  "layer_norm": (kernels.layer_norm, kernels.layer_norm_reference, 2),
  "log_softmax": (kernels.log_softmax, kernels.log_softmax_reference, 0),
  "reduce_max": (
    functools.partial(kernels.reduce_max, axis=1),
    functools.partial(kernels.reduce_max_reference, axis=1),
    0,
  ),
  "reduce_sum": (
    functools.partial(kernels.reduce_sum, axis=-1),
    functools.partial(kernels.reduce_sum_reference, axis=-1),
    0,
  ),
  "rms_norm": (kernels.rms_norm, kernels.rms_norm_reference, 1),
  "softmax": (kernels.softmax, kernels.softmax_reference, 0),
}
_EACH = pytest.mark.parametrize("name", _KERNELS)


def _arguments(name, num_rows):
  """Arguments, x cut out of an array that is NaN around it."""
  rng = np.random.default_rng(0)
  around = np.full((num_rows + 3, 210), np.nan, np.float32)
  around[2 : 2 + num_rows, 5:205] = rng.normal(size=(num_rows, 200))
  x = jnp.asarray(around)[2 : 2 + num_rows, 5:205]
  vectors = rng.normal(size=(_KERNELS[name][2], 200)).astype(np.float32)
  return x, *map(jnp.asarray, vectors)


@_EACH
def test_values_and_gradients_on_devices_are_those_of_the_reference(name):
  kernel, reference, num_vectors = _KERNELS[name]
  chip = cm.chip("v5p:2x2x1")
  mesh = chip.device_mesh(("device", "replica"), (2, 2), on="simulator")
  specs = (P("device"), *[P()] * num_vectors)

  def total(fn):
    """A sum over devices, so that its gradients are."""

    def on_device(*args):
      y = fn(*args)
      return jax.lax.psum(jnp.sum(y * jnp.cos(y)), "device")

    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P())

  args = _arguments(name, 2 * 5)
  argnums = tuple(range(len(args)))
  got = jax.jit(jax.value_and_grad(total(kernel), argnums))(*args)
  want = jax.jit(jax.value_and_grad(total(reference), argnums))(*args)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    # Sums of up to 2000 terms of size 1 in float32.
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@_EACH
def test_bits_are_the_same_twice_in_a_jit_under_vmap_donated_and_in_x64(name):
  kernel = _KERNELS[name][0]
  x, *vectors = _arguments(name, 9)
  rest = [None] * len(vectors)

  @jax.jit
  def both(x, *vectors):
    again = jax.vmap(kernel, in_axes=(0, *rest))(x[None], *vectors)
    return kernel(x, *vectors), kernel(x, *vectors), again[0]

  first, *others = both(x, *vectors)
  assert not np.isnan(first).any()
  with jax.enable_x64(True):
    wide = jax.jit(lambda *args: kernel(*args))(x, *vectors)
  assert wide.dtype == first.dtype
  # XLA warns of what it cannot use, such as an array for its sums.
  donate = 0 if first.shape == x.shape else ()
  donated = jax.jit(lambda *args: kernel(*args), donate_argnums=donate)
  for other in (*others, wide, donated(x + 0, *vectors)):
    np.testing.assert_array_equal(first, other)


def test_vmap_is_one_launch_whatever_is_batched():
  x = jnp.stack([_arguments("softmax", 9)[0]] * 3)
  x = x * jnp.arange(1.0, 4.0).reshape(3, 1, 1)
  row = jnp.arange(200) % 3
  masks = jnp.stack([row != 0, row != 1, row != 2])
  with cm.simulation() as run:
    masked = jax.vmap(kernels.softmax)(x, masks)
    scaled = jax.vmap(kernels.rms_norm, (None, 0))(x[0], x[:, 0])
    products = jax.vmap(
      lambda a, b: kernels.elementwise(jnp.multiply, a, b), (0, None)
    )(x, x[1])
  assert len(run.runs) == 3
  for i in range(3):
    np.testing.assert_array_equal(masked[i], kernels.softmax(x[i], masks[i]))
    np.testing.assert_array_equal(scaled[i], kernels.rms_norm(x[0], x[i, 0]))
  np.testing.assert_array_equal(products, x * x[1:2])


@_EACH
@pytest.mark.parametrize("shape", [(0, 200), (3, 0)])
def test_no_elements_are_no_error(name, shape):
  kernel, reference, num_vectors = _KERNELS[name]
  if name == "reduce_max" and not shape[1]:
    with pytest.raises(cm.ShapeError):  # There is no maximum of nothing.
      kernel(jnp.ones(shape))
    return
  args = [jnp.ones(shape), *[jnp.ones(shape[1:])] * num_vectors]
  y, vjp = jax.vjp(kernel, *args)
  want, want_vjp = jax.vjp(reference, *args)
  np.testing.assert_array_equal(y, want)
  for a, b in zip(vjp(y), want_vjp(want), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("value", [None, 1.5, [[1.0]]])
def test_what_is_no_array_is_refused_by_name(value):
  x = jnp.ones((2, 3, 3))
  sizes = jnp.ones(1, jnp.int32)
  calls = {
    "x of matmul": lambda: kernels.matmul(value, x),
    r"w\[1\] of matmul": lambda: kernels.matmul(x, (x, value)),
    r"operands\[0\] of matmul": lambda: kernels.matmul(x, x, value),
    "k of attention": lambda: kernels.attention(x, value, x),
    "x must": lambda: kernels.grouped_matmul(value, x, sizes),
    "d must": lambda: kernels.grouped_weight_gradient(x[0], value, sizes),
  }
  for words, call in calls.items():
    with pytest.raises(cm.DTypeError, match=f"{words}.* an array; got"):
      call()
  for kernel, _, _ in _KERNELS.values():
    with pytest.raises(cm.DTypeError, match="must be an array; got"):
      kernel(value)


@pytest.mark.parametrize("epsilon", [None, "a", -1.0, float("nan")])
def test_epsilon_is_a_number(epsilon):
  with pytest.raises(cm.ShapeError, match="epsilon must be a finite number"):
    kernels.layer_norm(jnp.ones((2, 3)), epsilon=epsilon)


@_EACH
def test_64_bits_are_refused(name):
  with jax.enable_x64(True):
    args = [jnp.ones((3, 4), jnp.float64)]
    with pytest.raises(cm.DTypeError, match="got float64"):
      _KERNELS[name][0](*args)


# Rows of less than a tile, of half a tile, and lanes that fill none.
@pytest.mark.parametrize(
  ("chip_name", "shape"),
  [
    *((chip_name, (3, 5, 130)) for chip_name in support.COMPILED_CHIPS),
    ("v5p:2x2x1", (24, 200)),
  ],
)
def test_kernels_and_gradients_compile(chip_name, shape):
  chip = cm.chip(chip_name)
  mesh = chip.device_mesh("device", on="compiler")

  def everything(x, vector, narrow):
    results = []
    for kernel, _, num_vectors in _KERNELS.values():
      vectors = [vector] * num_vectors
      y, vjp = jax.vjp(kernel, x, *vectors)
      results.append((y, vjp(y)))
    masked = kernels.log_softmax(narrow, vector > 0)
    return results, masked, kernels.reduce_sum(narrow, (0, -1))

  fn = jax.shard_map(everything, mesh=mesh, in_specs=P(), out_specs=P())
  compiled = cm.compile(
    jax.jit(fn),
    jax.ShapeDtypeStruct(shape, jnp.float32),
    jax.ShapeDtypeStruct(shape[-1:], jnp.float32),
    jax.ShapeDtypeStruct(shape, jnp.bfloat16),
  )
  assert {k.name for k in compiled.kernels} >= {"softmax_grad", "rms_norm_grad"}
