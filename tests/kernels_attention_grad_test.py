"""The derivatives of kernels.attention against autodiff in float64."""

import dataclasses
import functools
import itertools
from typing import Any

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh.kernels._attention import backward, call, masks
from coremesh.kernels._attention import backward_blocks as blocks_
from coremesh.kernels._attention.backward_blocks import BackwardBlocks
from coremesh.kernels._attention.backward_tiles import Tiles
from coremesh.kernels._attention.backward_units import Rounds
from coremesh.kernels._attention.call import Call, Problem
from coremesh.kernels.attention import attention, attention_reference
from tests import support
from tests.attention_cases import Answer, Case, answer_to, case_of

# So that few numbers make many blocks, which keys are held in two shares of.
_SMALL = BackwardBlocks(
  rows=128, keys=128, part=128, edge_part=64, held_rows=256, held_keys=256
)
# Each derivative is a sum of some hundred terms that were rounded to float32 a
# few times each, and for bfloat16 to 8 bits twice. Relative to the norm of all,
# such errors average out to a few roundings.
_ERROR = {jnp.float32: 20 * 2.0**-24, jnp.bfloat16: 3 * 2.0**-8}
_STATIC = ("is_causal", "window", "scale", "soft_cap")


def _kernel(
  case: Case,
  answer: Answer,
  *,
  dtype: Any = jnp.float32,
  blocks: BackwardBlocks = _SMALL,
) -> list[jax.Array]:
  """The derivatives by the kernels, given what the forward pass found."""
  q, k, v, out, d_out = (
    jnp.asarray(a, dtype)
    for a in (case.q, case.k, case.v, answer.out, case.d_out)
  )
  lse, d_lse = (jnp.asarray(a, jnp.float32) for a in (answer.lse, case.d_lse))
  options = case.options
  arrays = {
    name: None if array is None else jnp.asarray(array, dtype)
    for name, array, dtype in (
      ("bias", options.get("bias"), jnp.float32),
      ("segments", options.get("segment_ids"), jnp.int32),
      ("kv_segments", options.get("kv_segment_ids"), jnp.int32),
      ("lengths", options.get("kv_lengths"), jnp.int32),
    )
  }
  static: Any = {name: options.get(name) for name in _STATIC}
  static["is_causal"] = bool(static["is_causal"])
  *d_qkv, d_operands = backward.gradients(
    call.checked_call(d_qk=q.shape[-1], blocks=None, **static),
    (q, k, v, call.checked_operands(q, k, **arrays), out, lse),
    d_out,
    d_lse,
    blocks=blocks,
  )
  if "bias" in options:
    d_qkv.append(d_operands.bias.reshape(options["bias"].shape))
  return d_qkv


def _check(got, answer: Answer, *, dtype: Any = jnp.float32) -> None:
  """Compares each derivative, by its norm."""
  names = ("q", "k", "v", "bias")
  for name, a, b in zip(names, got, answer.derivatives, strict=False):
    assert a.shape == b.shape, name
    a = np.asarray(a, np.float64)
    size = np.linalg.norm(b)
    if name == "bias":
      size = max(size, answer.size)  # Its terms may cancel.
    assert np.linalg.norm(a - b) <= _ERROR[dtype] * size + 1e-6, name


_OPTIONS = {
  "keys in two shares": dict(kv_len=300),
  "causal, more rows than keys": dict(is_causal=True, q_len=300, kv_len=140),
  "causal, whole blocks": dict(is_causal=True, q_len=256, kv_len=384, heads=1),
  "causal, shifted by half a block": dict(
    is_causal=True, scale=0.7, heads=1, q_len=256, kv_len=192
  ),
  "window": dict(window=(70, 30)),
  "window, whole blocks": dict(window=(140, 30), q_len=256, kv_len=256),
  "window to the left": dict(window=(70, None), q_len=128, kv_len=384),
  "soft cap": dict(soft_cap=1.5),
  "segments": dict(segments=True, lead=(2,)),
  "segments in whole blocks": dict(
    q_len=384,
    kv_len=384,
    heads=1,
    segment_ids=np.repeat(np.array([0, 1, 1]), 128),
    kv_segment_ids=np.repeat(np.array([0, 0, 1]), 128),
  ),
  "lengths": dict(kv_lengths=[157, 0, 128], lead=(3,), heads=1),
  "heads of its own": dict(heads=3, kv_heads=3, is_causal=True),
  "one of all": dict(heads=1, q_len=1, kv_len=1, d_qk=1, d_v=1),
  "many dimensions": dict(d_qk=200, d_v=130, q_len=20, kv_len=130),
  "bias": dict(bias=(2, 2, 140, 200), lead=(2,), soft_cap=2.0),
  "bias of keys": dict(bias=(2, 1, 1, 200), lead=(2,), segments=True),
  "bias of rows": dict(bias=(1, 140, 1), is_causal=True),
  "bias of some batches": dict(
    bias=(3, 1, 1, 1, 1), lead=(3, 2), heads=1, kv_len=20
  ),
}


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_each_option(options):
  case = case_of(**options)
  answer = answer_to(case)
  _check(_kernel(case, answer), answer)


