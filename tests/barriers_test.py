"""Tests for coremesh.barriers.

A simulated kernel gives the right values with a barrier deleted, as long as
nothing else goes wrong. So three kinds of test stand beside each other: values
with race detection, the real programs run in every order (`protocols`), and
programs read for the signals that must be in them.
"""

from collections.abc import Sequence
import functools
import itertools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import coremesh as cm
from coremesh import barriers, mesh, scope
from tests import protocols, support

_ROWS = 8
_SEM = pltpu.SemaphoreType.REGULAR
_PAIR = pltpu.SemaphoreType.REGULAR((2,))
_OF_JAX = pltpu.InterpretParams(detect_races=True)
_SYNC = ("get_barrier_semaphore", "semaphore_signal", "semaphore_wait")


def _no_barrier() -> None:
  """What a kernel would do that synchronises by itself."""
  pltpu.get_barrier_semaphore()


# --- values ----------------------------------------------------------------


def _passing(chip, sync, to, *, rounds=3, loop="python", **kwargs):
  """A kernel in which every worker hands on what it got, `rounds` times."""

  @cm.kernel(
    mesh=chip.tensor_cores(),
    out=cm.like(0),
    scratch=dict(mine=cm.vmem_slab(0), theirs=cm.vmem_slab(0)),
    **kwargs,
  )
  def body(x_hbm, o_hbm, *, mine, theirs):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)

    def one_round(_):
      sync()  # The receiver is in the kernel, and is done with `theirs`.
      cm.put(mine, theirs, to=to()).wait()
      mine[...] = theirs[...]

    if loop == "python":
      for i in range(rounds):
        one_round(i)
    else:
      pl.loop(0, rounds)(one_round)
    cm.copy(mine, o_hbm.at[rows])

  return body


def _filled(numbers) -> np.ndarray:
  """A block for each worker, filled with its number: [workers * 8, 128]."""
  column = np.repeat(np.asarray(numbers, np.float32), _ROWS)
  return np.tile(column[:, None], (1, 128))


def _numbered(workers: int) -> np.ndarray:
  """Every worker's block, filled with the place of the worker."""
  return _filled(range(workers))


def _passed(sizes: dict[str, int], names: Sequence[str], rounds: int):
  """Whose number each worker holds after `rounds` round the ring `names`."""
  ring = [sizes[n] for n in names]
  held = np.empty(tuple(sizes.values()), int)
  for number, place in enumerate(np.ndindex(*sizes.values())):
    at = dict(zip(sizes, place, strict=True))
    index = np.ravel_multi_index([at[n] for n in names], ring)
    after = np.unravel_index((index + rounds) % math.prod(ring), ring)
    at.update(zip(names, after, strict=True))
    held[tuple(at.values())] = number
  return held.ravel()


def _check_passing(
  chip, device_mesh, sync, names, *, rounds=3, times=1, check_vma=True, **kwargs
):
  to = functools.partial(cm.shifted, names)
  kernel = _passing(chip, sync, to, rounds=rounds, num_links=rounds, **kwargs)

  def several(x):
    for _ in range(times):
      x = kernel(x)
    return x

  sizes = dict(device_mesh.shape) | {"core": chip.tensor_cores_per_device}
  fn = support.over_devices(several, device_mesh, check_vma=check_vma)
  with cm.simulation(races=True) as run:
    y = np.asarray(fn(_numbered(math.prod(sizes.values()))))
  assert not run.findings
  expected = _filled(_passed(sizes, names, rounds * times))
  np.testing.assert_array_equal(y, expected)


@pytest.fixture(autouse=True)
def _nothing_is_left_on_a_semaphore(capfd):
  """JAX's interpreter only prints it; coremesh's simulator raises."""
  yield
  assert "non-zero count" not in capfd.readouterr().out


_SQUARE = ("v5p:2x2x1", ("x", "y"), (2, 2))
_EIGHT = ("v6e:2x4", ("x", "y"), (2, 4))  # One core each.
_COLUMN = ("v5p:2x2x1", ("x", "y"), (4, 1))
_SINGLE_CORE = ("v6e:2x2", ("x", "y"), (2, 2))
_ALL = ("x", "y", "core")
_ALONE = ("v6e:1x1", ("x", "y"), (1, 1))


