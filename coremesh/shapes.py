"""Output and scratch types that follow from a kernel's arguments."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import errors

type CoreShape = dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Like:
  """An output like one argument; make it with `cm.like`."""

  argument: int
  dtype: Any = None

  def resolve(self, avals: Sequence[Any]) -> Any:
    """The type, for these argument types."""
    return jax.tree.map(self._one, _argument(self.argument, avals))

  def _one(self, aval):
    dtype = aval.dtype if self.dtype is None else self.dtype
    return jax.ShapeDtypeStruct(aval.shape, dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VmemSlab:
  """A core's share of one argument; make it with `cm.vmem_slab`."""

  argument: int
  axis: int = 0
  over: str | tuple[str, ...] = "core"
  dtype: Any = None

  def resolve(self, avals: Sequence[Any], cores: CoreShape) -> Any:
    """The VMEM type, for these argument types and these cores."""
    aval = _argument(self.argument, avals)
    if not hasattr(aval, "shape"):
      raise errors.ShapeError(
        f"cm.vmem_slab({self.argument}) needs an array argument; argument"
        f" {self.argument} is a {type(aval).__name__}."
      )
    rank = len(aval.shape)
    if not -rank <= self.axis < rank:
      raise errors.ShapeError(
        f"axis of cm.vmem_slab({self.argument}) must be in [-{rank}, {rank})"
        f" for shape {tuple(aval.shape)}; got {self.axis}."
      )
    axis = self.axis % rank
    workers = self._workers(cores)
    if aval.shape[axis] % workers:
      raise errors.ShapeError(
        f"cm.vmem_slab({self.argument}): axis {axis} of shape"
        f" {tuple(aval.shape)} must divide by the {workers} workers along"
        f" {self.over!r}. Pad it to a multiple of {workers}, or share it"
        " unevenly with cm.split and a scratch of its max_size."
      )
    shape = list(aval.shape)
    shape[axis] //= workers
    dtype = aval.dtype if self.dtype is None else self.dtype
    return pltpu.VMEM(tuple(shape), dtype)

  def _workers(self, cores: CoreShape) -> int:
    names = (self.over,) if isinstance(self.over, str) else self.over
    unknown = [n for n in names if n not in cores]
    if unknown:
      raise errors.AxisError(
        f"over of cm.vmem_slab must name core axes of the kernel,"
        f" {list(cores)}; got {unknown}."
      )
    if len(set(names)) != len(names) or not names:
      raise errors.AxisError(
        f"over of cm.vmem_slab must be one or more different names; got"
        f" {names}."
      )
    return math.prod(cores[n] for n in names)


def like(argument: int, *, dtype: Any = None) -> Like:
  """An output with the shape of one of the kernel's arguments.

  Args:
    argument: which one, counted from 0.
    dtype: another dtype for it; default that of the argument.

  Returns:
    A value for `out=` of `cm.kernel`.
  """
  return Like(argument=_check_index(argument), dtype=dtype)


def vmem_slab(
  argument: int,
  *,
  axis: int = 0,
  over: str | Sequence[str] = "core",
  dtype: Any = None,
) -> VmemSlab:
  """VMEM scratch that holds a core's equal share of one argument.

  The counterpart of `cm.slab`, which says where the share is.

  Args:
    argument: which argument of the kernel, counted from 0.
    axis: the axis that is shared out; negative counts from the end.
    over: the core axes it is shared over.
    dtype: another dtype for it; default that of the argument.

  Returns:
    A value for `scratch=` of `cm.kernel`.
  """
  names = over if isinstance(over, str) else tuple(over)
  return VmemSlab(
    argument=_check_index(argument), axis=axis, over=names, dtype=dtype
  )


def resolve_out(out: Any, avals: Sequence[Any]) -> Any:
  """`out=` of a kernel with everything deferred made a type.

  Args:
    out: a pytree of `cm.like`, `jax.ShapeDtypeStruct`, arrays and Pallas
      memory types, or a function from argument types to such a pytree.
    avals: the types of the kernel's arguments.

  Raises:
    ShapeError: what is no array type.
    DTypeError: a 64-bit output.
  """
  tree = _call_if_function(out, avals)
  return jax.tree.map(
    lambda leaf: _out_type(leaf, avals), tree, is_leaf=_is_deferred
  )


def _out_type(leaf: Any, avals: Sequence[Any]) -> Any:
  if isinstance(leaf, Like):
    return jax.tree.map(lambda t: check_dtype("out", t), leaf.resolve(avals))
  if isinstance(leaf, VmemSlab):
    raise errors.ShapeError(
      "out holds arrays in HBM; cm.vmem_slab is for scratch. Use cm.like."
    )
  if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
    raise errors.ShapeError(
      "out must be made of cm.like(i), jax.ShapeDtypeStruct, arrays or Pallas"
      f" memory types; got {leaf!r}."
    )
  return check_dtype("out", leaf)


