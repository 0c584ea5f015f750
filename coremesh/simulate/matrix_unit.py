"""The matrix units of a TensorCore, driven by `pltpu.matmul_*`."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coremesh.simulate import convolution

type Rule = Callable[
  [Mapping[str, Any], Sequence[Any], Sequence[Any]], Callable[..., Any]
]


class Mxu:
  """Staging registers, weights and result queues of one core's matrix units.

  Accumulators are memory: they are given to each call. Queues and registers
  have no limit here, and results are there at once.
  """

  def __init__(self) -> None:
    self._staged: dict[tuple[int, int], np.ndarray] = {}
    self._weights: dict[int, np.ndarray] = {}
    self._queues: dict[int, list[np.ndarray]] = collections.defaultdict(list)

  def push_rhs(
    self,
    rhs: np.ndarray,
    *,
    staging_register: int,
    mxu_index: int,
    transpose: bool = False,
  ) -> None:
    """Stages `rhs`, [K, N], or [N, K] with `transpose`.

    Raises:
      ValueError: if the register still holds an operand nobody loaded.
    """
    key = mxu_index, staging_register
    if key in self._staged:
      raise ValueError(
        f"matmul_push_rhs: staging register {staging_register} of MXU"
        f" {mxu_index} must be empty, but holds an operand that was not loaded."
        " Load it with load_staged_rhs first."
      )
    self._staged[key] = rhs.T if transpose else rhs

  def _multiply(
    self, lhs: np.ndarray, mxu_index: int, load_staged_rhs: int | None
  ) -> np.ndarray:
    if load_staged_rhs is not None:
      key = mxu_index, load_staged_rhs
      if key not in self._staged:
        raise ValueError(
          f"load_staged_rhs={load_staged_rhs}: that staging register of MXU"
          f" {mxu_index} is empty. Call matmul_push_rhs first."
        )
      self._weights[mxu_index] = self._staged.pop(key)
    if mxu_index not in self._weights:
      raise ValueError(
        f"MXU {mxu_index} has no right-hand side yet. Pass load_staged_rhs."
      )
    rhs = self._weights[mxu_index]
    # The hardware would read the bits of `rhs` as values of the type of `lhs`.
    if rhs.dtype != lhs.dtype or lhs.shape[1] != rhs.shape[0]:
      raise ValueError(
        "The operands of a matmul must be [M, K] and [K, N] of one dtype; got"
        f" lhs {lhs.dtype}{list(lhs.shape)} and rhs"
        f" {rhs.dtype}{list(rhs.shape)}."
      )
    return convolution.matmul(lhs, rhs)

  def acc_lhs(
    self,
    acc: np.ndarray,
    lhs: np.ndarray,
    *,
    mxu_index: int,
    load_staged_rhs: int | None = None,
  ) -> None:
    """Adds `lhs` @ the loaded operand to `acc`, in place.

    Args:
      acc: [M, N], float32 or int32: the accumulator itself, or a view of it.
      lhs: [M, K].
      mxu_index: the unit, which the accumulator's memory space names.
      load_staged_rhs: the staging register to load first; None keeps the
        operand loaded before.
    """
    acc += self._multiply(lhs, mxu_index, load_staged_rhs).astype(acc.dtype)

  def pop(self, acc: np.ndarray) -> np.ndarray:
    """The accumulator's values, [M, N]; leaves zeros in it."""
    result = acc.copy()
    acc[...] = 0
    return result

  def lhs_fifo(
    self,
    lhs: np.ndarray,
    *,
    mxu_index: int,
    load_staged_rhs: int | None = None,
  ) -> None:
    """Appends the rows of `lhs` @ the loaded operand to the unit's queue."""
    result = self._multiply(lhs, mxu_index, load_staged_rhs)
    self._queues[mxu_index].append(result)

  def pop_fifo(
    self, shape: tuple[int, int], dtype: Any, *, mxu_index: int
  ) -> np.ndarray:
    """Takes the oldest rows of a unit's queue, [M, N] of float32 or int32.

    Raises:
      ValueError: if fewer rows are queued, or of another width or dtype.
    """
    queue = self._queues[mxu_index]
    rows = np.concatenate(queue) if queue else np.zeros((0, shape[1]), dtype)
    if len(rows) < shape[0] or rows.shape[1] != shape[1] or rows.dtype != dtype:
      raise ValueError(
        f"matmul_pop_fifo asks MXU {mxu_index} for {np.dtype(dtype)}"
        f"{list(shape)}, but its queue holds {rows.dtype}{list(rows.shape)}."
      )
    queue[:] = [rows[shape[0] :]] if len(rows) > shape[0] else []
    return rows[: shape[0]]

  def leftovers(self) -> list[str]:
    """What is here, in words; a kernel must not end with any of it."""
    staged = [
      f"an operand in staging register {register} of MXU {mxu}"
      for mxu, register in sorted(self._staged)
    ]
    queued = [
      f"{sum(map(len, queue))} rows in the result queue of MXU {mxu}"
      for mxu, queue in sorted(self._queues.items())
      if queue
    ]
    return staged + queued


def _unit_of(acc_aval: Any) -> int:
  """The matrix unit whose accumulator a ref of this type is in."""
  space = acc_aval.memory_space
  # A core's own memory, `ACC(0) @ mesh`, names the memory inside.
  return getattr(space, "memory_space", space).mxu_id


def _check_whole(in_avals: Sequence[Any], expected: int, name: str) -> None:
  if len(in_avals) != expected:
    raise NotImplementedError(
      f"{name} takes whole accumulators: JAX cannot lower one that is sliced."
    )


def _push_rhs(params, in_avals, out_avals):
  del in_avals, out_avals
  options = dict(params)

  def push_rhs(mxu, rhs):
    mxu.push_rhs(rhs, **options)
    return ()

  return push_rhs


def _acc_lhs(params, in_avals, out_avals):
  del out_avals
  _check_whole(in_avals, 2, "matmul_acc_lhs")
  options = {
    "mxu_index": _unit_of(in_avals[0]),
    "load_staged_rhs": params["load_staged_rhs"],
  }

  def acc_lhs(mxu, acc, lhs):
    mxu.acc_lhs(acc, lhs, **options)
    return ()

  return acc_lhs


def _pop(params, in_avals, out_avals):
  del params, out_avals
  _check_whole(in_avals, 1, "matmul_pop")
  return lambda mxu, acc: mxu.pop(acc)


def _lhs_fifo(params, in_avals, out_avals):
  del in_avals, out_avals
  options = dict(params)

  def lhs_fifo(mxu, lhs):
    mxu.lhs_fifo(lhs, **options)
    return ()

  return lhs_fifo


def _pop_fifo(params, in_avals, out_avals):
  del in_avals, out_avals
  shape, dtype, unit = params["shape"], params["dtype"], params["mxu_index"]
  return lambda mxu: mxu.pop_fifo(shape, dtype, mxu_index=unit)


# As `tensor_core.RULES`, but the functions take an `Mxu` first, and the
# accumulator as the numpy array that is its memory, which they change.
STATEFUL: Mapping[str, Rule] = {
  "tpu.matmul_acc_lhs": _acc_lhs,
  "tpu.matmul_lhs_fifo": _lhs_fifo,
  "tpu.matmul_pop": _pop,
  "tpu.matmul_pop_fifo": _pop_fifo,
  "tpu.matmul_push_rhs": _push_rhs,
}
