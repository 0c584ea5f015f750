"""The copies of a run in model time: what each goes through, and when.

A memory and a link serve one copy after another, in the order in which they
start.
"""

from typing import Any

from coremesh.simulate import cores, intervals, memory, rates


class Traffic:
  """The memories and links of a run.

  Args:
    chip_rates: how long things take.

  Attributes:
    copies: in the order in which they start.
  """

  def __init__(self, chip_rates: rates.Rates):
    self._rates = chip_rates
    self._free_ps: dict[tuple[Any, ...], int] = {}
    self.copies: list[intervals.Copy] = []

  def copy(
    self,
    worker: int,
    start: int,
    *,
    src: memory.Buffer,
    dst: memory.Buffer,
    num_bytes: int,
    what: str,
  ) -> tuple[int, int]:
    """Sends a copy on its way.

    Args:
      worker: the index of who starts it.
      start: when, in picoseconds.
      src, dst: the memories.
      num_bytes: how much.
      what: the operation, with the user's line.

    Returns:
      When it has read, and when it has written.
    """
    crosses = src.place[0] != dst.place[0]
    done = start + rates.COPY_LATENCY_PS
    read = done = max(done, self._pass(start, num_bytes, _place(src)))
    if crosses:
      link = ("link", src.place[0], dst.place[0])
      done = max(done, self._pass(start, num_bytes, link))
      done += rates.LINK_LATENCY_PS
    done = max(done, self._pass(start, num_bytes, _place(dst)))
    self.copies.append(
      intervals.Copy(
        worker=worker,
        start_ps=start,
        end_ps=done,
        src=str(src),
        dst=str(dst),
        spaces=(src.family.space, dst.family.space),
        link=(src.place[0], dst.place[0]) if crosses else None,
        num_bytes=num_bytes,
        what=what,
      )
    )
    return read, done

  def _pass(self, start: int, num_bytes: int, place: tuple[Any, ...]) -> int:
    """When bytes have gone through a memory or a link, after those before."""
    first = max(start + rates.COPY_LATENCY_PS, self._free_ps.get(place, 0))
    end = first + self._rates.transfer_ps(num_bytes, place)
    self._free_ps[place] = end
    return end


def _place(buffer: memory.Buffer) -> tuple[Any, ...]:
  """What a copy goes through at a buffer, as `Rates` knows it."""
  space, device = buffer.family.space, buffer.place[0]
  if space in ("hbm", "host"):
    return (space, device)
  if space == "vmem_shared":
    return (space, *buffer.place)
  return (cores.kind_of(buffer.family.mesh), *buffer.place)
