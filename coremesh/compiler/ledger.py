"""What a kernel holds on each core, buffer by buffer, against the limits."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any

from jax.experimental.pallas import tpu as pltpu
import jax.extend.core as jex_core

from coremesh import _compat, chips
from coremesh._compat import aot
from coremesh.compiler import usage

_MEMORIES = ("VMEM", "SMEM", "semaphores")
# What libtpu 0.0.50.1 lets a kernel take of a TensorCore's VMEM; the rest is
# for what XLA keeps there around it.
_SCOPED_VMEM_MIB = {"v4": 16, "v5e": 16, "v5p": 16, "v6e": 32, "tpu7x": 32}
_RAISED_BY = (
  "raised by pltpu.CompilerParams(vmem_limit_bytes=...) or the flag"
  " xla_tpu_scoped_vmem_limit_kib"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
  """One buffer of a kernel.

  Attributes:
    name: the argument of the kernel's body that it is.
    memory: "VMEM", "SMEM" or "semaphores".
    shape: of one copy, before it is padded to tiles.
    dtype: of its elements.
    copies: how many are held at once: 2 if blocks are fetched while others
      are computed on.
    amount_per_core: bytes of all copies, padded; or how many semaphores.
    argument: its number among those of the body; -1 for what the body makes.
    is_block: whether it is a block of a grid.
    is_used: whether the body uses it; libtpu leaves out scratch it does not.
  """

  name: str
  memory: str
  shape: tuple[int, ...]
  dtype: str
  copies: int
  amount_per_core: int
  argument: int = -1
  is_block: bool = False
  is_used: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
  """What one kernel holds on each core.

  Attributes:
    kernel: its name.
    chip: the slice, as `cm.chip` names it.
    is_sparse: whether it runs on SparseCores.
    entries: its buffers, in the order of its arguments.
    vmem_limit_bytes: what it asked for with `vmem_limit_bytes`, or the flag
      `xla_tpu_scoped_vmem_limit_kib`; None if the compiler's own limit holds.
    collective_id: of the barrier semaphore, or None.
    used_vmem_bytes: what libtpu used of the VMEM, or on a SparseCore what
      Mosaic allocates of a subcore's; None before compilation.
    used_smem_bytes: what Mosaic allocates of the SMEM; as above. What libtpu
      adds, as scalars without a register, it does not say.
    used_semaphores: what Mosaic allocates; as above. Those with which libtpu
      copies the blocks of a grid come later and are its own.
    kept_by_xla: the arguments that XLA keeps in VMEM around the kernel, by
      their number. Their blocks are used where they are, so that libtpu needs
      no copies of them; this is known after compilation only.
    spilled_bytes: VMEM for vectors that found no register; as above. They share
      room where they are not needed at the same time, such as in loops of which
      one is over first, on v4 with what libtpu takes for itself, too.
    spilled_vector_bytes: what these vectors would take without sharing.
    own_vmem_bytes: what libtpu takes of VMEM for itself: by its own words for
      it, such as "temp for sublane replication", the bytes; as above.
    staged_bytes: VMEM through which scalar operands go to SMEM; as above.
    in_registers: the arguments, by their number, that are scratch which no
      instruction touches, as libtpu holds what is stored there in registers.
  """

  kernel: str
  chip: str
  is_sparse: bool
  entries: tuple[Entry, ...]
  vmem_limit_bytes: int | None
  collective_id: int | None
  used_vmem_bytes: int | None = None
  used_smem_bytes: int | None = None
  used_semaphores: int | None = None
  kept_by_xla: tuple[int, ...] = ()
  spilled_bytes: int = 0
  spilled_vector_bytes: int = 0
  own_vmem_bytes: tuple[tuple[str, int], ...] = ()
  staged_bytes: int = 0
  in_registers: tuple[int, ...] = ()

  def predicted(self, memory: str) -> int:
    """Bytes of a memory, or semaphores, that a core holds at once."""
    return sum(e.amount_per_core for e in self.entries if e.memory == memory)

  @property
  def least_vmem_entries(self) -> list[Entry]:
    """The buffers of VMEM it must have: no blocks, which XLA may hold."""
    return [
      e
      for e in self.entries
      if e.memory == "VMEM" and e.is_used and not e.is_block
    ]

  @property
  def least_vmem_bytes(self) -> int:
    """VMEM without which it cannot run."""
    return sum(e.amount_per_core for e in self.least_vmem_entries)

  @property
  def expected_vmem_bytes(self) -> int:
    """Predicted VMEM, corrected by what compilation tells.

    Without what is not used, what XLA keeps there anyway and scratch that is in
    registers instead, and with what is spilled, staged or libtpu's own.
    """
    return (
      self.spilled_bytes
      + self.staged_bytes
      + sum(num_bytes for _, num_bytes in self.own_vmem_bytes)
      + sum(
        e.amount_per_core
        for e in self.entries
        if e.memory == "VMEM" and not self._is_left_out(e)
      )
    )

  def _is_left_out(self, entry: Entry) -> bool:
    return (
      not entry.is_used
      or (entry.is_block and entry.argument in self.kept_by_xla)
      or (not entry.is_block and entry.argument in self.in_registers)
    )

  def _left_out(self) -> Mapping[str, list[str]]:
    """The buffers of the VMEM that libtpu does without, by the reason."""
    vmem = [e for e in self.entries if e.memory == "VMEM"]
    left_out = [e for e in vmem if self._is_left_out(e)]
    found: dict[str, list[str]] = {}
    for entry in left_out:
      if not entry.is_used:
        why = "nothing uses, so that libtpu leaves out"
      elif entry.is_block:
        why = "XLA keeps in VMEM, so that libtpu needs no blocks"
      else:
        why = "libtpu holds in registers"
      found.setdefault(why, []).append(entry.name)
    return found

  def used(self, memory: str) -> int | None:
    """What the compiler used of a memory, or None; see the attributes."""
    return {
      "VMEM": self.used_vmem_bytes,
      "SMEM": self.used_smem_bytes,
      "semaphores": self.used_semaphores,
    }[memory]

  def limit(self, memory: str) -> int | None:
    """What a kernel may take of a memory of a core; None if nobody says.

    Of a TensorCore's VMEM that is a share which the kernel can ask to be more.
    """
    chip = chips.chip(self.chip)
    if memory == "VMEM":
      if self.is_sparse:
        return chip.vmem_bytes_per_vector_subcore
      return self.vmem_limit_bytes or scoped_vmem_bytes(chip)
    if memory == "SMEM" and not self.is_sparse:
      return chip.smem_bytes_per_tensor_core
    if memory == "semaphores" and not self.is_sparse:
      return chip.semaphores_per_core("tensor") or None
    return None

  def __str__(self) -> str:
    lines = [f"{self.kernel} on {self.chip}, each core:"]
    for e in self.entries:
      shape = "x".join(map(str, e.shape)) or "scalar"
      copies = f" x {e.copies}" if e.copies > 1 else ""
      what = f"{e.dtype}[{shape}]{copies}"
      lines.append(
        f"  {e.memory:10} {e.name:20} {what:28} {e.amount_per_core:>12,}"
      )
    lines += [self._sum(memory) for memory in _MEMORIES]
    if self.collective_id is not None:
      lines.append(f"  barrier    of collective_id {self.collective_id}")
    if self.spilled_vector_bytes:
      lines.append(self._spilled())
    for what, num_bytes in self.own_vmem_bytes:
      lines.append(f"  {num_bytes:,} of VMEM for libtpu's own use: {what}")
    if self.staged_bytes:
      lines.append(f"  {self.staged_bytes:,} of VMEM to bring scalars to SMEM")
    if self.used_vmem_bytes is not None:
      for why, names in self._left_out().items():
        lines.append(f"  {why}: {', '.join(names)}")
      if unexplained := self.used_vmem_bytes - self.expected_vmem_bytes:
        kind = "more" if unexplained > 0 else "less"
        text = f"{abs(unexplained):,} of VMEM {kind} than all this explains"
        lines.append(f"  {text}")
    return "\n".join(lines)

  def _spilled(self) -> str:
    text = f"  {self.spilled_bytes:,} of VMEM for vectors without a register"
    if self.spilled_vector_bytes > self.spilled_bytes:
      text += f", which share room: {self.spilled_vector_bytes:,} together"
    return text

  def _sum(self, memory: str) -> str:
    """A line: what is predicted, used and allowed of a memory."""
    predicted, used = self.predicted(memory), self.used(memory)
    limit = self.limit(memory)
    text = f"  {memory:10} {predicted:,} predicted"
    if used is not None:
      text += f", {used:,} used"
    if limit is not None:
      text += f", of {limit:,}"
    is_tight = memory == "VMEM" and limit and 2 * predicted > limit
    if is_tight and not self.is_sparse:
      has = chips.chip(self.chip).vmem_bytes_per_tensor_core
      text += f" a kernel may take; the core has {has:,}, {_RAISED_BY}"
    return text


def scoped_vmem_bytes(chip: chips.Chip) -> int:
  """What libtpu lets a kernel take of a TensorCore's VMEM by itself."""
  return _SCOPED_VMEM_MIB[chip.generation] * 2**20


