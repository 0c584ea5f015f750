"""Memories of the simulated machine: buffers, families of them, and views."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from coremesh import tiles
from coremesh.simulate import clocks


def poison(dtype: np.dtype) -> Any:
  """What memory holds that nobody wrote, as JAX poisons it on a TPU.

  NaN, or the integer of which only the highest bit is set.
  """
  if dtype == np.bool_:
    return True
  if dtype.kind == "i":
    return np.iinfo(dtype).min
  if dtype.kind == "u":
    return np.iinfo(dtype).max // 2 + 1
  if dtype.kind == "c":
    return complex(np.nan, np.nan)
  try:
    return ml_dtypes.finfo(dtype).dtype.type(np.nan)
  except ValueError:
    info = ml_dtypes.iinfo(dtype)
    return info.min or info.max // 2 + 1


def padded_shape(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
  """The shape an array takes in a tiled memory."""
  return tuple(map(tiles.rounded_up, shape, tile(shape, dtype)))


def tile(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
  """The shape of a tile of an array in a tiled memory."""
  if len(shape) < 2:
    return (1,) * len(shape)
  rows = tiles.tile_rows(shape[-2], dtype)
  return (*(1,) * (len(shape) - 2), rows, tiles.LANES)


class Buffer:
  """One memory of one core (or, in HBM, of one device).

  Attributes:
    data: its elements, padded to tiles where `shape` does not fill them.
    shape: what the kernel may address.
    shadow: who touched which element, None if no other thread can.
    owner: the worker whose scope it is, None for what all of a device share.
    entered: the owner's event of entering the scope.
    is_input: whether it is an array that the kernel must not change.
    unwritten: marks of what nobody has written, None if there is nothing, or
      nobody looks for it.
  """

  __slots__ = (
    "data",
    "entered",
    "family",
    "is_input",
    "owner",
    "place",
    "shadow",
    "shape",
    "unwritten",
  )

  def __init__(self, family: "Family", place: tuple[Any, ...]):
    self.family = family
    self.place = place
    self.shape = family.shape
    self.shadow: clocks.Shadow | None = None
    self.owner: Any = None
    self.entered = 0
    self.is_input = False
    self.unwritten: Any = None
    full = family.shape
    if family.is_tiled:
      full = padded_shape(family.shape, family.dtype)
    full = (*full, *family.element_shape)
    # The matrix unit adds to what is there, and zeroes it when it is read.
    is_sum = family.space == "accumulator"
    first = family.dtype.type(0) if is_sum else poison(family.dtype)
    self.data = np.full(full, first, family.dtype)

  def fill(self, values: np.ndarray) -> None:
    """Sets what is inside `shape`."""
    self.data[tuple(slice(0, n) for n in self.shape)] = values

  def values(self) -> np.ndarray:
    """What is inside `shape`."""
    return self.data[tuple(slice(0, n) for n in self.shape)]

  def __str__(self) -> str:
    return self.part("")

  def part(self, index: str) -> str:
    """A part of it in words, by its index "[0:8]", "" for all."""
    where = describe(self.place, self.family.axes)
    return f"{self.family.part(index)} of {where}"


class Remains:
  """What is known of a buffer whose owner has left its scope; its elements go.

  Attributes:
    owner, entered: as the buffer's.
    state: what its shadow notes of each element: that the owner has left.
  """

  __slots__ = ("__weakref__", "entered", "owner", "state")

  def __init__(self, buffer: Buffer):
    self.owner = buffer.owner
    self.entered = buffer.entered
    shadow = buffer.shadow
    self.state = 0 if shadow is None else int(shadow.state.max(initial=0))

  def restore(self, buffer: Buffer) -> None:
    """Lets a new buffer stand for the old one, to whom it is still reached."""
    buffer.owner, buffer.entered = self.owner, self.entered
    if buffer.shadow is not None:
      buffer.shadow.state[...] = self.state


def describe(place: Sequence[Any], axes: Sequence[Any]) -> str:
  """A place in words: "device 1, core 0"."""
  device, *coords = place
  parts = [f"device {device}"]
  parts += [f"{a} {c}" for a, c in zip(axes, coords, strict=True)]
  return ", ".join(parts)


@dataclasses.dataclass(eq=False)
class Family:
  """The buffers that one ref of a program stands for, one for each core.

  Attributes:
    name: as in the user's code.
    space: "hbm", "vmem", "vmem_shared", "smem", "semaphore_mem", "accumulator"
      or "host".
    axes: the core axes along which there is one each.
    element_shape: the shape of one element, of a PRNG key its words.
    is_shared: whether others than the owner's instructions can reach it, so
      that accesses must be recorded.
    mesh: the mesh whose cores own the members.
    outlives_kernel: whether it is there before and after the kernel.
    is_block: whether a pipeline moves it over an array, beyond whose end it
      may reach.
    counts_bytes: whether a copy raises the semaphore by its bytes; a regular
      one it raises by one.
  """

  name: str
  space: str
  shape: tuple[int, ...]
  dtype: Any
  axes: tuple[Any, ...]
  element_shape: tuple[int, ...] = ()
  is_tiled: bool = False
  is_shared: bool = False
  mesh: Any = None
  outlives_kernel: bool = False
  is_block: bool = False
  counts_bytes: bool = True
  members: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict)

  def at(self, device: int, coords: Mapping[Any, int]) -> Any:
    """The member on a core, by its device and coordinates."""
    place = (device, *(coords[axis] for axis in self.axes))
    return self.members.get(place)

  def __str__(self) -> str:
    return self.part("")

  def part(self, index: str) -> str:
    """A part of each member in words, by its index, "" for all."""
    space = {"semaphore_mem": "semaphore"}.get(self.space, self.space.upper())
    return f"{space} {self.name + index!r}"


class Semaphore:
  """A counter with the knowledge of who raised it.

  Attributes:
    count: its value.
    signals: amounts, each with its sender's clock and line, of which waits
      have not taken all, but for those that tell its owner nothing new.
    waiter: the worker blocked on it and the count it needs, or None.
    arrivals: DMAs under way that will signal it.
  """

  __slots__ = (
    "arrivals",
    "bank",
    "count",
    "index",
    "signals",
    "waiter",
  )

  def __init__(self, bank: "Bank", index: int):
    self.bank = bank
    self.index = index
    self.count = 0
    self.signals: list[tuple[int, Any, Any]] = []
    self.waiter: Any = None
    self.arrivals: list[Any] = []

  def __str__(self) -> str:
    index = "" if self.bank.family.shape == () else f"[{self._subscript()}]"
    family = self.bank.family
    return (
      f"semaphore {family.name + index!r} of"
      f" {describe(self.bank.place, family.axes)}"
    )

  def raised_by(self, transfer: Any) -> int:
    """What a copy adds to the count when it is done."""
    return transfer.num_bytes if self.bank.family.counts_bytes else 1

  def _subscript(self) -> str:
    indices = np.unravel_index(self.index, self.bank.family.shape)
    return ", ".join(str(int(i)) for i in indices)


class Bank:
  """The semaphores that one ref stands for on one core."""

  __slots__ = ("entered", "family", "owner", "place", "semaphores")

  def __init__(self, family: Family, place: tuple[Any, ...]):
    self.family = family
    self.place = place
    self.owner: Any = None
    self.entered = 0
    size = int(np.prod(family.shape, dtype=np.int64))
    self.semaphores = [Semaphore(self, i) for i in range(size)]
