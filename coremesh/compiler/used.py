"""Ledgers of a compiled program: what the compiler says its kernels use."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import re
from typing import Any

from coremesh.compiler import allocations, dumps, vmem_report
from coremesh.compiler.ledger import Entry, Ledger

_USED = re.compile(r'"used_scoped_memory_configs":(\[[^\]]*\])')
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPERAND_IN_VMEM = re.compile(
  r"inlined_call_operand\.vmem \[shape: \w+\[[\d,]*\], index: (\d+)"
)
_STAGED = re.compile(
  r"inlined_call_operand\.<no memory space> \[shape: \w+\[([\d,]*)\], index:"
)
_SPILLED = re.compile(r"\bvmem:\[#allocation(\d+)_spill")
_TOUCHED = re.compile(r"#allocation(\d+)\b")
_VMEM_COLOR = "1"
# libtpu's number of the first scratch argument; before come three of its own.
_FIRST_SCRATCH = 3
_VECTOR_BYTES = 8 * 128 * 4
_LOWERED = "operations lowered through memory"


def with_used(
  ledgers: Sequence[Ledger],
  operations: Sequence[dumps.Texts | None],
  used_vmem_bytes: Mapping[str, int],
  *,
  report: str = "",
) -> tuple[Ledger, ...]:
  """The ledgers, with what libtpu says it used.

  Args:
    ledgers: of a program.
    operations: what runs each kernel; None, which is not filled in, if it is
      not certain.
    used_vmem_bytes: `vmem_bytes_by_operation`.
    report: the text "vmem-report"; without it what libtpu adds is not known.
  """
  holdings = vmem_report.of_page(report)
  return tuple(
    _filled(
      one,
      operation,
      used_vmem_bytes.get(operation.name),
      holdings.get(operation.name),
    )
    if operation
    else one
    for one, operation in zip(ledgers, operations, strict=True)
  )


def _filled(
  one: Ledger,
  operation: dumps.Texts,
  used_vmem_bytes: int | None,
  holding: vmem_report.Holding | None,
) -> Ledger:
  made = allocations.of_module(operation.texts.get("llo", ""))
  if made is not None:
    one = dataclasses.replace(
      one,
      used_vmem_bytes=made.vmem_bytes if one.is_sparse else None,
      used_smem_bytes=made.smem_bytes,
      used_semaphores=made.semaphores,
    )
  if one.is_sparse or used_vmem_bytes is None:
    return one
  bundles = operation.texts.get("bundles", "")
  kept = _OPERAND_IN_VMEM.findall(bundles)
  one = dataclasses.replace(
    one,
    used_vmem_bytes=used_vmem_bytes,
    kept_by_xla=tuple(sorted({int(n) for n in kept})),
    staged_bytes=sum(map(_staged_bytes, _STAGED.findall(bundles))),
    spilled_vector_bytes=len(set(_SPILLED.findall(bundles))) * _VECTOR_BYTES,
    **_added(operation, made, used_vmem_bytes, holding),
  )
  num_scratch = made.num_scratch if made else 0
  untouched = _untouched(one, bundles, num_scratch)
  # The sum must be what is missing, or the numbers mean something else.
  missing = one.expected_vmem_bytes - used_vmem_bytes
  if untouched and missing == sum(e.amount_per_core for e in untouched):
    numbers = tuple(e.argument for e in untouched)
    one = dataclasses.replace(one, in_registers=numbers)
  return one


def _added(
  operation: dumps.Texts,
  made: allocations.Allocations | None,
  used_vmem_bytes: int,
  holding: vmem_report.Holding | None,
) -> dict[str, Any]:
  """The fields of a ledger that say what libtpu takes for itself.

  Nothing, if its report is not of what it used.
  """
  own: dict[str, int] = {}
  before = allocations.of_module(operation.texts.get("mosaic-layouts", ""))
  if made is not None and before is not None:
    own[_LOWERED] = made.scoped_vmem_bytes - before.scoped_vmem_bytes
  spilled_bytes = 0
  if holding is not None and holding.total_bytes == used_vmem_bytes:
    own |= holding.own_bytes
    spilled_bytes = holding.spilled_bytes
  return {
    "spilled_bytes": spilled_bytes,
    "own_vmem_bytes": tuple((what, n) for what, n in own.items() if n > 0),
  }


def _untouched(one: Ledger, bundles: str, num_scratch: int) -> list[Entry]:
  """Scratch in VMEM that no instruction names, though the body uses it."""
  touched = {int(n) for n in _TOUCHED.findall(bundles)}
  last = max((e.argument for e in one.entries), default=-1)
  first = last + 1 - num_scratch
  return [
    e
    for e in one.entries
    if e.memory == "VMEM"
    and e.is_used
    and e.argument >= max(first, 0)
    and not e.is_block
    and e.argument - first + _FIRST_SCRATCH not in touched
  ]


def _staged_bytes(shape: str) -> int:
  """Words of a scalar operand, padded to a row of 128."""
  words = math.prod(int(n) for n in shape.split(",") if n)
  return -(-words // 128) * 128 * 4


def vmem_bytes_by_operation(hlo: str) -> dict[str, int]:
  """What libtpu says that each instruction of a module uses of VMEM."""
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
