"""kernels.attention against float64."""

import functools
from typing import Any

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh.kernels import attention, attention_reference
from coremesh.kernels._attention import masks
from coremesh.kernels._attention.blocks import Blocks
from coremesh.kernels._attention.call import Operands, checked_call, problem_of
from coremesh.kernels._attention.masks import Span
from coremesh.kernels._attention.units import Units
from tests import support

# So that few numbers make many blocks, turns and tiles.
_SMALL = Blocks(rows=128, keys=256, part=256, tile_rows=128)
# Scores below 2^6 are exponents with errors of some 2^-18, and so are the terms
# they make, relative to themselves. Of bfloat16 terms are rounded to 8 bits.
_ERROR = {jnp.float32: 2.0**-17, jnp.bfloat16: 2.0**-8}


def _expected(
  q: Any, k: Any, v: Any, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
  """The output and the LSE in float64, row by row."""
  q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
  lead, (heads, q_len, _) = q.shape[:-3], q.shape[-3:]
  kv_len = k.shape[-2]
  out = np.zeros((*q.shape[:-1], v.shape[-1]))
  lse = np.full(q.shape[:-1], -np.inf)
  bias = options.get("bias", 0.0)
  bias = np.broadcast_to(np.asarray(bias, np.float64), (*lse.shape, kv_len))
  for index in np.ndindex(*lse.shape):
    *element, head, row = index
    element = tuple(element)
    kv_head = head * k.shape[-3] // heads
    keys = np.flatnonzero(_counted_keys(options, element, row, q_len, kv_len))
    scores = k[(*element, kv_head, keys)] @ q[(*element, head, row)]
    scores = scores * options.get("scale", q.shape[-1] ** -0.5)
    if "soft_cap" in options:
      scores = np.tanh(scores / options["soft_cap"]) * options["soft_cap"]
    scores = scores + bias[(*element, head, row, keys)]
    keys, scores = keys[scores > -np.inf], scores[scores > -np.inf]
    if len(keys):
      terms = np.exp(scores - scores.max())
      values = v[(*element, kv_head, keys)]
      out[(*element, head, row)] = terms @ values / terms.sum()
      lse[(*element, head, row)] = np.log(terms.sum()) + scores.max()
  assert out.shape[: len(lead)] == lead
  return out, lse


def _counted_keys(options, element: Any, row, q_len, kv_len) -> np.ndarray:
  keys = np.arange(kv_len)
  counted = np.ones(kv_len, bool)
  own = row + kv_len - q_len
  left, right = options.get("window", (None, None))
  if options.get("is_causal"):
    counted &= keys <= own
  if left is not None:
    counted &= keys >= own - left
  if right is not None:
    counted &= keys <= own + right
  if "segment_ids" in options:
    ids = options.get("kv_segment_ids", options["segment_ids"])[element]
    counted &= (ids == options["segment_ids"][(*element, row)]) & (ids >= 0)
  if "kv_lengths" in options:
    counted &= keys < options["kv_lengths"][element]
  return counted


def _normal(*shape, dtype: Any = jnp.float32, seed=0) -> jax.Array:
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, jnp.float32).astype(dtype)


