"""What the specs of kernels have in common."""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp

from coremesh import spec

_SEARCHED_BYTES = (2**19, 2**20, 2**21, 2**22)


def memory_bound_spec(
  function: Callable[..., Any],
  reference: Callable[..., Any],
  *,
  name: str,
  cases: dict[str, spec.Case],
  flops_per_element: int,
) -> spec.KernelSpec:
  """The spec of a kernel that reads its arguments and writes its results once.

  Args:
    function: the kernel, tuned by `block_bytes`.
    reference: the same in `jnp`.
    name: the kernel's.
    cases: its calls.
    flops_per_element: operations for each element of the first argument.
  """

  def num_flops(x, *_, **__) -> int:
    return x.size * flops_per_element

  def num_bytes(*args, **options) -> int:
    outs = jax.eval_shape(lambda *a: reference(*a, **options), *args)
    return bytes_of(*jax.tree.leaves((args, outs)))

  return spec.KernelSpec(
    name=name,
    function=function,
    reference=reference,
    cases=cases,
    search_space={"block_bytes": _SEARCHED_BYTES},
    num_flops=num_flops,
    num_bytes=num_bytes,
  )


def bytes_of(*arrays: Any) -> int:
  """Bytes of arrays, or of their types."""
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


def case(
  *shapes: tuple[int, ...], dtype: Any = jnp.float32, **options: Any
) -> spec.Case:
  """A call with arrays of some shapes and one dtype."""
  types = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
  return spec.Case(args=tuple(types), options=options)
