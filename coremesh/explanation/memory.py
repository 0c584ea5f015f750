"""What became of a kernel's buffers once it was compiled."""

from coremesh.compiler.ledger import Entry, Ledger

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
