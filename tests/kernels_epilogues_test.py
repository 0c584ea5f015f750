"""kernels.epilogues: values, derivatives, and use in kernels.matmul."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.kernels import epilogues, matmul, matmul_reference
from coremesh.kernels._matmul.blocks import Blocks
from tests import support

_POINTS = np.array([0, -3.7, -5, 5, 1, -2, 0.3, 40], np.float32)


def _phi(x: float) -> float:
  return 0.5 * math.erfc(-x / math.sqrt(2))


_EXACT = {
  epilogues.relu: lambda x: max(x, 0.0),
  epilogues.silu: lambda x: x / (1 + math.exp(-x)),
  epilogues.gelu: lambda x: x * _phi(x),
  epilogues.gelu_tanh: lambda x: (
    0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
  ),
}
_ALL = pytest.mark.parametrize("function", _EXACT, ids=lambda f: f.__name__)


@_ALL
def test_values(function):
  want = [_EXACT[function](float(x)) for x in _POINTS]
  # A few roundings of a number of the size of x.
  most = np.abs(_POINTS) * 2.0**-22
  assert (
    np.abs(np.asarray(function(_POINTS), np.float64) - want) <= most
  ).all()


@_ALL
def test_slopes_are_those_of_the_function_itself(function):
  points = _POINTS[1:]  # relu has none at 0.
  got = jax.vmap(jax.grad(function))(points)
  step = 1e-5
  want = [
    (_EXACT[function](float(x) + step) - _EXACT[function](float(x) - step))
    / (2 * step)
    for x in points
  ]
  # 1 - tanh^2 is off by 2^-24, times what x^3 makes of that at 5.
  np.testing.assert_allclose(got, want, atol=26 * 2.0**-24)


@_ALL
def test_far_away_nothing_is_nan_and_zero_stays_zero(function):
  far = jnp.array([1e4, -1e4, 0], jnp.float32)
  np.testing.assert_array_equal(function(far), [1e4, 0, 0])
  slopes = jax.vmap(jax.grad(function))(far[:2])
  np.testing.assert_array_equal(slopes, [1, 0])
  assert jnp.isnan(function(jnp.float32(jnp.nan)))


def test_the_two_kinds_of_gelu_differ():
  # Published values at -2; below its minimum the slope is negative.
  x = jnp.float32(-2)
  assert abs(float(epilogues.gelu(x)) + 0.04550026) < 1e-6
  assert abs(float(epilogues.gelu_tanh(x)) + 0.04540231) < 1e-6
  for function in (epilogues.gelu, epilogues.gelu_tanh):
    assert jax.grad(function)(jnp.float32(-3.7)) < 0


def test_gelu_is_exact_to_its_own_size_and_at_the_ends():
  x = np.linspace(-12.5, 12.5, 20001).astype(np.float32)
  got = np.asarray(epilogues.gelu(jnp.asarray(x)), np.float64)
  want = np.array([float(v) * _phi(float(v)) for v in x])
  assert (np.abs(got - want) <= np.abs(x) * 2.0**-22).all()
  # The polynomial is off by 4e-6, and exp2 of -112 by 112 roundings.
  np.testing.assert_allclose(got, want, rtol=2e-5)
  ends = jnp.array([np.inf, -np.inf, 3e38, -3e38], jnp.float32)
  np.testing.assert_array_equal(epilogues.gelu(ends), jnp.maximum(ends, 0))
  slopes = jax.vmap(jax.grad(epilogues.gelu))(ends)
  np.testing.assert_array_equal(slopes, [1, 0, 1, 0])


def test_the_second_derivative_of_gelu_is_right_at_zero():
  second = jax.grad(jax.grad(epilogues.gelu))
  for x in (0.0, 0.5, -2.0):
    density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    want = (2 - x * x) * density
    assert abs(float(second(jnp.float32(x))) - want) < 1e-6


_LAYER = epilogues.chain(
  epilogues.scale, epilogues.bias, epilogues.gelu, epilogues.residual
)


def test_an_epilogue_is_applied_once_after_four_steps_of_k():
  x, w = jnp.zeros((16, 512)), jnp.zeros((512, 128))
  blocks = Blocks(rows=8, columns=128, inner=128)
  for function, want in ((epilogues.gelu, 0.84134475), (epilogues.relu, 1)):
    y = matmul(
      x,
      w,
      jnp.ones(128),
      epilogue=epilogues.chain(epilogues.bias, function),
      blocks=blocks,
    )
    np.testing.assert_allclose(y, want, rtol=1e-6)


def test_a_layer_of_int8_with_all_of_them():
  rng = np.random.default_rng(0)
  x, w = (
    jnp.asarray(rng.integers(-9, 9, s), jnp.int8) for s in ((9, 40), (40, 200))
  )
  floats = [
    jnp.asarray(rng.normal(size=s), jnp.bfloat16)
    for s in ((9, 1), (200,), (9, 200))
  ]
  got, want = (
    f(x, w, *floats, epilogue=_LAYER, out_dtype=jnp.float32)
    for f in (matmul, matmul_reference)
  )
  # The sums are whole numbers; the rest is a few roundings of up to 10^4.
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-3)


def test_a_gated_unit_and_its_gradients():
  rng = np.random.default_rng(0)
  x, a, b = (
    jnp.asarray(rng.normal(size=s) / 8, jnp.float32)
    for s in ((9, 40), (40, 128), (40, 128))
  )
  unit = epilogues.gated(epilogues.silu)

  def loss(f, x, *weights):
    return jnp.sin(f(x, weights, epilogue=unit)).sum()

  got, want = (
    jax.value_and_grad(functools.partial(loss, f), (0, 1, 2))(x, a, b)
    for f in (matmul, matmul_reference)
  )
  for one, other in zip(
    jax.tree.leaves(got), jax.tree.leaves(want), strict=True
  ):
    # Sums of at most 1152 terms below 1.
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_equal_epilogues_are_compiled_once():
  traces = []

  @functools.partial(jax.jit, static_argnames="epilogue")
  def layer(x, epilogue):
    traces.append(epilogue)
    return epilogue(x, x)

  for _ in range(2):
    layer(jnp.ones(3), epilogues.gated(epilogues.silu))
    layer(jnp.ones(3), epilogues.chain(epilogues.bias, epilogues.relu))
  assert len(traces) == 2


def test_a_chain_needs_the_operands_of_its_functions():
  layer = epilogues.chain(epilogues.bias, epilogues.gelu)
  with pytest.raises(
    cm.ShapeError, match=r"must be given 2 blocks.*got 1.*\[2, 1\]"
  ):
    layer(jnp.ones(3))
  with pytest.raises(cm.ShapeError, match="at least one function"):
    epilogues.chain()(jnp.ones(3))


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_each_compiles(chip):
  functions = {epilogues.chain(epilogues.bias, f): 1 for f in _EXACT} | {
    _LAYER: 3,
    epilogues.gated(epilogues.gelu): 0,
  }
  mesh = cm.chip(chip).device_mesh("device", on="compiler")
  shapes = [(24, 128), (128, 256)]
  operands = [(24, 1), (256,), (24, 256)]

  def layers(x, w, *operands):
    return [
      matmul(
        x,
        w if count else [w, w],
        *(operands if count == 3 else operands[1 : 1 + count]),
        epilogue=function,
      )
      for function, count in functions.items()
    ]

  types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (*shapes, *operands)]
  fn = jax.shard_map(
    layers,
    mesh=mesh,
    in_specs=jax.sharding.PartitionSpec(),
    out_specs=jax.sharding.PartitionSpec(),
  )
  assert len(cm.compile(jax.jit(fn), *types).kernels) == len(functions)
