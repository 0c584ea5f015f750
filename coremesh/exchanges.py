"""Exchanges in which every worker both sends and receives.

Each tells its sender that the destination is free, waits for its receiver to
say the same, and puts: so it is its own barrier, and may be called in a loop.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from coremesh import barriers, errors, mesh, remote, scope


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
  again with the same `dst` once this worker has finished with it: all calls of
  one axis and step share one link.

  Args:
    src: a ref on every worker along `axis`, in any data memory.
    dst: another ref of the same shape and dtype, which nothing else writes.
    axis: the ring; several axes form one ring, the last fastest, so that
      ("device", "core") passes through both cores of each device.
    steps: how far, a Python int; 0 modulo the ring copies locally.
    sem: see `cm.barrier`: a semaphore for the receivers' readiness.
    send_sem, recv_sem: see `put`.

  Raises:
    As `put`; CollectiveError if the semaphore carries another pattern, or
    `src` and `dst` are one ref.
  """
  route = _ring_route(axis, steps)
  if route is None:
    _check_exchange(src, dst)
    remote.copy(src, dst)
    return
  link = remote.given_link(send_sem, recv_sem) or _shared_link(route.pattern)
  _start_exchange(src, dst, route, sem, link).wait()


def start_ring_shift(
  src: Any,
  dst: Any,
  *,
  axis: mesh.Axes,
  steps: int = 1,
  sem: Any = None,
  send_sem: Any = None,
  recv_sem: Any = None,
) -> remote.Copy:
  """`ring_shift` that does not wait for the arrival, only for the receiver.

  Args: as of `ring_shift`. Each call takes a link of its own.

  Returns:
    The started copy: `.wait()` for both ends, or `.wait_send()` before `src`
    is written and `.wait_recv()` before `dst` is read.

  Raises:
    As `ring_shift`.
  """
  route = _ring_route(axis, steps)
  link = remote.given_link(send_sem, recv_sem)
  if route is None:
    _check_exchange(src, dst)
    return remote.start_copy(src, dst, sem=recv_sem)
  link = link or remote.take_link("start_ring_shift", "send_sem= and recv_sem")
  return _start_exchange(src, dst, route, sem, link)


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
    src: a ref on every worker, in any data memory.
    dst: where the partner's `src` lands; another ref, same shape and dtype.
    axis: an axis, or several taken as one, with an even number of workers.
    sem: see `cm.barrier`.
    send_sem, recv_sem: see `put`.

  Raises:
    As `ring_shift`; ShapeError if the number of workers is odd.
  """
  route = _swap_route(axis)
  link = remote.given_link(send_sem, recv_sem) or _shared_link(route.pattern)
  _start_exchange(src, dst, route, sem, link).wait()


def start_swap(
  src: Any,
  dst: Any,
  *,
  axis: mesh.Axes = "core",
  sem: Any = None,
  send_sem: Any = None,
  recv_sem: Any = None,
) -> remote.Copy:
  """`swap` that does not wait for the arrival, only for the partner.

  Args: as of `swap`. Each call takes a link of its own.

  Returns:
    The started copy; see `start_ring_shift`.

  Raises:
    As `swap`.
  """
  route = _swap_route(axis)
  link = remote.given_link(send_sem, recv_sem)
  link = link or remote.take_link("start_swap", "send_sem= and recv_sem")
  return _start_exchange(src, dst, route, sem, link)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Route:
  """Where an exchange sends to and hears from, on every worker alike."""

  pattern: scope.Pattern
  receiver: remote.Address
  sender: remote.Address


def _ring_route(axis: mesh.Axes, steps: int) -> _Route | None:
  """The route `steps` along a ring, None if it leads back to this worker."""
  names = mesh.as_axes(axis, argument="axis")
  if isinstance(steps, bool) or not isinstance(steps, int):
    raise errors.ShapeError(
      f"steps must be a Python int, the same on every worker; got {steps!r}."
    )
  steps = steps % mesh.num_workers(names)
  if steps == 0:
    return None
  return _Route(
    pattern=("ring_shift", names, steps),
    receiver=mesh.shifted(names, steps),
    sender=mesh.shifted(names, -steps),
  )


def _swap_route(axis: mesh.Axes) -> _Route:
  names = mesh.as_axes(axis, argument="axis")
  workers = mesh.num_workers(names)
  if workers % 2:
    raise errors.ShapeError(
      f"swap pairs workers, so the axes {list(names)} must hold an even"
      f" number of them; got {workers}."
    )
  place = mesh.worker_index(names)
  partner = mesh.coordinates(jax.lax.bitwise_xor(place, np.int32(1)), names)
  return _Route(pattern=("swap", names), receiver=partner, sender=partner)


def _start_exchange(
  src: Any, dst: Any, route: _Route, sem: Any, link: scope.Link
) -> remote.Copy:
  """Tells the sender that `dst` is free, and puts once the receiver's is."""
  barriers.check_semaphore("sem", sem)
  _check_exchange(src, dst)
  with jax.named_scope(route.pattern[0]):
    # Each worker has one receiver and one sender, so one count cannot be
    # mistaken: the receiver's next signal comes after this put has landed.
    ready = barriers.pattern_semaphore(sem, route.pattern)
    remote.signal(ready, to=route.sender)
    remote.wait(ready)
    send_sem, recv_sem = link
    return remote.put(
      src, dst, to=route.receiver, send_sem=send_sem, recv_sem=recv_sem
    )


def _check_exchange(src: Any, dst: Any) -> None:
  remote.check_pair(src, dst, is_remote=True)
  if src is dst:
    raise errors.CollectiveError(
      "src and dst must be two refs: what arrives would overwrite what is"
      " being sent. Use two buffers in turn, buffer.at[0] and buffer.at[1]."
    )


def _shared_link(pattern: scope.Pattern) -> scope.Link:
  return remote.take_link(pattern[0], "send_sem= and recv_sem", pattern)
