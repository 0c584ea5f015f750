"""Any function of arrays of one shape, element by element."""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.extend import core as jex_core
import jax.numpy as jnp

from coremesh import _compat, errors, launch, place
from coremesh.kernels import (
  batching,
  blocks,
  checks,
  costs,
  layouts,
  pointwise,
)
from coremesh.pipelines import blocks as specs
from coremesh.pipelines import emit

# What one turn of the inner loop holds of each array: 16 registers of 32 bits.
_PART_ROWS = 32
_PART_COLUMNS = 512


def elementwise(
  fn: Callable[..., Any], *arrays: jax.Array, block_bytes: int | None = None
) -> Any:
  """fn(*arrays), for a function that makes each element from those it is at.

  The arrays are cut into blocks that the cores share; while one is computed the
  next is copied in and the last is copied out. A block is computed in parts
  that stay in registers from the first operation of `fn` to the last.

  Moves the bytes of the arrays and of the results once, and holds two blocks of
  each in VMEM. Vectors that fill no whole tiles of 1024 words are padded before
  and cut after, which moves the bytes thrice. No result is rounded beyond what
  `fn` does.

  Args:
    fn: any jnp function of arrays of one shape, to an array or a pytree of
      arrays of that shape. It is called with parts of the arrays, so it must
      not look at where an element is, and must not hold arrays itself. It sees
      the dtypes of the arrays; a chip without arithmetic for one refuses it
      when it is compiled: convert inside `fn`.
    *arrays: of one shape, in HBM, of one device; at most 32 bits an element.
    block_bytes: of the first array in VMEM at once; default
      `blocks.BLOCK_BYTES`.

  Returns:
    What `fn` does. Its gradient is `jax.vjp` of `fn`, in such a kernel.

  Raises:
    ShapeError: no array, or not all of one shape, or a result of another; a
      function that mixes elements or holds an array.
    DTypeError: an array or a result of bool, or of more than 32 bits.

  Source: the vector addition of the Pallas documentation, "Pallas Quickstart".
  """
  checks.is_block_size(block_bytes)
  if not callable(fn):
    raise errors.DTypeError(
      f"fn of elementwise must be a function of parts of arrays; got {fn!r}."
    )
  if not arrays:
    raise errors.ShapeError("elementwise needs at least one array; got none.")
  pointwise.check_signature(
    "fn of elementwise",
    fn,
    num_blocks=len(arrays),
    given=f"a part of each of {len(arrays)} arrays",
  )
  checks.is_array("arrays[0]", arrays[0])
  shape = arrays[0].shape
  for i, array in enumerate(arrays):
    checks.has_shape(f"arrays[{i}]", array, shape)
    _check_is_number(f"arrays[{i}]", array)
  _out_types(fn, arrays)
  return _elementwise(fn, block_bytes, *_compat.varying_together(arrays))


def elementwise_reference(fn: Callable[..., Any], *arrays: jax.Array) -> Any:
  """`elementwise` in plain `jnp`."""
  return fn(*arrays)


def _out_types(fn, arrays) -> Any:
  """What `fn` makes of the arrays, checked."""
  shape = arrays[0].shape
  types = [jax.ShapeDtypeStruct(shape, a.dtype) for a in arrays]
  out = pointwise.traced("fn of elementwise", fn, *types)
  for path, leaf in jax.tree_util.tree_leaves_with_path(out):
    where = f"The result{jax.tree_util.keystr(path)} of fn"
    checks.has_shape(where, leaf, shape)
    _check_is_number(where, leaf)
  return out


