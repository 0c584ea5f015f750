"""What the value primitives of a SparseCore vector subcore compute.

A rule is called once for an equation of a kernel and gives a function that is
called each time the equation runs. Names are those of the attributes of
`jax._src.pallas.mosaic.sc_primitives`, without `_p`.

Sources: the docstrings of `jax.experimental.pallas.tpu_sc`, its lowering and
the descriptions of the operations (`tpu_ops.td`) it lowers to. None of this
was compared with hardware.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.experimental.pallas import tpu_sc as plsc
import numpy as np

from coremesh.simulate import packing

type Function = Callable[..., Any]
type Rule = Callable[
  [Mapping[str, Any], Sequence[Any], Sequence[Any]], Function
]


# --- scans -----------------------------------------------------------------


def _masked_scan(ufunc: np.ufunc, neutral: Callable[[np.dtype], Any]) -> Rule:
  """The rule of a running `ufunc` over the lanes that a mask allows.

  Lanes before the first allowed one pass through; the docstring says so of
  `cummax`, and `cumsum` lowers to the same operation, whose description leaves
  them open.
  A later lane that is masked off holds the result so far.
  """

  def rule(params, in_avals, out_avals):
    del params, in_avals
    dtype = np.dtype(out_avals[0].dtype)
    fill = dtype.type(neutral(dtype))

    def scan(x, mask):
      # Without dtype, numpy would add narrow integers in 64 bits.
      kwargs = {"axis": -1, "dtype": dtype}
      if mask.all():
        return ufunc.accumulate(x, **kwargs)
      result = ufunc.accumulate(np.where(mask, x, fill), **kwargs)
      return np.where(np.logical_or.accumulate(mask, axis=-1), result, x)

    return scan

  return rule


def _lowest(dtype: np.dtype) -> Any:
  return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _highest(dtype: np.dtype) -> Any:
  return np.inf if dtype.kind == "f" else np.iinfo(dtype).max


def _zero(dtype: np.dtype) -> Any:
  # 0.0 + -0.0 is 0.0, so the float that changes no sum is -0.0.
  return -0.0 if dtype.kind == "f" else 0


def _scan_count(params, in_avals, out_avals) -> Function:
  """Running count, from 1, of each value; and where each occurs last.

  A lane that is masked off counts 1 and is no last occurrence. Floats compare
  as IEEE does: every nan is a value of its own, and -0.0 equals 0.0.
  """
  del params, out_avals
  size = in_avals[0].shape[-1]
  before = np.tri(size, k=-1, dtype=bool)
  after = before.T

  def scan_count(x, mask):
    same = x[..., :, None] == x[..., None, :]
    same &= mask[..., None, :]
    same &= mask[..., :, None]
    counts = (same & before).sum(axis=-1, dtype=np.int32)
    counts += 1
    return counts, mask & ~(same & after).any(axis=-1)

  return scan_count


# --- sorting ---------------------------------------------------------------


def _order(keys: np.ndarray, descending: bool) -> np.ndarray:
  """Positions in sorted order; equal keys keep theirs in both directions."""
  if not descending:
    return np.argsort(keys, kind="stable")
  # Sorting the reversed keys and reversing the result keeps ties in order.
  return len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]


def _masked_sort(params, in_avals, out_avals) -> Function:
  """Stable sort of keys with values; masked-off lanes go last, as they were.

  nan counts as the largest key, as in `jax.lax.sort`; what the hardware does
  with it is not documented.
  """
  del out_avals
  descending = params["descending"]

  def sort(keys, values):
    order = _order(keys, descending)
    return keys[order], values[order]

  def masked_sort(keys, values, mask):
    valid = np.flatnonzero(mask)
    order = np.concatenate(
      [
        valid[_order(keys[valid], descending)],
        np.flatnonzero(~mask),
      ]
    )
    out_mask = np.arange(len(keys)) < len(valid)
    return keys[order], values[order], out_mask

  return masked_sort if len(in_avals) == 3 else sort


# --- packing ---------------------------------------------------------------


def _check_same_kind(old_dtype: Any, new_dtype: Any, *, name: str) -> None:
  if packing.is_floating(old_dtype) != packing.is_floating(new_dtype):
    raise NotImplementedError(
      f"plsc.{name} converts floats to floats or integers to integers; got"
      f" {old_dtype} and preferred_element_type={new_dtype}, which libtpu"
      " refuses as well. Convert with astype before or after it."
    )


def _pack(params, in_avals, out_avals) -> Function:
  """Two vectors as one of half the width: floats round, integers truncate.

  libtpu packs int32 with `pack.i.b32.b16`, which moves bits.
  """
  (out,) = out_avals
  _check_same_kind(in_avals[0].dtype, out.dtype, name="pack")
  interleaved = params["format"] == plsc.PackFormat.INTERLEAVED

  def pack(a, b):
    parts = packing.narrow(a, out.dtype), packing.narrow(b, out.dtype)
    if interleaved:
      return np.stack(parts, axis=-1).reshape(out.shape)
    # Compressed: all of `a`, then all of `b`, two neighbours to a word.
    return np.concatenate(parts).reshape(out.shape)

  return pack


def _unpack(params, in_avals, out_avals) -> Function:
  """Undoes `_pack`.

  Integers extend by their sign, unsigned ones too: the lowering hands on
  integers without a sign, and libtpu emits `unpack.i.l.s16.s32` for uint16.
  """
  out = out_avals[0]
  _check_same_kind(in_avals[0].dtype, out.dtype, name="unpack")
  half = packing.signed(in_avals[0].dtype)
  interleaved = params["format"] == plsc.PackFormat.INTERLEAVED

  def unpack(ab):
    flat = ab.reshape(-1).view(half)
    n = len(flat) // 2
    a, b = (flat[::2], flat[1::2]) if interleaved else (flat[:n], flat[n:])
    return a.astype(out.dtype), b.astype(out.dtype)

  return unpack


# --- reductions of masks ---------------------------------------------------


def _all_reduce_population_count(params, in_avals, out_avals) -> Function:
  """The number of true lanes, in every lane of the result."""
  del params, in_avals  # `reduce` only shortens the result.
  (out,) = out_avals
  return lambda x: np.full(out.shape, np.count_nonzero(x), np.int32)


def _all_reduce_ffs(params, in_avals, out_avals) -> Function:
  """The first true lane, or the number of lanes, in every lane."""
  del params, in_avals
  (out,) = out_avals

  def ffs(x):
    first = x.argmax()
    return np.full(out.shape, first if x[first] else x.size, np.int32)

  return ffs


RULES: Mapping[str, Rule] = {
  "sc.all_reduce_ffs": _all_reduce_ffs,
  "sc.all_reduce_population_count": _all_reduce_population_count,
  "sc.masked_cummax": _masked_scan(np.maximum, _lowest),
  "sc.masked_cummin": _masked_scan(np.minimum, _highest),
  "sc.masked_cumsum": _masked_scan(np.add, _zero),
  "sc.masked_sort": _masked_sort,
  "sc.pack": _pack,
  "sc.scan_count": _scan_count,
  "sc.unpack": _unpack,
}