def _qkv(
  *lead, heads=(2, 1), q_len=140, kv_len=300, d=(16, 24), dtype=jnp.float32
):
  shapes = (
    (heads[0], q_len, d[0]),
    (heads[1], kv_len, d[0]),
    (
      heads[1],
      kv_len,
      d[1],
    ),
  )
  return [_normal(*lead, *s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]


def _check(
  got: Any, want: Any, *, dtype: Any = jnp.float32, values: float = 5.0
) -> None:
  """Compares outputs made of values of a size, and the LSE."""
  (out, lse), (want_out, want_lse) = got, want
  assert out.dtype == dtype
  assert lse.dtype == jnp.float32
  np.testing.assert_allclose(
    np.asarray(out, np.float64), want_out, rtol=0, atol=_ERROR[dtype] * values
  )
  # The scores of rounded q and k have no further error than those of float32.
  np.testing.assert_allclose(lse, want_lse, rtol=2**-20, atol=2.0**-17)


def _attention(*args: Any, **options: Any) -> Any:
  """`attention`, of what numpy makes too."""
  return attention(*args, **options)


def _poisoned(k, v, options):
  """k and v with NaN where no row counts a key."""
  keys = np.arange(k.shape[-2])
  nobody = np.zeros((*k.shape[:-3], k.shape[-2]), bool)
  if "kv_lengths" in options:
    nobody |= keys >= np.asarray(options["kv_lengths"])[..., None]
  if "segment_ids" in options:
    ids = options.get("kv_segment_ids", options["segment_ids"])
    nobody |= np.asarray(ids) < 0
  nobody = nobody[..., None, :, None]
  return [
    jnp.where(nobody, jnp.asarray(x, a.dtype), a)
    for a, x in ((k, jnp.nan), (v, jnp.inf))
  ]


_IDS = np.random.default_rng(7)
_SEGMENTS = dict(
  segment_ids=_IDS.integers(-3, 3, (2, 140)).astype(np.int32),
  kv_segment_ids=_IDS.integers(-3, 3, (2, 300)).astype(np.int32),
)
# By name: leading axes and sizes, and options.
_OPTIONS: dict[str, tuple[tuple[int, ...], dict, dict]] = {
  "causal": ((), dict(heads=(3, 3), q_len=300), dict(is_causal=True)),
  "more rows than keys": (
    (),
    dict(q_len=300, kv_len=140),
    dict(is_causal=True),
  ),
  "causal window": (
    (),
    dict(q_len=300, heads=(4, 2)),
    dict(window=(9, 0), is_causal=True),
  ),
  "scale and cap": ((), {}, dict(scale=-1.5, soft_cap=2.0)),
  "segments": ((2,), {}, dict(_SEGMENTS, window=(70, 30))),
  "segments and lengths": (
    (2,),
    {},
    dict(_SEGMENTS, is_causal=True, kv_lengths=np.array([0, 257], np.int32)),
  ),
  "bias": ((2,), {}, dict(bias=_normal(2, 1, 140, 300, seed=5))),
  "bias of keys": ((2,), {}, dict(bias=_normal(2, 1, 1, 300, seed=5))),
  "bias of rows": ((), {}, dict(bias=_normal(2, 140, 1, seed=5))),
  "many dimensions": ((), dict(d=(200, 130), kv_len=130), {}),
}


@pytest.mark.parametrize("case", _OPTIONS.values(), ids=_OPTIONS)
def test_each_option(case):
  lead, sizes, options = case
  q, k, v = _qkv(*lead, **sizes)
  want = _expected(q, k, v, **options)
  k, v = _poisoned(k, v, options)
  got = _attention(q, k, v, return_lse=True, blocks=_SMALL, **options)
  _check(got, want)
  _check(attention_reference(q, k, v, return_lse=True, **options), want)


@hypothesis.given(
  q_len=st.integers(1, 300),
  kv_len=st.integers(1, 400),
  heads=st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]),
  d=st.tuples(st.integers(1, 40), st.integers(1, 40)),
  is_causal=st.booleans(),
  window=st.tuples(*[st.none() | st.integers(0, 200)] * 2),
  length=st.none() | st.integers(0, 400),
  dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
  blocks=st.sampled_from(
    [
      _SMALL,
      Blocks(rows=256, keys=256, part=128, tile_rows=256),
      Blocks(rows=256, keys=512, part=512, tile_rows=128, tile_keys=256),
    ]
  ),
)
@hypothesis.settings(max_examples=5, deadline=None)
def test_any_shape_and_blocks(
  q_len, kv_len, heads, d, is_causal, window, length, dtype, blocks
):
  q, k, v = _qkv(1, heads=heads, q_len=q_len, kv_len=kv_len, d=d, dtype=dtype)
  options: dict[str, Any] = dict(is_causal=is_causal, window=window)
  if length is not None:
    options["kv_lengths"] = np.array([min(length, kv_len)], np.int32)
  want = _expected(q, k, v, **options)
  k, v = _poisoned(k, v, options)
  got = _attention(q, k, v, return_lse=True, blocks=blocks, **options)
  _check(got, want, dtype=dtype)


@pytest.mark.parametrize(
  ("blocks", "options"),
  [
    # One block of keys with a diagonal, several of them, and two diagonals.
    (Blocks(rows=256, keys=512, part=128), dict(is_causal=True)),
    (Blocks(rows=256, keys=256, part=128, tile_rows=128), dict(is_causal=True)),
    (Blocks(rows=256, keys=512, part=128), dict(window=(255, 0))),
  ],
)
def test_diagonals_that_meet_the_corners_of_blocks(blocks, options):
  q, k, v = _qkv(heads=(1, 1), q_len=512, kv_len=768)
  got = _attention(q, k, v, return_lse=True, blocks=blocks, **options)
  _check(got, _expected(q, k, v, **options))


