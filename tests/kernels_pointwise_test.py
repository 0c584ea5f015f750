"""Functions of blocks are refused where blocks would show in the result."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels
from coremesh.kernels import epilogues
from coremesh.kernels.epilogues import bias, gated, gelu, silu

_X, _W = jnp.ones((16, 8)), jnp.ones((8, 24))
_ROW = np.arange(24, dtype=np.float32)[None]


def _product(epilogue, *operands, weights=1):
  w = _W if weights == 1 else (_W,) * weights
  return kernels.matmul(_X, w, *operands, epilogue=epilogue)


@pytest.mark.parametrize(
  ("epilogue", "primitive"),
  [
    (lambda t: jax.nn.softmax(t, axis=-1), "reduce_max"),
    (lambda t: t - t.mean(), "reduce_sum"),
    (lambda t: t[:, ::-1], "rev"),
    (lambda t: t + t[:, :1], "slice"),
    (lambda t: jnp.cumsum(t, axis=1), "cumsum"),
    (lambda t: jnp.where(jnp.arange(24) < 3, t, 0.0), "iota"),
    (jax.jit(lambda t: t - t.max()), "reduce_max"),
  ],
)
def test_a_function_that_mixes_elements_is_refused(epilogue, primitive):
  message = f"got one with {primitive}, which mixes elements"
  with pytest.raises(cm.ShapeError, match=f"epilogue of matmul .* {message}"):
    _product(epilogue)
  with pytest.raises(cm.ShapeError, match=f"of grouped_matmul .* {message}"):
    sizes = jnp.array([16], jnp.int32)
    kernels.grouped_matmul(_X, _W[None], sizes, epilogue=epilogue)
  with pytest.raises(cm.ShapeError, match=f"fn of elementwise .* {message}"):
    kernels.elementwise(epilogue, _W)


def test_a_function_that_closes_over_an_array_is_refused():
  row = jnp.asarray(_ROW)
  with pytest.raises(
    cm.ShapeError, match=r"shape \(1, 24\). Give it as an arg"
  ):
    _product(lambda t: t + row)


@pytest.mark.parametrize(
  ("epilogue", "operands", "weights", "message"),
  [
    (bias, (), 1, r"bias(total: jax.Array, bias: jax.Array) -> jax.Array, is"),
    (bias, (), 1, "here 1 and 0, and cannot take them: missing a required arg"),
    (silu, (_ROW,), 1, "here 1 and 1, and cannot take them: too many"),
    (gated(silu), (), 1, "cannot take them: missing a required argument: 'val"),
    (gated, (), 2, "here 2 and 0, and cannot take them: too many positional"),
  ],
)
def test_an_epilogue_of_other_arguments_is_refused(
  epilogue, operands, weights, message
):
  with pytest.raises(cm.ShapeError, match=re.escape(message)):
    _product(epilogue, *operands, weights=weights)


def test_an_epilogue_must_be_a_function():
  with pytest.raises(cm.DTypeError, match="function of blocks; got 'gelu'. Re"):
    _product("gelu")


def test_an_epilogue_must_make_a_block_of_the_same_shape():
  message = r"The result of epilogue of matmul must have shape \(16, 24\)"
  with pytest.raises(cm.ShapeError, match=message):
    _product(lambda t, row: row, _ROW)
  with pytest.raises(cm.DTypeError, match="must be an array; got a tuple"):
    _product(lambda t: (t, t))


def test_operands_and_functions_within_functions_are_no_mixing():
  @jax.jit
  def layer(total, row, column):
    return jax.nn.gelu(total + row, approximate=False) * column

  column = np.ones((16, 1), np.float32)
  got = _product(layer, _ROW, column)
  # The same float32 operations, but for the order of 8 equal terms.
  np.testing.assert_allclose(got, layer(_X @ _W, _ROW, column), rtol=1e-6)


@pytest.mark.parametrize("epilogue", [gelu, epilogues.gelu_tanh, silu])
def test_an_epilogue_has_a_gradient_where_jax_checks_what_varies(epilogue):
  chip = cm.chip("v5p:2x2x1")

  def loss(w, x):
    return kernels.matmul(x, w, epilogue=epilogue).sum()

  x = np.linspace(-1, 1, 32 * 8, dtype=np.float32).reshape(32, 8)
  gradient = jax.shard_map(
    jax.grad(loss),
    mesh=chip.device_mesh("device"),
    in_specs=(P(), P("device")),
    out_specs=P(),
    check_vma=True,
  )
  got = jax.jit(gradient)(_W, x)
  want = jax.grad(lambda w: epilogue(x @ w).sum())(_W)
  # Sums of 32 float32 terms, in another order; the largest is about 20.
  np.testing.assert_allclose(got, want, atol=2e-5)
