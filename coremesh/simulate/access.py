"""Source for parts of refs: which elements an equation reads or writes."""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from coremesh import errors, tiles
from coremesh._compat import kernel_ir
from coremesh.simulate import emitter, memory, packing, views


def out_of_bounds(worker: Any, what: str, site: Any) -> Any:
  """Ends the simulation: an index is outside its ref."""
  return worker.machine.stop("out of bounds", f"{worker}: {site}: {what}.")


def span(
  worker: Any,
  start: Any,
  size: Any,
  stride: int,
  dim: int,
  limit: int,
  name: str,
  site: Any,
) -> slice:
  """A checked slice of a dimension of `dim` elements, `limit` with padding."""
  start, size = int(start), int(size)
  stop = start + (size - 1) * stride + 1 if size > 0 else start
  if start < 0 or size < 0 or stop > limit:
    return out_of_bounds(
      worker,
      f"elements [{start}, {stop}) of a dimension of {dim} of {name!r}",
      site,
    )
  return slice(start, stop, stride)


def tiled_span(
  worker: Any,
  start: Any,
  size: int,
  tile: int,
  dim: int,
  limit: int,
  name: str,
  site: Any,
) -> slice:
  """As `span`, up to the end of the last tile if it starts at a tile.

  A pipeline over a part of an array copies whole tiles, as one over an array
  does; what it copies beyond the part is in the array, or in its padding.
  """
  part = span(worker, start, size, 1, dim, limit, name, site)
  if part.start % tile:
    return part
  return slice(part.start, min(tiles.rounded_up(part.stop, tile), limit), 1)


def position(worker: Any, index: Any, dim: int, name: str, site: Any) -> int:
  """A checked index of a dimension of `dim` elements."""
  index = int(index)
  if not 0 <= index < dim:
    return out_of_bounds(
      worker, f"element {index} of a dimension of {dim} of {name!r}", site
    )
  return index


def rows(
  worker: Any,
  key: tuple[Any, ...],
  dims: tuple[int, ...],
  ignored: int | None,
  axis: int,
  listed: Any,
  name: str,
  site: Any,
) -> views.Rows:
  """A checked index by arrays, whose `ignored` entries are left out."""
  kept, checked = None, []
  for entry, dim in zip(key, dims, strict=True):
    if isinstance(entry, np.ndarray):
      if ignored is not None:
        kept = np.reshape(entry != np.asarray(ignored, entry.dtype), -1)
        entry = np.where(entry == np.asarray(ignored, entry.dtype), 0, entry)
      bad = (entry < 0) | (entry >= dim)
      if bad.any():
        return out_of_bounds(
          worker,
          f"index {entry[bad].flat[0]} into a dimension of {dim} of {name!r}",
          site,
        )
    checked.append(entry)
  return views.Rows(tuple(checked), kept, axis, listed)


HELPERS = {
  "span": span,
  "tiled_span": tiled_span,
  "position": position,
  "rows": rows,
  "read": views.read,
  "write": views.write,
}


