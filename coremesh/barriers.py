"""Barriers between cores, subcores, neighbours and devices.

A barrier returns when every worker of a set has entered it. Each one here may
be called any number of times, and in kernels that follow one another with the
same collective id, and leaves its semaphore at zero. One semaphore must carry
one pattern of signals only: see `scope.claim_barrier_semaphore`.

Why counting is enough (one counting semaphore a worker, names lost):

* all-to-all: the first worker to leave round k has had n-1 signals, none of
  round k+1 can exist yet, so all have entered round k. Everybody who leaves
  later leaves after that.
* tree: a child signals again only after its parent released it, a parent
  releases only after it was released itself, so at any worker the signals of
  two rounds never overlap.
* neighbours: one round is not enough. A neighbour may finish a round and
  signal the next before the other neighbour has signalled at all. A second
  handshake, on a semaphore that is only used inside the first, stops it.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp

from coremesh import errors, mesh, scope

# Up to this many workers one exchange of signals is the fastest; above it the
# signals each worker sends (all of them) cost more than a tree's two passes.
_MAX_ALL_TO_ALL = 8
_TREE_FANOUT = 8


def barrier(axes: mesh.Axes, *, sem: Any = None) -> None:
  """Waits for all workers along `axes`; those of other axes do not matter.

  Args:
    axes: names of device axes, core axes or both.
    sem: a REGULAR semaphore of shape () that no other pattern uses, the same
      scratch on every worker. Default: the kernel's barrier semaphore, the
      only one that may be signalled before the receiver has entered the
      kernel. With any other, a barrier over the default semaphore that covers
      the same workers must come first.

  Raises:
    AxisError: a name that is no axis in scope.
    CollectiveError: the barrier semaphore already carries another pattern.
  """
  names = mesh.as_axes(axes)
  workers = mesh.num_workers(names)
  if workers == 1:
    return
  sem = pattern_semaphore(sem, ("barrier", names))
  with jax.named_scope("barrier"):
    if workers <= _MAX_ALL_TO_ALL:
      for steps in range(1, workers):
        _signal(sem, mesh.shifted(names, steps))
      pl.semaphore_wait(sem, workers - 1)
    else:
      _tree_barrier(sem, names, workers)


def core_barrier(axis: str = "core", *, sem: Any = None) -> None:
  """Waits for all cores of this device along one core axis.

  See `barrier` for `sem` and the errors.
  """
  _check_kind((axis,), mesh.core_axes(), "core", "axis")
  barrier(axis, sem=sem)


def device_barrier(axes: mesh.Axes | None = None, *, sem: Any = None) -> None:
  """Waits for the same core of all devices along `axes`.

  Args:
    axes: any of the device axes in scope; default all of them.
    sem: see `barrier`.

  Raises:
    AxisError: no device axis in scope, or a name that is none.
    CollectiveError: see `barrier`.
  """
  known = mesh.device_axes()
  if axes is None and not known:
    raise errors.AxisError(
      "device_barrier needs device axes: call the kernel inside"
      " jax.shard_map(mesh=chip.device_mesh(...))."
    )
  names = known if axes is None else mesh.as_axes(axes)
  _check_kind(names, known, "device", "axes")
  barrier(names, sem=sem)


def global_barrier(*, sem: Any = None) -> None:
  """Waits for every core of every device in scope.

  See `barrier` for `sem` and the errors.
  """
  barrier(mesh.device_axes() + mesh.core_axes(), sem=sem)


def subcore_barrier() -> None:
  """Waits for all vector subcores of this SparseCore, in hardware.

  Needs no semaphore and no collective id. Only in a kernel on a
  `plsc.VectorSubcoreMesh`.
  """
  plsc.subcore_barrier()


def neighbour_barrier(
  axis: mesh.Axes, *, wrap: bool = True, sem: Any = None
) -> None:
  """Waits for the workers just before and after this one along `axis`.

  The cheapest barrier that makes it safe to write to a neighbour: two signals
  each way whatever the length of the axis.

  Args:
    axis: a device or core axis; several form one ring, the last fastest.
    wrap: a ring, whose ends are neighbours, or a line.
    sem: see `barrier`.

  Raises:
    AxisError: a name that is no axis in scope.
    CollectiveError: see `barrier`.
  """
  names = mesh.as_axes(axis, argument="axis")
  workers = mesh.num_workers(names)
  if workers == 1:
    return
  sem = pattern_semaphore(
    sem, ("neighbours", names, "ring" if wrap else "line")
  )
  handshake = functools.partial(
    _signal_and_await_neighbours, names=names, workers=workers, wrap=wrap
  )
  with jax.named_scope("neighbour_barrier"):
    # The scope opens before the first handshake, so that when a neighbour has
    # seen it, the second semaphore is there to be signalled.
    @functools.partial(pl.run_scoped, second=pltpu.SemaphoreType.REGULAR)
    def _(second):
      handshake(sem)
      handshake(second)


def _signal_and_await_neighbours(sem, *, names, workers, wrap) -> None:
  place = mesh.worker_index(names)
  before, after = mesh.shifted(names, -1), mesh.shifted(names, 1)
  if workers == 2:
    _signal(sem, after)
    pl.semaphore_wait(sem, 1)
  elif wrap:
    _signal(sem, before)
    _signal(sem, after)
    pl.semaphore_wait(sem, 2)
  else:
    has_before, has_after = place > 0, place < workers - 1
    pl.when(has_before)(lambda: _signal(sem, before))
    pl.when(has_after)(lambda: _signal(sem, after))
    count = has_before.astype(jnp.int32) + has_after.astype(jnp.int32)
    pl.semaphore_wait(sem, count)


def _tree_barrier(sem, names: Sequence[str], workers: int) -> None:
  """Gathers arrivals up a tree and releases down it, by one semaphore."""
  place = mesh.worker_index(names)
  first_child = place * jnp.int32(_TREE_FANOUT) + jnp.int32(1)
  children = jnp.clip(jnp.int32(workers) - first_child, 0, _TREE_FANOUT)
  children = children.astype(jnp.int32)
  is_root = place == 0
  parent = jax.lax.div(
    jnp.maximum(place - jnp.int32(1), jnp.int32(0)), jnp.int32(_TREE_FANOUT)
  )

  pl.when(children > 0)(lambda: pl.semaphore_wait(sem, children))

  @pl.when(jnp.logical_not(is_root))
  def _():
    _signal(sem, mesh.coordinates(parent, names))
    pl.semaphore_wait(sem, 1)

  for k in range(_TREE_FANOUT):
    child = first_child + jnp.int32(k)
    to = functools.partial(mesh.coordinates, child, names)
    pl.when(child < workers)(_deferred_signal(sem, to))


def _deferred_signal(sem, to: Callable[[], Any]) -> Callable[[], None]:
  return lambda: _signal(sem, to())


def _signal(sem, to) -> None:
  pl.semaphore_signal(sem, 1, device_id=mesh.device_id(to))


def pattern_semaphore(sem: Any, pattern: scope.Pattern) -> Any:
  """`sem`, or the barrier semaphore once it is known to be free for this."""
  if sem is not None:
    return sem
  current = scope.current()
  if current is not None:
    current.claim_barrier_semaphore(pattern)
  return pltpu.get_barrier_semaphore()


def _check_kind(names, known, kind: str, argument: str) -> None:
  mesh.as_axes(names, argument=argument)
  wrong = [n for n in names if n not in known]
  if wrong:
    raise errors.AxisError(
      f"{argument} of {kind}_barrier must be {kind} axes; {wrong} are not."
      f" The {kind} axes in scope are {list(known)}; cm.barrier takes both"
      " kinds."
    )
