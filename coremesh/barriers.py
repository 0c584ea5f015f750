"""Barriers between cores, subcores, neighbours and devices.

A barrier returns when every worker of a set has entered it. Each one here may
be called any number of times, and in kernels that follow one another with the
same collective id, and leaves its semaphores at zero. One semaphore must carry
one pattern of signals only: see `scope.claim_barrier_semaphore`.

Why counting is enough (a semaphore counts signals and loses their names):

* all-to-all: the first worker to leave round k has had n-1 signals, none of
  round k+1 can exist yet, so all have entered round k. Everybody who leaves
  later leaves after that.
* tree: a child signals again only after its parent released it, a parent
  releases only after it was released itself, so at any worker the signals of
  two rounds never overlap.
* neighbours: waiting for two signals on one semaphore is wrong, because one
  neighbour may be a round ahead and signal twice. So each side has a semaphore
  of its own, and whatever is counted on it has one sender.

`tests/protocols.py` runs these programs in every order and checks it.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import numpy as np

from coremesh import errors, mesh, scope

# Up to this many workers one exchange of signals is the fastest; above it the
# signals each worker sends (all of them) cost more than a tree's two passes.
_MAX_ALL_TO_ALL = 8
_TREE_FANOUT = 8

_REGULAR = pltpu.SemaphoreType.REGULAR
_BARRIER = pltpu.SemaphoreType.BARRIER


def barrier(axes: mesh.Axes, *, sem: Any = None) -> None:
  """Waits for all workers along `axes`; those of other axes do not matter.

  Args:
    axes: names of device axes, core axes or both, in any order.
    sem: a REGULAR semaphore of shape () that no other pattern uses, the same
      scratch on every worker. Default: the kernel's barrier semaphore, the
      only one that may be signalled before the receiver has entered the
      kernel. With any other, a barrier over the default semaphore that covers
      the same workers must come first.

  Raises:
    AxisError: a name that is no axis in scope.
    CollectiveError: the semaphore already carries another pattern, or it is
      no REGULAR semaphore of that shape.
  """
  given = mesh.as_axes(axes)
  # In one order whatever the caller's, so that equal barriers are one pattern.
  in_scope = mesh.device_axes() + mesh.core_axes()
  names = mesh.with_several([n for n in in_scope if n in given])
  check_semaphore("sem", sem)
  if not names:
    return
  workers = mesh.num_workers(names)
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

  On vector subcores, for the same subcore of all SparseCores, or for all
  subcores of this SparseCore.

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

  Raises:
    UnsupportedError: a kernel on other cores.
  """
  if not mesh.on_vector_subcore():
    raise errors.UnsupportedError(
      "subcore_barrier is for vector subcores, chip.vector_subcores(); the"
      f" core axes here are {list(mesh.core_axes())}. Use cm.core_barrier."
    )
  plsc.subcore_barrier()


def neighbour_barrier(
  axis: mesh.Axes, *, wrap: bool = True, sems: Any = None
) -> None:
  """Waits for the workers just before and after this one along `axis`.

  What makes it safe to write to a neighbour, by two signals of each worker
  whatever the length of the axis. How long it takes is another matter:

  | workers | `barrier` | this | this with `sems` |
  |---|---|---|---|
  | 2; 3 of a ring | 1 | 1, it is that barrier | 1 |
  | up to 8 | 1 | 2 | 1 |
  | 9 and more | 2 for each level of a tree: 4 for 16 | 2 | 1 |

  in times that a signal takes to arrive. It is 2 because a worker may signal
  the scratch semaphore of the one before it only when that one has signalled,
  and so has it. So up to 8 workers `barrier` is faster, and from 9 this is.

  Args:
    axis: a device or core axis; several form one ring, the last fastest.
    wrap: a ring, whose ends are neighbours, or a line.
    sems: two REGULAR semaphores, shape (2,), one for each side, that no other
      pattern uses, the same scratch on every worker. Default: as for
      `barrier`, and the same rule for any other.

  Raises:
    AxisError: a name that is no axis in scope.
    CollectiveError: see `barrier`.
  """
  names = mesh.with_several(mesh.as_axes(axis, argument="axis"))
  check_semaphore("sems", sems, shape=(2,))
  if not names:
    return
  workers = mesh.num_workers(names)
  pattern = ("neighbours", names, "ring" if wrap else "line")
  sides = functools.partial(_Sides, names=names, workers=workers, wrap=wrap)
  with jax.named_scope("neighbour_barrier"):
    if sems is not None:
      pattern_semaphore(sems, pattern)
      sides(sems.at[0], sems.at[1]).meet_at_once()
    elif workers == 2 or (workers == 3 and wrap):
      barrier(names)  # All are neighbours, and one exchange is enough.
    else:
      before_sem = pattern_semaphore(None, pattern)
      _with_neighbour_semaphore(
        lambda after_sem: sides(before_sem, after_sem).meet_in_turn()
      )