def test_rows_and_keys_end_together():
  v = jnp.arange(6.0).reshape(1, 6, 1)
  k, q = jnp.ones((1, 6, 8)), jnp.zeros((1, 1, 8))
  assert _attention(q, k, v, is_causal=True).item() == 2.5
  q, v = jnp.zeros((1, 2, 8)), v[:, :4]
  rows = _attention(q, k[:, :4], v, is_causal=True).reshape(-1)
  np.testing.assert_array_equal(rows, [1.0, 1.5])


@pytest.mark.parametrize(
  ("kv_len", "is_causal"),
  [(1, False), (5, True), (127, False), (129, False), (192, True)],
)
def test_keys_beyond_the_array_do_not_count(kv_len, is_causal):
  q, k = jnp.zeros((1, kv_len, 8)), jnp.zeros((1, kv_len, 8))
  y = _attention(q, k, jnp.ones((1, kv_len, 8)), is_causal=is_causal)
  # Sums of ones, and 1 / n * n, which may be a rounding off.
  np.testing.assert_allclose(y, 1.0, rtol=2**-23)


def test_rows_that_count_nothing_are_zero():
  q, k, v = _qkv(q_len=5, kv_len=3)
  out, lse = _attention(q, k, v, is_causal=True, return_lse=True)
  want, want_lse = _expected(q, k, v, is_causal=True)
  assert (out[:, :2] == 0).all()
  assert (lse[:, :2] == -jnp.inf).all()
  _check((out, lse), (want, want_lse))
  bias = jnp.full((5, 3), -jnp.inf)
  out, lse = _attention(q, k, v, bias=bias, return_lse=True)
  assert (out == 0).all()
  assert (lse == -jnp.inf).all()


@pytest.mark.parametrize("size", [-3e38, 3e38])
def test_no_score_is_too_low_or_too_high(size):
  q, k, v = _qkv(q_len=8, kv_len=20)
  bias = jnp.full((8, 20), size, jnp.float32)
  bias = bias.at[:, 10:].set(-jnp.inf)
  out = _attention(q * 0, k, v, bias=bias / 2)
  want = np.broadcast_to(v[:, :10].mean(1, keepdims=True), out.shape)
  np.testing.assert_allclose(out, want, atol=1e-6)


def test_lse_merges_two_halves_of_the_keys():
  q, k, v = _qkv(kv_len=260)
  whole = _attention(q, k, v, blocks=_SMALL)
  halves = [
    _attention(q, k[:, s], v[:, s], return_lse=True, blocks=_SMALL)
    for s in (slice(0, 130), slice(130, None))
  ]
  empty = jnp.zeros_like(whole), jnp.full(whole.shape[:-1], -jnp.inf)
  outs, lses = (jnp.stack(a) for a in zip(*halves, empty, strict=True))
  weights = jax.nn.softmax(lses, axis=0)[..., None]
  np.testing.assert_allclose((outs * weights).sum(0), whole, atol=2**-17)


def test_bits_are_the_same_twice_in_a_jit_and_in_x64():
  q, k, v = _qkv(q_len=192, kv_len=300)
  run = functools.partial(_attention, is_causal=True, blocks=_SMALL)

  @jax.jit
  def twice(q, k, v):
    return run(q, k, v), run(q, k, v)

  first, *others = *twice(q, k, v), run(q, k, v)
  with jax.enable_x64(True):
    others.append(jax.jit(run)(q, k, v))
  for other in others:
    np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, 0)])
def test_vmap_is_one_launch(in_axes):
  arrays = _qkv(3, q_len=20, kv_len=140)
  q, k, v = (
    a[0] if i is None else a for a, i in zip(arrays, in_axes, strict=True)
  )
  lengths = jnp.int32([7, 140, 0])

  def run(q, k, v, length):
    return _attention(q, k, v, kv_lengths=length, blocks=_SMALL)

  with cm.simulation() as simulated:
    got = jax.vmap(run, (*in_axes, 0))(q, k, v, lengths)
  assert len(simulated.runs) == 1
  for i in range(3):
    own: list[Any] = [
      a if j is None else a[i] for a, j in zip((q, k, v), in_axes, strict=True)
    ]
    want, _ = _expected(*own, kv_lengths=np.asarray(lengths[i]))
    np.testing.assert_allclose(got[i], want, rtol=0, atol=2**-17 * 5)