@pytest.mark.parametrize(
  ("place", "sync", "ring", "loop"),
  [
    (_SQUARE, cm.core_barrier, ("core",), "python"),
    (_SQUARE, cm.device_barrier, ("x", "y"), "pallas"),
    (_SQUARE, lambda: cm.device_barrier("y"), ("y",), "python"),
    (_SQUARE, lambda: cm.barrier(("core", "x")), ("x", "core"), "pallas"),
    (_SQUARE, cm.global_barrier, ("x", "y", "core"), "python"),
    (_SQUARE, cm.global_barrier, ("core", "y", "x"), "pallas"),
    (_SQUARE, lambda: cm.neighbour_barrier("core"), ("core",), "pallas"),
    (_EIGHT, cm.global_barrier, ("y", "x"), "pallas"),
    (_EIGHT, lambda: cm.device_barrier("y"), ("y",), "python"),
    (_EIGHT, lambda: cm.neighbour_barrier("y"), ("y",), "python"),
    (_EIGHT, lambda: cm.neighbour_barrier("y"), ("y",), "pallas"),
    (_COLUMN, lambda: cm.device_barrier("x"), ("x",), "pallas"),
    (_COLUMN, lambda: cm.neighbour_barrier("x"), ("x",), "pallas"),
    (_COLUMN, lambda: cm.neighbour_barrier(_ALL), ("x", "core"), "python"),
    (_SINGLE_CORE, cm.global_barrier, ("x", "y"), "python"),
    (_SINGLE_CORE, lambda: cm.neighbour_barrier("x"), ("x",), "pallas"),
  ],
)
def test_a_barrier_in_every_round_keeps_the_rounds_apart(
  place, sync, ring, loop
):
  chip, device_mesh = support.simulated(*place)
  check_vma = loop == "pallas"  # Both are tried, by place.
  _check_passing(chip, device_mesh, sync, ring, loop=loop, check_vma=check_vma)


@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_a_tree_keeps_the_rounds_apart(fanout, monkeypatch):
  monkeypatch.setattr(barriers, "_MAX_ALL_TO_ALL", 1)
  monkeypatch.setattr(barriers, "_TREE_FANOUT", fanout)
  chip, device_mesh = support.simulated(*_SQUARE)
  ring = ("core", "y", "x")
  _check_passing(chip, device_mesh, cm.global_barrier, ring)


def test_more_workers_than_one_exchange_serves_meet_in_a_tree():
  chip, device_mesh = support.simulated("v5p:2x2x2", ("x", "y"), (2, 4))
  assert barriers._MAX_ALL_TO_ALL < 15
  _check_passing(chip, device_mesh, cm.global_barrier, ("y", "core", "x"))


@pytest.mark.parametrize(
  ("place", "sync", "ring"),
  [
    (_SQUARE, cm.core_barrier, ("core",)),
    (_SQUARE, cm.global_barrier, ("x", "y", "core")),
    (_SQUARE, lambda: cm.neighbour_barrier("core"), ("core",)),
    (_EIGHT, lambda: cm.device_barrier("y"), ("y",)),
    (_COLUMN, lambda: cm.neighbour_barrier(_ALL), ("x", "core")),
  ],
)
def test_jaxs_interpreter_keeps_the_rounds_apart(place, sync, ring):
  chip, device_mesh = support.simulated(*place)
  _check_passing(chip, device_mesh, sync, ring, interpret=_OF_JAX)


@pytest.mark.parametrize("dma", ["late", "early", "random"])
def test_without_the_barrier_the_race_between_rounds_is_found(dma):
  # So the races=True of the tests here means something.
  chip, device_mesh = support.simulated()
  kernel = _passing(chip, _no_barrier, lambda: cm.shifted("core"), rounds=3)
  fn = support.over_devices(kernel, device_mesh)
  with (
    pytest.raises(cm.SimulationError) as caught,
    cm.simulation(races=True, dma=dma),
  ):
    jax.block_until_ready(fn(_numbered(8)))
  kinds = {f.kind for f in caught.value.findings}
  assert kinds == {"race", "scope"}