class _Sides:
  """The two neighbours of this worker, and a semaphore for each."""

  def __init__(self, before_sem, after_sem, *, names, workers, wrap):
    place = mesh.worker_index(names)
    self.before_sem, self.after_sem = before_sem, after_sem
    self.before = mesh.shifted(names, -1)
    self.after = mesh.shifted(names, 1)
    self.when_before = _always if wrap else pl.when(place > 0)
    self.when_after = _always if wrap else pl.when(place < workers - 1)

  def signal_after(self) -> None:
    """Counts at the next worker, which has this one before it."""
    self.when_after(lambda: _signal(self.before_sem, self.after))

  def signal_before(self) -> None:
    self.when_before(lambda: _signal(self.after_sem, self.before))

  def wait_before(self) -> None:
    self.when_before(lambda: pl.semaphore_wait(self.before_sem, 1))

  def wait_after(self) -> None:
    self.when_after(lambda: pl.semaphore_wait(self.after_sem, 1))

  def meet_at_once(self) -> None:
    """For semaphores that both neighbours are known to have allocated."""
    self.signal_after()
    self.signal_before()
    self.wait_before()
    self.wait_after()

  def meet_in_turn(self) -> None:
    """Signals `after_sem` only of a worker that has signalled, so has it."""
    self.signal_after()
    self.wait_before()
    self.signal_before()
    self.wait_after()


def _always(function: Callable[[], None]) -> None:
  function()


def _with_neighbour_semaphore(body: Callable[[Any], None]) -> None:
  """Calls `body` with a REGULAR semaphore for `neighbour_barrier` alone."""
  current = scope.current()
  if current is not None and current.neighbour_sem is not None:
    body(current.neighbour_sem)
  else:
    pl.run_scoped(body, _REGULAR)


def _tree_barrier(sem, names: Sequence[str], workers: int) -> None:
  """Gathers arrivals up a tree and releases down it, by one semaphore."""
  place = mesh.worker_index(names)
  fanout = np.int32(_TREE_FANOUT)
  first_child = place * fanout + np.int32(1)
  children = jax.lax.clamp(np.int32(0), np.int32(workers) - first_child, fanout)
  is_root = place == 0
  parent = jax.lax.div(jax.lax.max(place - np.int32(1), np.int32(0)), fanout)

  pl.when(children > 0)(lambda: pl.semaphore_wait(sem, children))

  @pl.when(jax.lax.bitwise_not(is_root))
  def _():
    _signal(sem, mesh.coordinates(parent, names))
    pl.semaphore_wait(sem, 1)

  for k in range(_TREE_FANOUT):
    child = first_child + np.int32(k)
    to = functools.partial(mesh.coordinates, child, names)
    pl.when(child < workers)(_deferred_signal(sem, to))


def _deferred_signal(sem, to: Callable[[], Any]) -> Callable[[], None]:
  return lambda: _signal(sem, to())


def _signal(sem, to) -> None:
  pl.semaphore_signal(sem, 1, device_id=mesh.device_id(to))


def pattern_semaphore(sem: Any, pattern: scope.Pattern) -> Any:
  """`sem`, or the barrier semaphore, once known to be free for the pattern."""
  current = scope.current()
  kind, axes, *_ = pattern
  if sem is None or is_barrier_semaphore(sem):
    if current is not None:
      current.claim_barrier_semaphore(pattern)
      current.num_barriers += sem is None
      current.meet(axes)
    return pltpu.get_barrier_semaphore() if sem is None else sem
  if current is not None:
    current.claim_semaphore(sem, pattern)
    current.reach(kind, axes)
  return sem


def is_barrier_semaphore(sem: Any) -> bool:
  """Whether this one may be signalled before its owner enters the kernel."""
  return sem.dtype == _BARRIER.dtype


def check_semaphore(
  argument: str,
  sem: Any,
  *,
  kind: pltpu.SemaphoreType = _REGULAR,
  shape: tuple[int, ...] = (),
) -> None:
  """Checks a semaphore that a user gave, None for none.

  Raises:
    CollectiveError: it is no semaphore, or of another kind or shape.
  """
  if sem is None:
    return
  dtype, given = getattr(sem, "dtype", None), getattr(sem, "shape", None)
  kinds = (kind, _BARRIER) if kind == _REGULAR else (kind,)
  if type(dtype) not in [type(k.dtype) for k in kinds] or given != shape:
    raise errors.CollectiveError(
      f"{argument} must be a pltpu.SemaphoreType.{kind.name} scratch of shape"
      f" {shape}; got {dtype or type(sem).__name__} of shape {given}. One of"
      " several is sems.at[i]."
    )


def _check_kind(names, known, kind: str, argument: str) -> None:
  mesh.as_axes(names, argument=argument)
  wrong = [n for n in names if n not in known]
  if wrong:
    raise errors.AxisError(
      f"{argument} of {kind}_barrier must be {kind} axes; {wrong} are not."
      f" The {kind} axes in scope are {list(known)}; cm.barrier takes both"
      " kinds."
    )
