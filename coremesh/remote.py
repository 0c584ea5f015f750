"""Copies and signals between the cores of one device and of many.

TPU DMAs push: the sender names the destination core and both semaphores, and
the receiver waits on its own semaphore for the bytes to land. The refs and
semaphores of the receiver are the same allocation as the sender's, on another
core. So before the first put, the receiver must be known to be in the kernel:
see `coremesh.barriers`.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import jax.core
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from coremesh import _compat, barriers, errors, mesh, scope

type Address = Mapping[str, mesh.Index]

_DMA = pltpu.SemaphoreType.DMA
# What a ref of the kernel's arguments is in; its memory may be left unsaid.
_HBM = (None, pl.ANY, pltpu.HBM)


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Copy:
  """A copy that has started: wait for it before touching either end.

  Each end may be waited for once. A kernel that ends without having waited for
  the source is refused.

  Attributes:
    descriptor: the Pallas copy descriptor.
    is_remote: whether the destination is on another worker.
    made_by: the function that started it, for errors.
    source_is_free: whether the source has been waited for.
    has_arrived: whether the destination has been waited for.
  """

  descriptor: Any
  is_remote: bool
  made_by: str
  source_is_free: bool = False
  has_arrived: bool = False

  def __post_init__(self):
    current = scope.current()
    if current is not None:
      current.copies = (*current.copies, self)

  def wait_send(self) -> None:
    """Waits until the source has been read and may be overwritten.

    Raises:
      CollectiveError: it has been waited for already.
    """
    self._check_first(self.source_is_free)
    self.source_is_free = True
    if self.is_remote:
      self.descriptor.wait_send()
    else:
      self.descriptor.wait()

  def wait_recv(self) -> None:
    """Waits until the copy that some other worker sent *here* has landed.

    In a program where every worker puts the same shape, that is the put whose
    destination this worker is.

    Raises:
      CollectiveError: a local copy, or it has been waited for already.
    """
    if not self.is_remote:
      raise errors.CollectiveError(
        "wait_recv is for a remote copy; a local copy has one end: wait()."
      )
    self._check_first(self.has_arrived)
    self.has_arrived = True
    self.descriptor.wait_recv()

  def wait(self) -> None:
    """Waits for both ends."""
    self.wait_send()
    if self.is_remote:
      self.wait_recv()

  def _check_first(self, done: bool) -> None:
    if done:
      raise errors.CollectiveError(
        f"The copy that {self.made_by} started is waited for twice: its"
        " semaphore counts one arrival, and the second wait would never end."
      )


class _Nothing:
  """The descriptor of a copy of no elements: no DMA may have length 0."""

  def wait(self) -> None:
    """Returns at once, as do the others."""

  wait_send = wait_recv = wait


def _is_empty(ref: Any) -> bool:
  return 0 in ref.shape


def copy(src: Any, dst: Any) -> None:
  """Copies `src` to `dst` on this worker and waits.

  Args:
    src: a ref in any data memory (HBM, VMEM, SMEM).
    dst: a ref of the same shape and dtype.

  Raises:
    ShapeError, DTypeError: the refs differ.
    UnsupportedError: memories between which this core has no DMA.
  """
  check_pair(src, dst, is_remote=False)
  if _is_empty(src) or _is_push_stream(src, dst):
    start_copy(src, dst).wait()
    return
  current = scope.current()
  if current is None or current.copy_sem is None:
    pltpu.sync_copy(src, dst)
  else:
    pltpu.async_copy(src, dst, current.copy_sem).wait()


def start_copy(src: Any, dst: Any, *, sem: Any = None) -> Copy:
  """Starts a copy on this worker; wait for it with `.wait()`.

  Args:
    src: a ref in any data memory.
    dst: a ref of the same shape and dtype.
    sem: a DMA semaphore; default one of the kernel's links. On a vector
      subcore a copy out of VMEM is a stream, which counts on none.

  Raises:
    ShapeError, DTypeError: the refs differ.
    UnsupportedError: memories between which this core has no DMA.
    CollectiveError: the kernel has no link left, or `sem` is no DMA semaphore.
  """
  check_pair(src, dst, is_remote=False)
  barriers.check_semaphore("sem", sem, kind=_DMA)
  if _is_empty(src):
    return Copy(descriptor=_Nothing(), is_remote=False, made_by="start_copy")
  if _is_push_stream(src, dst):
    sem = None
  elif sem is None:
    _, sem = take_link("start_copy", "sem")
  descriptor = pltpu.make_async_copy(src, dst, sem)
  descriptor.start()
  return Copy(descriptor=descriptor, is_remote=False, made_by="start_copy")


def put(
  src: Any,
  dst: Any,
  *,
  to: Address,
  send_sem: Any = None,
  recv_sem: Any = None,
) -> Copy:
  """Starts writing `src` into the `dst` of another worker.

  Every worker of the kernel usually runs the same put, so that each also
  receives one: `.wait()` waits for both. The receiver must have entered the
  kernel: call a barrier that covers it first.

  Args:
    src: a ref on this worker, in any data memory.
    dst: the ref the receiver calls by the same name; shape and dtype of `src`.
    to: the receiver, an index for each axis that differs from this worker's:
      `{"core": 1}` is a core of this device, `{"device": 2}` the same core of
      device 2, both keys any core of any device.
    send_sem: DMA semaphore counted here when `src` has been read.
    recv_sem: DMA semaphore counted at the receiver when `dst` is written, so
      that a put signals its own arrival. Default for both: a link of the
      kernel.

  Returns:
    The started copy.

  Raises:
    ShapeError, DTypeError: the refs differ.
    AxisError: `to` names no axis in scope, or an index outside its axis.
    CollectiveError: every axis of `to` has one worker, so that the receiver
      is the sender; or no semaphores are left.
    UnsupportedError: memories between which this core has no DMA.
  """
  check_pair(src, dst, is_remote=True)
  address = mesh.device_id(to)
  if mesh.num_workers(tuple(to)) == 1:
    raise errors.CollectiveError(
      f"to names {list(to)}, along which there is one worker: the receiver"
      " would be the sender. Use cm.copy, or a chip with more cores."
    )
  link = given_link(send_sem, recv_sem)
  send_sem, recv_sem = link or take_link("put", "send_sem= and recv_sem")
  _reach("put", to)
  if _is_empty(src):
    return Copy(descriptor=_Nothing(), is_remote=True, made_by="put")
  descriptor = pltpu.make_async_remote_copy(
    src, dst, send_sem, recv_sem, device_id=address
  )
  descriptor.start()
  return Copy(descriptor=descriptor, is_remote=True, made_by="put")


def get(src: Any, dst: Any, *, source: Address) -> None:
  """Copies the `src` of another core into `dst` here, where hardware can.

  A TPU core reads its own memories and those it shares: the HBM of its device,
  and the VMEM_SHARED of its SparseCore. No DMA pulls from elsewhere.

  Args:
    src: a ref in a memory both cores share.
    dst: a ref on this core; shape and dtype of `src`.
    source: the other core, core axes only; for VMEM_SHARED the subcore axis.

  Raises:
    AxisError: `source` names no axis in scope, or an index outside its axis.
    UnsupportedError: the memory is not shared with `source`: let the owner
      `cm.put` it.
  """
  check_pair(src, dst, is_remote=False)
  mesh.device_id(source)
  space = _compat.memory_space(src)
  if space in _HBM:
    shared_over = mesh.core_axes()
  elif space == pltpu.VMEM_SHARED:
    shared_over = mesh.core_axes()[1:]
  else:
    shared_over = ()
  if not set(source) <= set(shared_over):
    raise errors.UnsupportedError(
      f"TPU DMAs push: a core cannot read the {space or 'HBM'} of"
      f" {dict(source)}. Let the owner of src call cm.put(src, dst, to=...)"
      " and wait for it here with cm.wait_arrival."
    )
  copy(src, dst)


def wait_arrival(dst: Any, recv_sem: Any) -> None:
  """Waits until as many bytes as `dst` holds have landed on `recv_sem`.

  For a receiver that has no `Copy` of its own: put with a named `recv_sem` on
  one worker, this on the other.

  Raises:
    CollectiveError: `recv_sem` is no DMA semaphore of shape ().
  """
  _check_ref("dst", dst)
  barriers.check_semaphore("recv_sem", recv_sem, kind=_DMA)
  if not _is_empty(dst):
    pltpu.make_async_copy(dst, dst, recv_sem).wait()


def fence(*copies: Copy) -> None:
  """Waits for both ends of all the copies, in the order given."""
  for started in copies:
    started.wait()


def signal(sem: Any, *, to: Address | None = None, inc: Any = 1) -> None:
  """Adds `inc` to the semaphore `sem` of a worker.

  Args:
    sem: a REGULAR semaphore, shape (); the same scratch on the receiver.
    to: the receiver, as for `put`; None for this worker.
    inc: how much, at least 1.

  Raises:
    AxisError: `to` names no axis in scope, or an index outside its axis.
    CollectiveError: a static `inc` below 1, or no REGULAR semaphore.
  """
  barriers.check_semaphore("sem", sem)
  _check_count("inc", inc)
  if to is None:
    address = mesh.own_device_id()
  else:
    address = mesh.device_id(to)
    if not barriers.is_barrier_semaphore(sem):
      _reach("signal", to)
  pl.semaphore_signal(sem, inc, device_id=address)


def wait(sem: Any, count: Any = 1) -> None:
  """Waits until `sem` is at least `count`, then subtracts it.

  Args:
    sem: a REGULAR semaphore, shape ().
    count: how much, at least 1 if static; an int32 scalar may be 0.

  Raises:
    CollectiveError: a static `count` below 1, or no REGULAR semaphore.
  """
  barriers.check_semaphore("sem", sem)
  _check_count("count", count)
  pl.semaphore_wait(sem, count)


def check_pair(src: Any, dst: Any, *, is_remote: bool) -> None:
  """Checks that a DMA can copy one ref to the other."""
  _check_ref("src", src)
  _check_ref("dst", dst)
  if tuple(src.shape) != tuple(dst.shape):
    raise errors.ShapeError(
      "src and dst must have one shape; got src"
      f" {tuple(src.shape)} and dst {tuple(dst.shape)}."
    )
  if src.dtype != dst.dtype:
    raise errors.DTypeError(
      f"src and dst must have one dtype; got src {src.dtype} and dst"
      f" {dst.dtype}. A DMA moves bits and converts nothing."
    )
  spaces = _compat.memory_space(src), _compat.memory_space(dst)
  if pltpu.SEMAPHORE in spaces:
    raise errors.UnsupportedError(
      "src and dst must hold data; got semaphores. See cm.signal."
    )
  streams = not is_remote and spaces == (pltpu.VMEM_SHARED, pltpu.SMEM)
  if mesh.on_vector_subcore() and pltpu.SMEM in spaces and not streams:
    raise errors.UnsupportedError(
      f"A vector subcore has no DMA from {spaces[0] or 'HBM'} to"
      f" {spaces[1] or 'HBM'}: it copies into its SMEM from the VMEM_SHARED"
      " of its SparseCore only. Go through VMEM."
    )


def _check_ref(argument: str, ref: Any) -> None:
  if not isinstance(ref, jax.Ref) and not hasattr(ref, "transforms"):
    raise errors.DTypeError(
      f"{argument} must be a ref, or a part of one, ref.at[...]; got"
      f" {type(ref).__name__}. An array that was read from a ref is a value;"
      " write it to a VMEM scratch first."
    )


def _is_push_stream(src: Any, dst: Any) -> bool:
  """Whether a SparseCore copies this by a stream, not by a counted DMA."""
  spaces = _compat.memory_space(src), _compat.memory_space(dst)
  if spaces == (pltpu.VMEM_SHARED, pltpu.SMEM):
    return True
  out_of_vmem = spaces[0] == pltpu.VMEM and spaces[1] != pltpu.VMEM
  return out_of_vmem and mesh.on_vector_subcore()


def _check_count(argument: str, count: Any) -> None:
  if isinstance(count, jax.core.Tracer):
    return
  if isinstance(count, float) or count < 1:
    raise errors.CollectiveError(
      f"{argument} must be an integer of at least 1; got {count}."
    )


def given_link(send_sem: Any, recv_sem: Any) -> scope.Link | None:
  """The link a user gave, checked; None for none."""
  if (send_sem is None) != (recv_sem is None):
    raise errors.CollectiveError(
      "send_sem and recv_sem go together: give both or neither."
    )
  barriers.check_semaphore("send_sem", send_sem, kind=_DMA)
  barriers.check_semaphore("recv_sem", recv_sem, kind=_DMA)
  return None if send_sem is None else (send_sem, recv_sem)


def take_link(
  function: str, argument: str, pattern: scope.Pattern | None = None
) -> scope.Link:
  """A link of the kernel, for a helper that was given none."""
  current = scope.current()
  if current is None or current.copy_sem is None:
    raise errors.CollectiveError(
      f"{function} has no semaphores of its own here: they come with a"
      f" cm.kernel on a single mesh. Pass {argument}=, DMA semaphores from"
      " the kernel's scratch."
    )
  return current.take_link(pattern)


def _reach(helper: str, to: Address) -> None:
  current = scope.current()
  if current is not None:
    current.reach(helper, mesh.with_several(tuple(to)))
