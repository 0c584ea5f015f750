"""The kernel of a matrix product: its steps, and what each does."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import tiles
from coremesh.kernels import blocks
from coremesh.kernels._matmul.call import sum_dtype
from coremesh.kernels._matmul.plan import Indices, Plan, Steps
from coremesh.kernels._matmul.windows import Part, Window


def scratch(plan: Plan, x: Any, w: Any, operands: Sequence[Any], out: Any):
  """The scratch of `product`, from its arrays."""
  window = functools.partial(Window.scratch, plan)
  num_parts = -(-plan.n.block // plan.columns) * plan.num_strips
  sums = pltpu.VMEM((plan.m.block, plan.n.block), sum_dtype(x.dtype))
  num_weights = plan.call.num_weights
  return [
    window(plan.x_axes, x, num_parts=len(plan.chunks)),
    *[window(plan.w_axes, w, num_parts=len(plan.chunks))] * num_weights,
    *(window("mn", operand) for operand in operands),
    window("mn", out, num_parts=num_parts),
    *[sums] * (num_weights if plan.has_sums else 0),
  ]


def product(plan: Plan, *refs: Any) -> None:
  """The body of the kernel: all steps of a core.

  Args:
    plan: how to compute it.
    *refs: x, weights, operands of the epilogue and the output, in HBM; then
      `scratch`.
  """
  num_arrays = (len(refs) - plan.has_sums * plan.call.num_weights) // 2
  num_operands = num_arrays - plan.call.num_weights - 2
  axes = [plan.x_axes, *[plan.w_axes] * plan.call.num_weights]
  axes += ["mn"] * (num_operands + 1)
  *inputs, out = [
    Window(plan=plan, axes=own, hbm=hbm, vmem=vmem, sems=sems)
    for own, hbm, (vmem, sems) in zip(
      axes, refs[:num_arrays], refs[num_arrays : 2 * num_arrays], strict=True
    )
  ]
  core = _Core(
    plan=plan,
    steps=Steps.of_core(plan, jax.lax.axis_index("core")),
    inputs=inputs,
    out=out,
    sums=refs[2 * num_arrays :],
  )
  pl.when(core.steps.count > 0)(core.run)


class _Place(NamedTuple):
  """Where a core is, as the loop over its steps carries it.

  Attributes:
    step: the indices of the step.
    slots: where the block of each input is.
    tile: blocks of the output that are complete.
    before: a step of the last that is.
  """

  step: Indices
  slots: Sequence[Any]
  tile: Any
  before: Indices


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Core:
  """What a core does.

  The copies of a step start before the products of the step before it, and are
  awaited after them. The output leaves in parts, and is awaited one block of
  the output later.
  """

  plan: Plan
  steps: Steps
  inputs: Sequence[Window]
  out: Window
  sums: Sequence[Any]

  def run(self) -> None:
    zero = np.int32(0)
    first = self.steps.first
    slots = (zero,) * len(self.inputs)
    place = _Place(tuple(first), slots, zero, tuple(first))
    with jax.named_scope("first_block"):
      place = self._first_step(place)

    def step(number, carry):
      number = jnp.asarray(number, np.int32)  # In 64-bit mode it is int64.
      return self._step(number, carry)

    with jax.named_scope("blocks"):
      place = blocks.loop(self.steps.count, step, place, first=1)
    self._await_out(place.before, place.tile - 1)

  def _first_step(self, place: _Place) -> _Place:
    """Multiplies the first block chunk by chunk, as they come."""
    plan = self.plan
    chunks = list(self._chunks(place))
    for copies, _ in chunks:
      for copy in copies:
        copy.start()
    for i, (copies, (start, size)) in enumerate(chunks):
      is_last = i == len(chunks) - 1
      if is_last:
        self._start_next(0, place)
      for copy in copies:
        copy.wait()
      ends = is_last and plan.k.num_blocks == 1
      self._multiply(place, start, size, begins=i == 0, ends=ends)
    return self._await_next(0, place)

  def _chunks(self, place: _Place) -> Iterator[tuple[list[Any], Any]]:
    """The copies of each chunk of the first block, and where it is in it."""
    start, last = 0, len(self.plan.chunks) - 1
    for number, length in enumerate(self.plan.chunks):
      part = None
      if last:
        part = Part(number=number, at={"k": pl.ds(start, length)})
      copies = [
        window.copy_in(place.step, slot, part if "k" in window.axes else None)
        for window, slot in zip(self.inputs, place.slots, strict=True)
        if "k" in window.axes or number == last
      ]
      yield copies, (start, min(length, self.plan.k.size - start))
      start += length

  def _step(self, number: Any, place: _Place) -> _Place:
    self._start_next(number, place)
    axis, k = self.plan.k, place.step[-1]
    last = axis.num_blocks - 1
    rest = axis.size - last * axis.block
    multiply = functools.partial(self._multiply, place, 0)
    begin = functools.partial(multiply, axis.block, begins=True)
    go_on = functools.partial(multiply, axis.block)
    end = functools.partial(multiply, rest, begins=last == 0, ends=True)
    if last == 0:
      end()
    else:
      pl.when(k == 0)(begin)
      if last > 1:
        pl.when((k > 0) & (k < last))(go_on)
      pl.when(k == last)(end)
    return self._await_next(number, place)

  def _next(self, number: Any, place: _Place) -> Iterator[Any]:
    """For each input: whether the next step takes another block; its copy."""
    step = self.steps.after(place.step)
    more = jnp.bool_(number + 1 < self.steps.count)
    for window, slot in zip(self.inputs, place.slots, strict=True):
      changes = window.changes(place.step, step) & more
      yield changes, functools.partial(window.copy_in, step, 1 - slot)

  def _start_next(self, number: Any, place: _Place) -> None:
    for changes, copy in self._next(number, place):
      pl.when(changes)(lambda copy=copy: copy().start())

  def _await_next(self, number: Any, place: _Place) -> _Place:
    slots = []
    for slot, (changes, copy) in zip(
      place.slots, self._next(number, place), strict=True
    ):
      pl.when(changes)(lambda copy=copy: copy().wait())
      slots.append(jnp.where(changes, 1 - slot, slot))
    ended = place.step[-1] == self.plan.k.num_blocks - 1
    before = [
      jnp.where(ended, new, old)
      for new, old in zip(place.step, place.before, strict=True)
    ]
    step = tuple(self.steps.after(place.step))
    tile = place.tile + jnp.asarray(ended, np.int32)
    return _Place(step, tuple(slots), tile, tuple(before))

  def _multiply(
    self,
    place: _Place,
    start: int,
    size: int,
    *,
    begins: bool = False,
    ends: bool = False,
  ) -> None:
    """Adds products over a part of K to the sums, and ends the output.

    Args:
      place: the step.
      start, size: what of the block of K to sum over; all inside the arrays.
      begins: whether it is the first part of K: the sums are not read.
      ends: whether it is the last: the sums are not written.
    """
    strips = self.plan.strips if ends else [pl.ds(0, self.plan.m.block)]

    def part(number, _):
      columns = self.plan.part(number)
      for strip, rows in enumerate(strips):
        totals = self._products(place, start, size, rows, columns)
        if not begins:
          totals = [
            total[rows, columns] + more
            for total, more in zip(self.sums, totals, strict=True)
          ]
        if ends:
          self._finish(place, number, strip, totals)
        else:
          for total, value in zip(self.sums, totals, strict=True):
            total[rows, columns] = value

    blocks.loop(self.plan.num_parts(place.step), part, None)
    if ends:
      pl.when(place.tile > 0)(
        lambda: self._await_out(place.before, place.tile - 1)
      )

  def _products(self, place, start, size, rows, columns) -> list[jax.Array]:
    plan = self.plan
    x, *weights = [
      window.vmem.at[slot]
      for window, slot in zip(self.inputs, place.slots, strict=True)
    ][: 1 + plan.call.num_weights]
    x_axis, w_axis = plan.x_axes.index("k"), plan.w_axes.index("k")
    dot = functools.partial(
      _dot, axes=(x_axis, w_axis), precision=plan.call.precision
    )
    x_part = inside(x, x_axis, size, start=start, other=rows)
    return [
      dot(x_part, inside(w, w_axis, size, start=start, other=columns))
      for w in weights
    ]

  def _finish(self, place, number, strip, totals) -> None:
    """The epilogue of a part of the output, and the start of its copy."""
    columns, epilogue = self.plan.part(number), self.plan.call.epilogue
    rows = self.plan.strips[strip]
    if epilogue is not None:
      count = 1 + self.plan.call.num_weights
      operands = [
        window.vmem[slot]
        if window.vmem.shape[-1] == 1
        else window.vmem[slot, :, columns]
        for window, slot in zip(
          self.inputs[count:], place.slots[count:], strict=True
        )
      ]
      totals = [epilogue(*totals, *operands)]
    slot = place.tile & 1
    out = self.out.vmem.at[slot, rows, columns]
    out[...] = jnp.broadcast_to(totals[0], out.shape).astype(out.dtype)
    self._copy_out(place.step, slot, number, strip).start()

  def _copy_out(self, step: Indices, slot: Any, number: Any, strip: int) -> Any:
    plan, part = self.plan, None
    if plan.has_parts:
      part = Part(
        number=number * plan.num_strips + strip,
        at={"m": plan.strips[strip], "n": plan.part(number)},
      )
    return self.out.copy_out(step, slot, part)

  def _await_out(self, step: Indices, tile: Any) -> None:
    """Waits for a block of the output to be in HBM."""

    def wait(number, _):
      for strip in range(self.plan.num_strips):
        self._copy_out(step, tile & 1, number, strip).wait()

    blocks.loop(self.plan.num_parts(step), wait, None)


def _dot(
  x: jax.Array, w: jax.Array, *, axes: tuple[int, int], precision: Any
) -> jax.Array:
  """x [M, K] times w [K, N], either transposed where its axis of K says so.

  Pallas takes a single row on the right for a vector, and then fails to lower
  what is no float32: that row is multiplied as a tile of such rows.
  """
  is_vector = axes == (1, 1) and w.shape[0] == 1 and w.dtype != jnp.float32
  if is_vector:
    w = jnp.broadcast_to(w, (tiles.SUBLANES, w.shape[1]))
  product = jax.lax.dot_general(
    x,
    w,
    (((axes[0],), (axes[1],)), ((), ())),
    precision=precision,
    preferred_element_type=sum_dtype(x.dtype),
  )
  return product[:, :1] if is_vector else product


def inside(
  ref: Any, axis: int, size: int, *, start: int = 0, other: Any = slice(None)
) -> jax.Array:
  """What of a block is to be summed, followed by zeros up to a tile.

  Args:
    ref: [rows, columns] in VMEM, of which one axis is K.
    axis: that axis.
    size: of K, all of it inside the arrays.
    start: where in the block it begins.
    other: what of the other axis to take.
  """

  def part(start: int, size: int) -> jax.Array:
    along = pl.ds(start, size)
    return ref[(along, other) if axis == 0 else (other, along)]

  tail = size % tiles.LANES
  if not tail or start + size == ref.shape[axis]:
    return part(start, size)
  last = part(start + size - tail, tiles.LANES)
  position = jax.lax.broadcasted_iota(jnp.int32, last.shape, axis)
  last = jnp.where(position < tail, last, jnp.zeros_like(last))
  if size == tail:
    return last
  return jnp.concatenate([part(start, size - tail), last], axis)
