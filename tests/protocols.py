"""A model checker: the semaphore programs of kernels, run in every order.

`trace` takes the real code: it traces a body inside `cm.kernel`, then computes
the program of each worker, with the worker's own indices in place of
`axis_index`, down to a list of steps. `explore` runs these lists in all orders
(or many random ones) with counting semaphores and fails if

* a worker leaves a round before one it must wait for has entered it,
* a signal or a copy reaches scratch that its owner has not allocated,
* a copy lands outside the round of the worker that it lands on,
* the workers block each other, or a semaphore is not left at zero.

Signals arrive at once. Late ones give no new order: what is counted early is
seen when the receiver looks, and the receiver may look late.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
import operator
import random
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
import numpy as np

import coremesh as cm

type Step = tuple[Any, ...]
type Peers = Callable[[int], Iterable[int]]


# Where a round begins and ends: local signals of counts that nobody else sends.
_ENTER, _LEAVE = 1001, 1002
_MARKS = {_ENTER: "enter", _LEAVE: "leave"}


class ProtocolError(Exception):
  """An order of events in which the program is wrong."""


# --- from a body to the steps of each worker ---------------------------------


def trace(
  body: Callable[..., None],
  *,
  devices: Mapping[str, int],
  cores: int = 1,
  rounds: int = 2,
  kernels: int = 1,
  scratch: Mapping[str, Any] | None = None,
) -> list[list[Step]]:
  """The steps of every worker, of devices in order and their cores.

  Args:
    body: one round, called with the scratch by name; not with `x` and `o`.
    devices: the device axes and their sizes.
    cores: TensorCores of each device, axis "core".
    rounds: calls of `body` in a kernel.
    kernels: kernels that follow one another in one program.
    scratch: as of `cm.kernel`.
  """

  def marked(x, o, *, mark, **scratch):
    for _ in range(rounds):
      pl.semaphore_signal(mark, _ENTER)
      body(**scratch)
      pl.semaphore_signal(mark, _LEAVE)

  chip = cm.chip("v5p:2x2x1")
  kernel = cm.kernel(
    marked,
    mesh=chip.tensor_cores("core", cores),
    out=cm.like(0),
    scratch=dict(mark=pltpu.SemaphoreType.REGULAR, **(scratch or {})),
  )
  mesh = jax.sharding.AbstractMesh(
    tuple(devices.values()),
    tuple(devices),
    axis_types=(jax.sharding.AxisType.Auto,) * len(devices),
    abstract_device=chip.abstract_device(platform="tpu"),
  )

  def several(x):
    for _ in range(kernels):
      x = kernel(x)
    return x

  x = jax.ShapeDtypeStruct((8 * math.prod(devices.values()), 128), np.float32)
  spec = P(tuple(devices))
  fn = jax.shard_map(several, mesh=mesh, in_specs=spec, out_specs=spec)
  found = list(_kernels(jax.make_jaxpr(fn)(x).jaxpr))
  assert len(found) == kernels
  sizes = {**devices, "core": cores}
  places = [
    dict(zip(sizes, place, strict=True))
    for place in itertools.product(*map(range, sizes.values()))
  ]
  steps = []
  for place in places:
    worker = _Worker(place=place, places=places)
    for number, params in enumerate(found):
      worker.launch(number, params)
    steps.append(worker.steps)
  return steps


def _kernels(jaxpr):
  for eqn in jaxpr.eqns:
    if "jaxprs" in eqn.params:
      yield eqn.params
    else:
      for value in eqn.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
          yield from _kernels(inner)


def _divide(a, b):
  return math.trunc(a / b)


_SCALAR = {
  "add": operator.add,
  "sub": operator.sub,
  "mul": operator.mul,
  "div": _divide,
  "rem": lambda a, b: a - b * _divide(a, b),
  "max": max,
  "min": min,
  "clamp": lambda low, x, high: min(max(x, low), high),
  "eq": operator.eq,
  "ne": operator.ne,
  "lt": operator.lt,
  "le": operator.le,
  "gt": operator.gt,
  "ge": operator.ge,
  "and": operator.and_,
  "or": operator.or_,
  "xor": operator.xor,
  "not": lambda a: not a,
  "select_n": lambda which, *cases: cases[int(which)],
  "convert_element_type": lambda a: a,
}


class _Worker:
  """Evaluates a kernel's program at one place, and notes its steps."""

  def __init__(self, *, place, places):
    self.place, self.places = place, places
    self.steps: list[Step] = []
    self.depth = 0

  def launch(self, number, params) -> None:
    (jaxpr,) = params["jaxprs"]
    self.barrier = ("barrier", params["compiler_params"].collective_id)
    refs = [("scratch", number, i) for i in range(len(jaxpr.invars))]
    self.steps.append(("open", tuple(refs)))
    self.run(jaxpr, (), refs)
    self.steps.append(("close", tuple(refs)))

  def run(self, jaxpr, consts, args) -> list[Any]:
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
      if not hasattr(atom, "val"):
        return env[atom]
      return bool(atom.val) if atom.aval.dtype == bool else int(atom.val)

    for eqn in jaxpr.eqns:
      results = self.equation(eqn, [read(v) for v in eqn.invars])
      env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]

  def equation(self, eqn, args) -> Sequence[Any]:
    params = eqn.params
    match eqn.primitive.name:
      case "axis_index":
        return [self.place[params["axis_name"]]]
      case "get_barrier_semaphore":
        return [self.barrier]
      case "cond":
        branch = params["branches"][int(args[0])]
        return self.run(branch.jaxpr, branch.consts, args[1:])
      case "jit" | "pjit" | "closed_call":
        inner = params.get("jaxpr") or params["call_jaxpr"]
        return self.run(inner.jaxpr, inner.consts, args)
      case "run_scoped":
        return self.scoped(params["jaxpr"], args)
      case "semaphore_signal":
        return self.signal(*params["args_tree"].unflatten(args))
      case "semaphore_wait":
        ref, transforms, count, _ = params["args_tree"].unflatten(args)
        if count:
          self.steps.append(("wait", _key(ref, transforms), count))
        return []
      case "dma_start":
        return self.start(*params["tree"].unflatten(args))
      case "dma_wait":
        _, _, sem, _, _ = params["tree"].unflatten(args)
        self.steps.append(("wait", _part(sem), 1))
        return []
      case name:
        return [_SCALAR[name](*args)]

  def scoped(self, jaxpr, consts) -> list[Any]:
    # One memory for all scopes of one depth, as a compiler lays them out.
    self.depth += 1
    refs = [("scoped", self.depth, i) for i in range(len(jaxpr.invars))]
    self.steps.append(("open", tuple(refs)))
    results = self.run(jaxpr, consts, refs)
    self.steps.append(("close", tuple(refs)))
    self.depth -= 1
    return results

  def signal(self, ref, transforms, count, device_id, _) -> list[Any]:
    if count in _MARKS:
      self.steps.append((_MARKS[count],))
    else:
      key = _key(ref, transforms)
      self.steps.append(("signal", self.worker(device_id), key, count))
    return []

  def start(self, src, dst, recv_sem, send_sem, device_id) -> list[Any]:
    send = None if send_sem is None else _part(send_sem)
    where = self.worker(device_id)
    self.steps.append(("copy", where, send, _part(recv_sem)))
    return []

  def worker(self, device_id) -> int:
    return self.places.index({**self.place, **(device_id or {})})


