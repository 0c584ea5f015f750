"""Numbers that steer the kernels of attention: ints, or int32 scalars."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import errors, place
from coremesh.kernels._attention.call import Problem


def quotient(a: Any, b: int) -> Any:
  """a // b of what is not negative."""
  if isinstance(a, int):
    return a // b
  # a // b would also round what is negative, in more instructions.
  return a if b == 1 else jax.lax.div(a, np.int32(b))


def divided(a: Any, b: int) -> tuple[Any, Any]:
  """a // b and a % b of what is not negative."""
  if not isinstance(a, int) and b == 1:
    return a, 0
  whole = quotient(a, b)
  return whole, a - whole * (b if isinstance(a, int) else np.int32(b))


def place_in_deal(core: Any, deal: Any, num_cores: int) -> Any:
  """Where a core stands in a deal: every second goes back."""
  last = num_cores - 1
  if isinstance(deal, int):
    return last - core if deal % 2 else core
  goes_back = jax.lax.rem(deal, np.int32(2)) == 1
  return jnp.where(goes_back, last - core, core)


def with_num_keys(
  problem: Problem, inputs: Sequence[Any], run: Callable[..., None]
) -> None:
  """Calls run(inputs, num_keys_smem), the number of keys apart, if given.

  Args:
    problem: says whether the last of the inputs, in HBM, is that number.
    inputs: refs.
    run: num_keys_smem is None if all keys are valid.

  Raises:
    ShapeError: there are more numbers than SMEM holds.
  """
  if "num_keys" not in problem.operands:
    run(inputs, None)
    return
  needed = 4 * inputs[-1].size
  limit = place.current_chip().smem_bytes_per_tensor_core
  if needed >= limit:
    raise errors.ShapeError(
      f"kv_lengths of attention take {needed} bytes of SMEM, and a core has"
      f" {limit}. Call it for some of the leading axes at a time."
    )

  def copied(num_keys_smem):
    pltpu.sync_copy(inputs[-1], num_keys_smem)
    run(inputs[:-1], num_keys_smem)

  pl.run_scoped(copied, pltpu.SMEM(inputs[-1].shape, jnp.int32))


def num_keys_of(problem: Problem, num_keys_smem: Any, batch: Any) -> Any:
  """How many keys of an element are valid; None for all."""
  if num_keys_smem is None:
    return None
  element = 0 if num_keys_smem.shape == (1,) else batch
  return jnp.clip(num_keys_smem[element], 0, problem.kv_len)


def both(a: Any, b: Any) -> Any:
  """Whether both hold, known when the kernel is compiled if possible."""
  if isinstance(a, bool):
    return b if a else False
  if isinstance(b, bool):
    return a if b else False
  return a & b


def negated(a: Any) -> Any:
  """Whether it does not hold."""
  return not a if isinstance(a, bool) else ~a


def when(condition: Any, then: Callable[[], None]) -> None:
  """`pl.when`, without a branch where the answer is known."""
  if not isinstance(condition, bool):
    pl.when(condition)(then)
  elif condition:
    then()