def _check_is_number(argument, array) -> None:
  if array.dtype == jnp.bool_ or array.dtype.itemsize > 4:
    raise errors.DTypeError(
      f"{argument} must hold numbers of at most 32 bits; got {array.dtype}."
      " Convert it, a bool for instance with .astype(jnp.int8)."
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _elementwise(fn, block_bytes, *arrays):
  types = _out_types(fn, arrays)
  leaves, tree = jax.tree.flatten(types)
  if not leaves:
    return types

  def leaves_of(*parts):
    return jax.tree.leaves(fn(*parts))

  outs = _run(leaves_of, arrays, [t.dtype for t in leaves], block_bytes)
  return jax.tree.unflatten(tree, outs)


def _forward(fn, block_bytes, *arrays):
  return _elementwise(fn, block_bytes, *arrays), arrays


def _backward(fn, block_bytes, arrays, cotangents):
  is_float = [jnp.issubdtype(a.dtype, jnp.floating) for a in arrays]
  floats = [a for a, flag in zip(arrays, is_float, strict=True) if flag]
  given = [
    ct for ct in jax.tree.leaves(cotangents) if ct.dtype != jax.dtypes.float0
  ]
  gradients = iter(())
  if floats and given:

    def gradient(*parts):
      inputs, cts = parts[: len(arrays)], parts[len(arrays) :]
      return _vjp(fn, inputs, cts, is_float)

    def in_kernel(*parts):
      # Traced on its own: in a kernel, what is loaded varies over devices and
      # what is computed does not, which jax.vjp takes for a mistake.
      types = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts]
      return jex_core.jaxpr_as_fun(jax.make_jaxpr(gradient)(*types))(*parts)

    dtypes = [a.dtype for a in floats]
    gradients = iter(_run(in_kernel, (*arrays, *given), dtypes, block_bytes))
  return tuple(next(gradients, None) if flag else None for flag in is_float)


def _vjp(fn, inputs, cotangents, is_float):
  """Gradients of the floating-point inputs, from those of such results."""

  def of_floats(*floats):
    rest = iter(floats)
    args = [
      next(rest) if flag else value
      for value, flag in zip(inputs, is_float, strict=True)
    ]
    leaves = jax.tree.leaves(fn(*args))
    return [y for y in leaves if jnp.issubdtype(y.dtype, jnp.floating)]

  floats = [x for x, flag in zip(inputs, is_float, strict=True) if flag]
  return jax.vjp(of_floats, *floats)[1](list(cotangents))


_elementwise.defvjp(_forward, _backward)

# --- the kernel -------------------------------------------------------------


def _run(fn, arrays, out_dtypes, block_bytes) -> list[jax.Array]:
  """Runs a function of parts, to a sequence of parts, over whole arrays."""

  def launch_on(*arrays):
    return _launch(fn, arrays, out_dtypes, block_bytes)

  return batching.one_launch(launch_on, *arrays, repeats=True)


def _launch(fn, arrays, out_dtypes, block_bytes) -> list[jax.Array]:
  shape = arrays[0].shape
  if layouts.lies_transposed(shape):
    turned = [layouts.transposed(a) for a in arrays]
    results = _launch(fn, turned, out_dtypes, block_bytes)
    return [layouts.transposed(y) for y in results]
  dtypes = [*(a.dtype for a in arrays), *out_dtypes]
  views = _views(arrays, dtypes)
  chip = place.current_chip()
  block = _block(
    views[0].shape,
    dtypes,
    block_bytes=block_bytes or blocks.BLOCK_BYTES,
    chip=chip,
  )
  spec = specs.block(block, lambda *point: point)
  results = launch.kernel(
    functools.partial(
      _body, fn=fn, block=block, spec=spec, num_inputs=len(views)
    ),
    mesh=chip.tensor_cores("core"),
    out=[jax.ShapeDtypeStruct(views[0].shape, d) for d in out_dtypes],
    compiler_params=dict(
      vmem_limit_bytes=chip.vmem_bytes_per_tensor_core * 7 // 8
    ),
    name="elementwise",
  )(*views)
  size = math.prod(shape)
  if len(shape) == 1:  # Without what it was padded with.
    results = [y.reshape(-1)[:size] for y in results]
  return [y.reshape(shape) for y in results]


def _views(arrays, dtypes) -> list[jax.Array]:
  """The arrays as matrices; vectors in rows of 128, as they are tiled."""
  if arrays[0].ndim != 1:
    return blocks.as_matrices(arrays)
  missing = -arrays[0].size % (blocks.tile_rows(dtypes) * blocks.LANES)
  if missing:
    arrays = [jnp.pad(a, (0, missing)) for a in arrays]
  return [a.reshape(1, -1, blocks.LANES) for a in arrays]


