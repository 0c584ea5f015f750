"""Attention and its derivatives by the formula, in float64."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """Arrays of float64 and int32, and options, of a call and its derivative."""

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  d_out: np.ndarray
  d_lse: np.ndarray
  options: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """What float64 gives: the output, the LSE, and derivatives.

  Attributes:
    out, lse: of the forward pass.
    derivatives: of q, k, v and any bias.
    size: the norm of the derivatives of all scores.
  """

  out: np.ndarray
  lse: np.ndarray
  derivatives: list[np.ndarray]
  size: float


def case_of(
  *,
  lead=(),
  heads=2,
  kv_heads=1,
  q_len=140,
  kv_len=200,
  d_qk=16,
  d_v=24,
  bias: Any = None,
  segments: bool = False,
  seed=0,
  **options,
) -> Case:
  rng = np.random.default_rng(seed)
  if bias is not None:
    options["bias"] = rng.normal(size=bias)
  if segments:
    for name, size in (("segment_ids", q_len), ("kv_segment_ids", kv_len)):
      ids = rng.integers(-1, 3, (*lead, size))
      options[name] = np.sort(ids, axis=-1).astype(np.int32)
  return Case(
    q=rng.normal(size=(*lead, heads, q_len, d_qk)),
    k=rng.normal(size=(*lead, kv_heads, kv_len, d_qk)),
    v=rng.normal(size=(*lead, kv_heads, kv_len, d_v)),
    d_out=rng.normal(size=(*lead, heads, q_len, d_v)),
    d_lse=rng.normal(size=(*lead, heads, q_len)),
    options=options,
  )


def _counted(case: Case) -> np.ndarray:
  """Which scores count, [..., 1, q_len, kv_len]."""
  q_len, kv_len = case.q.shape[-2], case.k.shape[-2]
  options = case.options
  offset = np.arange(kv_len) - np.arange(q_len)[:, None] - (kv_len - q_len)
  left, right = options.get("window") or (None, None)
  counted = np.ones((q_len, kv_len), bool)
  counted &= not options.get("is_causal") or offset <= 0
  counted &= left is None or offset >= -left
  counted &= right is None or offset <= right
  counted = counted[None]
  if "segment_ids" in options:
    rows = options["segment_ids"][..., None, :, None]
    keys = options["kv_segment_ids"][..., None, None, :]
    counted = counted & (rows == keys) & (keys >= 0)
  if "kv_lengths" in options:
    lengths = np.asarray(options["kv_lengths"])[..., None, None, None]
    counted = counted & (np.arange(kv_len) < lengths)
  return counted


def answer_to(case: Case) -> Answer:
  """By the formula, which a test below compares to autodiff."""
  q, options = case.q, case.options
  group = q.shape[-3] // case.k.shape[-3]
  k, v = (np.repeat(a, group, axis=-3) for a in (case.k, case.v))
  scale = options.get("scale") or q.shape[-1] ** -0.5
  scores = scale * q @ k.swapaxes(-1, -2)
  slope = 1.0
  if (cap := options.get("soft_cap")) is not None:
    scores = cap * np.tanh(scores / cap)
    slope = 1 - (scores / cap) ** 2
  scores = scores + options.get("bias", 0.0)
  scores = np.where(_counted(case), scores, -np.inf)
  largest = scores.max(-1, keepdims=True)
  terms = np.exp(scores - np.where(largest == -np.inf, 0, largest))
  total = terms.sum(-1, keepdims=True)
  is_empty = total == 0
  weights = terms / np.where(is_empty, 1, total)
  out = weights @ v
  lse = np.where(is_empty, -np.inf, largest + np.log(total + is_empty))
  less = (case.d_out * out).sum(-1) - case.d_lse
  d_weights = case.d_out @ v.swapaxes(-1, -2)
  d_scores = weights * (d_weights - less[..., None])
  d_products = scale * d_scores * slope
  d_k = d_products.swapaxes(-1, -2) @ q
  d_v = weights.swapaxes(-1, -2) @ case.d_out
  derivatives = [d_products @ k]
  for d, like in ((d_k, case.k), (d_v, case.v)):
    parts = d.reshape(*like.shape[:-2], group, *like.shape[-2:])
    derivatives.append(parts.sum(-3))
  if "bias" in options:
    derivatives.append(_summed_to(d_scores, options["bias"].shape))
  size = float(np.linalg.norm(d_scores))
  return Answer(out=out, lse=lse[..., 0], derivatives=derivatives, size=size)


def _summed_to(full: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  aligned = (1,) * (full.ndim - len(shape)) + shape
  lost = tuple(i for i, n in enumerate(full.shape) if aligned[i] != n)
  return full.sum(lost).reshape(shape)
