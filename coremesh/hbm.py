"""Which arguments of a kernel stay in HBM, whatever XLA would gain elsewhere.

A kernel hides the way of its arguments from HBM behind its own work. Where XLA
copies one to VMEM before the kernel, that copy is hidden by nothing if the
kernel is all there is to do, and the kernel copies the array once more.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from coremesh import _compat, chips

# Generations for which libtpu copies arguments to VMEM, of up to half of it.
_PREFETCHING = ("tpu7x",)
# Shorter copies take hardly longer than their latency, wherever they are from.
_LEAST_BYTES = 2**20


def kept(args: Any, *, meshes: Sequence[Any], chip: chips.Chip) -> Any:
  """The arguments of a kernel, those that are to stay in HBM marked so.

  Args:
    args: a pytree of arrays and refs.
    meshes: of the kernel; SparseCores have no VMEM that XLA would copy to.
    chip: that it is compiled for.
  """
  on_tensor_cores = all(isinstance(m, pltpu.TensorCoreMesh) for m in meshes)
  if not on_tensor_cores or chip.generation not in _PREFETCHING:
    return args
  return jax.tree.map(_kept, args)


def _kept(arg: Any) -> Any:
  aval = jax.typeof(arg)
  # Pallas converts booleans by an operation that takes none in HBM.
  if _compat.is_ref_type(aval) or aval.dtype == bool:
    return arg
  if aval.size * aval.dtype.itemsize < _LEAST_BYTES:
    return arg
  return pltpu.with_memory_space_constraint(arg, pltpu.HBM)
