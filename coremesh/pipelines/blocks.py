"""Blocks of a pipeline: how a user declares them, and what they mean."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import errors

type Grid = tuple[Any, ...]
type Index = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Accumulator:
  """An output that several steps add to; make it with `cm.accumulator`."""

  spec: pl.BlockSpec
  init: Any = 0
  dtype: Any = None


def block(
  block_shape: Sequence[Any],
  index_map: Callable[..., Any],
  *,
  buffers: int = 2,
  lookahead: bool = False,
  memory_space: Any = None,
) -> pl.BlockSpec:
  """A `pl.BlockSpec`, with the buffering as plain arguments.

  Args:
    block_shape: elements along each axis; None drops an axis of size 1 from
      what the body sees; `pl.BoundedSlice(n)` is a run-time size up to n.
    index_map: from grid indices (and prefetched refs) to *block* indices: the
      k-th block starts at element k * size. For a `pl.BoundedSlice` axis it
      returns `pl.ds(start, size)` in elements. Along the last two axes of an
      array start and size must be whole tiles, or the slice end the array:
      the copy is rounded up to tiles, and overwrites what follows in an output.
    buffers: copies of the block in VMEM, at least 1; 2 overlaps copies with
      compute.
    lookahead: fetch a later block as soon as a buffer is free; inputs only.
    memory_space: where the body sees the block; default VMEM.

  Raises:
    PipelineError: fewer than one buffer, or lookahead with fewer than two.
  """
  if isinstance(buffers, bool) or not isinstance(buffers, int) or buffers < 1:
    raise errors.PipelineError(
      f"buffers must be an int of at least 1; got {buffers!r}."
    )
  if lookahead and buffers < 2:
    raise errors.PipelineError(
      f"lookahead needs at least 2 buffers; got buffers={buffers}."
    )
  mode = None
  if buffers != 2 or lookahead:
    mode = pl.Buffered(buffers, use_lookahead=lookahead)
  return pl.BlockSpec(
    tuple(block_shape),
    index_map,
    memory_space=memory_space,
    pipeline_mode=mode,
  )


def accumulator(
  block_shape: Sequence[Any],
  index_map: Callable[..., Any],
  *,
  init: Any = 0,
  dtype: Any = None,
  buffers: int = 2,
) -> Accumulator:
  """An output block that stays while several steps add to it.

  The body may read and add to it: at the first of consecutive steps with this
  block it holds `init`. It is written back after the last of them.

  Args:
    block_shape: as for `cm.block`.
    index_map: as for `cm.block`. The steps of one block must follow each other:
      it ignores the innermost grid axes, over which the output is accumulated.
    init: what a block holds at its first step, a scalar.
    dtype: dtype to accumulate in, for instance float32 for a bfloat16 output;
      converted once, after the last step. Default that of the output.
    buffers: as for `cm.block`.

  Raises:
    PipelineError: `init` is no scalar, or as for `cm.block`.
  """
  if np.ndim(init):
    raise errors.PipelineError(
      f"init must be a scalar; got one of shape {np.shape(init)}. To start"
      " from an array, make it an input and add it at the first step."
    )
  if isinstance(init, jax.Array) and not isinstance(init, Tracer):
    init = init.item()  # A kernel cannot hold an array from outside.
  spec = block(block_shape, index_map, buffers=buffers)
  return Accumulator(spec=spec, init=init, dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
  """A ref that a pipeline was called with, and the block of it.

  Attributes:
    label: its name in errors, such as "output 0".
    ref: all of it, in HBM.
    spec: the block; its index map takes the grid indices only.
    is_output: whether blocks of it are written.
    accumulator: how it was declared, if several steps add to a block.
    reads_tables: whether its index map reads prefetched tables, so that only
      the kernel knows the blocks.
  """

  label: str
  ref: Any
  spec: pl.BlockSpec
  is_output: bool
  accumulator: Accumulator | None = None
  reads_tables: bool = False

  @property
  def has_blocks(self) -> bool:
    """Whether the body sees blocks of it, not the ref itself."""
    return self.spec.block_shape is not None

  @property
  def is_copied(self) -> bool:
    """Whether the body sees a copy, not the ref in HBM itself."""
    return self.spec.memory_space is not pltpu.HBM

  @property
  def sizes(self) -> tuple[Any, ...]:
    """The sizes of a block, as the user wrote them."""
    sizes = self.spec.block_shape
    return tuple(self.ref.shape if sizes is None else sizes)

  @property
  def dtype(self) -> Any:
    """The dtype of what the body sees."""
    own = self.accumulator and self.accumulator.dtype
    return jnp.dtype(own or self.ref.dtype)

  @property
  def block_type(self) -> Any:
    """The memory type of what the body sees."""
    shape = tuple(
      getattr(size, "block_size", size)
      for size in self.sizes
      if size is not None and not isinstance(size, pl.Squeezed)
    )
    return (self.spec.memory_space or pltpu.VMEM)(shape, self.dtype)

  @property
  def num_indices(self) -> tuple[int, ...]:
    """How many block indices each axis has, the last maybe partial."""
    return tuple(map(_num_indices, self.sizes, self.ref.shape))

  def index_at(self, point: Sequence[Any]) -> Index:
    """What the index map returns at a grid point, as a tuple.

    Raises:
      PipelineError: not one index for each axis.
    """
    assert self.spec.index_map is not None  # By `operand`.
    result = self.spec.index_map(*point)
    index = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(index) != len(self.sizes):
      raise errors.PipelineError(
        f"The index map of {self.label} must return one index for each axis of"
        f" its block {self.sizes}; got {index}."
      )
    return index

  def check(self) -> None:
    """Checks that the block fits the ref.

    Raises:
      ShapeError: another rank, or a part of an array whose last block would
        be written beyond it.
      PipelineError: lookahead for an output.
    """
    if self.has_blocks and len(self.sizes) != len(self.ref.shape):
      raise errors.ShapeError(
        f"The block of {self.label} must have one size for each axis of the"
        f" array; got block {self.sizes} for shape {tuple(self.ref.shape)}."
      )
    if not self.is_output:
      return
    if getattr(self.spec.pipeline_mode, "use_lookahead", False):
      raise errors.PipelineError(
        f"{self.label} has lookahead, which fetches input blocks early. Give"
        " an output more buffers instead."
      )
    if self.has_blocks and self.is_copied and _is_view(self.ref):
      self._check_view()

  def _check_view(self) -> None:
    for axis, (size, extent, tile) in enumerate(
      zip(self.sizes, self.ref.shape, tiles(self.ref), strict=True)
    ):
      if isinstance(size, int) and extent % size % tile:
        raise errors.ShapeError(
          f"{self.label} is a part of a larger array, of shape"
          f" {tuple(self.ref.shape)}, and axis {axis} ends within a tile of"
          f" {tile}: the copy of its last block of {size} is rounded up to"
          f" whole tiles and would overwrite what follows. Make the part whole"
          f" tiles (cm.split(unit={tile})), or use a block that divides it."
        )


def operand(
  label: str, ref: Any, declared: pl.BlockSpec | Accumulator, *, is_output: bool
) -> Operand:
  """An operand with what Pallas adds to a spec by default said in full."""
  sums = declared if isinstance(declared, Accumulator) else None
  spec = declared.spec if isinstance(declared, Accumulator) else declared
  if spec.memory_space is pl.ANY:  # Which pltpu.emit_pipeline does not know.
    spec = dataclasses.replace(spec, memory_space=pltpu.HBM)
  if spec.block_shape is not None or spec.memory_space is not pltpu.HBM:
    shape = spec.block_shape or tuple(ref.shape)
    spec = dataclasses.replace(
      spec,
      block_shape=shape,
      index_map=spec.index_map or (lambda *_: (0,) * len(shape)),
    )
  return Operand(
    label=label,
    ref=ref,
    spec=spec,
    is_output=is_output,
    accumulator=sums,
  )


def parts(index: Index) -> tuple[Any, ...]:
  """An index with the start and the size of each `pl.ds` in its place."""
  pairs = (
    (i.start, i.size) if isinstance(i, pl.Slice) else (i,) for i in index
  )
  return tuple(itertools.chain.from_iterable(pairs))


def tiles(ref: Any) -> tuple[int, ...]:
  """Elements along each axis of an array in HBM that are copied together."""
  rank = len(ref.shape)
  if rank < 2:
    return (128 * 4 // jnp.dtype(ref.dtype).itemsize,) * rank
  return (*(1,) * (rank - 2), 8, 128)


def _is_view(ref: Any) -> bool:
  return bool(getattr(ref, "transforms", ()))


def _num_indices(size: Any, extent: int) -> int:
  match size:
    case int(n) | pl.Blocked(n):
      return pl.cdiv(extent, n)
    case _:  # The index counts elements.
      return extent


def in_throwaway_trace(check: Callable[[], Any]) -> Any:
  """Runs `check`, leaving nothing it computes in the program being traced."""
  results: list[Any] = []
  jax.make_jaxpr(lambda: results.append(check()))()
  return results[0]