def test_heads_are_sharded_over_devices():
  mesh = cm.chip("v5p:2x2x1").device_mesh("device")
  q, k, v = _qkv(heads=(8, 4), q_len=20, kv_len=140)
  lengths = jnp.int32(139)  # The same on all devices.

  def run(q, k, v, lengths):
    return _attention(q, k, v, kv_lengths=lengths, return_lse=True)

  specs = (P("device"),) * 3
  fn = jax.shard_map(
    run, mesh=mesh, in_specs=(*specs, P()), out_specs=P("device")
  )
  got = jax.jit(fn)(q, k, v, lengths)
  _check(got, _expected(q, k, v, kv_lengths=np.asarray(lengths)))


@pytest.mark.parametrize(
  ("lead", "sizes"),
  [
    ((0,), {}),
    ((), dict(q_len=0)),
    ((), dict(kv_len=0)),
    ((), dict(heads=(0, 1))),
  ],
)
def test_arrays_without_elements(lead, sizes):
  q, k, v = _qkv(*lead, **sizes)
  out, lse = _attention(q, k, v, return_lse=True)
  assert out.shape == (*q.shape[:-1], 24)
  assert (out == 0).all()
  assert (lse == -jnp.inf).all()


def test_no_races_under_other_interleavings():
  q, k, v = _qkv(2, q_len=140, kv_len=400)
  lengths = jnp.int32([400, 130])
  want = _expected(q, k, v, kv_lengths=lengths)
  for seed in range(2):
    with cm.simulation(seed=seed, dma="random") as run:
      got = _attention(
        q, k, v, kv_lengths=lengths, return_lse=True, blocks=_SMALL
      )
    assert not run.findings
    _check(got, want)


