"""Which rows of attention each TensorCore does, in which order.

A unit is a block of rows of one head. Whole heads of keys go round the cores,
with all units that use them, so that each core does as many. Of those that are
left when they no longer go round, units are dealt out to the cores and back,
0 1 1 0 0 1 1 0: under a causal mask each has more work than the one before it.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from coremesh.kernels._attention.call import Problem
from coremesh.kernels._attention.scalars import divided, place_in_deal


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
  """A block of rows: int32 scalars of a kernel, or ints.

  Attributes:
    batch: the element.
    head: of q.
    kv_head: of k and v.
    block: of rows.
  """

  batch: Any
  head: Any
  kv_head: Any
  block: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Units:
  """The units of all cores.

  Attributes:
    problem: what is to be done.
    blocks: of rows, for each head.
    num_cores: that share them.
  """

  problem: Problem
  blocks: int
  num_cores: int

  @property
  def _of_kv_head(self) -> int:
    return self.problem.group * self.blocks

  @property
  def _rounds(self) -> int:
    """How many heads of keys each core has to itself."""
    return self.problem.batch * self.problem.kv_heads // self.num_cores

  @property
  def _num_dealt(self) -> int:
    """Units that are dealt out."""
    heads = self.problem.batch * self.problem.kv_heads
    return heads % self.num_cores * self._of_kv_head

  def count(self, core: Any) -> Any:
    """How many units a core does."""
    whole = self._rounds * self._of_kv_head
    deals, rest = divmod(self._num_dealt, self.num_cores)
    if not rest:
      return whole + deals
    return (
      whole
      + deals
      + jnp.int32(place_in_deal(core, deals, self.num_cores) < rest)
    )

  def unit(self, core: Any, index: Any) -> Unit:
    """The unit that a core does at an index below its count."""
    per_head, cores = self._of_kv_head, self.num_cores
    whole = self._rounds * per_head
    round_, item = divided(index, per_head)
    pair = round_ * cores + core
    if self._num_dealt:
      deal = index - whole
      dealt = deal * cores + place_in_deal(core, deal, self.num_cores)
      its_head, its_item = divided(dealt, per_head)
      is_dealt = index >= whole
      pair = jnp.where(is_dealt, self._rounds * cores + its_head, pair)
      item = jnp.where(is_dealt, its_item, item)
    batch, kv_head = divided(pair, self.problem.kv_heads)
    member, block = divided(item, self.blocks)
    head = kv_head * self.problem.group + member
    return Unit(batch=batch, head=head, kv_head=kv_head, block=block)
