"""How kernels that start their own copies are launched."""

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from coremesh import launch, place


def kernel(
  body: Callable[..., None],
  *,
  out: Any,
  scratch: Any,
  vmem_limit_bytes: int,
  name: str,
) -> launch.Kernel:
  """A kernel on all TensorCores of a device, which tells no other device.

  Args:
    body, out, scratch, name: as for `cm.kernel`.
    vmem_limit_bytes: of a core, with what the compiler spills.
  """
  return launch.kernel(
    body,
    mesh=place.current_chip().tensor_cores("core"),
    out=out,
    scratch=scratch,
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes),
    num_links=0,
    name=name,
  )