def _part(ref) -> Step:
  """A semaphore, or a part of an array of them."""
  if hasattr(ref, "transforms"):
    return _key(ref.ref, ref.transforms)
  return ref


def _key(ref, transforms) -> Step:
  indices = [i for t in transforms for i in t.indices]
  return (*ref, *map(int, indices))


# --- every order of the steps ------------------------------------------------


@dataclasses.dataclass
class _State:
  """Where each worker is, and what each counts."""

  position: list[int]
  entered: list[int]
  inside: list[bool]
  counts: Counter
  allocated: set
  moving: list[Step]

  def copy(self) -> "_State":
    return _State(
      position=self.position.copy(),
      entered=self.entered.copy(),
      inside=self.inside.copy(),
      counts=self.counts.copy(),
      allocated=self.allocated.copy(),
      moving=self.moving.copy(),
    )

  def key(self):
    return (*self.position, *sorted(map(repr, self.moving)))


def explore(
  programs: Sequence[Sequence[Step]],
  *,
  peers: Peers | None = None,
  runs: int | None = None,
  seed: int = 0,
) -> int:
  """Runs the programs in all orders, or in `runs` random ones.

  Args:
    programs: the steps of each worker, from `trace`.
    peers: whom a worker may not leave a round before; default everybody.
    runs: how many random orders; None for all.
    seed: of the random orders.

  Returns:
    How many different states were seen.

  Raises:
    ProtocolError: an order in which something is wrong.
  """
  model = _Model(programs, peers or (lambda _: range(len(programs))))
  if runs is not None:
    source = random.Random(seed)
    return sum(model.run_one(source) for _ in range(runs))
  seen, todo = set(), [model.start()]
  while todo:
    state = todo.pop()
    for choice in model.choices(state):
      after = model.taken(state.copy(), choice)
      if (key := after.key()) not in seen:
        seen.add(key)
        todo.append(after)
  return len(seen)


