"""How two cores that summed over different parts of K add their sums."""

from collections.abc import Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from coremesh import remote
from coremesh.kernels._matmul.plan import Plan
from coremesh.partition import num_blocks


def scratch(plan: Plan, sums: Any) -> list[Any]:
  """The scratch of `exchange`: received sums, and semaphores.

  Args:
    plan: of the product.
    sums: the type of the sums of one weight, in VMEM.
  """
  num_weights = plan.call.num_weights
  return [*[sums] * num_weights, pltpu.SemaphoreType.DMA((2, num_weights))]


def parts_of(plan: Plan, core: int) -> range:
  """The parts of the block of the output that a core finishes."""
  count = num_blocks(plan.n.block, plan.columns)
  share = num_blocks(count, plan.num_cores)
  return range(core * share, min((core + 1) * share, count))


def exchange(
  plan: Plan, core: Any, sums: Sequence[Any], received: Sequence[Any], sems: Any
) -> None:
  """Adds the sums of the other core to those of the parts of this one.

  Args:
    plan: of the product.
    core: the index of this core.
    sums: [M, N] of each weight, in VMEM; of the parts of the other core they
      stay as they are.
    received: as `sums`, of the other core.
    sems: [2, weights], of DMAs. The other core is known to be in the kernel.
  """
  ranges = [parts_of(plan, i) for i in range(plan.num_cores)]
  columns = [
    pl.ds(r.start * plan.columns, min(len(r) * plan.columns, plan.n.block))
    for r in ranges
    if r
  ]

  def send(owner: int, own: pl.Slice) -> None:
    copies = [
      remote.put(
        mine.at[:, own],
        theirs.at[:, own],
        to={"core": owner},
        send_sem=sems.at[0, i],
        recv_sem=sems.at[1, i],
      )
      for i, (mine, theirs) in enumerate(zip(sums, received, strict=True))
    ]
    for copy in copies:
      copy.wait_send()

  def add(own: pl.Slice) -> None:
    for i, (mine, theirs) in enumerate(zip(sums, received, strict=True)):
      remote.wait_arrival(theirs.at[:, own], sems.at[1, i])
      mine[:, own] += theirs[:, own]

  for owner, own in enumerate(columns):
    pl.when(core != owner)(lambda owner=owner, own=own: send(owner, own))
  for owner, own in enumerate(columns):
    pl.when(core == owner)(lambda own=own: add(own))