def test_the_formula_is_what_autodiff_of_the_reference_finds():
  case = case_of(
    lead=(2,),
    q_len=30,
    kv_len=20,
    bias=(2, 1, 20),
    segments=True,
    kv_lengths=[20, 11],
    is_causal=True,
    window=(7, 3),
    soft_cap=1.5,
    scale=0.3,
  )
  answer = answer_to(case)
  options = dict(case.options)
  with (
    jax.enable_x64(True),
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
  ):
    arrays = map(jnp.asarray, (case.q, case.k, case.v, options.pop("bias")))
    for name in ("segment_ids", "kv_segment_ids", "kv_lengths"):
      options[name] = jnp.asarray(options[name], jnp.int32)

    def f(q, k, v, bias):
      options_ = dict(options, bias=bias, return_lse=True)
      return attention_reference(q, k, v, **options_)

    (out, lse), vjp = jax.vjp(f, *arrays)
    # Autodiff of a row in which nothing counts is NaN, unless asked for 0.
    d_lse = jnp.where(lse == -jnp.inf, 0, case.d_lse)
    want = vjp((jnp.asarray(case.d_out), d_lse))
  assert np.isneginf(answer.lse).any()
  np.testing.assert_allclose(answer.out, out, atol=1e-12)
  np.testing.assert_allclose(answer.lse, lse, atol=1e-12)
  for a, b in zip(answer.derivatives, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-12)


@hypothesis.given(
  q_len=st.integers(1, 300),
  kv_len=st.integers(1, 300),
  heads=st.sampled_from([(1, 1), (2, 1), (3, 3)]),
  d=st.tuples(st.integers(1, 40), st.integers(1, 40)),
  is_causal=st.booleans(),
  window=st.none() | st.tuples(*[st.none() | st.integers(0, 200)] * 2),
  soft_cap=st.none() | st.just(2.0),
  segments=st.booleans(),
  lengths=st.none() | st.integers(0, 300),
  bias=st.sets(st.integers(0, 2)) | st.none(),
  keys=st.sampled_from([128, 256]),
  seed=st.integers(0, 99),
)
@hypothesis.settings(max_examples=3, deadline=None)
def test_options_together(q_len, kv_len, heads, d, lengths, bias, keys, **rest):
  if bias is not None:
    shape = enumerate((heads[0], q_len, kv_len))
    bias = tuple(n if i in bias else 1 for i, n in shape)
  if lengths is not None:
    rest["kv_lengths"] = np.int32(min(lengths, kv_len))
  case = case_of(
    heads=heads[0],
    kv_heads=heads[1],
    q_len=q_len,
    kv_len=kv_len,
    d_qk=d[0],
    d_v=d[1],
    bias=bias,
    **rest,
  )
  answer = answer_to(case)
  blocks = dataclasses.replace(_SMALL, keys=keys)
  _check(_kernel(case, answer, blocks=blocks), answer)


def test_bfloat16():
  case = case_of(
    is_causal=True, q_len=256, kv_len=256, d_qk=64, d_v=64, heads=1
  )
  answer = answer_to(case)
  got = _kernel(case, answer, dtype=jnp.bfloat16)
  assert {a.dtype for a in got} == {jnp.dtype(jnp.bfloat16)}
  _check(got, answer, dtype=jnp.bfloat16)


def test_rows_that_count_no_key_have_derivatives_of_0_whatever_is_asked():
  case = case_of(is_causal=True, q_len=300, kv_len=140, bias=(2, 300, 140))
  case.options["bias"][:, 200] = -np.inf
  answer = answer_to(case)
  is_empty = np.isneginf(answer.lse)
  assert is_empty.sum() == 2 * (160 + 1)
  case.d_lse[is_empty] = np.nan
  got = _kernel(case, answer)
  assert (np.asarray(got[0])[is_empty] == 0).all()
  assert (np.asarray(got[3])[is_empty] == 0).all()
  _check(got, answer)


def test_what_is_padding_may_be_nan():
  case = case_of(
    lead=(2,), segments=True, kv_lengths=[157, 128], is_causal=True
  )
  answer = answer_to(case)
  is_row = case.options["segment_ids"] >= 0
  is_key = case.options["kv_segment_ids"] >= 0
  is_key &= np.arange(200) < np.array(case.options["kv_lengths"])[:, None]
  assert 0 < is_row.mean() < 1
  for array, known in (
    (case.q, is_row),
    (case.d_out, is_row),
    (case.k, is_key),
    (case.v, is_key),
  ):
    array.swapaxes(1, 2)[~known] = np.nan
  got = _kernel(case, answer)
  _check(got, answer)
  for d_keys in got[1:]:
    assert (np.asarray(d_keys).swapaxes(1, 2)[~is_key] == 0).all()