class Part:
  """A ref and the steps to a part of it, as source."""

  def __init__(self, em: emitter.Emitter, value: Any, transforms: Any = ()):
    ref, inner = kernel_ir.split_ref(value)
    self.transforms = (*inner, *transforms)
    self.name = _chosen(em, ref, self.transforms)
    if isinstance(ref, tuple | list):
      self.transforms = self.transforms[1:]
    self.declaration = em.refs[str(self.name)]
    self._em = em

  def steps(self, site: Any, *, reaches_padding: bool = False) -> str:
    """The steps, as the source of a tuple; only DMAs may reach padding."""
    writer = _Steps(self._em, self.declaration, site, reaches_padding)
    for i, transform in enumerate(self.transforms):
      writer.add(transform, self.transforms[i + 1 :])
    return writer.finish()

  def num_bytes(self) -> str:
    """The bytes of the part, as source."""
    part = kernel_ir.transformed_type(self.declaration.type, self.transforms)
    dtype, element_shape = kernel_ir.stored_dtype(part.dtype)
    bits = packing.bits_of(dtype) * math.prod(element_shape)
    sizes = [
      str(n) if isinstance(n, int) else f"int({_expression(self._em, n)})"
      for n in part.shape
    ]
    if all(isinstance(n, int) for n in part.shape):
      return str(-(-math.prod(part.shape) * bits // 8))
    return f"-(-{' * '.join([*sizes, str(bits)])} // 8)"

  def semaphore(self, site: Any, bank: Any = None) -> str:
    """The one semaphore that the part is."""
    bank = bank or self.name
    if not self.transforms or self.declaration.shape == ():
      return f"{bank}.semaphores[0]"
    indexers = self.transforms
    if len(indexers) == 1 and self.declaration.shape[1:] == ():
      index = indexers[0].indices[0]
      if not isinstance(index, kernel_ir.Slice):
        value = _expression(self._em, index)
        (dim,) = self.declaration.shape
        name = self.declaration.name
        return (
          f"{bank}.semaphores[position(w, {value}, {dim}, {name!r}, {site})]"
        )
    shape = self.declaration.shape
    flat = self._em.constant(np.arange(math.prod(shape)).reshape(shape))
    return f"{bank}.semaphores[int(read({flat}, {self.steps(site)}))]"


def _chosen(em: emitter.Emitter, ref: Any, transforms: Any) -> emitter.Name:
  """The name of a ref, or of the one chosen of several."""
  if not isinstance(ref, tuple | list):
    return ref
  (select, *_) = transforms
  if not isinstance(select, kernel_ir.SelectTransform):
    raise errors.UnsupportedError(
      f"coremesh's simulator does not know {type(select).__name__} of several"
      f" refs, at {em.place}. Choose one of them with jax.lax.cond, around the"
      " operation on it."
    )
  names = [kernel_ir.split_ref(r)[0] for r in ref]
  chosen = em.let(
    f"({', '.join(map(str, names))},)[int({_expression(em, select.idx)})]", "r"
  )
  em.refs[str(chosen)] = em.refs[str(names[0])]
  for name in names:
    em.refs[str(name)].is_shared = True
  return chosen


def _expression(em: emitter.Emitter, value: Any) -> str:
  """Source of a scalar or array operand: a name, or a number."""
  if isinstance(value, emitter.Name):
    return value.text
  if isinstance(value, int | np.integer):
    return str(int(value))
  return str(em.constant(np.asarray(value)))


class _Steps:
  """Writes the steps of one part."""

  def __init__(
    self,
    em: emitter.Emitter,
    declaration: Any,
    site: Any,
    reaches_padding: bool,
  ):
    self._em = em
    self._site = site
    self._reaches_padding = reaches_padding
    self._name = declaration.name
    self._shape = list(declaration.shape)
    self._limit: list[Any] = list(declaration.padded)
    self._tile = [1] * len(self._shape)
    if declaration.is_tiled:
      self._tile = list(memory.tile(declaration.shape, declaration.dtype))
    self._dtype = declaration.dtype
    self._steps: list[str] = []

  def add(self, transform: Any, rest: Sequence[Any]) -> None:
    match transform:
      case kernel_ir.NDIndexer():
        is_inner = bool(rest) and isinstance(rest[0], kernel_ir.NDIndexer)
        keeps = is_inner and self._reaches_padding
        self._index(transform, keeps_padding=keeps)
      case kernel_ir.ReshapeTransform(shape=shape):
        self._view(views.Reshape(tuple(shape)), shape)
      case kernel_ir.TransposeTransform(permutation=permutation):
        shape = [self._shape[i] for i in permutation]
        self._view(views.Transpose(tuple(permutation)), shape)
      case kernel_ir.BitcastTransform(dtype=dtype):
        self._bitcast(dtype)
      case kernel_ir.SharedSliceTransform():
        self._subcore_slice()
      case _ if isinstance(transform, kernel_ir.PLAIN_TRANSFORMS):
        pass
      case _:
        raise errors.UnsupportedError(
          "coremesh's simulator does not know the ref transform"
          f" {type(transform).__name__} of {self._name!r}, at"
          f" {self._em.place}; it knows slices, indices, reshape, bitcast and"
          " transpose. Load the ref and change the value."
        )

  def finish(self) -> str:
    self._crop()
    return f"({''.join(step + ', ' for step in self._steps)})"

  def _crop(self) -> None:
    """Leaves padding out."""
    if self._shape != self._limit:
      slices = "".join(f"slice(0, {n}), " for n in self._shape)
      self._steps.append(f"({slices})")
      self._limit = list(self._shape)

  def _view(self, step: Any, shape: Sequence[int]) -> None:
    self._crop()
    self._steps.append(str(self._em.constant(step)))
    self._shape = list(shape)
    self._limit = list(shape)
    self._tile = [1] * len(shape)

  def _bitcast(self, dtype: Any) -> None:
    dtype = np.dtype(dtype)
    shape = list(self._shape)
    axis = max(0, len(shape) - 2)
    old, new = packing.bits_of(self._dtype), packing.bits_of(dtype)
    if shape and old != new:
      shape[axis] = shape[axis] * old // new
    self._view(views.Bitcast(dtype, self._dtype), shape)
    self._dtype = dtype

  def _subcore_slice(self) -> None:
    self._crop()
    axis = tuple(self._em.mesh.shape)[-1]
    size = self._shape[-1] // self._em.chip.vector_subcores_per_sparse_core
    before = "slice(None), " * (len(self._shape) - 1)
    self._steps.append(
      f"({before}slice(w.coords[{axis!r}] * {size}, (w.coords[{axis!r}] + 1)"
      f" * {size}),)"
    )
    self._shape[-1] = size
    self._limit = list(self._shape)

  def _index(self, indexer: Any, *, keeps_padding: bool) -> None:
    entries, shape, limit, tiles, arrays = [], [], [], [], []
    ignored, listed = None, ""
    for index, dim, most, tile in zip(
      indexer.indices, self._shape, self._limit, self._tile, strict=True
    ):
      if isinstance(index, kernel_ir.Slice):
        size = index.size if isinstance(index.size, int) else None
        shape.append(size)
        tiles.append(tile)
        is_whole = index.size == dim and index.stride == 1
        if keeps_padding and not is_whole and _ends_in_a_tile(index, tile):
          part = self._tiled_slice(index, dim, most, tile)
          entries.append(part)
          limit.append(f"({part}.stop - {part}.start)")
          continue
        entries.append(self._slice(index, dim, most, keeps_padding))
        limit.append(most if is_whole and keeps_padding else size)
      elif self._is_array(index, indexer):
        value, ignored, part = self._array(index)
        listed += part
        arrays.append(len(entries))
        entries.append(value)
      else:
        value = _expression(self._em, index)
        checked = self._em.once(
          f"position(w, {value}, {dim}, {self._name!r}, {self._site})",
          ("position", value, dim),
        )
        entries.append(str(checked))
    key = f"({', '.join(entries)},)" if entries else "()"
    if arrays:
      axis = _array_axis(indexer, arrays)
      key = (
        f"rows(w, {key}, {tuple(self._shape)}, {ignored}, {axis},"
        f" ({listed}), {self._name!r}, {self._site})"
      )
      shape[axis:axis] = [*indexer.int_indexer_shape]
      limit[axis:axis] = [*indexer.int_indexer_shape]
      tiles[axis:axis] = [1] * len(indexer.int_indexer_shape)
    self._steps.append(key)
    self._shape, self._limit, self._tile = shape, limit, tiles

  def _tiled_slice(self, index: Any, dim: Any, most: Any, tile: int) -> str:
    start = _expression(self._em, index.start)
    part = self._em.let(
      f"tiled_span(w, {start}, {index.size}, {tile}, {dim}, {most},"
      f" {self._name!r}, {self._site})",
      "s",
    )
    return str(part)

  def _slice(self, index: Any, dim: Any, most: Any, keeps: bool) -> str:
    start, size = index.start, index.size
    if isinstance(start, int) and isinstance(size, int):
      if start == 0 and size == dim and index.stride == 1:
        return "slice(None)" if keeps or dim == most else f"slice(0, {dim})"
      if 0 <= start and start + (size - 1) * index.stride < dim:
        stop = start + (size - 1) * index.stride + 1 if size else start
        return f"slice({start}, {stop}, {index.stride})"
    numbers = (
      f"{_expression(self._em, start)}, {_expression(self._em, size)},"
      f" {index.stride}, {dim}, {most if self._reaches_padding else dim}"
    )
    checked = self._em.once(
      f"span(w, {numbers}, {self._name!r}, {self._site})", ("span", numbers)
    )
    return str(checked)

  def _is_array(self, index: Any, indexer: Any) -> bool:
    return bool(indexer.int_indexer_shape) or isinstance(
      index, kernel_ir.Indices
    )

  def _array(self, index: Any) -> tuple[str, int | None, str]:
    """Source of an index array: values, the ignored one, where they are."""
    ignored = None
    if isinstance(index, kernel_ir.Indices):
      index, ignored = index.values, index.ignored_value
    ref, _ = kernel_ir.split_ref(index)
    if isinstance(ref, emitter.Name) and self._em.is_ref(ref):
      part = Part(self._em, index)
      part.declaration.is_shared = True
      listed = self._em.let(f"{part.name}, {part.steps(self._site)}", "i")
      return f"m.load(w, *{listed}, {self._site})", ignored, f"{listed}, "
    return f"np.asarray({_expression(self._em, index)})", ignored, ""


def _ends_in_a_tile(index: Any, tile: int) -> bool:
  """Whether a slice from the start of a tile ends within one."""
  size, stride = index.size, index.stride
  return isinstance(size, int) and stride == 1 and size % tile != 0


def _array_axis(indexer: Any, arrays: list[int]) -> int:
  """Where in the result the axes of the index arrays are."""
  are_int = [not isinstance(i, kernel_ir.Slice) for i in indexer.indices]
  ints = [i for i, is_int in enumerate(are_int) if is_int]
  if ints != list(range(ints[0], ints[-1] + 1)):
    return 0
  return sum(not is_int for is_int in are_int[: ints[0]])
