"""`pallas_call` on the simulator: a loop over its grid, blocks in and out."""

from collections.abc import Sequence
from typing import Any

from jax.experimental.pallas import tpu as pltpu
import numpy as np

from coremesh import errors
from coremesh._compat import kernel_ir
from coremesh.simulate import control, emitter, machine, memory, unwritten

CORE_AXIS = "tensor_core"


class Window:
  """A block of an array that moves over it as the grid advances.

  It is copied in when the index map leads elsewhere, and out before it leaves.
  What of a block is outside the array holds poison and is not written.

  Args:
    array: the whole array, in HBM; an attribute.
    block: the block's memory; an attribute.
    squeezed: the dimensions of the array that the block has not.
    is_input, is_output: whether it is copied in and out.
  """

  __slots__ = (
    "_inside",
    "_is_input",
    "_is_output",
    "_place",
    "_squeezed",
    "_within",
    "array",
    "block",
  )

  def __init__(
    self,
    array: memory.Buffer,
    block: memory.Buffer,
    squeezed: tuple[int, ...],
    *,
    is_input: bool,
    is_output: bool,
  ):
    self.array = array
    self.block = block
    self._squeezed = squeezed
    self._is_input = is_input
    self._is_output = is_output
    self._place: Any = None
    self._inside: tuple[slice, ...] = ()
    self._within: tuple[slice, ...] = ()

  def move(
    self,
    m: machine.Machine,
    w: machine.Worker,
    place: tuple[tuple[int, int], ...],
    site: machine.Site,
  ) -> None:
    """Moves to a place: for each dimension of the array (start, size)."""
    if place == self._place:
      return
    self.leave(m, w, site)
    self._place = place
    inside, within = [], []
    for i, ((start, size), dim) in enumerate(
      zip(place, self.array.shape, strict=True)
    ):
      first, last = max(0, start), min(dim, start + size)
      if first >= last:
        m.stop(
          "out of bounds",
          f"{w}: {site}: block [{start}, {start + size}) is outside a dimension"
          f" of {dim} of {self.array.family.name!r}.",
        )
      inside.append(slice(first, last))
      if i not in self._squeezed:
        within.append(slice(first - start, last - start))
    self._inside, self._within = tuple(inside), tuple(within)
    self.block.data[...] = memory.poison(self.block.data.dtype)
    self.block.unwritten = None
    if self._is_output:
      m.forget(self.block)
    if self._is_input:
      part = m.load(w, self.array, (self._inside,), site)
      m.copied_block(w, self, out=False, num_bytes=part.nbytes, site=site)
      part = np.squeeze(part, axis=self._squeezed)
      m.store(w, self.block, (self._within,), part, site)

  def leave(
    self, m: machine.Machine, w: machine.Worker, site: machine.Site
  ) -> None:
    """Writes the block back, if it is an output."""
    if self._is_output and self._place is not None:
      marks = unwritten.of_part(self.block, (self._within,))
      part = m.load(w, self.block, (self._within,), site, counts=False)
      m.copied_block(w, self, out=True, num_bytes=part.nbytes, site=site)
      part = np.expand_dims(part, self._squeezed)
      m.store(w, self.array, (self._inside,), part, site)
      if marks is not None:
        unwritten.copied(marks, self.array, (self._inside,))


def mesh_of(
  kernel: kernel_ir.KernelProgram, num_cores: int
) -> pltpu.TensorCoreMesh:
  """The TensorCores that share the grid: several if a dimension is parallel."""
  is_split = _split_dimension(kernel) is not None
  return pltpu.TensorCoreMesh(
    axis_name=CORE_AXIS, num_cores=num_cores if is_split else 1
  )


def _split_dimension(kernel: kernel_ir.KernelProgram) -> int | None:
  """The grid dimension that cores share: the first that is parallel."""
  semantics = kernel.dimension_semantics or ()
  offset = len(kernel.grid.grid) - len(semantics)
  for i, meaning in enumerate(semantics):
    size = kernel.grid.grid[i + offset]
    if meaning == "parallel" and (not isinstance(size, int) or size > 1):
      return i + offset
  return None


def operand_types(kernel: kernel_ir.KernelProgram) -> list[Any]:
  """Types of the operands: of arrays as they are outside, then of scratch.

  None stands for the size of a grid dimension that is known only at run time.
  """
  grid, (jaxpr,) = kernel.grid, kernel.jaxprs
  refs = [v.aval for v in jaxpr.invars]
  num_blocks = grid.num_inputs + grid.num_outputs
  first = grid.num_index_operands
  blocks = refs[first : first + num_blocks]
  first_input = len(kernel.in_types) - grid.num_inputs
  arrays = [*kernel.in_types[first_input:], *kernel.out_types]
  return [
    *[None] * grid.num_dynamic_grid_bounds,
    *refs[:first],
    *(
      block if _is_passed(block, array) else array
      for block, array in zip(blocks, arrays, strict=True)
    ),
    *refs[first + num_blocks :],
  ]


def _is_passed(block_type: Any, array_type: Any) -> bool:
  """Whether the kernel gets the array itself, not a block of it."""
  space, _ = kernel_ir.place_of_type(block_type, None)
  home, _ = kernel_ir.place_of_type(array_type, None)
  return space in ("hbm", "host", "semaphore_mem") or home == space


