"""The kernel of a matrix product: its steps, and what each does."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from coremesh import barriers
from coremesh.kernels import blocks
from coremesh.kernels._matmul import join, terms
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
    *(join.scratch(plan, sums) if plan.joins else ()),
  ]


def product(plan: Plan, *refs: Any) -> None:
  """The body of the kernel: all steps of a core.

  Args:
    plan: how to compute it.
    *refs: x, weights, operands of the epilogue and the output, in HBM; then
      `scratch`.
  """
  num_weights = plan.call.num_weights
  num_sums = num_weights * plan.has_sums
  num_received = (num_weights + 1) * plan.joins
  num_arrays = (len(refs) - num_sums - num_received) // 2
  num_operands = num_arrays - num_weights - 2
  axes = [plan.x_axes, *[plan.w_axes] * num_weights]
  axes += ["mn"] * (num_operands + 1)
  *inputs, out = [
    Window(plan=plan, axes=own, hbm=hbm, vmem=vmem, sems=sems)
    for own, hbm, (vmem, sems) in zip(
      axes, refs[:num_arrays], refs[num_arrays : 2 * num_arrays], strict=True
    )
  ]
  index = jax.lax.axis_index("core")
  core = _Core(
    plan=plan,
    index=index,
    steps=Steps.of_core(plan, index),
    inputs=inputs,
    out=out,
    sums=refs[2 * num_arrays :][:num_sums],
    received=refs[2 * num_arrays + num_sums :],
  )
  pl.when(core.steps.count > 0)(core.run)


class _Cursor(NamedTuple):
  """A step, and the slots of its blocks of the inputs."""

  step: Indices
  slots: Sequence[Any]


class _Place(NamedTuple):
  """Where a core is, as the loop over its steps carries it.

  Attributes:
    now: the step whose blocks are multiplied.
    ahead: the last step whose blocks have been asked for.
    tile: blocks of the output that are complete.
    oldest: a step of the oldest of these that has not been awaited.
  """

  now: _Cursor
  ahead: _Cursor
  tile: Any
  oldest: Indices


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Core:
  """What a core does.

  The copies to all slots but one are on their way while the blocks in that are
  multiplied. The output leaves in parts, and is awaited when its slot is to be
  written again.
  """

  plan: Plan
  index: Any
  steps: Steps
  inputs: Sequence[Window]
  out: Window
  sums: Sequence[Any]
  received: Sequence[Any]

  @property
  def num_ahead(self) -> int:
    """Steps, and blocks of the output, that copies may be away from now."""
    return self.plan.num_slots - 1

  def run(self) -> None:
    zero = np.int32(0)
    first = tuple(self.steps.first)
    cursor = _Cursor(first, (zero,) * len(self.inputs))
    place = _Place(cursor, cursor, zero, first)
    with jax.named_scope("first_block"):
      place = self._first_step(place)

    def step(number, carry):
      number = jnp.asarray(number, np.int32)  # In 64-bit mode it is int64.
      return self._step(number, carry)

    with jax.named_scope("blocks"):
      place = blocks.loop(self.steps.count, step, place, first=1)
    if self.plan.joins:
      with jax.named_scope("join"):
        self._join(place)
    else:
      self._await_all(place)

  def _first_step(self, place: _Place) -> _Place:
    """Multiplies the first block chunk by chunk, as they come."""
    plan = self.plan
    chunks = list(self._chunks(place))
    for copies, _ in chunks:
      for copy in copies:
        copy.start()
    if self.plan.joins:
      barriers.core_barrier("core")
    # The next blocks, if large, would delay the chunks of the first.
    last = len(chunks) - 1
    asks_at = 0 if plan.is_small else last
    for i, (copies, (start, size)) in enumerate(chunks):
      if i == asks_at:
        for number in range(1, self.plan.num_slots):
          place = self._start(number, place)
      for copy in copies:
        copy.wait()
      ends = i == last and plan.k.num_blocks == 1
      self._multiply(place, start, size, begins=i == 0, ends=ends)
    return self._move_on(0, place)

  def _chunks(self, place: _Place) -> Iterator[tuple[list[Any], Any]]:
    """The copies of each chunk of the first block, and where it is in it."""
    step, slots = place.now
    start, last = 0, len(self.plan.chunks) - 1
    for number, length in enumerate(self.plan.chunks):
      part = None
      if last:
        part = Part(number=number, at={"k": pl.ds(start, length)})
      copies = [
        window.copy_in(step, slot, part if "k" in window.axes else None)
        for window, slot in zip(self.inputs, slots, strict=True)
        if "k" in window.axes or number == last
      ]
      yield copies, (start, min(length, self.plan.k.size - start))
      start += length

  def _step(self, number: Any, place: _Place) -> _Place:
    place = self._start(number + np.int32(self.num_ahead), place)
    axis, k = self.plan.k, place.now.step[-1]
    last = axis.num_blocks - 1
    rest = axis.size - last * axis.block
    ends = not self.plan.joins
    multiply = functools.partial(self._multiply, place, 0)
    begin = functools.partial(multiply, axis.block, begins=True)
    go_on = functools.partial(multiply, axis.block)
    end = functools.partial(multiply, rest, begins=last == 0, ends=ends)
    if last == 0:
      end()
    else:
      # A core that sums a part of K began in the first block that it took.
      if ends:
        pl.when(k == 0)(begin)
      if last > 1:
        pl.when(((k > 0) | (not ends)) & (k < last))(go_on)
      pl.when(k == last)(end)
    return self._move_on(number, place)

  def _advanced(
    self, cursor: _Cursor, number: Any, act: Callable[[Any], None]
  ) -> _Cursor:
    """The cursor at the step after, which has a number; there may be none.

    Args:
      cursor: at the step before.
      number: of the step after.
      act: what to do with the copy of each block that this step takes anew.
    """
    step = tuple(self.steps.after(cursor.step))
    more = jnp.bool_(number < self.steps.count)
    slots = []
    for window, old in zip(self.inputs, cursor.slots, strict=True):
      changes = window.changes(cursor.step, step) & more
      slot = self.plan.next_slot(old)
      copy = functools.partial(window.copy_in, step, slot)
      pl.when(changes)(lambda copy=copy: act(copy()))
      slots.append(jnp.where(changes, slot, old))
    return _Cursor(step, tuple(slots))

  def _start(self, number: Any, place: _Place) -> _Place:
    """Asks for the blocks of a step, the one after those asked for."""
    ahead = self._advanced(place.ahead, number, lambda copy: copy.start())
    return place._replace(ahead=ahead)

  def _move_on(self, number: Any, place: _Place) -> _Place:
    """Awaits the blocks of the step after that of a number."""
    now = place.now
    place = place._replace(
      now=self._advanced(now, number + 1, lambda copy: copy.wait())
    )
    if self.plan.joins:
      return place
    ended = now.step[-1] == self.plan.k.num_blocks - 1
    awaited = ended & (place.tile >= self.num_ahead)
    after = self.steps.after_output(place.oldest)
    oldest = [
      jnp.where(awaited, new, old)
      for new, old in zip(after, place.oldest, strict=True)
    ]
    tile = place.tile + jnp.asarray(ended, np.int32)
    return place._replace(tile=tile, oldest=tuple(oldest))

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

    blocks.loop(self.plan.num_parts(place.now.step), part, None)
    if ends:
      oldest = place.tile - np.int32(self.num_ahead)
      pl.when(oldest >= 0)(lambda: self._await_out(place.oldest, oldest))

  def _products(self, place, start, size, rows, columns) -> list[jax.Array]:
    plan = self.plan
    x, *weights = [
      window.vmem.at[slot]
      for window, slot in zip(self.inputs, place.now.slots, strict=True)
    ][: 1 + plan.call.num_weights]
    x_axis, w_axis = plan.x_axes.index("k"), plan.w_axes.index("k")
    dot = functools.partial(
      terms.dot, axes=(x_axis, w_axis), precision=plan.call.precision
    )
    x_part = terms.inside(x, x_axis, size, start=start, other=rows)
    return [
      dot(x_part, terms.inside(w, w_axis, size, start=start, other=columns))
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
          self.inputs[count:], place.now.slots[count:], strict=True
        )
      ]
      totals = [epilogue(*totals, *operands)]
    slot = self._out_slot(place.tile)
    out = self.out.vmem.at[slot, rows, columns]
    out[...] = jnp.broadcast_to(totals[0], out.shape).astype(out.dtype)
    self._copy_out(place.now.step, slot, number, strip).start()

  def _join(self, place: _Place) -> None:
    """Adds the sums of the other core, and finishes this core's parts."""
    *received, sems = self.received
    join.exchange(self.plan, self.index, self.sums, received, sems)
    (rows,) = self.plan.strips
    step = self.steps.first

    def finish(number: int) -> None:
      columns = self.plan.part(number)
      totals = [total[rows, columns] for total in self.sums]
      self._finish(place, number, 0, totals)

    def finish_all(parts: range) -> None:
      for number in parts:
        finish(number)
      for number in parts:
        self._copy_out(step, np.int32(0), number, 0).wait()

    for core in range(self.plan.num_cores):
      parts = join.parts_of(self.plan, core)
      pl.when(self.index == core)(lambda parts=parts: finish_all(parts))

  def _out_slot(self, tile: Any) -> Any:
    return tile & np.int32(self.plan.num_slots - 1)

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
        self._copy_out(step, self._out_slot(tile), number, strip).wait()

    blocks.loop(self.plan.num_parts(step), wait, None)

  def _await_all(self, place: _Place) -> None:
    """Waits for the blocks of the output that are on their way."""

    def wait(tile, oldest):
      self._await_out(oldest, jnp.asarray(tile, np.int32))
      return tuple(self.steps.after_output(oldest))

    first = jnp.maximum(place.tile - np.int32(self.num_ahead), np.int32(0))
    jax.lax.fori_loop(first, place.tile, wait, place.oldest)