def test_without_the_barrier_jaxs_interpreter_finds_the_race_too():
  chip, device_mesh = support.simulated()
  kernel = _passing(
    chip,
    _no_barrier,
    lambda: cm.shifted("core"),
    rounds=3,
    interpret=_OF_JAX,
  )
  fn = support.over_devices(kernel, device_mesh)
  with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
    jax.block_until_ready(fn(_numbered(8)))


@pytest.mark.parametrize(
  ("sync", "ring", "collective_id"),
  [
    (cm.global_barrier, ("device", "core"), None),
    (cm.core_barrier, ("core",), 7),
    (lambda: cm.neighbour_barrier("device"), ("device",), None),
    (lambda: cm.neighbour_barrier("device"), ("device",), 7),
  ],
)
def test_kernels_that_follow_one_another_may_share_an_id(
  sync, ring, collective_id
):
  chip, device_mesh = support.simulated()
  _check_passing(
    chip,
    device_mesh,
    sync,
    ring,
    rounds=2,
    times=2,
    collective_id=collective_id,
  )


@pytest.mark.parametrize(
  ("sync", "ring"),
  [
    (cm.global_barrier, ("x", "y", "core")),
    (lambda: cm.neighbour_barrier(("y", "x")), ("y", "x")),
  ],
)
def test_devices_may_be_in_any_order(sync, ring):
  chip, plain = support.simulated()
  devices = [plain.devices.flat[i] for i in (3, 1, 0, 2)]
  device_mesh = chip.device_mesh(
    ("x", "y"), (2, 2), on="simulator", devices=devices
  )
  _check_passing(chip, device_mesh, sync, ring)


@pytest.mark.parametrize("wrap", [True, False])
def test_a_line_of_neighbours_meets_in_pairs(wrap):
  chip, device_mesh = support.simulated()

  def partner():
    place = cm.worker_index("device")
    return {"device": jax.lax.bitwise_xor(place, jnp.int32(1))}

  sync = functools.partial(cm.neighbour_barrier, "device", wrap=wrap)
  kernel = _passing(chip, sync, partner)
  with cm.simulation(races=True):
    y = support.over_devices(kernel, device_mesh)(_numbered(8))
  np.testing.assert_array_equal(y, _filled([2, 3, 0, 1, 6, 7, 4, 5]))


def test_barriers_of_one_worker_do_nothing_and_may_be_mixed():
  chip, device_mesh = support.simulated(*_ALONE)

  @cm.kernel(mesh=chip.tensor_cores(), out=cm.like(0), scratch=dict(pair=_PAIR))
  def body(x_hbm, o_hbm, *, pair):
    cm.core_barrier()
    cm.device_barrier()
    cm.device_barrier("y")
    cm.global_barrier()
    cm.neighbour_barrier("x")
    cm.neighbour_barrier("y", wrap=False, sems=pair)
    cm.copy(x_hbm, o_hbm)

  fn = support.over_devices(body, device_mesh)
  x = _numbered(1)
  assert not set(_SYNC) & set(support.primitives(fn, x))
  np.testing.assert_array_equal(fn(x), x)


def test_an_axis_of_one_worker_changes_no_pattern():
  chip, device_mesh = support.simulated(*_COLUMN)

  @cm.kernel(mesh=chip.tensor_cores("core", 1), out=cm.like(0))
  def body(x_hbm, o_hbm):
    cm.device_barrier()
    cm.device_barrier("x")
    cm.barrier(("core", "y", "x"))
    cm.global_barrier()
    cm.copy(x_hbm, o_hbm)

  x = _numbered(4)
  np.testing.assert_array_equal(support.over_devices(body, device_mesh)(x), x)


