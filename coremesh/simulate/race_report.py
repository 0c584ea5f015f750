"""Two accesses of a memory that are not ordered, as a finding."""

from typing import Any

from coremesh.simulate import clocks, findings, memory, regions


def told(
  buffer: memory.Buffer,
  before: clocks.Access,
  now: clocks.Access,
  box: regions.Box | None,
) -> tuple[findings.Kind, str]:
  """What sort of fault it is, and who does what to which part.

  Args:
    buffer: the memory.
    before, now: the accesses, in the order in which they came.
    box: the part that `now` touches.
  """
  index = regions.index(box, buffer.shape)
  part = buffer.part(index)
  if before.kind == "enter":
    return "scope", (
      f"{now.who}: {now.site} touches {part} without knowing that"
      f" {before.who} has entered the scope of that memory. Meet in a barrier"
      " first."
    )
  if before.kind == "leave":
    return "scope", (
      f"{now.who}: {now.site} ({now.kind}) touches {part} when {before.who}"
      f" may have left the scope of that memory ({before.site}). Let the owner"
      " wait for it first."
    )
  if now.kind == "leave":
    return "scope", (
      f"{now.who} leaves the scope of {buffer} while {before.who}:"
      f" {before.site} ({before.kind}) may still be under way. Wait for it"
      " first."
    )
  other = regions.index(before.box, buffer.shape)
  of = f" of {buffer.family.name + other!r}" if other or index else ""
  return "race", (
    f"{now.kind} of {part} by {now.who} ({now.site}) and {before.kind}{of} by"
    f" {before.who} ({before.site}) are not ordered. Order them: wait for the"
    " DMA, or signal from one and wait in the other."
  )


def sites(before: clocks.Access, now: clocks.Access) -> tuple[Any, Any]:
  """The lines of both; of a race in one order, whichever came first."""
  pair = before.site, now.site
  if {before.kind, now.kind} & {"enter", "leave"}:
    return pair
  first, second = sorted(pair, key=id)
  return first, second


def worker_of(access: clocks.Access) -> Any:
  """The worker who made an access, or started the DMA that did."""
  return getattr(access.who, "starter", access.who)
