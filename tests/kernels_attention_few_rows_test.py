"""kernels.attention where few rows share the keys, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh.kernels import attention
from coremesh.kernels._attention import few_rows
from coremesh.kernels._attention.blocks import Blocks
from coremesh.kernels._attention.call import Call, Problem
from tests import support
from tests.attention_cases import Answer, Case, answer_to, case_of

# So that few keys make many blocks.
_SMALL = Blocks(rows=128, keys=128, part=128, tile_rows=128)
# Relative to the norm of all: float32 terms are off by some roundings, and
# bfloat16 rounds inputs, terms and results to 8 bits.
_ERROR = {jnp.float32: 20 * 2.0**-24, jnp.bfloat16: 3 * 2.0**-8}
_KERNELS = {"attention_of_few_rows", "attention_of_few_rows_backward"}
_ARRAYS = {"segment_ids": jnp.int32, "kv_segment_ids": jnp.int32}
_ARRAYS |= {"kv_lengths": jnp.int32, "bias": jnp.float32}


def _found(
  case: Case, *, dtype: Any = jnp.float32, blocks: Any = _SMALL
) -> tuple:
  """The output, the LSE and the derivatives of q, k, v and any bias."""
  options = dict(case.options, blocks=blocks, return_lse=True)
  for name, kind in _ARRAYS.items():
    if name in options:
      options[name] = jnp.asarray(options[name], kind)
  given = [jnp.asarray(a, dtype) for a in (case.q, case.k, case.v)]
  if "bias" in options:
    given.append(options.pop("bias"))

  def fn(*args):
    bias = args[3] if len(args) > 3 else None
    return attention(*args[:3], bias=bias, **options)

  (out, lse), pull = jax.vjp(fn, *given)
  d_out, d_lse = jnp.asarray(case.d_out, dtype), jnp.asarray(case.d_lse)
  return out, lse, *pull((d_out, d_lse.astype(lse.dtype)))


def _check(found: Any, answer: Answer, *, dtype: Any = jnp.float32) -> None:
  out, lse, *derivatives = found
  assert (np.isneginf(lse) == np.isneginf(answer.lse)).all()
  pairs: dict[str, Any] = {"out": (out, answer.out)}
  pairs["lse"] = np.exp(lse), np.exp(answer.lse)
  names = "q", "k", "v", "bias"
  for name, *pair in zip(names, derivatives, answer.derivatives, strict=False):
    pairs[name] = pair
  for name, (a, b) in pairs.items():
    assert a.shape == b.shape, name
    # The terms of the derivative of a bias may cancel.
    size = max(np.linalg.norm(b), answer.size if name == "bias" else 0)
    error = np.linalg.norm(np.asarray(a, np.float64) - b)
    assert error <= _ERROR[dtype] * size + 1e-6, name


# Of 16 and 24 dimensions k and v lie with keys on lanes, of 128 they do not.
_GROUP: dict[str, Any] = dict(heads=4, kv_heads=2, q_len=3, kv_len=300)
_OPTIONS: dict[str, dict[str, Any]] = {
  "causal": dict(_GROUP, bias=(4, 1, 300), is_causal=True),
  "causal, rows without keys": dict(
    q_len=9, kv_len=5, is_causal=True, soft_cap=1.5
  ),
  "keys on sublanes": dict(_GROUP, lead=(2,), segments=True, d_qk=128, d_v=130),
  "keys on both": dict(_GROUP, d_v=128, window=(130, 0), scale=-0.7),
  "queries on lanes": dict(heads=3, kv_heads=3, q_len=40, is_causal=True),
  "one query": dict(
    _GROUP | dict(q_len=1), lead=(2,), bias=(2, 1, 1, 300), segments=True
  ),
  "lengths": dict(
    _GROUP,
    lead=(5,),
    bias=(4, 3, 300),
    kv_lengths=[300, 0, 128, 129, 1],
    d_qk=128,
  ),
  "window to the right": dict(_GROUP, window=(0, None), bias=(1, 3, 1)),
  "one of all": dict(heads=1, q_len=1, kv_len=1, d_qk=1, d_v=1),
}


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_each_option(options):
  case = case_of(**options)
  with cm.simulation() as run:
    found = _found(case)
  names = {r.kernel for r in run.runs}
  assert names - {"attention_backward_bias"} == _KERNELS
  _check(found, answer_to(case))


def test_bfloat16():
  case = case_of(**_GROUP, d_qk=64, d_v=128)
  found = _found(case, dtype=jnp.bfloat16, blocks=None)
  assert {a.dtype for i, a in enumerate(found) if i != 1} == {
    jnp.dtype(jnp.bfloat16)
  }
  _check(found, answer_to(case), dtype=jnp.bfloat16)


@pytest.mark.parametrize("d", [16, 128])
def test_what_is_padding_may_be_nan(d):
  case = case_of(
    **_GROUP,
    lead=(2,),
    segments=True,
    kv_lengths=[257, 128],
    is_causal=True,
    d_qk=d,
    d_v=d,
  )
  answer = answer_to(case)
  is_row = case.options["segment_ids"] >= 0
  is_key = case.options["kv_segment_ids"] >= 0
  is_key &= np.arange(300) < np.array(case.options["kv_lengths"])[:, None]
  assert 0 < is_row.mean() < 1
  for array, known in (
    (case.q, is_row),
    (case.d_out, is_row),
    (case.k, is_key),
    (case.v, is_key),
  ):
    array.swapaxes(1, 2)[~known] = np.nan
  found = _found(case)
  _check(found, answer)
  for d_keys in found[3:]:
    assert (np.asarray(d_keys).swapaxes(1, 2)[~is_key] == 0).all()


def test_only_blocks_with_keys_that_count_are_read():
  case = case_of(lead=(3,), q_len=1, kv_len=1024, kv_lengths=[300, 1, 1024])
  read = {}
  for name, options in (("lengths", {}), ("window", dict(window=(9, 0)))):
    if options:
      case.options.pop("kv_lengths")
    case.options.update(options)
    arrays = [jnp.asarray(a, jnp.float32) for a in (case.q, case.k, case.v)]
    given = {
      n: jnp.int32(a) if n in _ARRAYS else a for n, a in case.options.items()
    }
    with cm.simulation() as run:
      attention(*arrays, blocks=_SMALL, **given)
    (kernel,) = run.runs
    read[name] = sum(
      count
      for (source, _, target, _), count in kernel.bytes_moved.items()
      if (source, target) == ("hbm", "vmem")
    )
  of_block = 128 * 4 * (16 + 24)
  of_rows = 3 * 2 * 4 * 16
  assert read["lengths"] == (3 + 1 + 8) * of_block + of_rows
  assert read["window"] == 3 * of_block + of_rows


def test_the_order_of_events_does_not_matter():
  case = case_of(**_GROUP, lead=(2,), kv_lengths=[140, 300])
  first = _found(case)
  with cm.simulation(seed=1, dma="random") as run:
    again = _found(case)
  assert not run.findings
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a, b)


def test_visits_that_smem_does_not_hold_are_refused():
  q = jax.ShapeDtypeStruct((2100, 1, 1, 8), jnp.float32)
  k = jax.ShapeDtypeStruct((2100, 1, 128 * 128, 8), jnp.float32)
  lengths = jax.ShapeDtypeStruct((2100,), jnp.int32)

  def run(q, k, lengths):
    return attention(q, k, k, kv_lengths=lengths, blocks=_SMALL)

  with pytest.raises(cm.ShapeError, match="134400 blocks of 128 keys in SMEM"):
    jax.eval_shape(run, q, k, lengths)


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "tpu7x"])
def test_blocks_fit_vmem(name):
  chip = cm.chip(name)
  for rows, d, dtype in ((1, 128, "bfloat16"), (256, 256, "float32")):
    problem = Problem(
      call=Call(scale=1.0),
      batch=1,
      heads=rows,
      kv_heads=1,
      q_len=1,
      kv_len=10**6,
      d_qk=d,
      d_v=d,
      dtype=jnp.dtype(dtype),
      operands=("bias",),
    )
    plan = few_rows.planned(problem, chip)
    size = plan.problem.dtype.itemsize
    # Four of k, v and the bias, two of dk and dv, and the scores some times.
    need = plan.keys * (6 * 2 * d * size + rows * 4 * (4 + 6))
    assert need < chip.vmem_bytes_per_tensor_core * 0.8


@pytest.mark.parametrize("chip_name", support.COMPILED_CHIPS)
def test_compiles(chip_name):
  mesh = cm.chip(chip_name).device_mesh("device", on="compiler")

  def loss(q, k, v, bias, ids, lengths):
    out, lse = attention(
      q,
      k,
      v,
      bias=bias,
      segment_ids=ids[:, :3],
      kv_segment_ids=ids,
      kv_lengths=lengths,
      return_lse=True,
      blocks=_SMALL,
    )
    return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

  # k with keys on lanes, v with keys on sublanes.
  fn = jax.grad(loss, (0, 1, 2))
  fn = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())
  bf16, f32, int32 = jnp.bfloat16, jnp.float32, jnp.int32
  compiled = cm.compile(
    jax.jit(fn),
    *(
      jax.ShapeDtypeStruct(shape, dtype)
      for shape, dtype in (
        ((2, 4, 3, 64), bf16),
        ((2, 2, 300, 64), bf16),
        ((2, 2, 300, 128), bf16),
        ((4, 1, 300), f32),
        ((2, 300), int32),
        ((2,), int32),
      )
    ),
  )
  assert {operation.kernel for operation in compiled.operations} >= _KERNELS
