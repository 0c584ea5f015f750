"""How the backward pass of attention is computed: sizes, and what follows."""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from coremesh.kernels._attention import masks
from coremesh.kernels._attention.backward_blocks import BackwardBlocks
from coremesh.kernels._attention.backward_tiles import Tiles
from coremesh.kernels._attention.backward_units import Rounds
from coremesh.kernels._attention.call import Problem
from coremesh.kernels._attention.masks import Span


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
  """How the backward pass is computed.

  Attributes:
    problem: what is asked for.
    blocks: the sizes.
    share: of the keys, which of those that are held at once.
    num_cores: of a device.
  """

  problem: Problem
  blocks: BackwardBlocks
  share: int
  num_cores: int

  @property
  def rounds(self) -> Rounds:
    """What each core does."""
    return Rounds(
      problem=self.problem,
      blocks=pl.cdiv(self.problem.q_len, self.blocks.held_rows),
      num_cores=self.num_cores,
    )

  @property
  def tiles(self) -> Tiles:
    """The pairs of blocks."""
    return Tiles(
      band=masks.band(self.problem),
      rows=self.blocks.rows,
      keys=self.blocks.keys,
      part=self.blocks.part,
      edge_part=self.blocks.edge_part,
    )

  @property
  def held_keys(self) -> Span:
    """The keys of this share."""
    start = self.share * self.blocks.held_keys
    stop = min(start + self.blocks.held_keys, self.problem.kv_len)
    return Span(start, stop)

  @property
  def names(self) -> tuple[str, ...]:
    """Of the inputs that go in blocks, in order."""
    operands = (n for n in self.problem.operands if n != "num_keys")
    return ("q", "k", "v", "out", "d_out", "lse", "d_lse", *operands)

  @property
  def has_other_pairs(self) -> bool:
    """Whether some pairs are neither full nor on an edge with its own code."""
    p, b = self.problem, self.blocks
    if p.q_len % b.rows or p.kv_len % b.keys:
      return True
    if {"num_keys", "row_segments"} & set(p.operands):
      return True
    return self.tiles.has_many_edges

  @property
  def out_names(self) -> tuple[str, ...]:
    """Of the outputs; the derivative of a bias is made of the last."""
    names = "dq", "dk", "dv"
    return (*names, "row_values") if "bias" in self.problem.operands else names

  def scratch(self) -> dict[str, Any]:
    """The sums of dq, dk and dv, and the `row_values`, by name."""
    rows, keys = self.blocks.held_rows, self.blocks.held_keys
    d_qk, d_v = self.problem.d_qk, self.problem.d_v
    shapes = {
      "dq": (rows, d_qk),
      "dk": (keys, d_qk),
      "dv": (keys, d_v),
      "row_values": (2, rows),
    }
    return {n: pltpu.VMEM(shape, jnp.float32) for n, shape in shapes.items()}
