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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from coremesh import _compat, barriers, errors, mesh, scope

type Address = Mapping[str, mesh.Index]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
  """A copy that has started: wait for it before touching either end.

  Attributes:
    descriptor: the Pallas copy descriptor.
    is_remote: whether the destination is on another worker.
  """

  descriptor: Any
  is_remote: bool

  def wait_send(self) -> None:
    """Waits until the source has been read and may be overwritten."""
    if self.is_remote:
      self.descriptor.wait_send()
    else:
      self.descriptor.wait()

  def wait_recv(self) -> None:
    """Waits until the copy that some other worker sent *here* has landed.

    In a program where every worker puts the same shape, that is the put whose
    destination this worker is.
    """
    if not self.is_remote:
      raise errors.CollectiveError(
        "wait_recv is for a remote copy; a local copy has one end: wait()."
      )
    self.descriptor.wait_recv()

  def wait(self) -> None:
    """Waits for both ends."""
    self.descriptor.wait()


def copy(src: Any, dst: Any) -> None:
  """Copies `src` to `dst` on this worker and waits.

  Args:
    src: a ref in any data memory (HBM, VMEM, SMEM).
    dst: a ref of the same shape and dtype.

  Raises:
    ShapeError, DTypeError: the refs differ.
  """
  _check_pair(src, dst)
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
    sem: a DMA semaphore; default one of the kernel's links.

  Raises:
    ShapeError, DTypeError: the refs differ.
    CollectiveError: the kernel has no link left.
  """
  _check_pair(src, dst)
  sem = _take_link("start_copy", "sem")[0] if sem is None else sem
  descriptor = pltpu.make_async_copy(src, dst, sem)
  descriptor.start()
  return Copy(descriptor=descriptor, is_remote=False)


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
    src: a ref on this worker, in HBM or VMEM.
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
    AxisError: `to` names no axis in scope.
    CollectiveError: every axis of `to` has one worker, so that the receiver
      is the sender; or no semaphores are left.
    UnsupportedError: a ref in a memory no remote DMA reaches.
  """
  _check_pair(src, dst)
  for argument, ref in (("src", src), ("dst", dst)):
    _check_remote_memory(argument, ref)
  address = mesh.device_id(to)
  if mesh.num_workers(tuple(to)) == 1:
    raise errors.CollectiveError(
      f"to={dict(to)} can only be this worker: the axes {list(to)} have one"
      " worker. Use cm.copy, or a chip with more cores."
    )
  if (send_sem is None) != (recv_sem is None):
    raise errors.CollectiveError(
      "send_sem and recv_sem go together: give both or neither."
    )
  if send_sem is None:
    send_sem, recv_sem = _take_link("put", "send_sem= and recv_sem")
  descriptor = pltpu.make_async_remote_copy(
    src, dst, send_sem, recv_sem, device_id=address
  )
  descriptor.start()
  return Copy(descriptor=descriptor, is_remote=True)


def get(src: Any, dst: Any, *, source: Address) -> None:
  """Copies the `src` of another core into `dst` here, where hardware can.

  A TPU core reads its own memories and the HBM of its device, which all its
  cores share; there is no DMA that pulls from elsewhere.

  Args:
    src: a ref in HBM.
    dst: a ref on this core; shape and dtype of `src`.
    source: the other core, core axes only.

  Raises:
    UnsupportedError: `src` is not in HBM, or on another device: let the
      owner `cm.put` it.
  """
  _check_pair(src, dst)
  mesh.device_id(source)
  on_devices = [n for n in source if n in mesh.device_axes()]
  if on_devices or not _in_shared_memory(src):
    raise errors.UnsupportedError(
      "TPU DMAs push: a core cannot read"
      f" {'another device' if on_devices else 'the VMEM of another core'}."
      " Let the owner of src call cm.put(src, dst, to=...) and wait for it"
      " here with cm.wait_arrival."
    )
  pltpu.sync_copy(src, dst)


