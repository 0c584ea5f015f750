"""What became of a kernel's buffers once it was compiled."""

from coremesh.compiler.ledger import Entry, Ledger
from coremesh.explanation import words

MEMORIES = ("VMEM", "SMEM", "semaphores")


def fate(entry: Entry, ledger: Ledger) -> str:
  """Why a buffer takes nothing, in two words; "" if it takes what is predicted.

  Args:
    entry: one of the ledger's.
    ledger: of a compiled kernel.
  """
  if not entry.is_used:
    return "left out"
  if entry.is_block and entry.argument in ledger.kept_by_xla:
    return "by XLA"
  if not entry.is_block and entry.argument in ledger.in_registers:
    return "in registers"
  return ""


def held(ledger: Ledger, memory: str) -> int:
  """What is used of a memory, or predicted where nobody says what is used."""
  used = ledger.used(memory)
  return ledger.predicted(memory) if used is None else used


def added(ledger: Ledger) -> list[tuple[str, str, int]]:
  """What libtpu adds to the VMEM of a kernel: its name, a note, its bytes."""
  vectors = ledger.spilled_vector_bytes
  shares = vectors > ledger.spilled_bytes
  together = f"share room, {words.num_bytes(vectors)} together"
  rows = [
    ("spilled registers", together if shares else "", ledger.spilled_bytes),
    ("scalars on their way to SMEM", "", ledger.staged_bytes),
    *((what, "libtpu's own", size) for what, size in ledger.own_vmem_bytes),
  ]
  return [row for row in rows if row[-1]]
