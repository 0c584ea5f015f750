"""Tests for coremesh.remote, of the three kinds that barriers_test explains."""

import functools
import re

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh import exchanges, remote
from tests import protocols, support

_ROWS = 8
_BLOCK = (_ROWS, 128)
_F32 = jnp.float32
_VMEM = pltpu.VMEM(_BLOCK, _F32)
_SMEM = pltpu.SMEM(_BLOCK, _F32)
_DMA = pltpu.SemaphoreType.DMA
_SEM = pltpu.SemaphoreType.REGULAR

_LINE = ("v5p:2x2x1", ("device",), (4,))
_SQUARE = ("v5p:2x2x1", ("x", "y"), (2, 2))
_EIGHT = ("v6e:2x4", ("x", "y"), (2, 4))  # One core each.
_RING = ("device", "core")


@pytest.fixture(autouse=True)
def _nothing_is_left_on_a_semaphore(capfd):
  """JAX's interpreter only prints it; coremesh's simulator raises."""
  yield
  assert "non-zero count" not in capfd.readouterr().out


_OF_JAX = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True)
_by_either = pytest.mark.parametrize(
  "interpret", [None, _OF_JAX], ids=["ours", "jax"]
)


def _filled(numbers, dtype=np.float32) -> np.ndarray:
  """A block for each worker, filled with its number: [workers * 8, 128]."""
  column = np.repeat(np.asarray(numbers, dtype), _ROWS)
  return np.tile(column[:, None], (1, 128))


def _kernel(body, cores, scratch, **kwargs):
  return cm.kernel(body, mesh=cores, out=cm.like(0), scratch=scratch, **kwargs)


def _moved(move, *place, **kwargs):
  """The number of the block each worker holds after `move(mine, theirs)`.

  Every worker starts with its place in `mine` and -1 in `theirs`, which is
  what it returns.
  """
  numbers, findings = _moved_and_found(move, *place, **kwargs)
  assert not findings
  return numbers


def _moved_and_found(
  move, place=_LINE, *, dtype=_F32, scratch=None, devices=None, **kw
):
  """As `_moved`, and what the simulator notes."""
  chip, device_mesh = support.simulated(*place)
  if devices is not None:
    found = [device_mesh.devices.flat[i] for i in devices]
    device_mesh = chip.device_mesh(*place[1:], on="simulator", devices=found)
  check_vma = kw.pop("check_vma", True)

  def body(x_hbm, o_hbm, *, mine, theirs, **scratch):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    theirs[...] = jnp.full(theirs.shape, -1, theirs.dtype)
    move(mine, theirs, **scratch)
    cm.copy(theirs, o_hbm.at[rows])

  blocks = dict(mine=cm.vmem_slab(0), theirs=cm.vmem_slab(0))
  kernel = _kernel(body, chip.tensor_cores(), blocks | (scratch or {}), **kw)
  fn = support.over_devices(kernel, device_mesh, check_vma=check_vma)
  workers = device_mesh.size * chip.tensor_cores_per_device
  with cm.simulation(races=True) as run:
    y = fn(jnp.asarray(_filled(range(workers)), dtype))
  assert y.dtype == dtype
  numbers = np.asarray(y.astype(_F32))[::_ROWS, 0].astype(int)
  np.testing.assert_array_equal(y.astype(_F32), _filled(numbers))
  return numbers.tolist(), run.findings


# --- put -------------------------------------------------------------------


@pytest.mark.parametrize(
  ("to", "check_vma", "expected"),
  [
    (lambda: {"core": cm.next_core()}, True, [1, 0, 3, 2, 5, 4, 7, 6]),
    (lambda: cm.shifted("device"), True, [6, 7, 0, 1, 2, 3, 4, 5]),
    (lambda: cm.shifted("device"), False, [6, 7, 0, 1, 2, 3, 4, 5]),
    (lambda: cm.shifted(_RING, 3), True, [5, 6, 7, 0, 1, 2, 3, 4]),
    (
      lambda: {**cm.shifted("device", -1), "core": cm.next_core()},
      False,
      [3, 2, 5, 4, 7, 6, 1, 0],
    ),
  ],
)
def test_put_reaches_any_core_of_any_device(to, check_vma, expected):
  def move(mine, theirs):
    cm.global_barrier()
    cm.put(mine, theirs, to=to()).wait()

  assert _moved(move, check_vma=check_vma) == expected


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.int8])
def test_put_moves_any_dtype(dtype):
  def move(mine, theirs):
    cm.global_barrier()
    cm.put(mine, theirs, to=cm.shifted(_RING)).wait()

  assert _moved(move, dtype=dtype) == [7, 0, 1, 2, 3, 4, 5, 6]


def test_put_follows_the_place_in_the_mesh_not_the_number_of_the_device():
  def move(mine, theirs):
    cm.global_barrier()
    cm.put(mine, theirs, to=cm.shifted(("y", "x"))).wait()

  # Places (x, y): 0 = (0, 0), 1 = (0, 1), 2 = (1, 0), 3 = (1, 1).
  by_place = [3, 2, 0, 1]
  expected = [2 * d + c for d in by_place for c in range(2)]
  for devices in None, (2, 0, 3, 1):
    assert _moved(move, _SQUARE, devices=devices) == expected


def test_one_worker_puts_and_signals_another_that_waits_for_the_arrival():
  def move(mine, theirs, *, sent, arrived):
    place = cm.worker_index(_RING)
    cm.global_barrier()

    @pl.when(place == 0)
    def _():
      to = {"device": 2, "core": 1}
      cm.put(mine, theirs, to=to, send_sem=sent, recv_sem=arrived).wait_send()

    @pl.when(place == 5)
    def _():
      cm.wait_arrival(theirs, arrived)

  scratch = dict(sent=_DMA, arrived=_DMA)
  expected = [-1, -1, -1, -1, -1, 0, -1, -1]
  assert _moved(move, scratch=scratch) == expected


