"""What is guarded of a program: sizes and cycles that only change for a cause.

None of them is a time of this machine, so that equal code gives equal figures.
"""

import dataclasses

OTHERS = "(XLA's own)"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperationFigures:
  """A kernel, or all operations of XLA's around the kernels together.

  Attributes:
    name: of the kernel, "#2" after the second of a name; or `OTHERS`.
    bundles: of its machine code, those of all kinds of cores.
    code: a digest of that code.
    cycles: predicted, central value, the operations one after the other; None
      if nobody knows.
    vmem_bytes_per_core: what libtpu says it uses, or what its ledger predicts;
      None for operations of XLA's.
    operations_beside: how many others XLA runs between the start and the end
      of a SparseCore kernel; None for what is not started and awaited.
  """

  name: str
  bundles: int
  code: str
  cycles: int | None
  vmem_bytes_per_core: int | None = None
  operations_beside: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
  """A compiled program.

  Attributes:
    code_bytes: of the whole program, as libtpu counts them.
    arguments: a digest of their types, and of values that may steer a kernel.
    operations: kernels by name, then those of XLA's.
    unpredicted: why there are no cycles; None if there are.
    num_assumed: how many things the prediction takes for granted.
  """

  code_bytes: int
  arguments: str
  operations: tuple[OperationFigures, ...]
  unpredicted: str | None
  num_assumed: int

  def operation(self, name: str) -> OperationFigures | None:
    """The operation of a name, or None."""
    return next((o for o in self.operations if o.name == name), None)