def of_program(
  jaxpr: jex_core.Jaxpr,
  chip: chips.Chip,
  *,
  vmem_limit_bytes: int | None = None,
) -> tuple[Ledger, ...]:
  """The kernels of a traced program, in order, before they are compiled.

  Args:
    jaxpr: the program.
    chip: what for.
    vmem_limit_bytes: that of kernels which ask for none, if a flag says so.
  """
  return tuple(
    _of_kernel(eqn, chip, vmem_limit_bytes) for eqn in usage.kernels(jaxpr)
  )


def _of_kernel(
  eqn: jex_core.JaxprEqn, chip: chips.Chip, vmem_limit_bytes: int | None
) -> Ledger:
  params = eqn.params.get("compiler_params")
  meshes = eqn.params.get("meshes") or ()
  return Ledger(
    kernel=aot.body_name(eqn),
    chip=chip.name,
    is_sparse=any(map(usage.is_sparse, meshes)),
    entries=tuple(_entries(eqn, meshes)),
    vmem_limit_bytes=getattr(params, "vmem_limit_bytes", None)
    or vmem_limit_bytes,
    collective_id=getattr(params, "collective_id", None),
  )


def _entries(eqn: jex_core.JaxprEqn, meshes: Sequence[Any]) -> Iterator[Entry]:
  bodies = aot.kernel_bodies(eqn)
  for mesh, body in zip(meshes or (None,), bodies, strict=True):
    windows = aot.windows(eqn)
    names = body.debug_info.arg_names or [""] * len(body.invars)
    inputs = (v for e in body.eqns for v in e.invars)
    used = {v for v in inputs if isinstance(v, jex_core.Var)}
    for number, (var, name) in enumerate(zip(body.invars, names, strict=True)):
      window = windows.get(number)
      is_used = window is not None or var in used
      for entry in _entry(number, str(name), var.aval, window):
        yield dataclasses.replace(entry, is_used=is_used)
    is_sparse = usage.is_sparse(mesh)
    peak = usage.peak_of_scopes(body, is_sparse=is_sparse)
    for memory, amount in zip(
      _MEMORIES,
      (
        peak.vmem_bytes_per_core,
        peak.smem_bytes_per_core,
        peak.semaphores_per_core,
      ),
      strict=True,
    ):
      if amount:
        yield Entry(
          name="scopes, the most at once",
          memory=memory,
          shape=(),
          dtype="",
          copies=1,
          amount_per_core=amount,
        )


def _entry(
  number: int, name: str, aval: Any, copies: int | None
) -> Iterator[Entry]:
  space = _compat.memory_space_of_type(aval)
  if copies is not None and aot.is_default_space(space):
    space = pltpu.VMEM
  memory = {
    pltpu.VMEM: "VMEM",
    pltpu.SMEM: "SMEM",
    pltpu.SEMAPHORE: "semaphores",
  }.get(space)
  if memory is None:
    return
  one = (
    math.prod(aval.shape)
    if memory == "semaphores"
    else usage.padded_bytes(aval)
  )
  yield Entry(
    name=name,
    memory=memory,
    shape=tuple(aval.shape),
    dtype=str(aval.dtype),
    copies=copies or 1,
    amount_per_core=one * (copies or 1),
    argument=number,
    is_block=copies is not None,
  )
