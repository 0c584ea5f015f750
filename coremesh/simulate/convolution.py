"""Convolutions and matrix products as the matrix unit sums them."""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import math
from typing import Any

import numpy as np

from coremesh.simulate import packing


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """[..., M, K] @ [..., K, N]: float32 for floats, int32 for integers.

  Products and sums are those of float32, whatever precision the kernel asks
  for; int32 sums wrap.
  """
  if packing.is_floating(a.dtype):
    return np.matmul(a.astype(np.float32), b.astype(np.float32))
  if max(packing.bits_of(a.dtype), packing.bits_of(b.dtype)) <= 16:
    # Exact below 2^53, and BLAS knows float64 but no integers.
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    return exact.astype(np.int64).astype(np.int32)
  return np.matmul(a.astype(np.int32), b.astype(np.int32))


def _spread(
  x: np.ndarray,
  dilation: Sequence[int],
  padding: Sequence[tuple[int, int]],
) -> np.ndarray:
  """Puts `dilation - 1` zeros between neighbours, then pads or crops.

  Args:
    x: [batch, channel, *space].
    dilation: one for each axis of space.
    padding: zeros before and after each; negative ones crop.
  """
  shape = list(x.shape[:2])
  target, source = [slice(None)] * 2, [slice(None)] * 2
  for n, d, (low, high) in zip(x.shape[2:], dilation, padding, strict=True):
    size = max(0, low + max(0, (n - 1) * d + 1) + high)
    # Element k lands at low + k * d, if that is in [0, size).
    first = max(0, -(low // d))
    stop = max(first, min(n, (size - 1 - low) // d + 1))
    start = low + first * d
    shape.append(size)
    source.append(slice(first, stop))
    target.append(slice(start, start + (stop - first) * d, d))
  result = np.zeros(shape, x.dtype)
  result[tuple(target)] = x[tuple(source)]
  return result


def _grouped(lhs, rhs, *, feature_groups, batch_groups):
  """Both operands as [groups, batch or output, channel, *space].

  At most one of the two numbers is not 1. Feature groups divide the channels
  of `lhs`, batch groups its batch; either divides the outputs of `rhs`.
  """
  n, c, *space = lhs.shape
  lhs = lhs.reshape(
    batch_groups, n // batch_groups, feature_groups, c // feature_groups, *space
  )
  lhs = np.moveaxis(lhs, 2, 1)
  groups = feature_groups * batch_groups
  lhs = lhs.reshape(groups, n // batch_groups, c // feature_groups, *space)
  return lhs, rhs.reshape(groups, -1, *rhs.shape[1:])


def rule(
  params: Mapping[str, Any], in_avals: Sequence[Any], out_avals: Sequence[Any]
) -> Callable[..., np.ndarray]:
  """The rule of `pltpu.conv`: see `tensor_core.RULES`.

  The sum is float32 or int32, then it is rounded, then `acc` is added.
  """
  (out,) = out_avals
  dims = params["dimension_numbers"]
  space = len(dims.lhs_spec) - 2
  ones = (1,) * space
  strides = params["window_strides"] or ones
  padding = params["padding"] or ((0, 0),) * space
  lhs_dilation = params["lhs_dilation"] or ones
  rhs_dilation = params["rhs_dilation"] or ones
  reversal = params["window_reversal"] or (False,) * space
  reverse = tuple(i + 2 for i, r in enumerate(reversal) if r)
  groups = {
    "feature_groups": params["feature_group_count"],
    "batch_groups": params["batch_group_count"],
  }
  out_space = [out.shape[i] for i in dims.out_spec[2:]]
  to_out = np.argsort(dims.out_spec)
  taps = list(
    itertools.product(*(range(in_avals[1].shape[i]) for i in dims.rhs_spec[2:]))
  )

  def window(tap):
    """Where the inputs lie that one element of the filter meets."""
    starts = [k * d for k, d in zip(tap, rhs_dilation, strict=True)]
    return tuple(
      slice(start, start + (n - 1) * stride + 1, stride)
      for start, n, stride in zip(starts, out_space, strides, strict=True)
    )

  windows = [(..., *window(tap)) for tap in taps]

  def conv(lhs, rhs, acc=None):
    lhs = _spread(lhs.transpose(dims.lhs_spec), lhs_dilation, padding)
    rhs = np.flip(rhs.transpose(dims.rhs_spec), reverse)
    lhs, rhs = _grouped(lhs, rhs, **groups)

    def term(tap, where):
      # [groups, 1, out, channel] @ [groups, batch, channel, positions]
      seen = lhs[where].reshape(*lhs.shape[:3], math.prod(out_space))
      return matmul(rhs[(..., *tap)][:, None], seen)

    total = functools.reduce(np.add, map(term, taps, windows))
    result = np.moveaxis(total, 0, 1)  # [batch, groups, out, positions]
    result = result.reshape([out.shape[i] for i in dims.out_spec])
    result = result.transpose(to_out).astype(out.dtype)
    return result if acc is None else acc + result

  return conv
