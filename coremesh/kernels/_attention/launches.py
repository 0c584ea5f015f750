"""What launches of the kernels of attention have in common."""

from collections.abc import Callable
from typing import Any

from coremesh import launch, place
from coremesh.kernels import launches


def kernel(
  body: Callable[..., None], *, out: Any, scratch: Any, name: str
) -> launch.Kernel:
  """A kernel on all TensorCores, which may use nearly all of their VMEM."""
  most = place.current_chip().vmem_bytes_per_tensor_core
  return launches.kernel(
    body, out=out, scratch=scratch, vmem_limit_bytes=most * 9 // 10, name=name
  )