def emit(
  em: emitter.Emitter,
  kernel: kernel_ir.KernelProgram,
  operands: Sequence[emitter.Name],
) -> None:
  """Writes the loop over the grid."""
  grid, (jaxpr,) = kernel.grid, kernel.jaxprs
  sizes, rest = (
    operands[: grid.num_dynamic_grid_bounds],
    list(operands[grid.num_dynamic_grid_bounds :]),
  )
  dynamic = iter(sizes)
  dims = [
    d if isinstance(d, int) else f"int({next(dynamic)})" for d in grid.grid
  ]
  prefetched = rest[: grid.num_index_operands]
  num_blocks = grid.num_inputs + grid.num_outputs
  arrays = rest[grid.num_index_operands :][:num_blocks]
  scratch = rest[grid.num_index_operands + num_blocks :]
  windows = [_window(em, kernel, i, array) for i, array in enumerate(arrays)]
  indices = [em.name("i") for _ in dims]
  _loop(
    em,
    kernel,
    dims,
    indices,
    0,
    lambda: _step(
      em, jaxpr, grid, (indices, dims), prefetched, windows, scratch
    ),
  )
  for window, _, site in windows:
    if window is not None:
      em.line(f"{window}.leave(m, w, {site})")


def _loop(em, kernel, dims, indices, axis, body) -> None:
  if axis == len(dims):
    body()
    return
  size, bounds = dims[axis], f"range({dims[axis]})"
  if axis == _split_dimension(kernel):
    cores = em.mesh.num_cores
    core = f"w.coords[{CORE_AXIS!r}]"
    bounds = (
      f"range({core} * {size} // {cores}, ({core} + 1) * {size} // {cores})"
    )
  with em.nest(), em.block(f"for {indices[axis]} in {bounds}:"):
    _loop(em, kernel, dims, indices, axis + 1, body)


def _step(em, jaxpr, grid, loop, prefetched, windows, scratch) -> None:
  """One point of the grid."""
  indices, dims = loop
  ids = [em.let(f"np.int32({i})") for i in indices]
  for mapping, (window, _, site) in zip(
    grid.block_mappings, windows, strict=True
  ):
    if window is not None:
      place = _place(em, mapping, [*ids, *prefetched])
      em.line(f"{window}.move(m, w, ({place}), {site})")
  em.grid = [
    (str(i), str(d))
    for axis, (i, d) in enumerate(zip(indices, dims, strict=True))
    if axis not in grid.vmapped_dims
  ]
  em.inline(jaxpr, [*prefetched, *(ref for _, ref, _ in windows), *scratch])


def _window(em, kernel, index, array) -> tuple[Any, emitter.Name, Any]:
  """The window on an array, the ref that the body gets, and who copies."""
  grid, (jaxpr,) = kernel.grid, kernel.jaxprs
  var = jaxpr.invars[grid.num_index_operands + index]
  if em.refs[array.text].type is var.aval:
    return None, array, None
  mapping = grid.block_mappings[index]
  name = em.refs[array.text].name
  if 0 in var.aval.shape:
    raise errors.UnsupportedError(
      f"A block needs an element along each dimension; that of {name!r} of"
      f" kernel {kernel.name!r} has shape {var.aval.shape}. Give its BlockSpec"
      " a block shape, or leave out an array without elements."
    )
  where = f"the BlockSpec of kernel {kernel.name!r}"
  site = em.constant(machine.Site(f"copy of a block of {name!r}", where), "s")
  count = _num_buffers(grid, mapping)
  block = control.allocate(em, name, var.aval, site, count)
  squeezed = tuple(
    i
    for i, dim in enumerate(mapping.block_shape)
    if type(dim).__name__ == "Squeezed"
  )
  is_input = index < grid.num_inputs
  window = em.let(
    f"Window({array}, {block}, {squeezed}, is_input={is_input},"
    f" is_output={not is_input})"
  )
  return window, block, site


def _num_buffers(grid: Any, mapping: Any) -> int:
  """The buffers of a block on a TPU: two, if the grid moves it."""
  if (
    count := getattr(mapping.pipeline_mode, "buffer_count", None)
  ) is not None:
    return count
  jaxpr = mapping.index_map_jaxpr
  stays = {
    v for v, size in zip(jaxpr.invars, grid.grid, strict=False) if size == 1
  }
  moves = any(
    not isinstance(v, kernel_ir.Literal) and v not in stays
    for v in jaxpr.outvars
  )
  return 2 if moves and any(size != 1 for size in grid.grid) else 1


def _place(em, mapping, operands) -> str:
  """Source of (start, size) along each dimension of the array."""
  jaxpr = mapping.index_map_jaxpr
  results = em.inline(jaxpr, operands)
  starts = mapping.index_map_out_tree.unflatten(results)
  parts = []
  for start, dim in zip(starts, mapping.block_shape, strict=True):
    kind = type(dim).__name__
    if kind == "Squeezed":
      parts.append(f"(int({start}), 1), ")
    elif kind == "Blocked":
      parts.append(f"(int({start}) * {dim.block_size}, {dim.block_size}), ")
    elif kind == "Element":
      low = dim.padding[0]
      parts.append(f"(int({start}) - {low}, {dim.block_size}), ")
    elif kind == "BoundedSlice":
      size = start.size if isinstance(start.size, int) else f"int({start.size})"
      parts.append(f"(int({start.start}), {size}), ")
    else:
      raise errors.UnsupportedError(
        f"coremesh's simulator does not know block dimensions of kind {kind},"
        f" as in the BlockSpec of {mapping.origin}; it knows pl.Blocked,"
        " pl.Squeezed, pl.Element and pl.BoundedSlice. Copy other blocks"
        " yourself, with pltpu.async_copy."
      )
  return "".join(parts)


HELPERS = {"Window": Window}
