"""What attention is asked for, and whether it can be."""

from collections.abc import Sequence
import dataclasses
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coremesh import errors
from coremesh.kernels import checks
from coremesh.kernels._attention.blocks import Blocks
from coremesh.kernels.blocks import with_copied_rows

MOST_DIMENSIONS = 256

type Window = tuple[int | None, int | None]


class Operands(NamedTuple):
  """Arrays beside q, k and v, None where there is none.

  All have the rank of q, and axes of size 1 where they broadcast: what is said
  of a row has its rows on the last axis, what is said of a key its keys.

  Attributes:
    bias: float32 or bfloat16 [..., heads, q_len, kv_len], any of them 1.
    row_segments: int32 [..., 1, 1, q_len].
    key_segments: int32 [..., 1, 1, kv_len].
    num_keys: int32 [..., 1, 1, 1], the keys of a batch element that are valid.
  """

  bias: Any = None
  row_segments: Any = None
  key_segments: Any = None
  num_keys: Any = None

  @property
  def given(self) -> dict[str, Any]:
    """Those that there are, by name."""
    return {n: a for n, a in self._asdict().items() if a is not None}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
  """The static arguments of a call; see `kernels.attention`."""

  scale: float
  is_causal: bool = False
  window: Window | None = None
  soft_cap: float | None = None
  blocks: Blocks | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """A call and the sizes of its arrays, leading axes joined.

  Attributes:
    call: the static arguments.
    batch, heads, kv_heads, q_len, kv_len, d_qk, d_v: sizes.
    dtype: of q, k, v and the output.
    operands: names of the operands that are given.
  """

  call: Call
  batch: int
  heads: int
  kv_heads: int
  q_len: int
  kv_len: int
  d_qk: int
  d_v: int
  dtype: Any
  operands: tuple[str, ...] = ()

  @property
  def group(self) -> int:
    """Heads that share a head of keys."""
    return self.heads // self.kv_heads

  @property
  def is_empty(self) -> bool:
    """Whether there is no output, or nothing that could count."""
    sizes = self.batch, self.heads, self.q_len, self.kv_len
    return 0 in sizes


def problem_of(call: Call, q: Any, k: Any, v: Any, operands: Operands):
  """The problem that arrays of any rank pose."""
  return Problem(
    call=call,
    batch=math.prod(q.shape[:-3]),
    heads=q.shape[-3],
    kv_heads=k.shape[-3],
    q_len=q.shape[-2],
    kv_len=k.shape[-2],
    d_qk=q.shape[-1],
    d_v=v.shape[-1],
    dtype=jnp.dtype(q.dtype),
    operands=tuple(operands.given),
  )


def joined(array: jax.Array, lead: Sequence[int]) -> jax.Array:
  """An array with its leading axes, all but the last three, as one.

  Args:
    array: of any rank; its leading axes broadcast to `lead`.
    lead: those of q.

  Returns:
    Four axes, the first prod(lead) long, or 1 if all leading axes are.
  """
  own = array.shape[:-3]
  if all(n == 1 for n in own):
    return array.reshape(1, *array.shape[-3:])
  array = jnp.broadcast_to(
    array.reshape((1,) * (len(lead) - len(own)) + array.shape),
    (*lead, *array.shape[-3:]),
  )
  return array.reshape(-1, *array.shape[-3:])


def in_blocks(name: str, array: jax.Array, lead: Sequence[int]) -> jax.Array:
  """An array as a kernel takes it, `joined`, for copies in blocks.

  Args:
    name: of q, k, v, out, d_out, or of another that is cut along its last axis
      only, or of one of `Operands`.
    array, lead: as for `joined`.
  """
  array = joined(array, lead)
  if name == "num_keys":
    return array.reshape(-1)
  is_cut = name in ("q", "k", "v", "out", "d_out") or (
    name == "bias" and array.shape[-2] > 1
  )
  return with_copied_rows(array) if is_cut else array


def checked_call(
  *,
  d_qk: int,
  is_causal: bool,
  window: Window | None,
  scale: float | None,
  soft_cap: float | None,
  blocks: Blocks | None,
) -> Call:
  """The static arguments, if they are valid.

  Raises:
    ShapeError: one is not; see `kernels.attention`.
  """
  if window is not None:
    is_pair = isinstance(window, tuple | list) and len(window) == 2
    if not is_pair or not all(n is None or _is_count(n) for n in window):
      raise errors.ShapeError(
        "window of attention must be None or two counts of keys, (left, right),"
        f" each None or an int of at least 0; got {window!r}."
      )
    window = tuple(None if n is None else int(n) for n in window)  # type: ignore
  if scale is None:
    scale = 1 / math.sqrt(max(d_qk, 1))
  if not _is_finite(scale):
    raise errors.ShapeError(
      f"scale of attention must be a finite number; got {scale!r}. It is"
      " static: multiply q by one that is known at run time only."
    )
  if soft_cap is not None and not (_is_finite(soft_cap) and soft_cap > 0):
    raise errors.ShapeError(
      "soft_cap of attention must be None or a finite number above 0 that is"
      f" known when the kernel is traced; got {soft_cap!r}."
    )
  if blocks is not None and not isinstance(blocks, Blocks):
    raise errors.ShapeError(
      f"blocks of attention must be None or Blocks; got {blocks!r}."
    )
  return Call(
    scale=float(scale),
    is_causal=checks.checked_flag("is_causal of attention", is_causal),
    window=window,
    soft_cap=None if soft_cap is None else float(soft_cap),
    blocks=blocks,
  )