def test_what_no_window_reaches_may_be_nan():
  case = case_of(window=(10, 0), q_len=128, kv_len=256)
  answer = answer_to(case)
  case.k[:, :118] = case.v[:, :118] = np.nan
  _check(_kernel(case, answer), answer)


def test_interleavings_do_not_matter():
  case = case_of(heads=4, is_causal=True, bias=(140, 1), kv_len=140, d_v=8)
  answer = answer_to(case)
  first = _kernel(case, answer)
  _check(first, answer)
  for seed in range(2):
    with cm.simulation(seed=seed, dma="random") as run:
      again = _kernel(case, answer)
    assert not run.findings
    for a, b in zip(first, again, strict=True):
      np.testing.assert_array_equal(a, b)


def _pulled(fn, *args, **options) -> tuple[jax.Array, ...]:
  """The derivatives of q, k, v and bias for some of the output and the LSE."""

  def f(*args):
    return fn(*args[:3], bias=args[3], return_lse=True, **options)

  (out, lse), vjp = jax.vjp(f, *args)
  # Exact, so that it does not depend on how XLA computes it.
  d_out = (jnp.arange(24, dtype=jnp.float32) - 12) / 8
  return vjp((jnp.broadcast_to(d_out, out.shape), jnp.full_like(lse, 0.5)))


def _arrays(lead=()):
  shapes = (4, 40, 16), (2, 70, 16), (2, 70, 24), (1, 40, 70)
  rng = np.random.default_rng(0)
  return [
    jnp.asarray(rng.normal(size=(*lead, *s)), jnp.float32) for s in shapes
  ]


def _loss(fn, *args, **options):
  out, lse = fn(*args[:3], bias=args[3], return_lse=True, **options)
  return jnp.sum(jnp.sin(out.astype(lse.dtype))) + jnp.sum(jnp.cos(lse))


_GRAD = functools.partial(jax.grad, argnums=(0, 1, 2, 3))


def test_bits_are_the_same_in_jit_under_vmap_and_in_x64():
  args = _arrays((3,))
  pulled = functools.partial(_pulled, attention, window=(30, 4), soft_cap=3.0)

  @jax.jit
  def both(*args):
    return pulled(*args), pulled(*args)

  one = [a[1] for a in args]
  first, second = both(*one)
  with cm.simulation() as run:
    mapped = jax.vmap(pulled)(*args)
  # One of the forward pass, one of the backward, one of the bias.
  assert len(run.runs) == 3
  with jax.enable_x64(True):
    wide = jax.jit(lambda *args: pulled(*args))(*one)
  for a, b, c, d in zip(first, second, mapped, wide, strict=True):
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c[1])
    np.testing.assert_array_equal(a, d)
    assert a.dtype == d.dtype
  options = dict(window=(30, 4), soft_cap=3.0)
  for a, b in zip(
    mapped, _pulled(attention_reference, *args, **options), strict=True
  ):
    # Both are float32: sums of 70 terms of size 1.
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_vmap_of_q_only_has_a_derivative_of_what_is_shared_for_each():
  args = _arrays((2,))
  q, rest = args[0], [a[0] for a in args[1:]]

  def total(fn, *args):
    mapped = jax.vmap(functools.partial(_loss, fn), (0, None, None, None))
    return jnp.sum(mapped(*args))

  got = _GRAD(functools.partial(total, attention))(q, *rest)
  want = _GRAD(functools.partial(total, attention_reference))(q, *rest)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=5e-5)


def test_keys_that_are_the_same_on_all_devices():
  mesh = cm.chip("v5p:2x2x1").device_mesh("device", on="simulator")
  q, k, v, bias = _arrays((4,))
  k, v, bias = k[:1], v[:1], bias[:1]
  specs = P("device"), P(), P(), P()

  def total(fn):
    def on_device(*args):
      return jax.lax.psum(_loss(fn, *args), "device")

    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P())

  got = jax.jit(_GRAD(total(attention)))(q, k, v, bias)
  want = jax.jit(_GRAD(total(attention_reference)))(q, k, v, bias)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_no_rows_or_no_keys(sizes):
  q = jnp.ones((2, sizes[0], 8))
  k = v = jnp.ones((2, sizes[1], 8))

  def loss(q, k, v):  # Not of the LSE: -inf has a derivative of no size.
    return jnp.sum(attention(q, k, v))

  for a, b in zip(jax.grad(loss, (0, 1, 2))(q, k, v), (q, k, v), strict=True):
    np.testing.assert_array_equal(a, jnp.zeros_like(b))