def wait_arrival(dst: Any, recv_sem: Any) -> None:
  """Waits until as many bytes as `dst` holds have landed on `recv_sem`.

  For a receiver that has no `Copy` of its own: put with a named `recv_sem` on
  one worker, this on the other.
  """
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
    AxisError: `to` names no axis in scope.
    CollectiveError: a static `inc` below 1.
  """
  _check_count("inc", inc)
  address = None if to is None else mesh.device_id(to)
  pl.semaphore_signal(sem, inc, device_id=address)


def wait(sem: Any, count: Any = 1) -> None:
  """Waits until `sem` is at least `count`, then subtracts it.

  Args:
    sem: a REGULAR semaphore, shape ().
    count: how much, at least 1 if static; an int32 scalar may be 0.

  Raises:
    CollectiveError: a static `count` below 1.
  """
  _check_count("count", count)
  pl.semaphore_wait(sem, count)


def ring_shift(
  src: Any,
  dst: Any,
  *,
  axis: mesh.Axes,
  steps: int = 1,
  sem: Any = None,
  send_sem: Any = None,
  recv_sem: Any = None,
) -> None:
  """Moves every worker's `src` into the `dst` of the worker `steps` ahead.

  Waits for the receiver to be ready, and for the arrival here. May be called
  again with the same `dst` once this worker has finished with it.

  Args:
    src: a ref on every worker along `axis`, HBM or VMEM.
    dst: a ref of the same shape and dtype, which nothing else writes.
    axis: the ring; several axes form one ring, the last fastest, so that
      ("device", "core") passes through both cores of each device.
    steps: how far, a Python int; 0 modulo the ring copies locally.
    sem: see `cm.barrier`: a semaphore for the receivers' readiness.
    send_sem, recv_sem: see `put`.

  Raises:
    As `put`; CollectiveError if the barrier semaphore carries another pattern.
  """
  names = mesh.as_axes(axis, argument="axis")
  steps = steps % mesh.num_workers(names)
  if steps == 0:
    copy(src, dst)
    return
  with jax.named_scope("ring_shift"):
    # Each worker has one receiver and one sender, so one count cannot be
    # mistaken: the receiver's next signal comes after this put has landed.
    ready = barriers.pattern_semaphore(sem, ("ring_shift", names, steps))
    signal(ready, to=mesh.shifted(names, -steps))
    wait(ready)
    put(
      src,
      dst,
      to=mesh.shifted(names, steps),
      send_sem=send_sem,
      recv_sem=recv_sem,
    ).wait()


def swap(
  src: Any,
  dst: Any,
  *,
  axis: mesh.Axes = "core",
  sem: Any = None,
  send_sem: Any = None,
  recv_sem: Any = None,
) -> None:
  """Exchanges `src` between the workers of each pair along `axis`.

  Workers 2k and 2k+1 are a pair. Waits for the partner to be ready and for
  the arrival here.

  Args:
    src: a ref on every worker, HBM or VMEM.
    dst: where the partner's `src` lands; same shape and dtype.
    axis: an axis, or several taken as one, with an even number of workers.
    sem: see `cm.barrier`.
    send_sem, recv_sem: see `put`.

  Raises:
    As `ring_shift`; ShapeError if the number of workers is odd.
  """
  names = mesh.as_axes(axis, argument="axis")
  workers = mesh.num_workers(names)
  if workers % 2:
    raise errors.ShapeError(
      f"swap pairs workers, so the axes {list(names)} must hold an even"
      f" number of them; got {workers}."
    )
  place = mesh.worker_index(names)
  partner = mesh.coordinates(jax.lax.bitwise_xor(place, jnp.int32(1)), names)
  with jax.named_scope("swap"):
    ready = barriers.pattern_semaphore(sem, ("swap", names))
    signal(ready, to=partner)
    wait(ready)
    put(src, dst, to=partner, send_sem=send_sem, recv_sem=recv_sem).wait()


def _check_pair(src: Any, dst: Any) -> None:
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


def _in_shared_memory(ref: Any) -> bool:
  return _compat.memory_space(ref) in (None, pl.ANY, pltpu.HBM)


def _check_remote_memory(argument: str, ref: Any) -> None:
  if _in_shared_memory(ref) or _compat.memory_space(ref) in (
    pltpu.VMEM,
    pltpu.VMEM_SHARED,
  ):
    return
  raise errors.UnsupportedError(
    f"{argument} of a put must be in HBM or VMEM; got a ref in"
    f" {_compat.memory_space(ref)}. Copy it to VMEM first."
  )


def _check_count(argument: str, count: Any) -> None:
  if isinstance(count, int) and count < 1:
    raise errors.CollectiveError(f"{argument} must be at least 1; got {count}.")


def _take_link(function: str, argument: str) -> tuple[Any, Any]:
  current = scope.current()
  if current is None or current.copy_sem is None:
    raise errors.CollectiveError(
      f"{function} has no semaphores of its own here: they come with a"
      f" cm.kernel on a single mesh. Pass {argument}=, DMA semaphores from"
      " the kernel's scratch."
    )
  return current.take_link()