def resolve_scratch(
  scratch: Any, avals: Sequence[Any], cores: CoreShape
) -> Any:
  """`scratch=` of a kernel with everything deferred made a type.

  Args:
    scratch: a dict or sequence of Pallas memory types and `cm.vmem_slab`, or a
      function from argument types to such.
    avals: the types of the kernel's arguments.
    cores: the cores along each axis of the kernel's meshes.

  Raises:
    ShapeError: a slab that does not divide, an empty buffer, a `cm.like`, or
      no dict or sequence.
    DTypeError: a 64-bit scratch.
  """
  tree = _call_if_function(scratch, avals)
  if not isinstance(tree, Mapping | Sequence):
    raise errors.ShapeError(
      f"scratch must be a dict or a sequence of memory types; got {tree!r}."
    )

  def one(leaf):
    if isinstance(leaf, Like):
      raise errors.ShapeError(
        "scratch holds memory of a core; cm.like is for out. Use cm.vmem_slab"
        " or pltpu.VMEM(shape, dtype)."
      )
    if isinstance(leaf, VmemSlab):
      leaf = leaf.resolve(avals, cores)
    if 0 in getattr(leaf, "shape", ()):
      # XLA and libtpu crash.
      raise errors.ShapeError(
        f"scratch must not be empty; got shape {leaf.shape}. Do not call the"
        " kernel where the argument it is made for is empty."
      )
    return check_dtype("scratch", leaf)

  return jax.tree.map(one, tree, is_leaf=_is_deferred)


def check_dtype(argument: str, leaf: Any) -> Any:
  """Returns `leaf` if a TPU kernel can hold its dtype.

  Raises:
    DTypeError: 64-bit or complex. A Pallas pipeline over a 64-bit array never
      finishes tracing, so this is found first. Or a key of `jax.random`.
  """
  dtype = getattr(leaf, "dtype", None)
  if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
    raise errors.DTypeError(
      f"{argument} is a key of jax.random; a TPU kernel holds numbers only."
      " Pass jax.random.key_data(key)."
    )
  if isinstance(dtype, np.dtype) and (dtype.itemsize > 4 or dtype.kind == "c"):
    raise errors.DTypeError(
      f"{argument} has dtype {dtype}; a TPU kernel holds elements of at most"
      " 32 bits and no complex numbers. Convert it with"
      f" .astype(jnp.{_narrower(dtype)})."
    )
  return leaf


def type_without_empty_axes(leaf: Any) -> Any:
  """An array type with 1 in place of each 0 of its shape.

  libtpu crashes on a kernel with an empty operand. So an empty array goes in
  as a small one, of which the body sees an empty part.
  """
  if 0 not in getattr(leaf, "shape", ()):
    return leaf
  return leaf.update(shape=tuple(max(n, 1) for n in leaf.shape))


def all_empty(out: Any) -> bool:
  """Whether a kernel has outputs and not one element of them to write."""
  leaves = jax.tree.leaves(out)
  return bool(leaves) and all(0 in getattr(t, "shape", ()) for t in leaves)


def without_empty_axes(array: Any) -> Any:
  """The array that goes in for `array`; see `type_without_empty_axes`."""
  shape = jnp.shape(array)
  if 0 not in shape:
    return array
  return jnp.zeros(tuple(max(n, 1) for n in shape), array.dtype)


def with_empty_axes(result: Any, leaf: Any) -> Any:
  """The empty part of a result that its declared type says is empty."""
  if 0 not in getattr(leaf, "shape", ()):
    return result
  return jax.lax.full_like(result, 0, shape=leaf.shape)


def as_empty_ref(leaf: Any, ref: Any) -> Any:
  """The empty part of a ref that the body's type says is empty."""
  if 0 not in getattr(leaf, "shape", ()):
    return ref
  return ref.at[tuple(pl.ds(0, n) for n in leaf.shape)]


def _narrower(dtype: np.dtype) -> str:
  return {"i": "int32", "u": "uint32"}.get(dtype.kind, "float32")


def _is_deferred(leaf: Any) -> bool:
  return isinstance(leaf, Like | VmemSlab)


def _call_if_function(tree: Any, avals: Sequence[Any]) -> Any:
  is_function = isinstance(tree, Callable) and not hasattr(tree, "dtype")
  return tree(*avals) if is_function else tree


def _check_index(argument: Any) -> int:
  if isinstance(argument, bool) or not isinstance(argument, int):
    raise errors.ShapeError(
      f"argument must be the position of a kernel argument, an int; got"
      f" {argument!r}."
    )
  return argument


def _argument(index: int, avals: Sequence[Any]) -> Any:
  if not 0 <= index < len(avals):
    raise errors.ShapeError(
      f"argument must be in [0, {len(avals)}), the kernel was called with"
      f" {len(avals)} arguments; got {index}."
    )
  return avals[index]
