"""What a scalar slot without a result does, as a Python statement."""

from collections.abc import Mapping, Sequence

from coremesh.profile.bundles import Operand, Register, Slot

# They do not change what happens when.
WITHOUT_EFFECT = frozenset(
  [
    *("sfence", "compiler-scheduling-barrier", "spush.sccf", "sc.u32"),
    *("strace", "vsyncmov"),
  ]
)
_MEMORIES = {"hbm", "vmem", "smem"}
# Copies of a SparseCore by the memories they are between.
_BETWEEN = {"shared": "copy_shared", "subcore": "copy_to_subcore"}
# What decides when things happen, so that each form of it must be known.
_TIMED = (
  *("vsync", "vwait", "inlined_call"),
  *("stream", "swait", "ssync", "sbarrier", "task"),
)
# How a wait compares, by the second word of its opcode, and what is added to
# its number. Semaphores rise, so that one is equal when it has come so far.
_WAITS = {"ge": 0, "eq": 0, "gt": 1}


def statement(
  slot: Slot,
  at: str,
  bundle: int,
  *,
  words: Sequence[str],
  spaces: Mapping[int, str],
) -> str:
  """The call of a method of `H`, or what stores into `D`.

  Args:
    slot: one that writes no register and is not a branch.
    at: expressions of the cycle and the bundle.
    bundle: where.
    words: expressions of its operands.
    spaces: the memory that each value which is a pointer points to.
  """
  opcode = slot.opcode
  named = dict(zip(slot.names, words, strict=True))
  match opcode:
    case "shalt.err":
      return f"H.halt({bundle}, {slot.notes[:1]!r})"
    case "sst":
      return f"H.store({bundle}, {words[0]}, {words[1]})"
    case "sdivrem.u32":
      function = "remainder" if "kRem" in slot.notes else "quotient"
      return f"D['%{slot.token}'] = {function}({words[0]}, {words[1]})"
    case "dma.done.wait":
      return f"H.wait({at}, {words[0]}, {words[1]})"
    case "vsyncadd":
      return f"H.add({at}, {words[0]}, {words[1]})"
    case "vsyncadd.remote":
      return f"H.signal({at}, {words[0]}, {words[1]})"
    case "vsyncpa" | "vsyncset":
      return f"H.set({at}, {words[0]}, {words[1]})"
    case "vdelay":
      return f"H.delay({at}, {words[0]})"
    case "meet":
      return f"H.meet({at}, {words[0]})"
    case "fence":
      return f"H.fence({at})"
    case "task":
      return f"H.task({at}, {words[1]})"
    case "task.clear_ibuf":
      return f"H.start({at}, {words[1]})"
    case "signal.subcore":
      return f"H.signal_subcore({at}, {words[0]}, {words[1]})"
    case "signal.scalar":
      return f"H.signal_scalar({at}, {words[0]}, {words[1]})"
    case "fetch":
      return f"H.fetch({bundle}, {words[0]}, {words[1]})"
    case "stream.read" | "stream.write" | "stream.local":
      kind = opcode.removeprefix("stream.")
      return f"H.stream({at}, {kind!r}, {', '.join(words)})"
  kind, _, rest = opcode.partition(".")
  if kind in _BETWEEN:
    source, _, place = rest.partition(".")
    ends = f"{source!r}, {place!r}"
    return f"H.{_BETWEEN[kind]}({at}, {ends}, {', '.join(words)})"
  relation = rest.split(".")[0]
  if kind == "vwait" and relation in _WAITS and len(words) == 2:
    return f"H.wait({at}, {words[0]}, {words[1]} + {_WAITS[relation]})"
  if kind == "dma":
    return _copy(slot, at, named, spaces) or _refusal(slot, bundle)
  if kind.startswith(_TIMED):
    return _refusal(slot, bundle)
  return f"H.unknown({bundle}, {opcode!r})"


def _refusal(slot: Slot, bundle: int) -> str:
  return f"H.refuse({bundle}, {slot.opcode!r}, {slot.notes[:1]!r})"


def _copy(
  slot: Slot, at: str, named: Mapping[str, str], spaces: Mapping[int, str]
) -> str | None:
  """The statement of a DMA, None if it is of no form known here."""
  flag, size = named.get("dst_syncflagno"), named.get("size_in_granules")
  if flag is None or size is None:
    return None
  if "_to_" in slot.opcode:
    source, _, place = slot.opcode.removeprefix("dma.").partition("_to_")
    if {source, place} <= _MEMORIES:
      ends = f"{named.get(source)}, {named.get(place)}"
      return f"H.dma({at}, {source!r}, {place!r}, {flag}, {size}, {ends})"
  if slot.opcode == "dma.general":
    source, place = (
      _space(slot.operand(name), spaces) for name in ("src", "dst")
    )
    if {source, place} <= {"hbm", "vmem"}:
      others = f"{named.get('src_syncflagno')}, {named.get('overrides')}"
      return f"H.general({at}, {source!r}, {place!r}, {flag}, {size}, {others})"
  return None


def _space(operand: Operand | None, spaces: Mapping[int, str]) -> str | None:
  """The memory a pointer is to, if the slot that made it says so."""
  is_register = isinstance(operand, Register)
  return spaces.get(operand.value) if is_register else None