def test_a_core_without_work_takes_part_in_the_barrier():
  chip, device_mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores(),
    out=cm.like(0),
    scratch=dict(x_vmem=cm.vmem_slab(0)),
  )
  def body(x_hbm, o_hbm, *, x_vmem):
    @pl.when(cm.worker_index("core") == 0)
    def _():
      for half in range(2):
        rows = pl.ds(half * _ROWS, _ROWS)
        cm.copy(x_hbm.at[rows], x_vmem)
        cm.copy(x_vmem, o_hbm.at[rows])

    for _ in range(2):
      cm.global_barrier()

    @pl.when(cm.worker_index(("device", "core")) == 5)
    def _():  # Writes after core 0 did, by the barrier.
      x_vmem[...] = jnp.full(x_vmem.shape, 99.0)
      cm.copy(x_vmem, o_hbm.at[pl.ds(0, _ROWS)])

  x = _numbered(8)
  with cm.simulation(races=True):
    y = support.over_devices(body, device_mesh)(x)
  expected = x.copy()
  expected[4 * _ROWS : 5 * _ROWS] = 99
  np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
  "interpret", [None, pltpu.InterpretParams()], ids=["ours", "jax"]
)
def test_neighbours_meet_though_not_all_have_opened_the_same_scopes(interpret):
  # JAX's interpreter takes it that all cores do, and gets a semaphore of a
  # later scope wrong if they do not. So the barrier must not open one.
  chip, device_mesh = support.simulated()

  @cm.kernel(mesh=chip.tensor_cores(), out=cm.like(0), interpret=interpret)
  def body(x_hbm, o_hbm):
    @pl.when(cm.worker_index(("device", "core")) == 0)
    def _():
      pl.run_scoped(lambda sem: None, _SEM)

    assert scope.current().neighbour_sem is not None
    for _ in range(2):
      cm.neighbour_barrier(("device", "core"))
    cm.copy(x_hbm, o_hbm)

  x = _numbered(4)
  np.testing.assert_array_equal(support.over_devices(body, device_mesh)(x), x)


def test_x64_gives_the_same_bits():
  chip, device_mesh = support.simulated()
  with jax.enable_x64(True):
    for sync, ring in (
      (cm.global_barrier, ("device", "core")),
      (lambda: cm.neighbour_barrier("device", wrap=True), ("device",)),
    ):
      _check_passing(chip, device_mesh, sync, ring, rounds=2)


# --- every order -----------------------------------------------------------


def _ring_peers(workers):
  return lambda w: {(w - 1) % workers, (w + 1) % workers}


def _line_peers(workers):
  return lambda w: {w - 1, w + 1} & set(range(workers))


def _device_line(workers):
  return {"device": workers}


@pytest.fixture
def tree(monkeypatch):
  """Makes every barrier a tree of this fan-out."""

  def choose(fanout):
    monkeypatch.setattr(barriers, "_MAX_ALL_TO_ALL", 1)
    monkeypatch.setattr(barriers, "_TREE_FANOUT", fanout)

  return choose


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
@pytest.mark.parametrize(("rounds", "kernels"), [(3, 1), (1, 3), (2, 2)])
def test_no_order_breaks_an_exchange_of_all_with_all(workers, rounds, kernels):
  programs = protocols.trace(
    cm.device_barrier,
    devices=_device_line(workers),
    rounds=rounds,
    kernels=kernels,
  )
  assert protocols.explore(programs) > workers * rounds


@pytest.mark.parametrize("fanout", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6])
def test_no_order_breaks_a_tree(workers, fanout, tree):
  tree(fanout)
  programs = protocols.trace(
    cm.device_barrier, devices=_device_line(workers), rounds=2, kernels=2
  )
  assert protocols.explore(programs) > workers