@hypothesis.given(
  first=st.none() | st.integers(-300, 300),
  last=st.none() | st.integers(-300, 300),
  rows=st.sampled_from([128, 256]),
  keys=st.sampled_from([128, 256]),
)
# One score short of a full block.
@hypothesis.example(first=None, last=254, rows=128, keys=128)
@hypothesis.example(first=-254, last=None, rows=128, keys=128)
@hypothesis.settings(max_examples=40, deadline=None)
def test_strips_hold_all_that_counts(first, last, rows, keys):
  band = masks.Band(first=first, last=last, num_rows=512, num_keys=512)
  tiles = Tiles(band=band, rows=rows, keys=keys, part=128, edge_part=64)
  edges = tiles.edges
  offset = np.arange(keys)[:, None] - np.arange(rows)
  for distance in range(-768, 769, min(rows, keys)):
    at = offset + distance
    counted = np.ones((keys, rows), bool)
    counted &= first is None or at >= first
    counted &= last is None or at <= last
    assert tiles.is_full(distance) == counted.all()
    strips = edges.get(distance, ())
    covered = np.zeros_like(counted)
    for strip in strips:
      covered[slice(*strip.keys), slice(*strip.rows)] = True
    if distance in edges:
      assert not counted.all()
      assert not (counted & ~covered).any()
    elif not tiles.has_many_edges:
      assert counted.all() or not counted.any()


@hypothesis.given(
  batch=st.integers(1, 5),
  kv_heads=st.integers(1, 3),
  group=st.integers(1, 3),
  blocks=st.integers(1, 5),
  num_cores=st.sampled_from([1, 2, 4]),
)
@hypothesis.settings(max_examples=10, deadline=None)
def test_each_block_is_done_once(batch, kv_heads, group, blocks, num_cores):
  problem = _problem(batch=batch, heads=kv_heads * group, kv_heads=kv_heads)
  rounds = Rounds(problem=problem, blocks=blocks, num_cores=num_cores)
  done = []
  for core in range(num_cores):
    heads = int(rounds.num_heads(jnp.int32(core)))
    items = int(rounds.num_items(jnp.int32(core)))
    for head, item in itertools.product(range(heads), range(items)):
      unit = rounds.unit(*map(jnp.int32, (core, head, item)))
      assert int(unit.kv_head) == int(unit.head) // group
      done.append((int(unit.batch), int(unit.head), int(unit.block)))
  everything = itertools.product(
    range(batch), range(kv_heads * group), range(blocks)
  )
  assert sorted(done) == sorted(everything)


def _problem(**sizes) -> Problem:
  given: Any = dict(
    batch=1, heads=1, kv_heads=1, q_len=128, kv_len=128, d_qk=128, d_v=128
  )
  return Problem(
    call=Call(scale=1.0), dtype=jnp.dtype(jnp.bfloat16), **(given | sizes)
  )


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("size", [1, 1000, 4096, 32768, 10**6])
def test_chosen_blocks_fit_vmem(name, size):
  chip = cm.chip(name)
  for d, operands in ((128, ()), (256, ("bias",))):
    problem = _problem(
      q_len=size, kv_len=size, d_qk=d, d_v=d, operands=operands
    )
    blocks = blocks_.choose(problem, chip)
    assert blocks_.vmem_bytes(problem, blocks) <= (
      chip.vmem_bytes_per_tensor_core
    )


@pytest.mark.parametrize("chip_name", support.COMPILED_CHIPS)
def test_compiles(chip_name):
  mesh = cm.chip(chip_name).device_mesh("device", on="compiler")

  def both(q, k, v, bias, ids, lengths):
    causal = functools.partial(_loss, attention, is_causal=True)
    masked = functools.partial(
      _loss,
      attention,
      segment_ids=ids,
      kv_segment_ids=ids,
      kv_lengths=lengths,
      soft_cap=3.0,
    )
    return jax.grad(causal)(q, k, v, bias), _GRAD(masked)(q, k, v, bias)

  fn = jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P())
  bf16, f32, int32 = jnp.bfloat16, jnp.float32, jnp.int32
  compiled = cm.compile(
    jax.jit(fn),
    *(
      jax.ShapeDtypeStruct(shape, dtype)
      for shape, dtype in (
        ((2, 4, 200, 64), bf16),
        ((2, 2, 200, 64), bf16),
        ((2, 2, 200, 40), bf16),
        ((4, 1, 200), f32),
        ((2, 200), int32),
        ((2,), int32),
      )
    ),
  )
  names = [operation.kernel for operation in compiled.operations]
  assert names.count("attention_backward") == 2
  # The first call does not ask for it, and XLA drops it.
  assert names.count("attention_backward_bias") == 1
