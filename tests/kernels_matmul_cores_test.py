"""How the cores of a device share a matrix product, and its copies ahead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels
from coremesh.kernels import epilogues
from coremesh.kernels._matmul import choice, streams
from coremesh.kernels._matmul.blocks import Blocks, Product

_V5P = cm.chip("v5p:2x2x1")


def _normal(*shape, seed=0):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def _check(y, x, w):
  """Against float64: K roundings of the sum of absolute values."""
  x, w = (np.asarray(a, np.float64) for a in (x, w))
  assert y.shape == (x @ w).shape
  most = x.shape[-1] * 2.0**-24 * (np.abs(x) @ np.abs(w))
  assert (np.abs(np.asarray(y, np.float64) - x @ w) <= most).all()


@pytest.mark.parametrize(
  ("m", "n", "k", "columns", "part"),
  [
    (20, 256, 900, 256, 128),  # A part for each core.
    (7, 100, 513, 128, None),  # One part, of one core.
    (3, 384, 2000, 384, 128),  # One core has two of three.
    (16, 128, 640, 256, None),  # Blocks beyond the array.
  ],
)
def test_each_core_sums_half_of_the_terms(m, n, k, columns, part):
  x, w = _normal(m, k), _normal(k, n, seed=1)
  blocks = Blocks(rows=24, columns=columns, inner=128, split="inner", part=part)
  product = functools.partial(kernels.matmul, blocks=blocks)
  with cm.simulation(races=True, seed=3):
    y = product(x, w)
  _check(y, x, w)
  # Which core adds the sums of the other changes no bit.
  np.testing.assert_array_equal(y, product(x, w))


def test_halves_of_the_sum_pass_the_epilogue_once():
  x, bias = _normal(9, 700), _normal(200, seed=5)
  weights = [_normal(700, 200, seed=i) for i in (1, 2)]

  def gated(a, b, bias):
    return jax.nn.silu(a) * (b + bias)

  blocks = Blocks(rows=16, columns=256, inner=128, split="inner", part=128)
  y = kernels.matmul(x, weights, bias, epilogue=gated, blocks=blocks)
  want = kernels.matmul_reference(x, weights, bias, epilogue=gated)
  # The sums of 700 terms of about 1, in another order.
  np.testing.assert_allclose(y, want, rtol=1e-4, atol=2e-3)


def test_halves_of_whole_numbers():
  x = jnp.full((32, 600), -128, jnp.int8)
  w = jnp.full((600, 128), 127, jnp.int8)
  blocks = Blocks(rows=32, columns=128, inner=128, split="inner")
  y = kernels.matmul(x, w, blocks=blocks)
  assert (y == -128 * 127 * 600).all()


@pytest.mark.parametrize("batch", [(2,), (5,), (3, 2), (1, 7)])
def test_cores_share_leading_axes(batch):
  x, w = _normal(*batch, 9, 40), _normal(*batch, 40, 130, seed=1)
  blocks = Blocks(rows=16, columns=256, inner=128, split="batch")
  with cm.simulation(races=True):
    _check(kernels.matmul(x, w, blocks=blocks), x, w)


@pytest.mark.parametrize("most_slots", [2, 4, 8])
@pytest.mark.parametrize("split", ["rows", "columns"])
def test_copies_ahead_change_nothing(most_slots, split, monkeypatch):
  monkeypatch.setattr(streams, "MOST_SLOTS", most_slots)
  x, w = _normal(50, 300), _normal(300, 700, seed=1)
  scale = _normal(50, 1, seed=2)
  blocks = Blocks(rows=8, columns=128, inner=128, split=split)
  y = kernels.matmul(x, w, scale, epilogue=jnp.multiply, blocks=blocks)
  _check(y / scale, x, w)


@pytest.mark.parametrize(
  ("batch", "sizes", "options", "words"),
  [
    ((), (8, 128, 512), dict(split="batch"), "needs a product with leading"),
    ((2,), (8, 128, 512), dict(split="inner"), "needs one block of the output"),
    ((), (8, 300, 512), dict(split="inner"), "1 x 8 x 300 in blocks of 8 x 12"),
    ((), (8, 128, 384), dict(split="inner"), "at least 4 blocks of the axis"),
  ],
)
def test_splits_that_cannot_be(batch, sizes, options, words):
  m, n, k = sizes
  blocks = Blocks(rows=8, columns=128, inner=128, **options)
  with pytest.raises(cm.ShapeError, match=words):
    kernels.matmul(
      jnp.ones((*batch, m, k)), jnp.ones((*batch, k, n)), blocks=blocks
    )


@pytest.mark.parametrize("split", ["batch", "inner"])
def test_groups_are_split_by_rows_or_columns(split):
  blocks = Blocks(rows=64, columns=128, inner=128, split=split)
  x, w, sizes = (
    jnp.ones((64, 128)),
    jnp.ones((2, 128, 128)),
    jnp.int32([30, 34]),
  )
  with pytest.raises(cm.ShapeError, match="split of Blocks must be 'rows'"):
    kernels.grouped_matmul(x, w, sizes, blocks=blocks)


def test_few_outputs_of_many_terms_are_split_along_the_terms():
  few = Product(batch=1, rows=256, columns=256, inner=65_536)
  assert choice.choose(few, _V5P).split == "inner"
  many = Product(batch=64, rows=128, columns=128, inner=128)
  assert choice.choose(many, _V5P).split == "batch"


def test_as_much_is_on_its_way_as_arrives_in_a_latency():
  product = Product(batch=64, rows=128, columns=128, inner=128)
  small = Blocks(rows=128, columns=128, inner=128)
  assert streams.num_slots(product, small, _V5P) == streams.MOST_SLOTS
  large = Blocks(rows=1024, columns=1024, inner=512)
  product = Product(batch=1, rows=4096, columns=4096, inner=4096)
  assert streams.num_slots(product, large, _V5P) == 2


def test_halves_compile_and_are_predicted():
  x = jax.ShapeDtypeStruct((8, 65_536), jnp.bfloat16)
  w = jax.ShapeDtypeStruct((65_536, 256), jnp.bfloat16)

  def fn(x, w):
    return kernels.matmul(x, w, epilogue=epilogues.relu)

  # Both cores signal and send: nothing of that is assumed.
  (operation,) = cm.predict(jax.jit(fn), x, w, chip=_V5P).operations
  assert not operation.assumed
