"""Which heads of keys and blocks of rows each TensorCore goes back through.

Whole heads of keys go round the cores, and a core sums the derivatives of its
keys over all rows of all heads that use them. Where there are too few heads of
keys to go round evenly, the cores share each: every one has blocks of rows of
all of them, dealt out and back, 0 1 1 0 0 1 1 0, as under a causal mask each
has more work than the one before it. Then what each core has for the keys is
only its part of the sum.
"""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl
import jax.numpy as jnp

from coremesh.kernels._attention.call import Problem
from coremesh.kernels._attention.scalars import divided, place_in_deal
from coremesh.kernels._attention.units import Unit


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
  """The work of all cores: heads of keys, and blocks of rows for each.

  Attributes:
    problem: what is to be done.
    blocks: of rows, for each head of q.
    num_cores: that share them.
  """

  problem: Problem
  blocks: int
  num_cores: int

  @property
  def shares_heads(self) -> bool:
    """Whether several cores have rows of one head of keys."""
    heads = self._heads
    is_uneven = heads % self.num_cores != 0 and heads < 2 * self.num_cores
    return is_uneven and self._items >= self.num_cores

  @property
  def num_sums(self) -> int:
    """Parts of which the derivative of the keys is the sum."""
    return self.num_cores if self.shares_heads else 1

  def num_heads(self, core: Any) -> Any:
    """Heads of keys that a core goes through."""
    if self.shares_heads:
      return self._heads
    return _count(self._heads, self.num_cores, core)

  def num_items(self, core: Any) -> Any:
    """Blocks of rows that a core has of each of its heads of keys."""
    if not self.shares_heads:
      return self._items
    deals, rest = divmod(self._items, self.num_cores)
    if not rest:
      return deals
    return deals + jnp.int32(place_in_deal(core, deals, self.num_cores) < rest)

  def unit(self, core: Any, head: Any, item: Any) -> Unit:
    """The block at indices below those numbers."""
    if self.shares_heads:
      item = item * self.num_cores + place_in_deal(core, item, self.num_cores)
    else:
      head = head * self.num_cores + core
    batch, kv_head = divided(head, self.problem.kv_heads)
    member, block = divided(item, self.blocks)
    return Unit(
      batch=batch,
      head=kv_head * self.problem.group + member,
      kv_head=kv_head,
      block=block,
    )

  @property
  def _heads(self) -> int:
    return self.problem.batch * self.problem.kv_heads

  @property
  def _items(self) -> int:
    return self.problem.group * self.blocks


def _count(total: int, num_cores: int, core: Any) -> Any:
  """How many of the things that go round come to a core."""
  if total % num_cores == 0:
    return total // num_cores
  return pl.cdiv(total, num_cores) - jnp.int32(core >= total % num_cores)
