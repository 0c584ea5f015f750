"""kernels.grouped_matmul and its gradients against float64 and plain jnp."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh.kernels import (
  grouped_matmul,
  grouped_matmul_reference,
  grouped_weight_gradient,
  grouped_weight_gradient_reference,
)
from coremesh.kernels._grouped.blocks import (
  GroupedProduct,
  choose,
  vmem_bytes,
)
from coremesh.kernels._matmul.blocks import Blocks
from tests import support

_ROWS = Blocks(rows=32, columns=128, inner=128)
_COLUMNS = Blocks(rows=64, columns=128, inner=256, split="columns")
_GRADIENT = Blocks(rows=128, columns=128, inner=128)
# A product of n terms of float32, each rounded to 24 bits, summed in another
# order: at most n units in the last place of the sum of absolute values.
_UNIT = 2.0**-24


def _normal(shape, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  if jnp.issubdtype(dtype, jnp.integer):
    return jnp.asarray(rng.integers(-128, 128, shape), dtype)
  return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


def _sizes(*sizes):
  return jnp.asarray(sizes, jnp.int32)


def _groups(sizes):
  stops = np.cumsum(sizes)
  return [slice(b - n, b) for n, b in zip(sizes, stops, strict=True)]


def _check_sums(got, left, right):
  """Equal to left @ right within the rounding of float32 sums."""
  left, right = (np.asarray(a, np.float64) for a in (left, right))
  most = left.shape[-1] * _UNIT * (np.abs(left) @ np.abs(right))
  assert got.shape == (left.shape[0], right.shape[1])
  assert (np.abs(np.asarray(got, np.float64) - left @ right) <= most).all()


def _check_product(y, x, w, sizes):
  for rows, weights in zip(_groups(sizes), w, strict=True):
    _check_sums(y[rows], x[rows], weights)
  assert (np.asarray(y[sum(sizes) :]) == 0).all()


def _check_gradient(d_w, x, d, sizes):
  for rows, got in zip(_groups(sizes), d_w, strict=True):
    _check_sums(got, x[rows].T, d[rows])


@functools.cache
def _kernels(blocks):
  """Both kernels; the sizes of groups are arguments, so that one trace does."""
  gradient = Blocks(rows=128, columns=128, inner=128, split=blocks.split)
  product = functools.partial(grouped_matmul, blocks=blocks)
  return jax.jit(
    lambda x, w, d, sizes: (
      product(x, w, sizes),
      grouped_weight_gradient(x, d, sizes, blocks=gradient),
    )
  )


def _check_both(blocks, sizes):
  """Of 150 rows; those beyond the groups hold NaN."""
  num_rows = 150
  x, d = _normal((num_rows, 130)), _normal((num_rows, 140), seed=1)
  w = _normal((len(sizes), 130, 140), seed=2)
  x, d = (a.at[sum(sizes) :].set(jnp.nan) for a in (x, d))
  y, d_w = _kernels(blocks)(x, w, d, _sizes(*sizes))
  _check_product(y, x, w, sizes)
  _check_gradient(d_w, x, d, sizes)


@st.composite
def _cut(draw):
  """Sizes of four groups of up to 150 rows, many of them empty or in tiles."""
  cuts = draw(
    st.lists(
      st.one_of(st.integers(0, 150), st.sampled_from([0, 16, 64, 128, 150])),
      min_size=4,
      max_size=4,
    )
  )
  return np.diff([0, *sorted(cuts)]).tolist()


@hypothesis.given(sizes=_cut(), blocks=st.sampled_from([_ROWS, _COLUMNS]))
@hypothesis.settings(max_examples=4, deadline=None)
def test_any_sizes_of_groups(sizes, blocks):
  _check_both(blocks, sizes)


@pytest.mark.parametrize(
  ("blocks", "sizes"),
  [
    (_ROWS, (8, 0, 8, 0)),
    (_ROWS, (0, 0, 0, 0)),
    (_COLUMNS, (0, 150, 0, 0)),
    (_ROWS, (13, 12, 0, 125)),
    (_COLUMNS, (1, 1, 1, 1)),
    (_COLUMNS, (64, 32, 0, 32)),
  ],
  ids=str,
)
def test_empty_huge_and_unaligned_groups(blocks, sizes):
  _check_both(blocks, sizes)


@pytest.mark.parametrize(
  ("sizes", "meant"),
  [
    ((-5, 20, -(2**31), 4), (0, 20, 0, 4)),
    ((100, 100, 7, 0), (100, 50, 0, 0)),
    ((3, 2**31 - 1, 2**31 - 1, 2**31 - 1), (3, 147, 0, 0)),
  ],
  ids=str,
)
def test_sizes_that_cannot_be_are_cut_at_run_time(sizes, meant):
  x, d = _normal((150, 130)), _normal((150, 140), seed=1)
  w = _normal((4, 130, 140), seed=2)
  y, d_w = _kernels(_ROWS)(x, w, d, _sizes(*sizes))
  _check_product(y, x, w, meant)
  _check_gradient(d_w, x, d, meant)


@pytest.mark.parametrize(
  ("shape", "sizes"),
  [((3, 1, 1), (2,)), ((65, 7, 300), (33, 32))],
  ids=str,
)
def test_chosen_blocks_of_any_shape(shape, sizes):
  m, k, n = shape
  x, w = _normal((m, k)), _normal((len(sizes), k, n), seed=1)
  _check_product(grouped_matmul(x, w, _sizes(*sizes)), x, w, sizes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_narrow_floats_are_summed_in_float32(dtype):
  x, d = _normal((100, 300), dtype), _normal((100, 130), dtype, seed=1)
  w, sizes = _normal((2, 300, 130), dtype, seed=2), (37, 40)
  y = grouped_matmul(
    x,
    w,
    _sizes(*sizes),
    out_dtype=jnp.float32,
    blocks=Blocks(rows=32, columns=128, inner=128),
  )
  _check_product(y, x, w, sizes)
  if dtype == jnp.bfloat16:
    d_w = grouped_weight_gradient(x, d, _sizes(*sizes), out_dtype=jnp.float32)
    _check_gradient(d_w, x, d, sizes)


def test_a_narrow_output_is_rounded_once_where_groups_meet():
  x, w = (
    jnp.ones((24, 512), jnp.bfloat16),
    jnp.ones((2, 512, 128), jnp.bfloat16),
  )
  x = x.at[:, 1:257].set(0)
  y = grouped_matmul(x, w, _sizes(3, 18), blocks=_ROWS)
  assert y.dtype == jnp.bfloat16
  assert (y[:21] == 256).all() and (y[21:] == 0).all()


def test_int8_is_summed_in_int32():
  x, w = jnp.full((40, 1024), -128, jnp.int8), _normal((2, 1024, 128), jnp.int8)
  y = grouped_matmul(
    x, w, _sizes(7, 30), blocks=Blocks(rows=32, columns=128, inner=512)
  )
  want = -128 * np.asarray(w, np.int64).sum(1)
  assert y.dtype == jnp.int32
  assert (y[:7] == want[:1]).all() and (y[7:37] == want[1:]).all()
  assert (y[37:] == 0).all()


def _gated(a, b):
  return jax.nn.silu(a + 1) * (b + 1)


@pytest.mark.parametrize(
  ("epilogue", "count", "transpose_w", "blocks"),
  [(_gated, 2, False, _ROWS), (None, 1, True, None)],
  ids=["several weights", "transposed"],
)
def test_gradients_are_those_of_the_reference(
  epilogue, count, transpose_w, blocks
):
  sizes = _sizes(13, 0, 40)
  x = _normal((60, 130)).at[53:].set(jnp.nan)
  weights = [_normal((3, 130, 140), seed=i) / 12 for i in range(1, 1 + count)]
  weights = [w.mT if transpose_w else w for w in weights]
  options = dict(epilogue=epilogue, transpose_w=transpose_w)

  def loss(product, x, weights):
    y = product(x, weights, sizes, **options)
    return jnp.sum(jnp.sin(y)), y

  got, want = (
    jax.jit(
      jax.value_and_grad(functools.partial(loss, f), (0, 1), has_aux=True)
    )(x, weights)
    for f in (
      functools.partial(grouped_matmul, blocks=blocks),
      grouped_matmul_reference,
    )
  )
  (_, y), (d_x, d_weights) = got
  assert (np.asarray(y[53:]) == 0).all() and (np.asarray(d_x[53:]) == 0).all()
  assert all((np.asarray(d[1]) == 0).all() for d in d_weights)
  # Sums of up to 140 terms of size 1 and below 20, in chains of three.
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=3 * 140 * 20 * _UNIT)


def test_the_reference_of_a_gradient_is_that_of_the_reference():
  x, d, sizes = _normal((60, 13)), _normal((60, 14), seed=1), _sizes(13, 0, 40)

  @jax.jit
  def both(x, d):
    product = functools.partial(grouped_matmul_reference, group_sizes=sizes)
    _, pull = jax.vjp(lambda w: product(x, w), jnp.zeros((3, 13, 14)))
    return grouped_weight_gradient_reference(x, d, sizes), pull(d)[0]

  # Sums of up to 40 terms below 20.
  np.testing.assert_allclose(*both(x, d), atol=40 * 20 * _UNIT)


def test_whole_numbers_have_no_gradient():
  x, w = _normal((8, 40), jnp.int8), _normal((1, 40, 128), jnp.int8)
  _, pull = jax.vjp(grouped_matmul, x, w, _sizes(8))
  gradients = pull(np.zeros((8, 128), jax.dtypes.float0))
  assert {g.dtype for g in gradients} == {jax.dtypes.float0}


@pytest.mark.parametrize(
  ("x_shape", "w_shape"),
  [
    ((0, 8), (2, 8, 128)),
    ((8, 0), (2, 0, 128)),
    ((8, 8), (2, 8, 0)),
    ((8, 8), (0, 8, 8)),
  ],
)
def test_arrays_without_elements(x_shape, w_shape):
  x, w = jnp.ones(x_shape), jnp.ones(w_shape)
  sizes = jnp.full(w_shape[0], x_shape[0] // 4, jnp.int32)
  product = functools.partial(grouped_matmul, epilogue=lambda t: t + 1)
  y, pull = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
  want = jnp.zeros(y.shape).at[: int(sizes.sum())].set(x_shape[1] + 1)
  np.testing.assert_array_equal(y, want)
  d_x, d_w = pull(y)
  assert (d_x.shape, d_w.shape) == (x_shape, w_shape)


def test_bits_are_the_same_in_a_jit_under_vmap_in_x64_and_with_other_blocks():
  x, w = _normal((2, 40, 130)), _normal((3, 130, 140), seed=1)
  sizes = jnp.stack([_sizes(5, 0, 20), _sizes(0, 17, 23)])

  def both(x, sizes):
    return (
      grouped_matmul(x, w, sizes, blocks=_COLUMNS),
      grouped_weight_gradient(x, x, sizes),
    )

  @jax.jit
  def together(x, sizes):
    return both(x[0], sizes[0]), jax.vmap(both)(x, sizes)

  alone = jax.jit(both)
  first, second = (alone(*args) for args in zip(x, sizes, strict=True))
  once, batch = together(x, sizes)
  with jax.enable_x64(True):
    wide = both(x[0], sizes[0])
  for other in (once, wide, jax.tree.map(lambda a: a[0], batch)):
    jax.tree.map(np.testing.assert_array_equal, other, first)
  last = jax.tree.map(lambda a: a[1], batch)
  jax.tree.map(np.testing.assert_array_equal, last, second)
  # K in one block: each row is one sum, wherever its block starts.
  large = Blocks(rows=16, columns=256, inner=256)
  other = grouped_matmul(x[0], w, sizes[0], blocks=large)
  np.testing.assert_array_equal(other, first[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_that_are_the_same_on_all_devices(check_vma):
  mesh = cm.chip("v5p:2x2x1").device_mesh("device")
  x, w = _normal((32, 130)), _normal((2, 130, 140), seed=1)
  sizes = _sizes(5, 2, 0, 8, 8, 0, 3, 3)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P("device"), P(), P("device")),
    out_specs=P("device"),
    check_vma=check_vma,
  )
  def product(x, w, sizes):
    return grouped_matmul(x, w, sizes)

  @jax.jit
  def both(w):
    if not check_vma:  # Then who asks for a gradient sums it over devices.
      return product(x, w, sizes), None
    y, pull = jax.vjp(lambda w: product(x, w, sizes), w)
    return y, pull(jnp.ones_like(y))[0]

  y, d_w = both(w)
  total = np.zeros(w.shape)
  for i in range(4):
    part, own = x[8 * i : 8 * i + 8], sizes[2 * i : 2 * i + 2].tolist()
    _check_product(y[8 * i : 8 * i + 8], part, w, own)
    for group, rows in enumerate(_groups(own)):
      total[group] += np.asarray(part[rows]).sum(0)[:, None]
  if check_vma:
    np.testing.assert_allclose(d_w, total, atol=1e-4)


def test_races_under_other_interleavings():
  for seed in range(2):
    with cm.simulation(seed=seed, dma="random") as run:
      x, d = _normal((150, 130)), _normal((150, 140), seed=1)
      w = _normal((4, 130, 140), seed=2)
      y, d_w = _kernels(_ROWS)(x, w, d, _sizes(30, 0, 90, 7))
    assert not run.findings
    _check_product(y, x, w, (30, 0, 90, 7))
    _check_gradient(d_w, x, d, (30, 0, 90, 7))


_X, _W, _OK = (8, 4), (2, 4, 8), (3, 5)


@pytest.mark.parametrize(
  ("x", "w", "sizes", "words"),
  [
    ((4,), _W, _OK, r"x must be \[rows, K\]; got shape \(4,\)"),
    (_X, (4, 8), _OK, r"w must be \[groups, K, N\]; got shape \(4, 8\)"),
    (_X, (2, 5, 8), _OK, "differ along K: 4 and 5"),
    (_X, _W, (3, 4, 1), r"group_sizes must have shape \[2\]"),
    (_X, _W, (-1, 5), "a least size of -1 and a sum of 4"),
    (_X, _W, (8, 1), "no more than the 8 rows; got a least size of 1 and"),
  ],
)
def test_shapes_that_do_not_fit(x, w, sizes, words):
  with pytest.raises(cm.ShapeError, match=words):
    grouped_matmul(jnp.ones(x), jnp.ones(w), _sizes(*sizes))


def test_weights_that_do_not_fit():
  x, w, sizes = jnp.ones(_X), jnp.ones(_W), _sizes(*_OK)
  with pytest.raises(cm.ShapeError, match="give an epilogue"):
    grouped_matmul(x, [w, w], sizes)
  with pytest.raises(cm.ShapeError, match="All of w must have one shape"):
    grouped_matmul(x, [w, w[:, :, :4]], sizes, epilogue=_gated)
  with pytest.raises(cm.ShapeError, match="at least one array"):
    grouped_matmul(x, [], sizes)


def test_dtypes_that_do_not_fit():
  x, w, sizes = jnp.ones(_X), jnp.ones(_W), _sizes(*_OK)
  with pytest.raises(cm.DTypeError, match="x and w must be of one dtype"):
    grouped_matmul(x, w.astype(jnp.bfloat16), sizes)
  with pytest.raises(cm.DTypeError, match="x must be float32 or"):
    grouped_matmul(x.astype(jnp.int16), w.astype(jnp.int16), sizes)
  with pytest.raises(cm.DTypeError, match="group_sizes must be int32"):
    grouped_matmul(x, w, sizes.astype(jnp.float32))


def test_rows_of_a_gradient_that_do_not_fit():
  x, sizes = jnp.ones(_X), _sizes(*_OK)
  with pytest.raises(cm.ShapeError, match="the same rows; got 8 and 7"):
    grouped_weight_gradient(x, x[:7], sizes)
  with pytest.raises(cm.DTypeError, match="x and d must be of one dtype"):
    grouped_weight_gradient(x, x.astype(jnp.bfloat16), sizes)


def test_blocks_that_do_not_fit():
  x, w, sizes = jnp.ones((64, 256)), jnp.ones((2, 256, 256)), _sizes(3, 5)
  part = Blocks(rows=16, columns=256, inner=256, part=128)
  with pytest.raises(cm.ShapeError, match="part of Blocks must be None"):
    grouped_matmul(x, w, sizes, blocks=part)
  narrow = Blocks(rows=8, columns=128, inner=128)
  with pytest.raises(cm.ShapeError, match="rows of Blocks .* multiple of 128"):
    grouped_weight_gradient(x, x, sizes, blocks=narrow)
  x, w = x.astype(jnp.int8), w.astype(jnp.int8)
  with pytest.raises(cm.ShapeError, match="rows of Blocks .* multiple of 32"):
    grouped_matmul(x, w, sizes, blocks=narrow)


def test_tables_that_smem_does_not_hold():
  sizes = jnp.zeros(100_000, jnp.int32)
  with pytest.raises(cm.ShapeError, match="100000 groups .* bytes of SMEM"):
    jax.eval_shape(
      grouped_matmul, jnp.ones(_X), jnp.ones((100_000, 4, 8)), sizes
    )


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("is_gradient", [False, True])
def test_chosen_blocks_fit_vmem(name, is_gradient):
  chip = cm.chip(name)
  for m, n, k, groups in (
    (1, 1, 1, 1),
    (8192, 14336, 4096, 8),
    (131_072, 768, 2048, 128),
    (64, 512, 100_000, 3),
  ):
    product = GroupedProduct(
      rows=m, columns=n, inner=k, num_groups=groups, is_gradient=is_gradient
    )
    blocks = choose(product, chip)
    assert vmem_bytes(product, blocks) < chip.vmem_bytes_per_tensor_core
    block = blocks.inner if is_gradient else blocks.rows
    assert block.bit_count() == 1  # The scalar core shifts, not divides.


@pytest.mark.parametrize("chip_name", support.COMPILED_CHIPS)
def test_products_and_gradients_compile(chip_name):
  mesh = cm.chip(chip_name).device_mesh("device", on="compiler")

  def everything(x, w, narrow, sizes):
    blocks = Blocks(rows=64, columns=128, inner=128, split="columns")
    y = grouped_matmul(x, w, sizes)
    z = grouped_matmul(
      narrow[0], narrow, sizes, transpose_w=True, blocks=blocks
    )
    return y, grouped_weight_gradient(x, y, sizes), z

  args = (
    jax.ShapeDtypeStruct((100, 130), jnp.bfloat16),
    jax.ShapeDtypeStruct((3, 130, 140), jnp.bfloat16),
    jax.ShapeDtypeStruct((3, 256, 256), jnp.int8),
    np.array([13, 0, 70], np.int32),
  )
  fn = jax.shard_map(everything, mesh=mesh, in_specs=P(), out_specs=P())
  compiled = cm.compile(jax.jit(fn), *args)
  names = {k.name for k in compiled.kernels}
  assert names == {"grouped_matmul", "grouped_weight_gradient"}
  # The sizes decide what is run: nothing is assumed, each register is read as
  # the compiler meant, and no check of bounds fails.
  operations = cm.predict(compiled, *args).operations
  assert not [o.assumed for o in operations if o.kernel and o.assumed]
