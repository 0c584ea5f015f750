"""Kernels that are ready to use; each is a function of arrays.

Call them inside `jax.shard_map` on every device, or outside it on one.
"""

from coremesh.kernels import epilogues as epilogues
from coremesh.kernels.attention import attention as attention
from coremesh.kernels.attention import (
  attention_reference as attention_reference,
)
from coremesh.kernels.elementwise import elementwise as elementwise
from coremesh.kernels.elementwise import (
  elementwise_reference as elementwise_reference,
)
from coremesh.kernels.grouped_matmul import grouped_matmul as grouped_matmul
from coremesh.kernels.grouped_matmul import (
  grouped_matmul_reference as grouped_matmul_reference,
)
from coremesh.kernels.grouped_weight_gradient import (
  grouped_weight_gradient as grouped_weight_gradient,
)
from coremesh.kernels.grouped_weight_gradient import (
  grouped_weight_gradient_reference as grouped_weight_gradient_reference,
)
from coremesh.kernels.matmul import matmul as matmul
from coremesh.kernels.matmul import matmul_reference as matmul_reference
from coremesh.kernels.norms import layer_norm as layer_norm
from coremesh.kernels.norms import layer_norm_reference as layer_norm_reference
from coremesh.kernels.norms import rms_norm as rms_norm
from coremesh.kernels.norms import rms_norm_reference as rms_norm_reference
from coremesh.kernels.reductions import reduce_max as reduce_max
from coremesh.kernels.reductions import (
  reduce_max_reference as reduce_max_reference,
)
from coremesh.kernels.reductions import reduce_mean as reduce_mean
from coremesh.kernels.reductions import (
  reduce_mean_reference as reduce_mean_reference,
)
from coremesh.kernels.reductions import reduce_sum as reduce_sum
from coremesh.kernels.reductions import (
  reduce_sum_reference as reduce_sum_reference,
)
from coremesh.kernels.softmax import log_softmax as log_softmax
from coremesh.kernels.softmax import (
  log_softmax_reference as log_softmax_reference,
)
from coremesh.kernels.softmax import softmax as softmax
from coremesh.kernels.softmax import softmax_reference as softmax_reference
