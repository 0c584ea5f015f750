"""kernels.matmul against plain jnp and against float64."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh.kernels import matmul, matmul_reference
from coremesh.kernels._matmul.blocks import Blocks, Product
from coremesh.kernels._matmul.choice import choose
from coremesh.kernels._matmul.memory import vmem_bytes

_SMALL = Blocks(rows=16, columns=128, inner=128)
# A product of n terms of float32, each rounded to 24 bits, summed in another
# order: at most n units in the last place of the sum of absolute values.
_UNIT = {jnp.float32: 2.0**-24, jnp.bfloat16: 2.0**-8}


def _normal(shape, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  if jnp.issubdtype(dtype, jnp.integer):
    return jnp.asarray(rng.integers(-128, 128, shape), dtype)
  return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


def _check_product(y, x, w, *, dtype=jnp.float32):
  """Against float64, within the rounding of the terms and of the output."""
  x, w = (np.asarray(a, np.float64) for a in (x, w))
  want, size = x @ w, np.abs(x) @ np.abs(w)
  most = x.shape[-1] * 2.0**-24 * size + _UNIT[dtype] * np.abs(want)
  assert y.shape == want.shape
  assert (np.abs(np.asarray(y, np.float64) - want) <= most).all()


@hypothesis.given(
  m=st.integers(1, 50),
  n=st.integers(1, 300),
  k=st.integers(1, 300),
  columns=st.booleans(),
  transpose=st.tuples(st.booleans(), st.booleans()),
)
@hypothesis.settings(max_examples=12, deadline=None)
def test_any_shape(m, n, k, columns, transpose):
  x, w = _normal((m, k)), _normal((k, n), seed=1)
  blocks = Blocks(
    rows=128 if transpose[0] else 16,
    columns=128,
    inner=128,
    split="columns" if columns else "rows",
  )
  y = matmul(
    x.T if transpose[0] else x,
    w.T if transpose[1] else w,
    transpose_x=transpose[0],
    transpose_w=transpose[1],
    blocks=blocks,
  )
  _check_product(y, x, w)


@pytest.mark.parametrize("blocks", [_SMALL, None], ids=["small", "chosen"])
@pytest.mark.parametrize("k", [1, 96, 128, 130, 257])
def test_terms_beyond_the_arrays_are_not_summed(k, blocks):
  x, w = jnp.ones((20, k)), jnp.ones((k, 200))
  assert (matmul(x, w, blocks=blocks) == k).all()


@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]
)
def test_narrow_floats_are_summed_in_float32(dtype):
  x, w = _normal((24, 300), dtype), _normal((300, 130), dtype, seed=1)
  y = matmul(
    x, w, out_dtype=jnp.float32, blocks=Blocks(rows=32, columns=128, inner=128)
  )
  _check_product(y, x, w)


def test_ones_of_bfloat16_do_not_stick_at_256():
  y = matmul(*[jnp.ones(s, jnp.bfloat16) for s in ((8, 4096), (4096, 128))])
  assert y.dtype == jnp.bfloat16
  assert (y == 4096).all()


def test_int8_is_summed_in_int32():
  x, w = (
    jnp.full((8, 1024), 127, jnp.int8),
    jnp.full((1024, 128), 127, jnp.int8),
  )
  y = matmul(x, w, blocks=Blocks(rows=32, columns=128, inner=256))
  assert y.dtype == jnp.int32
  assert (y == 127 * 127 * 1024).all()
  least = jnp.full((8, 1024), -128, jnp.int8)
  assert (matmul(least, -128 + 0 * w) == 128 * 128 * 1024).all()


@pytest.mark.parametrize(
  ("x_shape", "w_shape"),
  [
    ((3, 20, 130), (130, 140)),
    ((3, 20, 130), (3, 130, 140)),
    ((2, 1, 20, 130), (3, 130, 140)),
    ((20, 130), (2, 130, 140)),
  ],
)
def test_leading_axes_broadcast(x_shape, w_shape):
  x, w = _normal(x_shape), _normal(w_shape, seed=1)
  _check_product(matmul(x, w, blocks=_SMALL), x, w)


def _scaled_gelu(total, bias, scale):
  return jax.nn.gelu(total + bias) * scale


def _gated(a, b):
  return jax.nn.silu(a) * b


def test_the_epilogue_is_applied_once_after_the_last_term():
  x, w = jnp.zeros((16, 256)), jnp.zeros((256, 128))
  blocks = Blocks(rows=8, columns=128, inner=128)
  y = matmul(
    x, w, jnp.ones(128), jnp.ones(()), epilogue=_scaled_gelu, blocks=blocks
  )
  np.testing.assert_allclose(y, 0.841192, rtol=1e-6)  # tanh's gelu(1)


@pytest.mark.parametrize(
  "shapes",
  [
    [(140,), (20, 1)],
    [(1, 140), ()],
    [(3, 20, 140), (3, 1, 1)],
    [(3, 20, 1), (1,)],
  ],
  ids=str,
)
def test_operands_of_an_epilogue_broadcast(shapes):
  x, w = _normal((3, 20, 130)), _normal((130, 140), seed=1)
  operands = [_normal(s, seed=i + 2) for i, s in enumerate(shapes)]
  got = matmul(x, w, *operands, epilogue=_scaled_gelu, blocks=_SMALL)
  want = matmul_reference(x, w, *operands, epilogue=_scaled_gelu)
  # The sums differ by at most 130 roundings of numbers below 50.
  np.testing.assert_allclose(got, want, atol=130 * 50 * 2**-24)


def test_several_weights_make_a_gated_unit():
  x, a, b = (
    _normal((20, 260)),
    _normal((260, 140), seed=1),
    _normal((260, 140), seed=2),
  )
  got = matmul(x, [a, b], epilogue=_gated, blocks=_SMALL)
  want = matmul_reference(x, [a, b], epilogue=_gated)
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("transpose_x", [False, True])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_gradients_of_a_product(transpose_x, transpose_w):
  x = _normal((2, 130, 20) if transpose_x else (2, 20, 130))
  w = _normal((140, 130) if transpose_w else (130, 140), seed=1)
  options = dict(transpose_x=transpose_x, transpose_w=transpose_w)
  ours = jax.grad(lambda *a: jnp.sin(matmul(*a, **options)).sum(), (0, 1))(x, w)
  want = jax.grad(
    lambda *a: jnp.sin(matmul_reference(*a, **options)).sum(), (0, 1)
  )(x, w)
  for a, b in zip(ours, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-3)


def test_gradients_through_an_epilogue():
  x, w = _normal((20, 130)), _normal((130, 140), seed=1)
  bias, scale = _normal((140,), seed=2), _normal((20, 1), seed=3)

  def loss(f, *args):
    return jnp.sum(f(*args, epilogue=_scaled_gelu) ** 2)

  ours = jax.grad(functools.partial(loss, matmul), (0, 1, 2, 3))(
    x, w, bias, scale
  )
  want = jax.grad(functools.partial(loss, matmul_reference), (0, 1, 2, 3))(
    x, w, bias, scale
  )
  for a, b in zip(ours, want, strict=True):
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-2)


def test_gradient_of_operands_of_whole_numbers():
  x, w = _normal((8, 40), jnp.int8), _normal((40, 128), jnp.int8)

  def loss(scale):
    return matmul(
      x,
      w,
      scale,
      epilogue=lambda t, s: t.astype(jnp.float32) * s,
      out_dtype=jnp.float32,
    ).sum()

  want = (np.asarray(x, int) @ np.asarray(w, int)).sum()
  assert float(jax.grad(loss)(jnp.float32(2))) == want


@pytest.mark.parametrize(
  ("x_shape", "w_shape"),
  [
    ((0, 8), (8, 128)),
    ((8, 0), (0, 128)),
    ((8, 8), (8, 0)),
    ((0, 8, 8), (8, 8)),
  ],
)
def test_arrays_without_elements(x_shape, w_shape):
  x, w = jnp.ones(x_shape), jnp.ones(w_shape)
  y = matmul(x, w, jnp.ones(()), epilogue=jnp.add)
  np.testing.assert_array_equal(
    y, matmul_reference(x, w, jnp.ones(()), epilogue=jnp.add)
  )


def test_two_calls_in_a_jit_and_another_give_the_same_bits():
  x, w = _normal((20, 130)), _normal((130, 140), seed=1)

  @jax.jit
  def twice(x):
    return matmul(x, w), matmul(matmul(x, w), w, transpose_w=True), matmul(x, w)

  first, _, second = twice(x)
  np.testing.assert_array_equal(first, second)
  np.testing.assert_array_equal(first, matmul(x, w))


@pytest.mark.parametrize(
  "in_axes", [(0, None), (None, 0), (0, 0), (None, None)], ids=str
)
def test_vmap_is_one_launch(in_axes):
  x, w, bias = _normal((3, 20, 130)), _normal((3, 130, 140)), _normal((3, 140))
  args = [
    *(a if i == 0 else a[0] for a, i in zip((x, w), in_axes, strict=True)),
    bias,
  ]

  def layer(x, w, bias):
    return matmul(x, w, bias, epilogue=jnp.add, blocks=_SMALL)

  with cm.simulation() as run:
    got = jax.vmap(layer, (*in_axes, 0))(*args)
  assert len(run.runs) == 1
  for i, y in enumerate(got):
    one = [
      a if j is None else a[i] for a, j in zip(args, (*in_axes, 0), strict=True)
    ]
    # The simulator multiplies blocks of other heights by other sums: 130 terms
    # below 16, each rounded to 24 bits.
    np.testing.assert_allclose(y, layer(*one), atol=130 * 16 * 2**-24)


def test_vmap_of_a_gradient_and_of_a_vmap():
  x, w = _normal((2, 3, 8, 40)), _normal((40, 128), seed=1)

  def gradient(f):
    return jax.grad(lambda x, w: jnp.sin(f(x, w)).sum(), (0, 1))

  both = [
    jax.vmap(jax.vmap(gradient(f), (0, None)), (0, None))(x, w)
    for f in (matmul, matmul_reference)
  ]
  for a, b in zip(*both, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_that_are_the_same_on_all_devices(check_vma):
  mesh = cm.chip("v5p:2x2x1").device_mesh("device")
  x, w = _normal((32, 130)), _normal((130, 140), seed=1)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P("device"), P()),
    out_specs=P("device"),
    check_vma=check_vma,
  )
  def product(x, w):
    return matmul(x, w)

  _check_product(jax.jit(product)(x, w), x, w)
  if check_vma:
    got = jax.jit(jax.grad(lambda w: product(x, w).sum()))(w)
    np.testing.assert_allclose(
      got, jnp.broadcast_to(x.sum(0)[:, None], w.shape), atol=1e-4
    )


def test_nan_outside_the_arrays_does_not_come_in():
  whole_x, whole_w = (jnp.full(s, jnp.nan) for s in ((64, 256), (256, 256)))
  x, w = _normal((20, 130)), _normal((130, 140), seed=1)

  @jax.jit
  def product(whole_x, whole_w):
    return matmul(whole_x[8:28, 64:194], whole_w[64:194, 32:172], blocks=_SMALL)

  y = product(
    whole_x.at[8:28, 64:194].set(x), whole_w.at[64:194, 32:172].set(w)
  )
  _check_product(y, x, w)


def test_64_bit_mode_changes_nothing():
  x, w = _normal((20, 130)), _normal((130, 140), seed=1)
  want = matmul(x, w, blocks=_SMALL)
  with jax.enable_x64(True):
    np.testing.assert_array_equal(matmul(x, w, blocks=_SMALL), want)


def test_races_under_other_interleavings():
  x, w = _normal((40, 260)), _normal((260, 300), seed=1)
  for seed in range(5):
    with cm.simulation(seed=seed, dma="random") as run:
      y = matmul(x, w, blocks=_SMALL)
    assert not run.findings
    _check_product(y, x, w)


@pytest.mark.parametrize(
  ("args", "options", "error", "words"),
  [
    (
      ((8,), (8, 8)),
      {},
      cm.ShapeError,
      "x of matmul must have at least 2 axes",
    ),
    (((8, 4), (8, 8)), {}, cm.ShapeError, "4 and 8"),
    (((2, 8, 8), (3, 8, 8)), {}, cm.ShapeError, "do not broadcast"),
    (
      ((8, 8), (8, 8), (3,)),
      {"epilogue": jnp.add},
      cm.ShapeError,
      r"operands\[0\]",
    ),
    (((8, 8), (8, 8), (8,)), {}, cm.ShapeError, "no epilogue"),
  ],
)
def test_shapes_that_do_not_fit(args, options, error, words):
  with pytest.raises(error, match=words):
    matmul(*map(jnp.ones, args), **options)


def test_dtypes_that_do_not_fit():
  x = jnp.ones((8, 8))
  with pytest.raises(cm.DTypeError, match="of one dtype"):
    matmul(x, x.astype(jnp.bfloat16))
  with pytest.raises(cm.DTypeError, match="must be one of float32"):
    matmul(x.astype(jnp.int16), x.astype(jnp.int16))


def test_several_weights_need_an_epilogue():
  x = jnp.ones((8, 8))
  with pytest.raises(cm.ShapeError, match="give an epilogue"):
    matmul(x, [x, x])
  with pytest.raises(cm.ShapeError, match="one shape"):
    matmul(x, [x, x[:, :4]], epilogue=_gated)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (dict(rows=12, columns=128, inner=128), "rows of Blocks"),
    (dict(rows=8, columns=100, inner=128), "columns of Blocks"),
    (dict(rows=8, columns=128, inner=0), "inner of Blocks"),
    (dict(rows=8, columns=128, inner=128, split="k"), "split of Blocks"),
  ],
)
def test_blocks_that_cannot_be(options, words):
  with pytest.raises(cm.ShapeError, match=words):
    Blocks(**options)


def test_rows_of_blocks_fit_the_dtype():
  x = jnp.ones((64, 128), jnp.int8)
  with pytest.raises(cm.ShapeError, match="multiple of 32 for int8"):
    matmul(
      x,
      jnp.ones((128, 128), jnp.int8),
      blocks=Blocks(rows=8, columns=128, inner=128),
    )


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize(
  "sizes",
  [(1, 1, 1), (1000, 3000, 777), (8192, 28672, 8192), (8, 512, 100_000)],
)
def test_chosen_blocks_fit_vmem(name, sizes):
  chip = cm.chip(name)
  m, n, k = sizes
  product = Product(batch=1, rows=m, columns=n, inner=k)
  blocks = choose(product, chip)
  assert vmem_bytes(product, blocks, chip) <= chip.vmem_bytes_per_tensor_core


@pytest.mark.parametrize("name", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_compiles(name):
  chip = cm.chip(name)
  mesh = chip.device_mesh("device", on="compiler")

  def mlp(x, w, bias, narrow):
    y = matmul(x, w, bias, jnp.ones(()), epilogue=_scaled_gelu, blocks=_SMALL)
    return y, matmul(narrow, narrow, transpose_w=True)

  mapped = jax.jit(jax.shard_map(mlp, mesh=mesh, in_specs=P(), out_specs=P()))
  types = [
    ((200, 300), jnp.bfloat16),
    ((300, 400), jnp.bfloat16),
    ((400,), jnp.float32),
    ((64, 128), jnp.int8),
  ]
  compiled = cm.compile(mapped, *(jax.ShapeDtypeStruct(*t) for t in types))
  assert [k.name for k in compiled.kernels] == ["matmul", "matmul"]


@pytest.mark.parametrize(
  ("x_shape", "w_shape"),
  [
    ((250, 130), (130, 384)),
    ((16, 250), (250, 130)),
    ((250, 128), (128, 130)),
  ],
  ids=["x turned", "w turned", "output turned"],
)
def test_no_array_is_copied_to_another_layout(x_shape, w_shape):
  mesh = cm.chip("v5p:2x2x1").device_mesh("device", on="compiler")
  fn = jax.shard_map(matmul, mesh=mesh, in_specs=P(), out_specs=P())
  types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (x_shape, w_shape)]
  hlo = cm.compile(jax.jit(fn), *types).text("hlo")
  assert "custom-call" in hlo
  assert " copy(" not in hlo


def test_what_is_turned_for_its_layout_is_the_same_product():
  x, w = _normal((250, 130)), _normal((130, 250), seed=1)
  blocks = Blocks(rows=128, columns=256, inner=256, part=128)
  _check_product(matmul(x, w), x, w)
  _check_product(matmul(x, w, blocks=blocks), x, w)
  y = matmul(w.T, x.T, transpose_x=True, transpose_w=True)
  _check_product(y, w, x)


@pytest.mark.parametrize("part", [None, 128])
def test_the_output_leaves_in_strips_of_rows(part):
  x, w = _normal((1024, 200)), _normal((200, 300), seed=1)
  blocks = Blocks(rows=512, columns=256, inner=128, part=part)
  _check_product(matmul(x, w, blocks=blocks), x, w)
  turned = matmul(x.T, w, transpose_x=True, blocks=blocks)
  _check_product(turned, x, w)
  # 1000 rows are no whole number of strips; with an epilogue there is one.
  _check_product(matmul(x[:1000], w, blocks=blocks), x[:1000], w)
  twice = matmul(x, w, epilogue=lambda total: 2 * total, blocks=blocks)
  _check_product(twice, 2 * x, w)


def test_one_core_and_a_block_of_all_rows_on_the_lanes():
  chip = cm.chip("v6e:1x1")
  mesh = chip.device_mesh("device", on="simulator")
  x, w = _normal((130, 250)), _normal((130, 140), seed=1)
  blocks = Blocks(rows=256, columns=128, inner=128)
  fn = functools.partial(matmul, transpose_x=True, blocks=blocks)
  mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P("device"))
  _check_product(jax.jit(mapped)(x, w), x.T, w)
  on_compiler = jax.shard_map(
    fn,
    mesh=chip.device_mesh("device", on="compiler"),
    in_specs=P(),
    out_specs=P("device"),
  )
  # A start of a copy that is not known would have to be a whole tile.
  types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
  assert cm.compile(jax.jit(on_compiler), *types).kernels