@pytest.mark.parametrize(
  ("num_cores", "kv_heads", "blocks"),
  [(1, 2, 3), (2, 1, 5), (2, 5, 1), (2, 4, 2), (3, 5, 3)],
)
def test_cores_share_all_units(num_cores, kv_heads, blocks):
  q, k = (np.zeros((h, 1, 1)) for h in (2 * kv_heads, kv_heads))
  problem = problem_of(_call(), q, k, k, Operands())
  units = Units(problem=problem, blocks=blocks, num_cores=num_cores)
  counts = [int(units.count(core)) for core in range(num_cores)]
  done = []
  for core, count in enumerate(counts):
    unit = units.unit(core, jnp.arange(count, dtype=jnp.int32))
    done += zip(
      *(
        np.broadcast_to(a, count).tolist()
        for a in (unit.head, unit.kv_head, unit.block)
      ),
      strict=True,
    )
  assert max(counts) - min(counts) <= 1
  assert sorted(done) == [
    (head, head // 2, block)
    for head in range(2 * kv_heads)
    for block in range(blocks)
  ]


@hypothesis.given(
  q_len=st.integers(1, 20),
  kv_len=st.integers(1, 20),
  is_causal=st.booleans(),
  window=st.tuples(*[st.none() | st.integers(0, 25)] * 2),
  data=st.data(),
)
@hypothesis.settings(max_examples=25)
def test_spans_are_those_of_single_scores(
  q_len, kv_len, is_causal, window, data
):
  q, k = (np.zeros((1, n, 1)) for n in (q_len, kv_len))
  problem = problem_of(
    _call(is_causal=is_causal, window=window), q, k, k, Operands()
  )
  counted = np.stack(
    [
      _counted_keys(
        dict(is_causal=is_causal, window=window), (), r, q_len, kv_len
      )
      for r in range(q_len)
    ]
  )
  rows: Any = np.arange(q_len)
  keys: Any = np.arange(kv_len)
  got = masks.counted(problem, rows=rows[:, None], keys=keys[None])
  np.testing.assert_array_equal(np.broadcast_to(got, counted.shape), counted)
  band = masks.band(problem)
  for some, every, table in (
    (band.some_keys, band.all_keys, counted),
    (band.some_rows, band.all_rows, counted.T),
  ):
    start = data.draw(st.integers(0, len(table) - 1))
    stop = data.draw(st.integers(start + 1, len(table)))
    here = table[start:stop]
    for span, want in (
      (some(Span(start, stop)), here.any(0)),
      (every(Span(start, stop)), here.all(0)),
    ):
      inside = np.arange(table.shape[1])
      found = (inside >= span.start) & (inside < span.stop)
      np.testing.assert_array_equal(found, want)


def _call(**options):
  given: dict[str, Any] = dict(
    is_causal=False, window=None, scale=None, soft_cap=None
  )
  return checked_call(d_qk=1, blocks=None, **(given | options))


@pytest.mark.parametrize(
  ("shapes", "options", "words"),
  [
    (((8, 4),) * 3, {}, "q of attention must be .*Add an axis"),
    (((2, 8, 4), (3, 8, 4), (3, 8, 4)), {}, "heads of k and v must divide"),
    (((2, 8, 4), (2, 8, 5), (2, 8, 4)), {}, "same last axis; got 4 and 5"),
    (((2, 8, 4), (2, 8, 4), (2, 9, 4)), {}, "same heads and length"),
    (((3, 2, 8, 4), (2, 8, 4), (2, 8, 4)), {}, "same leading axes"),
    (((1, 8, 300),) * 3, {}, "1 to 256 dimensions"),
    (((1, 8, 4),) * 3, dict(window=3), "window of attention"),
    (((1, 8, 4),) * 3, dict(window=(-1, 0)), "window of attention"),
    (((1, 8, 4),) * 3, dict(scale=np.inf), "scale of attention"),
    (((1, 8, 4),) * 3, dict(soft_cap=0), "soft_cap of attention"),
    (((1, 8, 4),) * 3, dict(blocks=128), "blocks of attention"),
    (((1, 8, 4),) * 3, dict(bias=np.zeros(3, np.float32)), "bias of attention"),
    (
      ((1, 8, 4), (1, 9, 4), (1, 9, 4)),
      dict(segment_ids=np.zeros(8, np.int32)),
      "must be given together",
    ),
    (
      ((1, 8, 4),) * 3,
      dict(segment_ids=np.zeros(9, np.int32)),
      "segment_ids of attention must have shape",
    ),
    (
      ((1, 8, 4),) * 3,
      dict(kv_lengths=np.zeros(1, np.int32)),
      "kv_lengths of attention must have shape",
    ),
  ],
)
def test_arguments_that_do_not_fit(shapes, options, words):
  with pytest.raises(cm.ShapeError, match=words):
    _attention(*map(jnp.ones, shapes), **options)


def test_dtypes_that_do_not_fit():
  x = jnp.ones((1, 8, 4))
  with pytest.raises(cm.DTypeError, match="of one dtype; got float32 and bf"):
    _attention(x, x, x.astype(jnp.bfloat16))
  with pytest.raises(cm.DTypeError, match="q of attention must be float32 or"):
    _attention(*[x.astype(jnp.int32)] * 3)
  with pytest.raises(
    cm.DTypeError, match="kv_lengths of attention must be int"
  ):
    _attention(x, x, x, kv_lengths=jnp.float32(3))


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (dict(rows=100), "rows of Blocks"),
    (dict(rows=128), "rows of Blocks must be a positive multiple of 256"),
    (dict(keys=1000), "keys of Blocks must be a positive multiple of 1024"),
    (dict(tile_keys=0), "tile_keys of Blocks"),
  ],
)
def test_blocks_that_cannot_be(options, words):
  with pytest.raises(cm.ShapeError, match=words):
    Blocks(**options)


@pytest.mark.parametrize("chip_name", support.COMPILED_CHIPS)
def test_it_compiles(chip_name):
  chip = cm.chip(chip_name)
  mesh = chip.device_mesh("device", on="compiler")

  def everything(q, k, v, bias, ids, lengths):
    run = functools.partial(_attention, q, k, v, return_lse=True)
    return (
      run(is_causal=True, kv_lengths=lengths, blocks=_SMALL),
      run(bias=bias, soft_cap=30.0, segment_ids=ids, kv_segment_ids=ids),
      run(is_causal=True),
    )

  fn = jax.shard_map(everything, mesh=mesh, in_specs=P(), out_specs=P())
  shapes = (2, 4, 256, 64), (2, 2, 256, 64), (2, 2, 256, 80), (4, 256, 256)
  arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
  ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)
  lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
  compiled = cm.compile(jax.jit(fn), *arrays, ids, lengths)
  assert [k.name for k in compiled.kernels] == ["attention"] * 3
