"""What straight-line code of a kernel costs, written into its program.

One line `w.busy_ps += 5715` stands for a stretch without branches and without
synchronisation. It is there only when a timeline is asked for.
"""

from collections import Counter
import math
from typing import Any

from coremesh._compat import kernel_ir
from coremesh.simulate import rates as chip_rates

_LOADS = ("state.get", "pallas.load", "sc.load", "sc.gather")
_STORES = (
  *("state.swap", "state.addupdate", "pallas.swap"),
  *("sc.swap", "sc.scatter"),
)
_SYNCHRONISING = (
  *("pallas.semaphore_signal", "pallas.semaphore_wait"),
  *("pallas.semaphore_read", "sc.barrier"),
  *("tpu.dma_start", "tpu.dma_wait"),
)
# They name or rearrange values where they are, or only concern the compiler.
_FREE = (
  *("reshape", "broadcast_in_dim", "squeeze", "iota", "pallas.multiple_of"),
  *("copy", "copy_p", "stop_gradient", "optimization_barrier"),
)


class Costs:
  """Adds up the costs of the equations of one worker's program.

  Args:
    rates: of the chip.
    is_sparse: whether the worker is on a SparseCore.
    uncounted: operations that are programs of other equations.
  """

  def __init__(
    self,
    rates: chip_rates.Rates,
    *,
    is_sparse: bool,
    uncounted: frozenset[str],
  ):
    self._rates = rates
    self._is_sparse = is_sparse
    self._uncounted = uncounted
    self._operations: Counter[str] = Counter()
    self._product_ps = 0

  def add(self, em: Any, eqn: Any, name: str) -> None:
    """Counts an equation, before it is written."""
    if name in _SYNCHRONISING:
      self.flush(em)
    elif name == "sc.fetch_and_add":
      self.flush(em)  # There and back.
      em.line(f"w.busy_ps += {2 * chip_rates.CORE_SIGNAL_PS}")
    elif name in ("dot_general", "conv_general_dilated", "tpu.conv"):
      self._product(eqn, name)
    elif name in ("tpu.matmul_acc_lhs", "tpu.matmul_lhs_fifo"):
      self._product_with_loaded(eqn)
    elif name not in self._uncounted and name not in _FREE:
      self._simple(eqn, name)

  def flush(self, em: Any) -> None:
    """Writes what has been counted."""
    slots = self._rates.slots(is_sparse=self._is_sparse)
    cycles = max(
      (math.ceil(n / slots[kind]) for kind, n in self._operations.items()),
      default=0,
    )
    cost = max(self._rates.cycles_ps(cycles), self._product_ps)
    self._operations.clear()
    self._product_ps = 0
    if cost:
      em.line(f"w.busy_ps += {cost}")

  def _simple(self, eqn: Any, name: str) -> None:
    in_types, out_types = kernel_ir.eqn_types(eqn)
    shapes = [
      type_.shape
      for type_ in (*in_types, *out_types)
      if not hasattr(type_, "inner_aval") and hasattr(type_, "shape")
    ]
    shapes = [s for s in shapes if all(isinstance(n, int) for n in s)]
    if not any(shapes):
      self._operations["scalar"] += 1
      return
    count = max(
      self._rates.registers(s, is_sparse=self._is_sparse) for s in shapes
    )
    kind = "vector"
    if name in _LOADS:
      kind = "load"
    elif name in _STORES:
      kind = "store"
    self._operations[kind] += count

  def _product(self, eqn: Any, name: str) -> None:
    (lhs, rhs, *_), (out, *_) = kernel_ir.eqn_types(eqn)
    if name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      depth = math.prod(lhs.shape[i] for i in contracted)
    else:  # Each output takes the weights of one output feature.
      numbers = eqn.params["dimension_numbers"]
      depth = math.prod(rhs.shape) // rhs.shape[numbers.rhs_spec[0]]
    precision = eqn.params.get("precision")
    if isinstance(precision, tuple):
      precision = precision[0]
    self._product_ps += self._rates.product_ps(
      2 * math.prod(out.shape) * depth,
      str(lhs.dtype),
      getattr(precision, "name", "DEFAULT"),
    )

  def _product_with_loaded(self, eqn: Any) -> None:
    in_types, _ = kernel_ir.eqn_types(eqn)
    lhs = in_types[-1]
    flops = 2 * math.prod(lhs.shape) * self._rates.chip.mxu_columns
    self._product_ps += self._rates.product_ps(flops, str(lhs.dtype), "DEFAULT")
