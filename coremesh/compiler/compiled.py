"""What the compiler made of a program."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from coremesh import errors
from coremesh.compiler import ledger, usage
from coremesh.compiler.operands import KernelOperands


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
  """One operation of a compiled program: a kernel, or something of XLA's.

  Attributes:
    name: the HLO instruction, such as "double.1"; "TLP" is the program around
      all of them.
    kernel: the name of the kernel it runs; None for an operation of XLA's.
    texts: what the compiler wrote, by stage.
  """

  name: str
  kernel: str | None
  texts: Mapping[str, str] = dataclasses.field(repr=False)

  @property
  def stages(self) -> tuple[str, ...]:
    """The stages there are texts of."""
    return tuple(self.texts)

  def text(self, stage: str) -> str:
    """The text of a stage.

    Args:
      stage: "mosaic", the kernel as handed to the compiler; "mosaic-layouts",
        the same after vectors got their layouts; "llo", before scheduling;
        "bundles", the machine code, a line for each cycle; "schedule", what
        the scheduler says of it; "sparsecore", a SparseCore's machine code.

    Raises:
      StageError: there is no such text; it lists those there.
    """
    return _text(self.texts, stage, f"operation {self.name!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """A program that libtpu has compiled.

  Attributes:
    chip: what for, such as "v5p:2x2x1", or the kind of its devices.
    num_devices: how many devices it is for.
    kernels: what each kernel in it holds, counted before compilation.
    ledgers: the buffers of each of them, and what libtpu used. Of kernels of
      one name and alike, which is which is not told.
    operations: kernels and operations of XLA's that have machine code.
    texts: of the whole program, by stage.
    memory: bytes a device, as libtpu counts them.
    costs: XLA's estimates: "flops", "bytes accessed" and others.
    dropped: names of kernels that were traced and are not in it: no result
      needs them, or another call is the same.
    compile_seconds: wall time of tracing, lowering and compiling, this
      machine.
    from_cache: whether the disk had it.
    operands: what kernels are given, as far as it follows from arguments that
      had values.
  """

  chip: str
  num_devices: int
  kernels: tuple[usage.KernelUsage, ...]
  ledgers: tuple[ledger.Ledger, ...]
  operations: tuple[Operation, ...]
  texts: Mapping[str, str] = dataclasses.field(repr=False)
  memory: Mapping[str, int] = dataclasses.field(repr=False)
  costs: Mapping[str, float] = dataclasses.field(repr=False)
  compile_seconds: float
  from_cache: bool
  dropped: tuple[str, ...] = ()
  operands: tuple[KernelOperands, ...] = dataclasses.field(
    default=(), repr=False
  )

  @property
  def code_bytes(self) -> int:
    """Size of the machine code."""
    return self.memory["generated_code_size_in_bytes"]

  @property
  def temporary_bytes_per_device(self) -> int:
    """HBM for intermediate results."""
    return self.memory["temp_size_in_bytes"]

  @property
  def stages(self) -> tuple[str, ...]:
    """The stages `text` knows, of the program and of its operations."""
    found = dict.fromkeys(self.texts)
    for operation in self.operations:
      found.update(dict.fromkeys(operation.stages))
    return tuple(found)

  def text(self, stage: str, operation: str | None = None) -> str:
    """The text of a stage.

    Args:
      stage: of the program: "hlo", what XLA made of it; "stablehlo", what it
        was given; "vmem-report", an HTML page of what holds VMEM when. Or one
        of `Operation.text`.
      operation: whose text, by its name or that of its kernel. Not needed for
        a text of the program, or if a single kernel has the stage.

    Raises:
      StageError: there is no such text, or several; it lists those there.
    """
    if operation is not None:
      return self.operation(operation).text(stage)
    if stage in self.texts:
      return self.texts[stage]
    if stage not in self.stages:
      return _text({s: "" for s in self.stages}, stage, "the program")
    having = [o for o in self.operations if stage in o.texts]
    kernels = [o for o in having if o.kernel is not None]
    chosen = kernels or having
    if len(chosen) > 1:
      raise errors.StageError(
        f"{len(chosen)} operations have a stage {stage!r}: name one,"
        f" text({stage!r}, {chosen[0].name!r}); there are"
        f" {', '.join(repr(o.name) for o in chosen)}."
      )
    return chosen[0].text(stage)

  def operation(self, name: str) -> Operation:
    """An operation by its own name or that of its kernel.

    Raises:
      StageError: there is none, or several; it lists those there.
    """
    found = [o for o in self.operations if o.name == name]
    found = found or [o for o in self.operations if o.kernel == name]
    if len(found) == 1:
      return found[0]
    what = "no operation" if not found else f"{len(found)} operations"
    among = found or self.operations
    raise errors.StageError(
      f"The program has {what} {name!r}; choose from"
      f" {', '.join(repr(o.name) for o in among)}."
    )


def _text(texts: Mapping[str, Any], stage: str, whose: str) -> str:
  if stage not in texts:
    raise errors.StageError(
      f"stage must be one of {', '.join(map(repr, texts)) or 'none'}, which is"
      f" what the compiler wrote of {whose}; got {stage!r}."
    )
  return texts[stage]