def _block(shape, dtypes, *, block_bytes, chip) -> tuple[int, int, int]:
  """A block of at most `block_bytes` of the first array."""
  itemsizes = [jnp.dtype(d).itemsize for d in dtypes]
  most = chip.vmem_bytes_per_tensor_core // 4 * itemsizes[0] // sum(itemsizes)
  block_bytes = min(block_bytes, most)
  batch, num_rows, width = (max(n, 1) for n in shape)
  # Whole parts, unless the array is smaller than one.
  row_unit = blocks.tile_rows(dtypes)
  if num_rows >= _PART_ROWS:
    row_unit = _PART_ROWS
  column_unit = _PART_COLUMNS if width >= _PART_COLUMNS else blocks.LANES
  rows = min(num_rows, row_unit)
  columns = pl.cdiv(width, column_unit) * column_unit
  unit_bytes = max(rows, blocks.SUBLANES) * column_unit * itemsizes[0]
  if columns // column_unit * unit_bytes > block_bytes:
    columns = blocks.even_size(
      width,
      unit=column_unit,
      unit_bytes=unit_bytes,
      block_bytes=block_bytes,
      num_cores=chip.tensor_cores_per_device if batch * num_rows == 1 else 1,
    )
  if num_rows > row_unit:
    rows = blocks.even_size(
      num_rows,
      unit=row_unit,
      unit_bytes=row_unit * columns * itemsizes[0],
      block_bytes=block_bytes,
      num_cores=chip.tensor_cores_per_device if batch == 1 else 1,
    )
  batches = 1
  if rows >= num_rows:
    batches = blocks.even_size(
      batch,
      unit_bytes=max(rows, blocks.SUBLANES) * columns * itemsizes[0],
      block_bytes=block_bytes,
      num_cores=chip.tensor_cores_per_device,
    )
  return batches, rows, columns


def _body(*refs, fn, block, spec, num_inputs) -> None:
  shape = refs[0].shape

  def step(*parts) -> None:
    inputs, outputs = parts[:num_inputs], parts[num_inputs:]

    def compute(where) -> None:
      results = fn(*(ref[where] for ref in inputs))
      for ref, result in zip(outputs, results, strict=True):
        ref[where] = result

    _over_parts(compute, block, shape)

  emit.pipeline(
    step,
    grid=list(map(pl.cdiv, shape, block)),
    in_specs=[spec] * num_inputs,
    out_specs=[spec] * (len(refs) - num_inputs),
    over="core",
  )(*refs)


def _over_parts(compute, block, shape) -> None:
  """Calls `compute` with the index of each part of a block."""
  sizes = (1, *map(blocks.part_size, block[1:], (_PART_ROWS, _PART_COLUMNS)))

  def along(axis: int, index: tuple[Any, ...]) -> None:
    if axis == len(block):
      compute(index)
      return
    size = sizes[axis]
    inside = blocks.within(shape[axis], block[axis], axis=axis)

    def part(i, _):
      # Of the batch a number, so that a part has two axes.
      where = i if axis == 0 else pl.ds(i * size, size)
      along(axis + 1, (*index, where))

    blocks.loop(blocks.num_parts(inside, size), part, None)

  along(0, ())


_ARRAYS = {
  "8192x8192 f32": ((8192, 8192), jnp.float32),
  "8192x8192 bf16": ((8192, 8192), jnp.bfloat16),
  "1000x777 f32": ((1000, 777), jnp.float32),
  "67108864 f32": ((2**26,), jnp.float32),
}
SPECS = ADD, SCALE = tuple(
  costs.memory_bound_spec(
    functools.partial(elementwise, fn),
    functools.partial(elementwise_reference, fn),
    name=name,
    cases={
      case: costs.case(*[shape] * num_arrays, dtype=dtype)
      for case, (shape, dtype) in _ARRAYS.items()
    },
    flops_per_element=1,
  )
  for name, fn, num_arrays in (
    ("add", jnp.add, 2),
    ("scale", lambda x: x * 2, 1),
  )
)
