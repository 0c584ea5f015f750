"""Products of matrices.

Floats are multiplied in float32 by BLAS, whatever `precision` says: bfloat16
factors have exact products there. Integers are exact, and wrap.
"""

from collections.abc import Mapping, Sequence
import math

from jax import dtypes
import ml_dtypes
import numpy as np

from coremesh.simulate.values.kinds import (
  Function,
  Rule,
  is_integer,
  wide,
  widener,
)


def _working_dtype(left: np.dtype, right: np.dtype, depth: int) -> np.dtype:
  """In what to multiply and add `depth` products."""
  if not (is_integer(left) and is_integer(right)):
    if any(dtypes.issubdtype(d, np.complexfloating) for d in (left, right)):
      return np.result_type(left, right)
    return np.result_type(wide(left), wide(right), np.float32)
  bound = depth * math.prod(
    max(-int(info.min), int(info.max))
    for info in map(ml_dtypes.iinfo, (left, right))
  )
  # BLAS has no integers, but is exact as long as the sums fit the mantissa.
  if bound <= 2**24:
    return np.dtype(np.float32)
  if bound <= 2**53:
    return np.dtype(np.float64)
  # Wraps at 64 bits, hence rightly at fewer.
  return np.dtype(np.int64)


def _matrices(
  shape: Sequence[int],
  batch: Sequence[int],
  contracting: Sequence[int],
  *,
  contracting_first: bool,
) -> tuple[Function, tuple[int, ...]]:
  """How to bring a factor to [batch, rows, columns], and its free sizes."""
  free = [a for a in range(len(shape)) if a not in {*batch, *contracting}]
  inner = [*contracting, *free] if contracting_first else [*free, *contracting]
  order = [*batch, *inner]
  sizes = tuple(shape[axis] for axis in free)
  depth = math.prod(shape[axis] for axis in contracting)
  matrix = (math.prod(sizes), depth)
  batches = [math.prod(shape[axis] for axis in batch)] if batch else []
  target = (*batches, *(matrix[::-1] if contracting_first else matrix))
  straight = order == list(range(len(shape)))
  if straight and target == tuple(shape):
    return lambda x: x, sizes
  if straight:
    return lambda x: x.reshape(target), sizes
  return lambda x: x.transpose(order).reshape(target), sizes


def _dot_general(params, in_avals, out_avals):
  (contracting, batches) = params["dimension_numbers"]
  left, right = (aval.shape for aval in in_avals)
  to_left, _ = _matrices(
    left, batches[0], contracting[0], contracting_first=False
  )
  to_right, _ = _matrices(
    right, batches[1], contracting[1], contracting_first=True
  )
  depth = math.prod(left[axis] for axis in contracting[0])
  dtypes_in = [aval.dtype for aval in in_avals]
  working = _working_dtype(dtypes_in[0], dtypes_in[1], depth)
  widen_left, widen_right = (_to(dtype, working) for dtype in dtypes_in)
  narrow = _from(working, out_avals[0].dtype)
  shape = out_avals[0].shape

  def dot(x, y):
    product = _product(to_left(widen_left(x)), to_right(widen_right(y)))
    return narrow(product).reshape(shape)

  return (lambda x, y: dot(x, y)[()]) if shape == () else dot


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """`x @ y`, in stripes of rows that BLAS multiplies in one thread.

  The work of a block is too small to be shared: waking the other threads takes
  0.1 ms if cores are idle and 15 ms if they are not, the product 0.05 ms.
  """
  if x.ndim != 2:
    return np.matmul(x, y)
  rows, depth = x.shape
  columns = y.shape[1]
  stripe = _ONE_THREAD // max(1, depth * columns)
  if not _MIN_STRIPE <= stripe < rows:
    return np.matmul(x, y)
  whole = rows - rows % stripe
  product = np.empty((rows, columns), x.dtype)
  np.matmul(
    x[:whole].reshape(-1, stripe, depth),
    y,
    out=product[:whole].reshape(-1, stripe, columns),
  )
  if whole < rows:
    np.matmul(x[whole:], y, out=product[whole:])
  return product


# Up to so many products OpenBLAS stays in one thread; thin stripes are slow.
_ONE_THREAD = 1 << 18
_MIN_STRIPE = 4


def _to(source: np.dtype, working: np.dtype) -> Function:
  widen = widener(source)
  if wide(source) == working:
    return widen
  return lambda x: widen(x).astype(working)


def _from(working: np.dtype, target: np.dtype) -> Function:
  if working == target:
    return lambda x: x
  if not is_integer(target):
    return lambda x: x.astype(target)
  # By way of int64, which holds every sum, and wraps into the target.
  return lambda x: x.astype(np.int64).astype(wide(target)).astype(target)


RULES: Mapping[str, Rule] = {"dot_general": _dot_general}
