"""What a grouped matrix product is asked for, and whether it can be."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from coremesh import errors, spec
from coremesh.kernels import checks, costs
from coremesh.kernels._matmul.blocks import Blocks
from coremesh.kernels._matmul.call import (
  DTYPES,
  Epilogue,
  check_epilogue,
  sum_dtype,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
  """The static arguments of a call."""

  epilogue: Epilogue | None = None
  out_dtype: Any = None
  transpose_w: bool = False
  precision: Any = None
  blocks: Blocks | None = None
  num_weights: int = 1

  def columns(self, w: Any) -> int:
    """N."""
    return w.shape[1 if self.transpose_w else 2]


def even_case(
  x_shape: tuple[int, int], shape: tuple[int, ...], *, num_groups: int
) -> spec.Case:
  """A call with bfloat16 x and another array, of groups as even as can be.

  Their sizes steer the kernel, so that they are there and not their type only.
  """
  case = costs.case(x_shape, shape, dtype=jnp.bfloat16)
  ends = np.arange(num_groups + 1) * x_shape[0] // num_groups
  return spec.Case(args=(*case.args, np.diff(ends).astype(np.int32)))


def check(call: Call, x, weights: Sequence[Any], group_sizes) -> None:
  """Checks that the arrays of a grouped product fit each other.

  Raises:
    ShapeError, DTypeError: they do not; see `kernels.grouped_matmul`.
  """
  if not weights:
    raise errors.ShapeError(
      "w of grouped_matmul must be at least one array; got none."
    )
  check_matrix("x", x, "[rows, K]")
  shape = "[groups, N, K]" if call.transpose_w else "[groups, K, N]"
  for i, w in enumerate(weights):
    label = f"w[{i}]" if len(weights) > 1 else "w"
    checks.is_array(label, w)
    if w.ndim != 3:
      raise errors.ShapeError(
        f"{label} must be {shape}; got shape {w.shape}. Add an axis of size 1"
        " to the weights of a single group: w[None]."
      )
    if w.shape != weights[0].shape:
      raise errors.ShapeError(
        f"All of w must have one shape; got {weights[0].shape} and {w.shape}."
      )
    check_same_dtype(label, w, x)
  if len(weights) > 1 and call.epilogue is None:
    raise errors.ShapeError(
      f"{len(weights)} arrays in w make as many products: give an epilogue that"
      " makes one block of them, such as lambda a, b: jax.nn.silu(a) * b."
    )
  inner = weights[0].shape[2 if call.transpose_w else 1]
  if x.shape[1] != inner:
    raise errors.ShapeError(
      f"x of shape {x.shape} and w of shape {weights[0].shape} differ along K:"
      f" {x.shape[1]} and {inner} (transpose_w={call.transpose_w})."
    )
  if call.epilogue is not None:
    shape = x.shape[0], call.columns(weights[0])
    total = jax.ShapeDtypeStruct(shape, sum_dtype(x.dtype))
    check_epilogue("grouped_matmul", call.epilogue, [total] * len(weights))
  check_sizes(group_sizes, rows=x.shape[0], num_groups=weights[0].shape[0])


def as_sizes(group_sizes: Any) -> Any:
  """The sizes of groups, which may be given as a list, as an array.

  Raises:
    DTypeError: there are none.
  """
  if group_sizes is None:
    checks.is_array("group_sizes", group_sizes)
  if isinstance(group_sizes, jax.Array):
    return group_sizes
  # By numpy, so that the values stay known while a function is traced.
  try:
    sizes = np.asarray(group_sizes)
  except jax.errors.TracerArrayConversionError:
    return jnp.asarray(group_sizes)
  except ValueError as error:  # Rows of different lengths.
    raise errors.ShapeError(
      f"group_sizes must be an int32 array; got {group_sizes!r}."
    ) from error
  fits = sizes.dtype == np.int64 and (sizes == sizes.astype(np.int32)).all()
  return sizes.astype(np.int32) if fits else sizes


def check_matrix(label: str, array: Any, shape: str) -> None:
  """Checks an operand that lies in rows.

  Raises:
    ShapeError, DTypeError: it has not two axes, or its dtype has no product.
  """
  checks.is_array(label, array)
  if array.ndim != 2:
    raise errors.ShapeError(
      f"{label} must be {shape}; got shape {array.shape}. Join its leading axes"
      " to rows that lie group after group."
    )
  checks.dtype_is_one_of(label, array, DTYPES)


def check_same_dtype(label: str, array: Any, x: Any) -> None:
  """Raises DTypeError if an operand is of another dtype than x."""
  if array.dtype != x.dtype:
    raise errors.DTypeError(
      f"x and {label} must be of one dtype; got {x.dtype} and {array.dtype}."
      f" Convert one: {label}.astype(x.dtype)."
    )


def check_sizes(
  group_sizes: Any, *, rows: int, num_groups: int | None = None
) -> None:
  """Checks the sizes of groups, their values too where these are known.

  Raises:
    ShapeError, DTypeError: they are not int32[num_groups], or do not fit.
  """
  shape = tuple(group_sizes.shape)
  if len(shape) != 1 or num_groups not in (None, *shape):
    wanted = "[groups]" if num_groups is None else f"[{num_groups}]"
    raise errors.ShapeError(
      f"group_sizes must have shape {wanted}, a size for each group; got shape"
      f" {shape}."
    )
  checks.dtype_is_one_of("group_sizes", group_sizes, (jnp.int32,))
  if isinstance(group_sizes, Tracer):
    return
  if not getattr(group_sizes, "is_fully_addressable", True):
    return
  sizes = np.asarray(group_sizes, np.int64)
  if (sizes < 0).any() or sizes.sum() > rows:
    raise errors.ShapeError(
      "group_sizes must be at least 0 and sum to no more than the"
      f" {rows} rows; got a least size of {sizes.min()} and a sum of"
      f" {sizes.sum()}."
    )


def check_gradient(x, d, group_sizes) -> None:
  """Checks that the arrays of a gradient of grouped weights fit each other.

  Raises:
    ShapeError, DTypeError: they do not; see `kernels.grouped_weight_gradient`.
  """
  check_matrix("x", x, "[rows, K]")
  check_matrix("d", d, "[rows, N]")
  check_same_dtype("d", d, x)
  if x.shape[0] != d.shape[0]:
    raise errors.ShapeError(
      f"x and d must have the same rows; got {x.shape[0]} and {d.shape[0]}."
    )
  check_sizes(group_sizes, rows=x.shape[0])