def test_puts_in_flight_together_each_have_a_link():
  def move(mine, theirs, *, left, right):
    cm.global_barrier()
    to_right = cm.put(mine, right, to=cm.shifted(_RING))
    to_left = cm.put(mine, left, to=cm.shifted(_RING, -1))
    theirs[...] = jnp.full(theirs.shape, 100.0)  # Work meanwhile.
    to_right.wait_recv()
    theirs[...] += 10 * right[...]
    to_left.wait_recv()
    theirs[...] += left[...]
    to_left.wait_send()
    to_right.wait_send()

  expected = [100 + 10 * ((w - 1) % 8) + (w + 1) % 8 for w in range(8)]
  assert _moved(move, scratch=dict(left=_VMEM, right=_VMEM)) == expected


def test_a_put_may_go_to_an_output_of_another_core():
  chip, device_mesh = support.simulated()

  def body(x_hbm, o_hbm, *, mine):
    cm.copy(x_hbm.at[cm.slab(x_hbm)], mine)
    cm.core_barrier()
    place = pl.ds(cm.next_core() * _ROWS, _ROWS)
    cm.put(mine, o_hbm.at[place], to={"core": cm.next_core()}).wait()

  kernel = _kernel(body, chip.tensor_cores(), dict(mine=cm.vmem_slab(0)))
  y = support.over_devices(kernel, device_mesh)(_filled(range(8)))
  np.testing.assert_array_equal(y, _filled([1, 0, 3, 2, 5, 4, 7, 6]))


def test_a_put_in_a_loop_uses_one_link():
  def move(mine, theirs):
    @pl.loop(0, 5)
    def _(_):
      cm.global_barrier()
      cm.put(mine, theirs, to=cm.shifted(_RING)).wait()
      mine[...] = theirs[...]

  assert _moved(move, num_links=1) == [3, 4, 5, 6, 7, 0, 1, 2]


# --- copies on one worker --------------------------------------------------


def test_a_copy_started_early_is_waited_for_late():
  def move(mine, theirs, *, other, own):
    first = cm.start_copy(mine, theirs)
    second = cm.start_copy(mine, other, sem=own)
    second.wait_send()
    first.wait()
    theirs[...] += 10 * other[...]

  scratch = dict(other=_VMEM, own=_DMA)
  assert _moved(move, scratch=scratch) == [11 * w for w in range(8)]


def test_copies_pass_through_every_memory():
  def move(mine, theirs, *, scalars):
    cm.copy(mine, scalars)
    cm.copy(scalars, theirs)

  assert _moved(move, scratch=dict(scalars=_SMEM)) == list(range(8))


def test_fence_waits_for_all_it_is_given():
  def move(mine, theirs, *, other):
    cm.global_barrier()
    cm.fence()
    cm.fence(
      cm.put(mine, other, to=cm.shifted("core")), cm.start_copy(mine, theirs)
    )
    theirs[...] += 10 * other[...]

  expected = [10 * (w ^ 1) + w for w in range(8)]
  assert _moved(move, scratch=dict(other=_VMEM)) == expected


def test_a_core_gets_what_another_has_in_shared_hbm():
  chip, device_mesh = support.simulated()

  def body(x_hbm, o_hbm, *, mine):
    there = pl.ds(cm.next_core() * _ROWS, _ROWS)
    cm.get(x_hbm.at[there], mine, source={"core": cm.next_core()})
    cm.copy(mine, o_hbm.at[cm.slab(o_hbm)])

  kernel = _kernel(body, chip.tensor_cores(), dict(mine=cm.vmem_slab(0)))
  y = support.over_devices(kernel, device_mesh)(_filled(range(8)))
  np.testing.assert_array_equal(y, _filled([1, 0, 3, 2, 5, 4, 7, 6]))


def test_a_part_with_nothing_in_it_is_moved_too():
  none = pl.ds(0, 0)

  def move(mine, theirs):
    cm.copy(mine.at[none], theirs.at[none])
    cm.start_copy(mine.at[none], theirs.at[none]).wait()
    for _ in range(2):
      cm.ring_shift(mine.at[none], theirs.at[none], axis=_RING)

  assert _moved(move) == [-1] * 8


# --- signals ---------------------------------------------------------------


@_by_either
def test_a_signal_to_oneself_is_counted_on_ones_own_core(interpret):
  # JAX's interpreter counts a signal without a core on core 0.
  def move(mine, theirs, *, sem):
    cm.signal(sem, inc=3)
    cm.wait(sem, 2)
    cm.wait(sem)
    theirs[...] = mine[...]

  scratch = dict(sem=_SEM)
  assert _moved(move, scratch=scratch, interpret=interpret) == list(range(8))


def test_a_signal_to_one_who_may_not_be_there_yet_is_found():
  def move(mine, theirs, *, sem):
    cm.ring_shift(mine, theirs, axis=_RING, steps=3)
    cm.signal(sem, to=cm.shifted(_RING))  # Only the one 3 steps on is there.
    cm.wait(sem)

  _, findings = _moved_and_found(move, scratch=dict(sem=_SEM))
  assert [f.kind for f in findings] == ["scope"]
  # The semaphore is there all the same: 0, unless a kernel before used it.
  assert findings[0].is_warning
  message = "signal of 'sem'.*without knowing that its owner has entered"
  assert re.search(message, findings[0].text)


def test_signals_count_up_to_a_traced_number():
  def move(mine, theirs, *, sem):
    place = cm.worker_index(_RING)
    cm.global_barrier()
    # Worker w gets w - 1 (or none) from behind, and 1 from worker w + 1.
    pl.when(place < 7)(lambda: cm.signal(sem, to=cm.shifted(_RING), inc=place))
    pl.when(place > 0)(lambda: cm.signal(sem, to=cm.shifted(_RING, -1)))
    behind = jnp.maximum(place - 1, 0)
    cm.wait(sem, behind + jnp.where(place < 7, 1, 0))
    theirs[...] = mine[...]

  assert _moved(move, scratch=dict(sem=_SEM)) == list(range(8))


