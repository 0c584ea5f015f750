"""What launches of the kernels of attention have in common."""

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from coremesh import launch, place


def kernel(
  body: Callable[..., None], *, out: Any, scratch: Any, name: str
) -> launch.Kernel:
  """A kernel on all TensorCores, which may use nearly all of their VMEM."""
  chip = place.current_chip()
  return launch.kernel(
    body,
    mesh=chip.tensor_cores("core"),
    out=out,
    scratch=scratch,
    compiler_params=pltpu.CompilerParams(
      vmem_limit_bytes=chip.vmem_bytes_per_tensor_core * 9 // 10
    ),
    num_links=0,
    name=name,
  )