@pytest.mark.parametrize(
  ("devices", "cores", "fanout"),
  [
    ({"device": 9}, 1, 8),
    ({"device": 10}, 2, 8),
    ({"x": 3, "y": 4}, 1, 8),
    ({"x": 2, "y": 5}, 2, 2),
    ({"device": 19}, 1, 3),
    ({"x": 5, "y": 3, "z": 7}, 2, 8),
  ],
)
def test_no_order_tried_breaks_a_tall_tree(devices, cores, fanout, monkeypatch):
  monkeypatch.setattr(barriers, "_TREE_FANOUT", fanout)
  programs = protocols.trace(
    cm.global_barrier, devices=devices, cores=cores, rounds=2, kernels=2
  )
  workers = cores * math.prod(devices.values())
  assert workers == len(programs) > barriers._MAX_ALL_TO_ALL
  runs = max(2, 600 // workers)
  assert protocols.explore(programs, runs=runs) > runs * workers


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("wrap", [True, False])
def test_no_order_breaks_neighbours(workers, wrap):
  peers = _ring_peers(workers) if wrap else _line_peers(workers)
  programs = protocols.trace(
    lambda: cm.neighbour_barrier("device", wrap=wrap),
    devices=_device_line(workers),
    rounds=2 if workers > 5 else 3,
  )
  assert protocols.explore(programs, peers=peers) > workers


@pytest.mark.parametrize("wrap", [True, False])
def test_no_order_breaks_neighbours_over_kernels_and_axes(wrap):
  programs = protocols.trace(
    lambda: cm.neighbour_barrier(("x", "core"), wrap=wrap),
    devices={"x": 2},
    cores=2,
    rounds=2,
    kernels=2,
  )
  peers = _ring_peers(4) if wrap else _line_peers(4)
  assert protocols.explore(programs, peers=peers) > 8


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
@pytest.mark.parametrize("wrap", [True, False])
def test_no_order_breaks_neighbours_with_semaphores_of_their_own(workers, wrap):
  def body(pair, first):
    first()
    cm.neighbour_barrier("device", wrap=wrap, sems=pair)

  def explored(first):
    # A barrier before each round would hide what one before the first shows.
    before = itertools.chain([first], itertools.repeat(_no_barrier))
    programs = protocols.trace(
      lambda pair: body(pair, next(before)),
      devices=_device_line(workers),
      scratch=dict(pair=_PAIR),
      rounds=3 if workers < 5 else 2,
    )
    peers = _ring_peers(workers) if wrap else _line_peers(workers)
    return protocols.explore(programs, peers=peers)

  assert explored(cm.device_barrier) > workers
  # The rule in the docstring of `barrier` is there for a reason.
  with pytest.raises(protocols.ProtocolError, match="reached at"):
    explored(_no_barrier)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_no_order_breaks_two_barriers_with_a_semaphore_each(workers):
  def body(sem):
    cm.device_barrier()
    cm.barrier(("device", "core"), sem=sem)

  def unlike(sem):
    cm.global_barrier()
    cm.core_barrier(sem=sem)

  for one_round in body, unlike:
    programs = protocols.trace(
      one_round,
      devices=_device_line(workers),
      cores=2 if one_round is unlike and workers < 4 else 1,
      scratch=dict(sem=_SEM),
      kernels=2,
    )
    assert protocols.explore(programs) > workers


# --- the checker finds what is wrong ---------------------------------------


def _signal_and_wait(steps: Sequence[int], *, axis="device", count=None):
  sem = pltpu.get_barrier_semaphore()
  for step in steps:
    there = mesh.device_id(cm.shifted(axis, step))
    pl.semaphore_signal(sem, 1, device_id=there)
  count = len(steps) if count is None else count
  if count:
    pl.semaphore_wait(sem, count)


@pytest.mark.parametrize(("rounds", "kernels"), [(2, 1), (1, 2)])
def test_waiting_for_two_neighbours_on_one_semaphore_is_found_wrong(
  rounds, kernels
):
  # jax#27963. With three workers the neighbours are all, which is right.
  for workers, is_right in (3, True), (4, False), (5, False):
    programs = protocols.trace(
      lambda: _signal_and_wait([-1, 1]),
      devices=_device_line(workers),
      rounds=rounds,
      kernels=kernels,
    )
    if is_right:
      protocols.explore(programs)
    else:
      peers = _ring_peers(workers)
      with pytest.raises(protocols.ProtocolError, match="left round 1 before"):
        protocols.explore(programs, peers=peers)


def test_the_random_orders_find_it_too():
  programs = protocols.trace(
    lambda: _signal_and_wait([-1, 1]), devices=_device_line(6), rounds=3
  )
  with pytest.raises(protocols.ProtocolError, match="left round"):
    protocols.explore(programs, peers=_ring_peers(6), runs=100)


@pytest.mark.parametrize(
  ("body", "message"),
  [
    (lambda: _signal_and_wait([1], count=0), "left round 1 before"),
    (lambda: _signal_and_wait([1], count=2), "deadlock"),
    (lambda: _signal_and_wait([], count=1), "deadlock"),
    (lambda: None, "left round 1 before"),
  ],
)
def test_a_barrier_without_its_wait_or_signal_is_found_wrong(body, message):
  programs = protocols.trace(body, devices=_device_line(2))
  with pytest.raises(protocols.ProtocolError, match=message):
    protocols.explore(programs)


def test_a_signal_too_many_is_found_left_over():
  programs = protocols.trace(
    lambda: _signal_and_wait([1, 1], count=1), devices=_device_line(2), rounds=1
  )
  with pytest.raises(protocols.ProtocolError, match="not left at zero"):
    protocols.explore(programs)


@pytest.mark.parametrize(
  ("body", "sizes"),
  [
    (
      lambda: [_signal_and_wait([1], axis=a) for a in ("x", "y")],
      {"x": 2, "y": 2},
    ),
    (
      lambda: [cm.neighbour_barrier("x"), _signal_and_wait([1], axis="y")],
      {"x": 4, "y": 2},
    ),
  ],
)
def test_two_patterns_on_one_semaphore_are_found_wrong(body, sizes):
  # What scope.claim_barrier_semaphore refuses when both are coremesh's.
  programs = protocols.trace(body, devices=sizes, rounds=1)
  wrong = "left round 1 before|was reached at"
  with pytest.raises(protocols.ProtocolError, match=wrong):
    protocols.explore(programs, runs=200)


def test_a_deleted_wait_is_found_in_every_barrier(monkeypatch, tree):
  everybody = lambda: cm.device_barrier()
  in_turn = lambda: cm.neighbour_barrier("device")
  monkeypatch.setattr(barriers.pl, "semaphore_wait", lambda *_: None)
  for body in everybody, in_turn:
    programs = protocols.trace(body, devices=_device_line(4))
    with pytest.raises(protocols.ProtocolError):
      protocols.explore(programs, peers=_ring_peers(4))
  tree(2)
  programs = protocols.trace(everybody, devices=_device_line(4))
  with pytest.raises(protocols.ProtocolError):
    protocols.explore(programs)


# --- the programs ----------------------------------------------------------


def _traced_sync(sync, place, cores=None, **scratch):
  """The synchronisation in a kernel's program, in order."""
  chip, device_mesh = support.simulated(*place)

  @cm.kernel(
    mesh=cores or chip.tensor_cores(),
    out=cm.like(0),
    scratch=scratch,
    interpret=None if cores is None else False,
  )
  def body(x_hbm, o_hbm, **scratch):
    sync(**scratch)

  x = jax.ShapeDtypeStruct((device_mesh.size * _ROWS, 128), jnp.float32)
  fn = support.over_devices(body, device_mesh)
  wanted = (*_SYNC, "barrier")
  return [op for op in support.primitives(fn, x) if op in wanted]


@pytest.mark.parametrize(
  ("sync", "signals"),
  [
    (cm.core_barrier, 1),
    (cm.device_barrier, 3),
    (lambda: cm.device_barrier("x"), 1),
    (cm.global_barrier, 7),
    (lambda: cm.neighbour_barrier("core"), 1),
  ],
)
def test_an_exchange_signals_all_others_and_waits_for_them(sync, signals):
  expected = [_SYNC[0], *[_SYNC[1]] * signals, _SYNC[2]]
  assert _traced_sync(sync, _SQUARE) == expected


@pytest.mark.parametrize("wrap", [True, False])
def test_neighbours_signal_and_wait_once_for_each_side(wrap):
  axis = ("x", "y")
  meet = lambda: cm.neighbour_barrier(axis, wrap=wrap)
  assert _traced_sync(meet, _SQUARE) == [_SYNC[0], *_SYNC[1:] * 2]
  meet = lambda pair: [
    _no_barrier(),
    cm.neighbour_barrier(axis, wrap=wrap, sems=pair),
  ]
  expected = [_SYNC[0], *[_SYNC[1]] * 2, *[_SYNC[2]] * 2]
  assert _traced_sync(meet, _SQUARE, pair=_PAIR) == expected


def test_a_tree_waits_for_children_and_parent_and_releases_children(tree):
  tree(3)
  barrier, signal, wait = _SYNC
  expected = [barrier, wait, signal, wait, signal, signal, signal]
  assert _traced_sync(cm.global_barrier, _SQUARE) == expected


def test_a_semaphore_of_ones_own_takes_the_place_of_the_barrier_semaphore():
  meet = lambda sem: [_no_barrier(), cm.core_barrier(sem=sem)]
  assert _traced_sync(meet, _SQUARE, sem=_SEM) == list(_SYNC)


def test_subcores_meet_in_hardware():
  cores = cm.chip("v5p:2x2x1").vector_subcores()
  assert _traced_sync(cm.subcore_barrier, _SQUARE, cores) == ["barrier"]


# --- compiled --------------------------------------------------------------


def _compiles(
  chip, cores, sync, axes="device", shape=None, check_vma=True, **kwargs
):
  @cm.kernel(mesh=cores, out=cm.like(0), **kwargs)
  def body(x_hbm, o_hbm, **scratch):
    for _ in range(2):
      sync(**scratch)

  device_mesh = chip.device_mesh(axes, shape, on="compiler")
  spec = P(device_mesh.axis_names)
  x = jax.ShapeDtypeStruct((chip.num_devices * _ROWS, 128), jnp.float32)
  fn = jax.shard_map(
    body, mesh=device_mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
  )
  assert cm.compile(fn, x).code_bytes > 0


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@pytest.mark.parametrize(
  "sync",
  [
    cm.core_barrier,
    cm.device_barrier,
    cm.global_barrier,
    lambda: cm.neighbour_barrier(("device", "core")),
    lambda: cm.neighbour_barrier("device", wrap=False),
  ],
)
def test_barriers_of_tensor_cores_compile(chip, sync):
  chip = cm.chip(chip)
  for check_vma in True, False:
    _compiles(chip, chip.tensor_cores(), sync, check_vma=check_vma)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
@pytest.mark.parametrize(
  "sync",
  [
    cm.core_barrier,
    lambda: cm.core_barrier("subcore"),
    lambda: [cm.subcore_barrier(), cm.barrier(("core", "subcore"))],
    cm.global_barrier,
    lambda: cm.neighbour_barrier(("core", "subcore")),
  ],
)
def test_barriers_of_vector_subcores_compile(chip, sync):
  chip = cm.chip(chip)
  _compiles(chip, chip.vector_subcores(), sync)


@pytest.mark.parametrize("chip", support.COMPILED_CHIPS)
def test_barriers_of_scalar_subcores_compile(chip):
  chip = cm.chip(chip)
  for sync in cm.core_barrier, cm.global_barrier:
    _compiles(chip, chip.scalar_subcores(), sync)


@pytest.mark.parametrize("sync", [cm.global_barrier, cm.device_barrier])
def test_barriers_of_512_chips_compile(sync):
  chip = cm.chip("v5p:8x8x8")
  axes, shape = ("x", "y", "z"), (8, 8, 8)
  _compiles(chip, chip.tensor_cores(), sync, axes, shape)


def test_barriers_with_semaphores_of_their_own_compile():
  def sync(sem, pair):
    cm.global_barrier()
    cm.core_barrier(sem=sem)
    cm.neighbour_barrier("device", sems=pair)

  chip = cm.chip("v5p:2x2x1")
  scratch = dict(sem=_SEM, pair=_PAIR)
  _compiles(chip, chip.tensor_cores(), sync, scratch=scratch)


# --- refused ---------------------------------------------------------------


@pytest.mark.parametrize(
  ("sync", "error", "message"),
  [
    (
      lambda: [cm.global_barrier(), cm.core_barrier()],
      cm.CollectiveError,
      r"barrier over \('x', 'y', 'core'\) and for barrier over \('core'\).*"
      "Open the kernel with the wider one",
    ),
    (
      lambda: [cm.device_barrier("x"), cm.device_barrier("y")],
      cm.CollectiveError,
      r"barrier over \('x'\) and for barrier over \('y'\)",
    ),
    (
      lambda: [cm.device_barrier(), cm.neighbour_barrier(("x", "y"))],
      cm.CollectiveError,
      r"for neighbours over \('x', 'y', ring\)",
    ),
    (
      lambda: [
        cm.core_barrier(),
        cm.device_barrier(sem=pltpu.get_barrier_semaphore()),
      ],
      cm.CollectiveError,
      "uses its one barrier semaphore for",
    ),
    (lambda: cm.core_barrier("x"), cm.AxisError, r"\['x'\] are not. The core"),
    (lambda: cm.device_barrier("core"), cm.AxisError, "must be device axes"),
    (lambda: cm.device_barrier(("x", "z")), cm.AxisError, r"\['z'\] are not"),
    (lambda: cm.barrier("subcore"), cm.AxisError, "must name axes in scope"),
    (lambda: cm.barrier(()), cm.AxisError, "one or more different names"),
    (lambda: cm.neighbour_barrier("ring"), cm.AxisError, "axis must name"),
    (cm.subcore_barrier, cm.UnsupportedError, "is for vector subcores"),
  ],
)
def test_a_barrier_that_cannot_be_right_is_refused(sync, error, message):
  with pytest.raises(error, match=message):
    _traced_sync(sync, _SQUARE)


def test_one_given_semaphore_serves_one_pattern():
  def same(sem):
    cm.global_barrier()
    for _ in range(2):
      cm.core_barrier(sem=sem)

  def two(sem):
    same(sem)
    cm.device_barrier(sem=sem)

  _traced_sync(same, _SQUARE, sem=_SEM)
  with pytest.raises(cm.CollectiveError, match="uses one semaphore for"):
    _traced_sync(two, _SQUARE, sem=_SEM)


@pytest.mark.parametrize(
  ("scratch", "sync", "message"),
  [
    (_PAIR, lambda s: cm.core_barrier(sem=s), r"shape \(\); got semaphore"),
    (_SEM, lambda s: cm.neighbour_barrier("x", sems=s), r"of shape \(2,\)"),
    (
      pltpu.SemaphoreType.DMA,
      lambda s: cm.global_barrier(sem=s),
      "sem must be a pltpu.SemaphoreType.REGULAR scratch.*got dma_sem",
    ),
    (
      pltpu.VMEM((8, 128), jnp.float32),
      lambda s: cm.device_barrier(sem=s),
      "got float32",
    ),
    (_SEM, lambda s: cm.core_barrier(sem=7), "got int of shape None"),
  ],
)
def test_what_is_no_such_semaphore_is_refused(scratch, sync, message):
  with pytest.raises(cm.CollectiveError, match=message):
    _traced_sync(lambda given: sync(given), _SQUARE, given=scratch)


def test_a_device_barrier_outside_shard_map_says_so():
  kernel = cm.kernel(
    lambda x, o: cm.device_barrier(),
    mesh=cm.chip("v5p:2x2x1").tensor_cores(),
    out=cm.like(0),
  )
  with pytest.raises(cm.AxisError, match="needs device axes: call the kernel"):
    jax.eval_shape(kernel, jnp.zeros((_ROWS, 128)))


@pytest.mark.parametrize(
  "interpret",
  [cm.SimulatorParams(), pltpu.InterpretParams(num_cores_or_threads=2)],
  ids=["ours", "jax"],
)
def test_a_plain_pallas_kernel_may_call_barriers(interpret):
  chip, device_mesh = support.simulated()

  def body(x_hbm, o_hbm):
    for _ in range(2):
      cm.neighbour_barrier(("device", "core"))
    pltpu.sync_copy(x_hbm, o_hbm)

  kernel = pl.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((_ROWS, 128), jnp.float32),
    mesh=chip.tensor_cores(),
    compiler_params=pltpu.CompilerParams(collective_id=3),
    interpret=interpret,
  )
  fn, x = (
    support.over_devices(kernel, device_mesh, check_vma=False),
    _numbered(4),
  )
  np.testing.assert_array_equal(fn(x), x)
