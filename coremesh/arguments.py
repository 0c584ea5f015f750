"""What a kernel can be called with, and errors that name what it cannot."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
from typing import Any

import jax

from coremesh import _compat, errors, mesh, shapes


def checked(name: str, args: Sequence[Any]) -> Sequence[Any]:
  """The arguments, each of a type that a kernel can take."""
  try:
    for leaf in jax.tree.leaves(args):
      shapes.check_dtype("", jax.typeof(leaf))
  except (TypeError, errors.DTypeError):
    _explain_argument(name, args)
    raise
  return args


def _explain_argument(name: str, args: Sequence[Any]) -> None:
  """Raises for the first argument no kernel can take, naming it."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(args):
    where = f"Argument {jax.tree_util.keystr(path)} of kernel {name!r}"
    try:
      aval = jax.typeof(leaf)
    except TypeError as error:
      raise errors.DTypeError(
        f"{where} must be an array; got {type(leaf).__name__}. Pass what is"
        " no array to the body by functools.partial."
      ) from error
    shapes.check_dtype(where, aval)


def check_axis_names(name: str, cores: Mapping[str, int]) -> None:
  """Checks that no core axis is named like a device axis.

  Raises:
    AxisError: one is.
  """
  clash = set(cores) & set(_compat.bound_axis_sizes())
  if clash:
    raise errors.AxisError(
      f"Core axes of kernel {name!r} must not be named like device axes;"
      f" both have {sorted(clash)}. Rename one:"
      " chip.tensor_cores('core')."
    )


@contextlib.contextmanager
def explained(name: str, cores: Mapping[str, int]) -> Iterator[None]:
  """Says what to do where JAX only says what it lacks."""
  try:
    yield
  except NameError as error:
    if "unbound axis name" not in str(error):
      raise
    raise errors.AxisError(
      f"Kernel {name!r} uses an axis that is not in scope: {error}. In"
      f" scope: device axes {sorted(mesh.device_axes())}, core axes"
      f" {list(cores)}. A kernel that addresses other devices must be"
      " called inside jax.shard_map over a mesh with that axis."
    ) from error
  except ValueError as error:
    if "Unsupported TPU device kind" in str(error):
      raise errors.UnsupportedError(
        f"Kernel {name!r} asks JAX which chip it is for, and a mesh of"
        " plain CPU devices does not say. Make the mesh with"
        " chip.device_mesh(...)."
      ) from error
    if "not support Refs with varying manual axis types" in str(error):
      raise errors.UnsupportedError(
        f"Kernel {name!r} is passed a ref that varies over devices,"
        " which JAX does not allow under check_vma=True. Pass an array, or"
        " jax.shard_map(..., check_vma=False)."
      ) from error
    raise
