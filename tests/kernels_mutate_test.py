"""Each wait of each kernel is needed: without it the simulator objects.

Kernels have no other synchronisation: their cores share only inputs.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import kernels
from coremesh.kernels._attention import backward_blocks, few_rows
from coremesh.kernels._attention.backward_blocks import BackwardBlocks
from coremesh.kernels._attention.blocks import Blocks as AttentionBlocks
from coremesh.kernels._matmul import streams
from coremesh.kernels._matmul.blocks import Blocks

type _Case = tuple[Callable[..., Any], tuple[Any, ...]]

# So that few numbers make so many blocks that workers come to every wait: an
# output's block is awaited when its room is needed again, two blocks later.
_ATTENTION = AttentionBlocks(rows=128, keys=256, part=256, tile_rows=128)
_BACKWARD = BackwardBlocks(
  rows=128, keys=128, part=128, edge_part=128, held_rows=128, held_keys=256
)


def _normal(*shape: int) -> jax.Array:
  return jnp.asarray(
    np.random.default_rng(len(shape)).normal(size=shape), jnp.float32
  )


def _matmul() -> _Case:
  """More blocks of the output than slots, of several blocks of K."""
  blocks = Blocks(rows=8, columns=128, inner=128, split="columns")
  fn = functools.partial(kernels.matmul, blocks=blocks)
  return fn, (_normal(8, 260), _normal(260, 1280))


def _matmul_in_parts() -> _Case:
  """Blocks of all of K, whose output leaves part by part, and an epilogue."""
  blocks = Blocks(rows=8, columns=256, inner=128, part=128, split="columns")

  def fn(x, w, residual):
    return kernels.matmul(x, w, residual, epilogue=jnp.add, blocks=blocks)

  return fn, (_normal(24, 100), _normal(100, 600), _normal(24, 600))


def _matmul_of_halves() -> _Case:
  """Each core sums over half of K, and finishes a part of the output."""
  blocks = Blocks(rows=8, columns=256, inner=128, part=128, split="inner")
  fn = functools.partial(kernels.matmul, blocks=blocks)
  return fn, (_normal(8, 900), _normal(900, 256))


def _grouped_matmul() -> _Case:
  blocks = Blocks(rows=16, columns=128, inner=128)
  fn = functools.partial(kernels.grouped_matmul, blocks=blocks)
  sizes = jnp.int32([13, 0, 40, 7])
  return fn, (_normal(70, 200), _normal(4, 200, 200), sizes)


def _grouped_weight_gradient() -> _Case:
  blocks = Blocks(rows=128, columns=128, inner=128)
  fn = functools.partial(kernels.grouped_weight_gradient, blocks=blocks)
  sizes = jnp.int32([13, 0, 150, 77])
  return fn, (_normal(300, 300), _normal(300, 200), sizes)


def _attention() -> _Case:
  def fn(q, k, v, lengths):
    return kernels.attention(q, k, v, kv_lengths=lengths, blocks=_ATTENTION)

  shapes = (2, 3, 128, 16), (2, 1, 300, 16), (2, 1, 300, 24)
  return fn, (*(_normal(*s) for s in shapes), jnp.int32([300, 130]))


def _attention_backward() -> _Case:
  """By jax.vjp, of the bias too: two kernels."""
  shapes = (6, 128, 16), (6, 128, 16), (6, 128, 24), (6, 128, 1)

  def fn(q, k, v, bias):
    return kernels.attention(q, k, v, bias=bias)

  out, pull = jax.vjp(fn, *(_normal(*s) for s in shapes))
  return lambda d: pull(d), (out,)


def _attention_of_few_rows() -> _Case:
  def fn(q, k, v, lengths):
    return kernels.attention(q, k, v, kv_lengths=lengths, blocks=_ATTENTION)

  shapes = (4, 2, 3, 16), (4, 1, 300, 16), (4, 1, 300, 24)
  lengths = jnp.int32([300, 130, 0, 300])
  return fn, (*(_normal(*s) for s in shapes), lengths)


def _attention_of_few_rows_backward() -> _Case:
  shapes = (6, 3, 16), (6, 300, 16), (6, 300, 24)

  def fn(q, k, v):
    return kernels.attention(q, k, v, blocks=_ATTENTION)

  out, pull = jax.vjp(fn, *(_normal(*s) for s in shapes))
  return lambda d: pull(d), (out,)


def _elementwise() -> _Case:
  fn = functools.partial(
    kernels.elementwise, lambda a, b: (a + b, a * b), block_bytes=1
  )
  return fn, (_normal(96, 128),) * 2


def _softmax() -> _Case:
  def fn(x, mask):
    y, pull = jax.vjp(lambda x: kernels.softmax(x, mask, block_bytes=1), x)
    return y, pull(x)

  x = _normal(96, 128)
  return fn, (x, x > -1)


def _reductions() -> _Case:
  def fn(x, y):
    return (
      kernels.reduce_sum(x, 1, block_bytes=1),
      kernels.reduce_max(y, 1, block_bytes=1),
    )

  return fn, (_normal(8, 24, 128), _normal(1024, 128))


# By name: the kernels, and how many mutants there are at least, so that it does
# not go unseen that some are lost.
_CASES: dict[str, tuple[Callable[[], _Case], int]] = {
  "matmul": (_matmul, 17),
  "matmul, in parts": (_matmul_in_parts, 17),
  "matmul, of halves": (_matmul_of_halves, 30),
  "grouped_matmul": (_grouped_matmul, 11),
  "grouped_weight_gradient": (_grouped_weight_gradient, 11),
  "attention": (_attention, 17),
  "attention, backward": (_attention_backward, 50),
  "attention of few rows": (_attention_of_few_rows, 17),
  "attention of few rows, backward": (_attention_of_few_rows_backward, 27),
  "elementwise": (_elementwise, 14),
  "softmax": (_softmax, 18),
  "reductions": (_reductions, 14),
}
# The first block of an output finds none before it to wait for: a wait that is
# deleted or doubled where no worker comes.
_UNREACHED = {"matmul, in parts": ["delete", "duplicate"]}


@pytest.mark.parametrize("name", _CASES)
def test_each_wait_is_needed(name, monkeypatch):
  monkeypatch.setattr(backward_blocks, "choose", lambda *_: _BACKWARD)
  monkeypatch.setattr(streams, "MOST_SLOTS", 2 if "parts" in name else 4)
  monkeypatch.setattr(few_rows, "are_few", lambda _: "few rows" in name)
  case, num_mutants = _CASES[name]
  fn, args = case()
  report = cm.mutate(jax.jit(fn), *args, seeds=1)
  assert len(report.mutants) >= num_mutants, report.table()
  assert not [m for m in report.survivors if m.is_reached], str(report)
  assert [m.change for m in report.survivors] == _UNREACHED.get(name, [])