# --- ring shift ------------------------------------------------------------


@pytest.mark.parametrize(
  ("place", "axis", "steps", "expected"),
  [
    (_LINE, "core", 1, [1, 0, 3, 2, 5, 4, 7, 6]),
    (_LINE, "device", -1, [2, 3, 4, 5, 6, 7, 0, 1]),
    (_LINE, _RING, 3, [5, 6, 7, 0, 1, 2, 3, 4]),
    (_LINE, _RING, 11, [5, 6, 7, 0, 1, 2, 3, 4]),
    (_LINE, _RING, 0, list(range(8))),
    (_LINE, _RING, -8, list(range(8))),
    (_SQUARE, ("core", "x"), 1, [5, 4, 7, 6, 0, 1, 2, 3]),
    (_EIGHT, ("y", "x"), 1, [7, 4, 5, 6, 0, 1, 2, 3]),
    (_EIGHT, "core", 1, list(range(8))),
  ],
)
def test_ring_shift_moves_every_block_some_steps_ahead(
  place, axis, steps, expected
):
  def move(mine, theirs):
    cm.ring_shift(mine, theirs, axis=axis, steps=steps)

  assert _moved(move, place) == expected


@pytest.mark.parametrize("loop", ["python", "pallas"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_ring_shifts_may_follow_one_another_on_one_link(loop, check_vma):
  def move(mine, theirs):
    def one_round(_):
      cm.ring_shift(mine, theirs, axis=_RING)
      mine[...] = theirs[...]

    if loop == "pallas":
      pl.loop(0, 3)(one_round)
    for i in range(6 if loop == "python" else 3):
      one_round(i)

  expected = [(w - 6) % 8 for w in range(8)]
  assert _moved(move, num_links=1, check_vma=check_vma) == expected


def test_two_buffers_in_turn_need_no_copy_between_rounds():
  def move(mine, theirs, *, pair):
    pair[0] = mine[...]
    for i in range(5):
      here, there = pair.at[i % 2], pair.at[(i + 1) % 2]
      cm.ring_shift(here, there, axis=_RING)
    theirs[...] = pair[1]

  scratch = dict(pair=pltpu.VMEM((2, *_BLOCK), _F32))
  assert _moved(move, scratch=scratch) == [(w - 5) % 8 for w in range(8)]


@pytest.mark.parametrize("rounds", [1, 3])
def test_both_directions_of_a_ring_may_be_in_flight(rounds):
  def move(mine, theirs, *, up, down, left, right, back):
    up[...] = mine[...]
    down[...] = mine[...]
    for _ in range(rounds):
      ahead = exchanges.start_ring_shift(up, right, axis=_RING)
      behind = exchanges.start_ring_shift(
        down, left, axis=_RING, steps=-1, sem=back
      )
      cm.fence(ahead, behind)
      up[...] = right[...]
      down[...] = left[...]
    theirs[...] = 10 * up[...] + down[...]

  scratch = dict.fromkeys(("up", "down", "left", "right"), _VMEM)
  expected = [10 * ((w - rounds) % 8) + (w + rounds) % 8 for w in range(8)]
  moved = _moved(move, scratch=scratch | dict(back=_SEM), num_links=2 * rounds)
  assert moved == expected


def test_a_ring_shift_that_leads_back_is_a_copy_that_may_be_waited_for_late():
  def move(mine, theirs, *, sent, arrived):
    sems = dict(send_sem=sent, recv_sem=arrived)
    exchanges.start_ring_shift(
      mine, theirs, axis="core", steps=2, **sems
    ).wait()
    exchanges.start_ring_shift(mine, theirs, axis="core", steps=-2).wait()

  scratch = dict(sent=_DMA, arrived=_DMA)
  assert _moved(move, scratch=scratch) == list(range(8))


def test_kernels_with_ring_shifts_may_follow_one_another():
  chip, device_mesh = support.simulated()

  def body(x_hbm, o_hbm, *, mine, theirs):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    cm.ring_shift(mine, theirs, axis=_RING)
    cm.copy(theirs, o_hbm.at[rows])

  blocks = dict(mine=cm.vmem_slab(0), theirs=cm.vmem_slab(0))
  kernel = _kernel(body, chip.tensor_cores(), blocks, collective_id=5)
  fn = support.over_devices(lambda x: kernel(kernel(x)), device_mesh)
  with cm.simulation(races=True):
    y = fn(_filled(range(8)))
  np.testing.assert_array_equal(y, _filled([6, 7, 0, 1, 2, 3, 4, 5]))


def test_x64_gives_the_same_bits():
  def move(mine, theirs, *, sem):
    cm.ring_shift(mine, theirs, axis=_RING, steps=3)
    # To where its block went: that worker has said that it is there.
    cm.signal(sem, to=cm.shifted(_RING, 3), inc=jnp.int64(2))
    cm.wait(sem, jnp.int64(2))

  with jax.enable_x64(True):
    assert _moved(move, scratch=dict(sem=_SEM)) == [5, 6, 7, 0, 1, 2, 3, 4]


# --- swap ------------------------------------------------------------------


@pytest.mark.parametrize(
  ("place", "axis", "expected"),
  [
    (_LINE, "core", [1, 0, 3, 2, 5, 4, 7, 6]),
    (_LINE, "device", [2, 3, 0, 1, 6, 7, 4, 5]),
    (_LINE, ("core", "device"), [2, 3, 0, 1, 6, 7, 4, 5]),
    (_SQUARE, ("y", "x"), [4, 5, 6, 7, 0, 1, 2, 3]),
    (_EIGHT, "y", [1, 0, 3, 2, 5, 4, 7, 6]),
  ],
)
def test_swap_exchanges_the_blocks_of_each_pair(place, axis, expected):
  def move(mine, theirs):
    for _ in range(3):
      cm.swap(mine, theirs, axis=axis)

  assert _moved(move, place, num_links=1) == expected


def test_a_swap_started_early_is_waited_for_late():
  def move(mine, theirs, *, other, own, sent, arrived):
    sems = dict(sem=own, send_sem=sent, recv_sem=arrived)
    first = exchanges.start_swap(mine, theirs)
    second = exchanges.start_swap(mine, other, **sems)
    second.wait()
    first.wait()
    theirs[...] += 10 * other[...]

  scratch = dict(other=_VMEM, own=_SEM, sent=_DMA, arrived=_DMA)
  assert _moved(move, scratch=scratch) == [11 * (w ^ 1) for w in range(8)]


# --- every order -----------------------------------------------------------


def _alone(worker):
  """A copy waits for its partners only, which `explore` checks as it lands."""
  return {worker}


_BLOCKS = dict(mine=_VMEM, theirs=_VMEM)


def _explored(body, workers, *, cores=1, scratch=None, runs=None, **kwargs):
  programs = protocols.trace(
    body,
    devices={"device": workers},
    cores=cores,
    scratch=_BLOCKS | (scratch or {}),
    **kwargs,
  )
  return protocols.explore(programs, peers=_alone, runs=runs)


def _shift(mine, theirs, **kwargs):
  cm.ring_shift(mine, theirs, axis=_RING, **kwargs)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(("rounds", "kernels"), [(2, 1), (1, 2)])
def test_no_order_breaks_a_ring_shift(workers, rounds, kernels):
  assert _explored(_shift, workers, rounds=rounds, kernels=kernels) > workers


@pytest.mark.parametrize(("workers", "steps"), [(5, 1), (6, 2), (3, -1)])
def test_no_order_tried_breaks_a_ring_shift_of_many(workers, steps):
  body = functools.partial(_shift, steps=steps)
  runs = 100
  assert _explored(body, workers, cores=2, rounds=3, runs=runs) > runs


@pytest.mark.parametrize("workers", [2, 4])
def test_no_order_breaks_a_swap(workers):
  body = lambda mine, theirs: cm.swap(mine, theirs, axis="device")
  assert _explored(body, workers) > workers


@pytest.mark.parametrize("workers", [2, 3])
def test_no_order_breaks_two_ring_shifts_in_flight(workers):
  def both(mine, theirs, other, back):
    first = exchanges.start_ring_shift(mine, theirs, axis="device")
    second = exchanges.start_ring_shift(
      mine, other, axis="device", steps=-1, sem=back
    )
    cm.fence(first, second)

  def same(mine, theirs, other, back):
    first = exchanges.start_ring_shift(mine, theirs, axis="device")
    second = exchanges.start_ring_shift(mine, other, axis="device")
    cm.fence(second, first)

  for body in both, same:
    scratch = dict(other=_VMEM, back=_SEM)
    runs = None if workers == 2 else 1000
    assert _explored(body, workers, scratch=scratch, rounds=2, runs=runs)


def _put_on(mine, theirs):
  pltpu.get_barrier_semaphore()  # What synchronises by itself would take it.
  cm.put(mine, theirs, to=cm.shifted("device")).wait()


@pytest.mark.parametrize("workers", [2, 3])
def test_a_put_without_a_handshake_is_found_wrong(workers):
  with pytest.raises(protocols.ProtocolError, match="too early|in round"):
    _explored(_put_on, workers)

  def after_a_barrier(mine, theirs):
    cm.device_barrier()
    _put_on(mine, theirs)

  assert _explored(after_a_barrier, workers) > workers


@pytest.mark.parametrize("body", [_shift, lambda **refs: cm.swap(**_to(refs))])
def test_a_deleted_handshake_is_found_in_every_exchange(body, monkeypatch):
  real = remote.signal
  monkeypatch.setattr(remote, "wait", lambda *_: None)
  with pytest.raises(protocols.ProtocolError):
    _explored(body, 2)
  monkeypatch.setattr(remote, "signal", lambda *_, **__: None)
  with pytest.raises(protocols.ProtocolError, match="too early|in round"):
    _explored(body, 2)
  monkeypatch.undo()
  monkeypatch.setattr(remote, "signal", lambda sem, **_: real(sem))
  with pytest.raises(protocols.ProtocolError, match="too early|in round"):
    _explored(body, 2)


def _to(refs):
  return dict(src=refs["mine"], dst=refs["theirs"], axis="device")


def test_an_arrival_that_is_not_waited_for_is_found():
  def body(mine, theirs):
    exchanges.start_ring_shift(mine, theirs, axis="device").wait_send()

  with pytest.raises(protocols.ProtocolError):
    _explored(body, 2, rounds=1)


# --- the programs ----------------------------------------------------------


_SYNC = ("semaphore_signal", "semaphore_wait", "dma_start", "dma_wait")


def _traced_sync(
  move, place=_SQUARE, scratch=None, knows_who_is_there=True, **kwargs
):
  """The synchronisation in a kernel's program, in order."""
  chip, device_mesh = support.simulated(*place)

  def body(x_hbm, o_hbm, **refs):
    if knows_who_is_there:
      pltpu.get_barrier_semaphore()  # As a kernel has that finds out itself.
    move(**refs)

  kernel = _kernel(
    body, chip.tensor_cores(), _BLOCKS | (scratch or {}), **kwargs
  )
  fn = support.over_devices(kernel, device_mesh)
  x = jax.ShapeDtypeStruct((device_mesh.size * _ROWS, 128), _F32)
  return [op for op in support.primitives(fn, x) if op in _SYNC]


@pytest.mark.parametrize(
  "exchange",
  [
    lambda mine, theirs: cm.ring_shift(mine, theirs, axis="x"),
    lambda mine, theirs: cm.ring_shift(mine, theirs, axis=("y", "core")),
    lambda mine, theirs: cm.swap(mine, theirs),
    lambda mine, theirs: exchanges.start_swap(mine, theirs).wait(),
    lambda mine, theirs: exchanges.start_ring_shift(
      mine, theirs, axis="x"
    ).wait(),
  ],
)
def test_an_exchange_waits_for_its_receiver_and_for_both_ends(exchange):
  assert _traced_sync(exchange) == [*_SYNC, "dma_wait"]


def test_a_put_waits_for_both_ends_or_for_its_source():
  def put(mine, theirs):
    return cm.put(mine, theirs, to={"core": 1})

  both = ["dma_start", "dma_wait", "dma_wait"]
  assert _traced_sync(lambda **refs: put(**refs).wait()) == both
  one = lambda **refs: put(**refs).wait_send()
  assert _traced_sync(one) == ["dma_start", "dma_wait"]


@pytest.mark.parametrize(
  ("start", "name"),
  [
    (lambda mine, theirs: cm.put(mine, theirs, to={"core": 1}), "put"),
    (lambda **r: cm.put(**_to_core(r)).wait_recv(), "put"),
    (lambda mine, theirs: cm.start_copy(mine, theirs), "start_copy"),
  ],
)
def test_a_copy_whose_source_is_never_waited_for_is_refused(start, name):
  message = rf"ends without waiting for a copy that {name} started.*\.wait\(\)"
  with pytest.raises(cm.CollectiveError, match=message):
    _traced_sync(start)


def _to_core(refs):
  return dict(src=refs["mine"], dst=refs["theirs"], to={"core": 1})


@pytest.mark.parametrize("end", ["wait", "wait_send", "wait_recv"])
def test_an_end_cannot_be_waited_for_twice(end):
  def twice(**refs):
    copy = cm.put(**_to_core(refs))
    copy.wait()
    getattr(copy, end)()

  with pytest.raises(cm.CollectiveError, match="put started is waited for twi"):
    _traced_sync(twice)


def test_copies_fences_and_signals_leave_their_trace():
  start, wait = "dma_start", "dma_wait"
  traced = functools.partial(_traced_sync, scratch=dict(sem=_SEM))
  copied = lambda mine, theirs, sem: cm.copy(mine, theirs)
  assert traced(copied) == [start, wait]
  started = lambda mine, theirs, sem: cm.start_copy(mine, theirs)
  fenced = lambda **refs: cm.fence(started(**refs), started(**refs))
  assert traced(fenced) == [start, start, wait, wait]
  signalled = lambda mine, theirs, sem: cm.signal(sem)
  assert traced(signalled) == ["semaphore_signal"]
  waited = lambda mine, theirs, sem: cm.wait(sem)
  assert traced(waited) == ["semaphore_wait"]
  arrived = lambda mine, theirs, dma: cm.wait_arrival(theirs, dma)
  assert _traced_sync(arrived, scratch=dict(dma=_DMA)) == [wait]


@pytest.mark.parametrize(
  ("move", "message"),
  [
    (lambda **r: cm.put(**_to_core(r)).wait(), r"put along \['core'\]"),
    (
      lambda **r: [cm.device_barrier(), cm.put(**_to_core(r)).wait()],
      r"put along \['core'\]",
    ),
    (
      lambda mine, theirs: [
        cm.core_barrier(),
        cm.put(mine, theirs, to={"x": 1}).wait(),
      ],
      r"put along \['x'\]",
    ),
    (
      lambda **r: [cm.put(**_to_core(r)).wait(), cm.core_barrier()],
      r"put along \['core'\]",
    ),
  ],
)
def test_a_put_needs_a_barrier_before_it_that_covers_its_receiver(
  move, message
):
  with pytest.raises(cm.CollectiveError, match=message):
    _traced_sync(move, knows_who_is_there=False)


@pytest.mark.parametrize(
  "move",
  [
    lambda **r: [cm.core_barrier(), cm.put(**_to_core(r)).wait()],
    lambda **r: [cm.global_barrier(), cm.put(**_to_core(r)).wait()],
    lambda mine, theirs: cm.swap(mine, theirs),
    lambda mine, theirs: cm.copy(mine, theirs),
  ],
)
def test_a_move_behind_its_barrier_or_handshake_is_accepted(move):
  assert _traced_sync(move, knows_who_is_there=False)


# --- compiled --------------------------------------------------------------


def _compiles(chip, cores, move, memory=_VMEM, check_vma=True, **scratch):
  def body(x_hbm, o_hbm, *, mine, theirs, **scratch):
    cm.copy(x_hbm, mine)
    move(mine, theirs, **scratch)
    cm.copy(theirs, o_hbm)

  blocks = dict(mine=memory, theirs=memory)
  kernel = _kernel(body, cores, blocks | scratch)
  device_mesh = chip.device_mesh("device", on="compiler")
  fn = jax.shard_map(
    kernel,
    mesh=device_mesh,
    in_specs=P("device"),
    out_specs=P("device"),
    check_vma=check_vma,
  )
  x = jax.ShapeDtypeStruct((chip.num_devices * _ROWS, 128), _F32)
  assert cm.compile(fn, x).code_bytes > 0


def _every_exchange(mine, theirs, sem, *, axes):
  cm.ring_shift(mine, theirs, axis=axes)
  cm.ring_shift(mine, theirs, axis=axes)
  cm.swap(mine, theirs, axis=axes, sem=sem)
  cm.signal(sem)
  cm.wait(sem)
  started = exchanges.start_ring_shift(mine, theirs, axis=axes)
  started.wait_recv()
  started.wait_send()


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_exchanges_of_tensor_cores_compile(chip, check_vma):
  chip = cm.chip(chip)
  move = functools.partial(_every_exchange, axes=_RING)
  cores = chip.tensor_cores()
  _compiles(chip, cores, move, check_vma=check_vma, sem=_SEM)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_exchanges_of_vector_subcores_compile(chip):
  chip = cm.chip(chip)
  for axes in ("core", "subcore"), ("device", "core", "subcore"), "device":
    move = functools.partial(_every_exchange, axes=axes)
    _compiles(chip, chip.vector_subcores(), move, sem=_SEM)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_exchanges_of_scalar_subcores_compile_between_their_smem(chip):
  chip = cm.chip(chip)
  move = functools.partial(_every_exchange, axes=_RING)
  _compiles(chip, chip.scalar_subcores(), move, _SMEM, sem=_SEM)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_puts_between_subcores_and_devices_compile(chip):
  chip = cm.chip(chip)
  last = chip.vector_subcores_per_sparse_core - 1

  def move(mine, theirs):
    cm.global_barrier()
    cm.put(mine, theirs, to={"subcore": last}).wait_send()
    cm.put(
      mine, theirs, to={**cm.shifted("device"), "core": 0, "subcore": 1}
    ).wait_send()

  _compiles(chip, chip.vector_subcores(), move)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_copies_through_the_shared_memory_of_a_sparse_core_compile(chip):
  # These stream, where JAX warns of a semaphore that it ignores.
  chip = cm.chip(chip)

  def move(mine, theirs, *, shared, scalars):
    cm.copy(mine, shared)
    cm.subcore_barrier()
    cm.get(shared, theirs, source={"subcore": 3})
    cm.copy(shared, scalars)
    cm.start_copy(mine, shared).wait()

  shared = pltpu.VMEM_SHARED(_BLOCK, _F32)
  cores = chip.vector_subcores()
  _compiles(chip, cores, move, shared=shared, scalars=_SMEM)


def test_every_memory_of_a_tensor_core_compiles_in_a_put():
  chip = cm.chip("v5p:2x2x1")

  def move(mine, theirs, *, scalars):
    cm.ring_shift(mine, scalars, axis=_RING)
    cm.ring_shift(scalars, theirs, axis=_RING)

  _compiles(chip, chip.tensor_cores(), move, scalars=_SMEM)


def test_a_part_with_nothing_in_it_compiles():
  chip = cm.chip("v5p:2x2x1")
  none = pl.ds(0, 0)

  def move(mine, theirs):
    cm.copy(mine.at[none], theirs.at[none])
    cm.ring_shift(mine.at[none], theirs.at[none], axis=_RING)

  for cores in chip.tensor_cores(), chip.vector_subcores():
    _compiles(chip, cores, move)


# --- refused ---------------------------------------------------------------


_OTHER = dict(
  short=pltpu.VMEM((4, 128), _F32),
  half=pltpu.VMEM(_BLOCK, jnp.bfloat16),
  sem=_SEM,
  sent=_DMA,
  many=pltpu.SemaphoreType.DMA((2,)),
)


def _refused(move, error, message, place=_SQUARE, **kwargs):
  with pytest.raises(error, match=message):
    _traced_sync(
      lambda **refs: move(_Refs(refs)), place, scratch=_OTHER, **kwargs
    )


class _Refs:
  """The scratch of a body by attribute."""

  def __init__(self, refs):
    vars(self).update(refs)


_MOVES = {
  "copy": cm.copy,
  "start_copy": cm.start_copy,
  "put": functools.partial(cm.put, to={"core": 1}),
  "get": functools.partial(cm.get, source={"core": 1}),
  "ring_shift": functools.partial(cm.ring_shift, axis="core"),
  "ring_shift back": functools.partial(cm.ring_shift, axis="core", steps=2),
  "start_ring_shift": functools.partial(exchanges.start_ring_shift, axis="x"),
  "swap": cm.swap,
  "start_swap": exchanges.start_swap,
}


@pytest.mark.parametrize("move", _MOVES.values(), ids=_MOVES)
def test_refs_that_do_not_match_are_refused(move):
  _refused(
    lambda r: move(r.mine, r.short),
    cm.ShapeError,
    r"src and dst must have one shape; got src \(8, 128\) and dst \(4, 128\)",
  )
  _refused(
    lambda r: move(r.half, r.mine),
    cm.DTypeError,
    "one dtype; got src bfloat16 and dst float32. A DMA moves bits",
  )
  _refused(
    lambda r: move(r.mine[...], r.theirs),
    cm.DTypeError,
    "src must be a ref, or a part of one, ref.at.*An array that was read",
  )
  _refused(lambda r: move(r.sem, r.sem), cm.UnsupportedError, "must hold data")


@pytest.mark.parametrize(
  ("move", "error", "message"),
  [
    # Addresses.
    (
      lambda r: cm.put(r.mine, r.theirs, to={"z": 0}),
      cm.AxisError,
      r"to must name axes in scope; \['z'\] are not",
    ),
    (
      lambda r: cm.put(r.mine, r.theirs, to={"core": 2}),
      cm.AxisError,
      r"to\['core'\] must be in \[0, 2\); got 2",
    ),
    (lambda r: cm.signal(r.sem, to={"y": -1}), cm.AxisError, r"got -1"),
    (lambda r: cm.signal(r.sem, to={}), cm.AxisError, "at least one axis"),
    (
      lambda r: cm.get(r.mine, r.theirs, source={"core": 7}),
      cm.AxisError,
      "got 7",
    ),
    (
      lambda r: cm.ring_shift(r.mine, r.theirs, axis="z"),
      cm.AxisError,
      "axis must name axes in scope",
    ),
    (lambda r: cm.swap(r.mine, r.theirs, axis="z"), cm.AxisError, "axis must"),
    # What TPU DMAs cannot do.
    (
      lambda r: cm.get(r.mine, r.theirs, source={"core": 1}),
      cm.UnsupportedError,
      r"cannot read the vmem of \{'core': 1\}. Let the owner of src call"
      r" cm.put\(src, dst, to=...\) and wait for it here with cm.wait_arrival",
    ),
    (
      lambda r: cm.get(r.mine, r.theirs, source={"x": 1}),
      cm.UnsupportedError,
      "TPU DMAs push",
    ),
    # Exchanges that overwrite what they send, or have nowhere to go.
    (
      lambda r: cm.ring_shift(r.mine, r.mine, axis="core"),
      cm.CollectiveError,
      "src and dst must be two refs",
    ),
    (lambda r: cm.swap(r.mine, r.mine), cm.CollectiveError, "two refs"),
    (
      lambda r: cm.ring_shift(
        r.mine, r.theirs, axis="x", steps=cm.worker_index("x")
      ),
      cm.ShapeError,
      "steps must be a Python int, the same on every worker",
    ),
    (
      lambda r: cm.ring_shift(r.mine, r.theirs, axis="x", steps=1.0),
      cm.ShapeError,
      "got 1.0",
    ),
    # Semaphores.
    (
      lambda r: cm.put(r.mine, r.theirs, to={"core": 0}, send_sem=r.sent),
      cm.CollectiveError,
      "send_sem and recv_sem go together",
    ),
    (
      lambda r: cm.swap(r.mine, r.theirs, recv_sem=r.sent),
      cm.CollectiveError,
      "go together",
    ),
    (
      lambda r: cm.put(
        r.mine, r.theirs, to={"core": 0}, send_sem=r.sent, recv_sem=r.sem
      ),
      cm.CollectiveError,
      "recv_sem must be a pltpu.SemaphoreType.DMA scratch",
    ),
    (
      lambda r: cm.start_copy(r.mine, r.theirs, sem=r.many),
      cm.CollectiveError,
      r"got dma_sem of shape \(2,\). One of several is sems.at\[i\]",
    ),
    (
      lambda r: cm.wait_arrival(r.theirs, r.sem),
      cm.CollectiveError,
      "recv_sem must be",
    ),
    (lambda r: cm.signal(r.sent), cm.CollectiveError, "sem must be a pltpu"),
    (lambda r: cm.wait(r.sent), cm.CollectiveError, "sem must be a pltpu"),
    (
      lambda r: cm.swap(r.mine, r.theirs, sem=r.sent),
      cm.CollectiveError,
      "sem must be a pltpu.SemaphoreType.REGULAR",
    ),
    # Counts.
    (lambda r: cm.signal(r.sem, inc=0), cm.CollectiveError, "inc must be"),
    (lambda r: cm.wait(r.sem, -2), cm.CollectiveError, "at least 1; got -2"),
    (lambda r: cm.wait(r.sem, 1.5), cm.CollectiveError, "integer of at least"),
    # Two patterns on one semaphore.
    (
      lambda r: [
        cm.ring_shift(r.mine, r.theirs, axis="x"),
        cm.ring_shift(r.mine, r.theirs, axis="x", steps=0),
        cm.ring_shift(r.mine, r.theirs, axis=("x", "y")),
      ],
      cm.CollectiveError,
      r"ring_shift over \('x', 1\) and for ring_shift over \('x', 'y', 1\)",
    ),
    (
      lambda r: [cm.core_barrier(), cm.swap(r.mine, r.theirs)],
      cm.CollectiveError,
      r"barrier over \('core'\) and for swap over \('core'\)",
    ),
    (
      lambda r: [
        cm.swap(r.mine, r.theirs, sem=r.sem),
        cm.core_barrier(sem=r.sem),
      ],
      cm.CollectiveError,
      "uses one semaphore for swap",
    ),
  ],
)
def test_what_cannot_be_right_is_refused(move, error, message):
  _refused(move, error, message)


def test_a_self_send_is_refused_where_there_is_nobody_else():
  message = r"to names \['core'.*\], along which there is one worker"
  for to in {"core": 0}, {"core": 0, "x": 0}:
    _refused(
      lambda r: cm.put(r.mine, r.theirs, to=to),
      cm.CollectiveError,
      message,
      ("v6e:2x2", ("x", "y"), (1, 4)),
    )


@pytest.mark.parametrize("axis", ["x", ("x", "core")])
def test_an_odd_number_of_workers_cannot_swap(axis):
  _refused(
    lambda r: cm.swap(r.mine, r.theirs, axis=axis),
    cm.ShapeError,
    r"must hold an even number of them; got 1",
    ("v6e:2x2", ("x", "y"), (1, 4)),
  )


@pytest.mark.parametrize(
  "move",
  [
    lambda r: cm.put(r.mine, r.theirs, to={"core": 1}).wait(),
    lambda r: cm.start_copy(r.mine, r.theirs).wait(),
    lambda r: exchanges.start_swap(r.mine, r.theirs).wait(),
    lambda r: exchanges.start_ring_shift(r.mine, r.theirs, axis="x").wait(),
  ],
)
def test_a_python_loop_with_more_copies_than_links_says_what_to_do(move):
  repeat = lambda r: [move(r) for _ in range(3)]
  message = r"more than num_links=2 copies.*cm.kernel\(..., num_links=3\)"
  _refused(repeat, cm.CollectiveError, message, num_links=2)
  _traced_sync(lambda **refs: repeat(_Refs(refs)), scratch=_OTHER, num_links=3)


def test_a_kernel_without_links_needs_named_semaphores():
  message = r"more than num_links=0 copies.*num_links=1"
  shift = lambda r: cm.ring_shift(r.mine, r.theirs, axis="x")
  _refused(shift, cm.CollectiveError, message, num_links=0)


@pytest.mark.parametrize(
  ("move", "message"),
  [
    (
      lambda mine, theirs: cm.put(mine, theirs, to={"core": 1}),
      "put has no semaphores of its own here: they come with a cm.kernel on a"
      " single mesh. Pass send_sem= and recv_sem=, DMA semaphores",
    ),
    (cm.start_copy, "start_copy has no semaphores .* Pass sem="),
    (cm.swap, "swap has no semaphores"),
    (exchanges.start_swap, "start_swap has no semaphores"),
  ],
)
def test_a_plain_pallas_kernel_needs_named_semaphores(move, message):
  chip, device_mesh = support.simulated()
  kernel = pl.kernel(
    lambda x_hbm, o_hbm, mine, theirs: move(mine, theirs),
    out_type=jax.ShapeDtypeStruct(_BLOCK, _F32),
    mesh=chip.tensor_cores(),
    scratch_types=[_VMEM, _VMEM],
  )
  fn = support.over_devices(kernel, device_mesh, check_vma=False)
  with pytest.raises(cm.CollectiveError, match=message):
    jax.eval_shape(fn, jax.ShapeDtypeStruct((4 * _ROWS, 128), _F32))


def test_a_local_copy_has_one_end():
  _refused(
    lambda r: cm.start_copy(r.mine, r.theirs).wait_recv(),
    cm.CollectiveError,
    "wait_recv is for a remote copy",
  )


@pytest.mark.parametrize(
  ("src", "dst"), [("mine", "scalars"), ("scalars", "mine"), ("x", "scalars")]
)
def test_a_vector_subcore_has_no_dma_to_or_from_its_smem(src, dst):
  chip = cm.chip("v5p:2x2x1")

  def body(x_hbm, o_hbm, **refs):
    refs["x"] = x_hbm
    cm.copy(refs[src], refs[dst])

  kernel = _kernel(
    body,
    chip.vector_subcores(),
    dict(mine=_VMEM, scalars=_SMEM),
    interpret=False,
  )
  with pytest.raises(cm.UnsupportedError, match="A vector subcore has no DMA"):
    jax.eval_shape(kernel, jnp.zeros(_BLOCK))


@pytest.mark.parametrize("dma", ["late", "early", "random"])
@pytest.mark.parametrize(
  ("ring", "moved"),
  [
    ("device", lambda ids: np.roll(ids, 1, axis=0)),
    (("core", "subcore"), lambda ids: np.roll(ids, 1, axis=1)),
    (("device", "core", "subcore"), lambda ids: np.roll(ids, 1)),
  ],
)
def test_vector_subcores_shift_round_a_ring(ring, moved, dma):
  chip, device_mesh = support.simulated("v6e:2x2")
  cores = chip.vector_subcores()

  def body(x_hbm, o_hbm, *, mine, theirs):
    rows = cm.slab(x_hbm, over=("core", "subcore"))
    cm.copy(x_hbm.at[rows], mine)
    cm.ring_shift(mine, theirs, axis=ring)
    cm.copy(theirs, o_hbm.at[rows])

  kernel = _kernel(body, cores, dict(mine=_VMEM, theirs=_VMEM))
  subcores = cores.num_cores * cores.num_subcores
  ids = np.arange(device_mesh.size * subcores).reshape(-1, subcores)
  with cm.simulation(dma=dma) as run:
    y = support.over_devices(kernel, device_mesh)(_filled(ids.ravel()))
  assert not run.findings
  np.testing.assert_array_equal(y, _filled(moved(ids).ravel()))


@pytest.mark.parametrize("dma", ["late", "early", "random"])
@pytest.mark.parametrize("waits_first", [True, False])
def test_a_stream_out_of_vmem_must_be_waited_for(waits_first, dma):
  chip, device_mesh = support.simulated("v6e:2x2")
  cores = chip.vector_subcores()
  workers = ("core", "subcore")

  def body(x_hbm, o_hbm, *, mine):
    rows = cm.slab(x_hbm, over=workers)
    cm.copy(x_hbm.at[rows], mine)
    stream = cm.start_copy(mine, o_hbm.at[rows])  # It counts on no semaphore.
    if waits_first:
      stream.wait()
    mine[0, pl.ds(0, 8)] = jnp.zeros(8, _F32)
    if not waits_first:
      stream.wait()

  kernel = _kernel(body, cores, dict(mine=cm.vmem_slab(0, over=workers)))
  fn = support.over_devices(kernel, device_mesh)
  x = _filled(range(1, 1 + device_mesh.size * cores.num_cores * 16))
  if waits_first:
    with cm.simulation(dma=dma) as run:
      np.testing.assert_array_equal(fn(x), x)
    assert not run.findings
    return
  with pytest.raises(cm.SimulationError) as caught, cm.simulation(dma=dma):
    jax.block_until_ready(fn(x))
  assert {f.kind for f in caught.value.findings} == {"race"}


@_by_either
def test_a_plain_pallas_kernel_may_exchange_with_semaphores_it_names(interpret):
  chip, device_mesh = support.simulated()

  def body(x_hbm, o_hbm, mine, theirs, sent, arrived):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    for _ in range(2):
      cm.ring_shift(mine, theirs, axis=_RING, send_sem=sent, recv_sem=arrived)
    cm.copy(theirs, o_hbm.at[rows])

  kernel = pl.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((2 * _ROWS, 128), _F32),
    mesh=chip.tensor_cores(),
    scratch_types=[_VMEM, _VMEM, _DMA, _DMA],
    compiler_params=pltpu.CompilerParams(collective_id=2),
    interpret=interpret or cm.SimulatorParams(),
  )
  fn = support.over_devices(kernel, device_mesh, check_vma=False)
  y = fn(_filled(range(8)))
  np.testing.assert_array_equal(y, _filled(np.roll(range(8), 1)))
