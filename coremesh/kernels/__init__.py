"""Kernels that are ready to use; each is a function of arrays.

Call them inside `jax.shard_map` on every device, or outside it on one.
"""

from coremesh.kernels.matmul import matmul as matmul
from coremesh.kernels.matmul import matmul_reference as matmul_reference
