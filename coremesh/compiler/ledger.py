"""What a kernel holds on each core, buffer by buffer, against the limits."""

from collections.abc import Iterator, Sequence
import dataclasses
import json
import math
import re
from typing import Any

from jax.experimental.pallas import tpu as pltpu
import jax.extend.core as jex_core

from coremesh import _compat, chips
from coremesh._compat import aot
from coremesh.compiler import dumps, usage

_MEMORIES = ("VMEM", "SMEM", "semaphores")
_USED = re.compile(r'"used_scoped_memory_configs":(\[[^\]]*\])')
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPERAND_IN_VMEM = re.compile(
  r"inlined_call_operand\.vmem \[shape: \w+\[[\d,]*\], index: (\d+)"
)
_STAGED = re.compile(
  r"inlined_call_operand\.<no memory space> \[shape: \w+\[([\d,]*)\], index:"
)
_SPILLED = re.compile(r"vmem:\[#allocation(\d+)_spill")
_REGISTER_BYTES = 8 * 128 * 4
_VMEM_COLOR = "1"


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
    vmem_limit_bytes: what it asked for with `vmem_limit_bytes`, or None:
      libtpu's own limit, `--xla_tpu_scoped_vmem_limit_kib`, holds.
    collective_id: of the barrier semaphore, or None.
    used_vmem_bytes: what libtpu used of the VMEM; None if it did not say, as
      of SparseCores.
    kept_by_xla: the arguments that XLA keeps in VMEM around the kernel, by
      their number. Their blocks are used where they are, so that libtpu needs
      no copies of them; this is known after compilation only.
    spilled_bytes: VMEM for vectors that found no register; as above.
    staged_bytes: VMEM through which scalar operands go to SMEM; as above.
  """

  kernel: str
  chip: str
  is_sparse: bool
  entries: tuple[Entry, ...]
  vmem_limit_bytes: int | None
  collective_id: int | None
  used_vmem_bytes: int | None = None
  kept_by_xla: tuple[int, ...] = ()
  spilled_bytes: int = 0
  staged_bytes: int = 0

  def predicted(self, memory: str) -> int:
    """Bytes of a memory, or semaphores, that a core holds at once."""
    return sum(e.amount_per_core for e in self.entries if e.memory == memory)

  @property
  def expected_vmem_bytes(self) -> int:
    """Predicted VMEM, corrected by what compilation tells.

    Without what is not used and what XLA keeps there anyway, and with what is
    spilled or staged. Scratch that libtpu holds in registers instead is not
    found out.
    """
    return (
      self.spilled_bytes
      + self.staged_bytes
      + sum(
        e.amount_per_core
        for e in self.entries
        if e.memory == "VMEM"
        and e.is_used
        and not (e.is_block and e.argument in self.kept_by_xla)
      )
    )

  def _kept(self) -> list[str]:
    return [
      e.name
      for e in self.entries
      if e.is_block and e.argument in self.kept_by_xla
    ]

  def _unused(self) -> list[str]:
    vmem = [e for e in self.entries if e.memory == "VMEM"]
    return [e.name for e in vmem if not e.is_used]

  def limit(self, memory: str) -> int | None:
    """What a core has of a memory; None where JAX does not say."""
    chip = chips.chip(self.chip)
    if memory == "VMEM":
      if self.is_sparse:
        return chip.vmem_bytes_per_vector_subcore
      return self.vmem_limit_bytes or chip.vmem_bytes_per_tensor_core
    if memory == "SMEM" and not self.is_sparse:
      return chip.smem_bytes_per_tensor_core
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
    for memory in _MEMORIES:
      limit = self.limit(memory)
      of = f" of {limit:,}" if limit is not None else ""
      lines.append(f"  {memory:10} {self.predicted(memory):,}{of}")
    if self.used_vmem_bytes is not None:
      lines.append(f"  libtpu used {self.used_vmem_bytes:,} of VMEM")
      if self.spilled_bytes:
        lines.append(
          f"  {self.spilled_bytes:,} of it for vectors without a register"
        )
      if self.staged_bytes:
        lines.append(f"  {self.staged_bytes:,} of it to bring scalars to SMEM")
      for why, names in (
        ("XLA keeps in VMEM, so that libtpu needs no blocks", self._kept()),
        ("nothing uses, so that libtpu leaves out", self._unused()),
      ):
        if names:
          lines.append(f"  {why}: {', '.join(names)}")
    return "\n".join(lines)


def of_program(jaxpr: jex_core.Jaxpr, chip: chips.Chip) -> tuple[Ledger, ...]:
  """The kernels of a traced program, in order, before they are compiled."""
  return tuple(
    _of_kernel(eqn, chip)
    for eqn in _compat.walk(jaxpr)
    if eqn.primitive.name in aot.KERNEL_PRIMITIVES
  )


def with_used(
  ledgers: Sequence[Ledger], operations: Sequence[dumps.Texts], hlo: str
) -> tuple[Ledger, ...]:
  """The same, with what libtpu says it used.

  Args:
    ledgers: of a program.
    operations: of the program, compiled.
    hlo: its HLO.

  Returns:
    The ledgers. Of several kernels with one name none is filled in: which is
    which is not certain.
  """
  used = _used_by_instruction(hlo)
  filled = []
  for one in ledgers:
    named = [o for o in operations if o.kernel == one.kernel]
    alike = [other for other in ledgers if other.kernel == one.kernel]
    certain = len(named) == len(alike) == 1 and not one.is_sparse
    if certain and named[0].name in used:
      bundles = named[0].texts.get("bundles", "")
      kept = _OPERAND_IN_VMEM.findall(bundles)
      spilled = set(_SPILLED.findall(bundles))
      one = dataclasses.replace(
        one,
        used_vmem_bytes=used[named[0].name],
        kept_by_xla=tuple(sorted({int(n) for n in kept})),
        spilled_bytes=len(spilled) * _REGISTER_BYTES,
        staged_bytes=sum(map(_staged_bytes, _STAGED.findall(bundles))),
      )
    filled.append(one)
  return tuple(filled)


def _staged_bytes(shape: str) -> int:
  """Words of a scalar operand, padded to a row of 128."""
  words = math.prod(int(n) for n in shape.split(",") if n)
  return -(-words // 128) * 128 * 4


def _used_by_instruction(hlo: str) -> dict[str, int]:
  used = {}
  for line in dumps.statements(hlo):
    instruction, found = _INSTRUCTION.match(line), _USED.search(line)
    if instruction and found:
      used[instruction[1]] = sum(
        int(c["size"])
        for c in json.loads(found[1])
        if c["memory_space"] == _VMEM_COLOR
      )
  return used


def _of_kernel(eqn: jex_core.JaxprEqn, chip: chips.Chip) -> Ledger:
  params = eqn.params.get("compiler_params")
  meshes = eqn.params.get("meshes") or ()
  return Ledger(
    kernel=aot.body_name(eqn),
    chip=chip.name,
    is_sparse=any(not isinstance(m, pltpu.TensorCoreMesh) for m in meshes),
    entries=tuple(_entries(eqn)),
    vmem_limit_bytes=getattr(params, "vmem_limit_bytes", None),
    collective_id=getattr(params, "collective_id", None),
  )


def _entries(eqn: jex_core.JaxprEqn) -> Iterator[Entry]:
  for body in aot.kernel_bodies(eqn):
    windows = aot.windows(eqn)
    names = body.debug_info.arg_names or [""] * len(body.invars)
    inputs = (v for e in body.eqns for v in e.invars)
    used = {v for v in inputs if isinstance(v, jex_core.Var)}
    for number, (var, name) in enumerate(zip(body.invars, names, strict=True)):
      window = windows.get(number)
      is_used = window is not None or var in used
      for entry in _entry(number, str(name), var.aval, window):
        yield dataclasses.replace(entry, is_used=is_used)
    peak = usage.peak_of_scopes(body)
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