class _Model:
  """The machine: what may happen next, and what then is the case.

  A worker moves from one wait or entry to just before the next. Between them
  it does nothing that another worker could hold up.
  """

  def __init__(self, programs, peers):
    self.programs = [list(steps) for steps in programs]
    self.peers = [frozenset(peers(w)) for w in range(len(programs))]

  def start(self) -> _State:
    workers = len(self.programs)
    return _State(
      position=[0] * workers,
      entered=[0] * workers,
      inside=[False] * workers,
      counts=Counter(),
      allocated=set(),
      moving=[],
    )

  def run_one(self, source) -> int:
    state, taken = self.start(), 0
    while choices := self.choices(state):
      state = self.taken(state, source.choice(choices))
      taken += 1
    return taken

  def choices(self, state) -> list[Any]:
    ready = [w for w in range(len(self.programs)) if self.may_move(state, w)]
    choices = [*ready, *sorted(set(state.moving), key=repr)]
    if not choices:
      self.check_end(state)
    return choices

  def may_move(self, state, w) -> bool:
    if state.position[w] == len(self.programs[w]):
      return False
    kind, *rest = self.programs[w][state.position[w]]
    return kind != "wait" or state.counts[w, rest[0]] >= rest[1]

  def taken(self, state, choice) -> _State:
    if isinstance(choice, tuple):
      self.advance_copy(state, choice)
      return state
    steps, w = self.programs[choice], choice
    while True:
      self.step(state, w, *steps[state.position[w]])
      state.position[w] += 1
      if state.position[w] == len(steps):
        return state
      if steps[state.position[w]][0] in ("wait", "enter", "open"):
        return state

  def step(self, state, w, kind, *rest) -> None:
    match kind:
      case "open":
        state.allocated.update((w, ref) for ref in rest[0])
      case "close":
        for ref in rest[0]:
          state.allocated.discard((w, ref))
          self.check_zero(state, [(w, ref)])
      case "enter":
        state.entered[w] += 1
        state.inside[w] = True
      case "leave":
        state.inside[w] = False
        late = [p for p in self.peers[w] if state.entered[p] < state.entered[w]]
        if late:
          raise ProtocolError(
            f"worker {w} left round {state.entered[w]} before {late} entered"
          )
      case "signal":
        self.count(state, *rest)
      case "wait":
        state.counts[w, rest[0]] -= rest[1]
      case "copy":
        where, send, recv = rest
        state.moving.append(("read", w, where, send, recv, state.entered[w]))
      case _:
        raise ValueError(kind)

  def advance_copy(self, state, copy) -> None:
    """A copy has read its source, or has written where it goes."""
    stage, w, where, send, recv, entered = copy
    state.moving.remove(copy)
    if stage == "read":
      if send is not None:
        self.count(state, w, send, 1)
      state.moving.append(("written", *copy[1:]))
      return
    if not state.inside[where] or state.entered[where] != entered:
      raise ProtocolError(
        f"worker {w} wrote to {where} in round {entered}, which was in round"
        f" {state.entered[where]}, inside: {state.inside[where]}"
      )
    self.count(state, where, recv, 1)

  def count(self, state, w, key, count) -> None:
    if key[0] != "barrier" and (w, key[:3]) not in state.allocated:
      raise ProtocolError(f"worker {w} was reached at {key} too early or late")
    state.counts[w, key] += count

  def check_zero(self, state, refs) -> None:
    left = {
      (w, key): n
      for (w, key), n in state.counts.items()
      if n and any(w == v and key[:3] == ref for v, ref in refs)
    }
    if left:
      raise ProtocolError(f"semaphores not left at zero: {left}")

  def check_end(self, state) -> None:
    stuck = [
      (w, steps[at])
      for w, (steps, at) in enumerate(
        zip(self.programs, state.position, strict=True)
      )
      if at < len(steps)
    ]
    if stuck:
      raise ProtocolError(f"deadlock: {stuck}")
    left = {key: n for key, n in state.counts.items() if n}
    if left:
      raise ProtocolError(f"semaphores not left at zero: {left}")