def check_arrays(q: Any, k: Any, v: Any) -> None:
  """Checks that q, k and v fit each other.

  Raises:
    ShapeError, DTypeError: they do not; see `kernels.attention`.
  """
  for name, array in (("q", q), ("k", k), ("v", v)):
    checks.is_array(f"{name} of attention", array)
    if array.ndim < 3:
      raise errors.ShapeError(
        f"{name} of attention must be [..., heads, length, dimensions]; got"
        f" shape {tuple(array.shape)}. Add an axis of one head: {name}[None]."
      )
    checks.dtype_is_one_of(f"{name} of attention", array)
    if array.dtype != q.dtype:
      raise errors.DTypeError(
        f"q, k and v of attention must be of one dtype; got {q.dtype} and"
        f" {array.dtype} of {name}. Convert one: {name}.astype(q.dtype)."
      )
    if array.shape[:-3] != q.shape[:-3]:
      raise errors.ShapeError(
        "q, k and v of attention must have the same leading axes; got"
        f" {tuple(q.shape)} and {tuple(array.shape)} of {name}. Map over axes"
        " that only some have with jax.vmap."
      )
    if not 1 <= array.shape[-1] <= MOST_DIMENSIONS:
      raise errors.ShapeError(
        f"{name} of attention must have 1 to {MOST_DIMENSIONS} dimensions on"
        f" its last axis; got shape {tuple(array.shape)}."
      )
  if k.shape[-1] != q.shape[-1]:
    raise errors.ShapeError(
      f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)} must have"
      f" the same last axis; got {q.shape[-1]} and {k.shape[-1]}."
    )
  if k.shape[-3:-1] != v.shape[-3:-1]:
    raise errors.ShapeError(
      "k and v of attention must have the same heads and length; got"
      f" {tuple(k.shape)} and {tuple(v.shape)}."
    )
  heads, kv_heads = q.shape[-3], k.shape[-3]
  if kv_heads == 0 or heads % kv_heads:
    raise errors.ShapeError(
      "The heads of k and v must divide those of q: each is shared by as many;"
      f" got {heads} heads of q {tuple(q.shape)} and {kv_heads} of k"
      f" {tuple(k.shape)}."
    )


def checked_operands(
  q: Any, k: Any, *, bias: Any, segments: Any, kv_segments: Any, lengths: Any
) -> Operands:
  """The operands with their axes in place, if they fit q and k.

  Raises:
    ShapeError, DTypeError: they do not; see `kernels.attention`.
  """
  lead = q.shape[:-3]
  q_len, kv_len = q.shape[-2], k.shape[-2]
  if bias is not None:
    checks.dtype_is_one_of("bias of attention", bias)
    checks.broadcasts("bias of attention", bias, (*q.shape[:-1], kv_len))
    bias = bias.reshape((1,) * (q.ndim - bias.ndim) + bias.shape)
  if (segments is None) != (kv_segments is None):
    if q_len != kv_len or segments is None:
      raise errors.ShapeError(
        "segment_ids and kv_segment_ids of attention must be given together"
        " (kv_segment_ids may be left out if there are as many keys as rows);"
        f" got {'no' if segments is None else 'only'} segment_ids."
      )
    kv_segments = segments
  for name, array, shape in (
    ("segment_ids", segments, (*lead, q_len)),
    ("kv_segment_ids", kv_segments, (*lead, kv_len)),
    ("kv_lengths", lengths, lead),
  ):
    if array is not None:
      checks.dtype_is_one_of(f"{name} of attention", array, [jnp.int32])
      checks.has_shape(f"{name} of attention", array, shape)

  def aligned(array: Any, length: int) -> Any:
    return None if array is None else array.reshape(*lead, 1, 1, length)

  return Operands(
    bias=bias,
    row_segments=aligned(segments, q_len),
    key_segments=aligned(kv_segments, kv_len),
    num_keys=aligned(lengths, 1),
  )


def _is_count(value: Any) -> bool:
  is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  return is_int and int(value) >= 0


def _is_finite(value: Any) -> bool:
  is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_real and math.isfinite(value)
