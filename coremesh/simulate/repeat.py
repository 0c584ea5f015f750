"""One function simulated many times, compiled once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
import numpy as np

from coremesh import _compat, chips, errors, topology
from coremesh.simulate.findings import Finding, SimulationError
from coremesh.simulate.params import SimulatorParams, reset
from coremesh.simulate.session import Simulation
from coremesh.simulate.transfer import DMA_MODES, DmaMode


@contextlib.contextmanager
def simulating(
  params: SimulatorParams, *, chip: chips.Chip | None = None
) -> Iterator[Simulation]:
  """Runs the kernels called inside by these parameters, with a session.

  Args:
    params: how, with a session.
    chip: what Pallas takes the devices for outside a device mesh; default
      `cm.chip()`.

  Raises:
    ChipError: `chip` is none.
    SimulationError, DeadlockError: at the latest on exit.
  """
  session = params.session
  assert session is not None
  try:
    with _knowing(chip), pltpu.force_tpu_interpret_mode(params):
      yield session
      jax.effects_barrier()  # What went wrong inside is raised by its end.
  except BaseException as error:
    reset()
    fault = _fault_of(session, error)
    if fault is None:
      raise
    raise fault from error


def _knowing(chip: chips.Chip | None) -> Any:
  """A context in which Pallas sees a chip where no device mesh is in scope.

  An attached TPU is seen without, and what a mesh in scope says holds.
  """
  if chip is not None and not isinstance(chip, chips.Chip):
    raise errors.ChipError(
      f"chip must be what cm.chip() returns; got {chip!r}. Use"
      ' chip=cm.chip("v6e").'
    )
  mesh = jax.sharding.get_abstract_mesh()
  is_seen = not mesh.empty or mesh.abstract_device is not None
  if is_seen or (chip is None and topology.tpu_is_attached()):
    return contextlib.nullcontext()
  device = (chip or chips.chip()).abstract_device(platform="cpu")
  return _compat.empty_device_context(device)


def _fault_of(session: Simulation, error: BaseException) -> Exception | None:
  """What a kernel of the session did wrong, if that is what was raised.

  JAX wraps what a kernel raises in an error of its own, as text.
  """
  errors_of_jax = (jax.errors.JaxRuntimeError, ExceptionGroup)
  is_from_kernel = isinstance(error, errors_of_jax)
  return session.error() if is_from_kernel else None


class Repetition(Simulation):
  """A session that is used for one run after another.

  Attributes:
    seed, dma: what the run that goes on has in place of the parameters'.
  """

  def __init__(self):
    super().__init__()
    self.seed: int = 0
    self.dma: DmaMode = "late"

  def begin(self, seed: int, dma: DmaMode) -> None:
    """Forgets the last run."""
    self.runs.clear()
    self.seed, self.dma = seed, dma


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatedParams(SimulatorParams):
  """Parameters whose seed is read when a kernel runs.

  JAX compiles a function once for each value of its parameters, so what
  changes from run to run is not in them.
  """

  def now(self) -> SimulatorParams:
    session = self.session
    assert isinstance(session, Repetition)
    return dataclasses.replace(self, seed=session.seed, dma=session.dma)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
  """What came of one run.

  Attributes:
    how: seed and DMA mode, as `cm.simulation` takes them.
    outputs: by the path of each in what the function returned; None if it
      returned nothing because a kernel ended before its time.
    findings: what its kernels did wrong.
    kernels: the names of those that ran.
    turns: how often a worker was given its turn, in all of them.
  """

  how: str
  outputs: Mapping[str, np.ndarray] | None
  findings: tuple[Finding, ...]
  kernels: tuple[str, ...]
  turns: int

  @property
  def faults(self) -> tuple[Finding, ...]:
    """The findings that are more than warnings."""
    return tuple(f for f in self.findings if not f.is_warning)


class Runner:
  """Runs `fn(*args)` under one seed after another.

  Args:
    fn: contains kernels; jitted or not.
    args: its arguments.
    params: the parameters of all runs, with a `Repetition`.
  """

  def __init__(
    self, fn: Callable[..., Any], args: Sequence[Any], params: RepeatedParams
  ):
    self._fn, self._args, self._params = fn, args, params
    assert isinstance(params.session, Repetition)
    self._session = params.session

  def run(self, seed: int, dma: DmaMode) -> Outcome:
    """Runs it once.

    Raises:
      UnsupportedError: no kernel ran in coremesh's simulator.
    """
    session, how = self._session, f"seed={seed}, dma={dma!r}"
    session.begin(seed, dma)
    outputs = None
    try:
      with simulating(self._params):
        outputs = _on_host(self._fn(*self._args))
    except SimulationError as error:
      if not session.findings:
        raise
      del error
    except Exception as error:
      error.add_note(f"Raised under {how}.")
      raise
    if not session.runs:
      raise errors.UnsupportedError(
        f"{name_of(self._fn)} ran no kernel in coremesh's simulator: either it"
        " has none, or they say interpret= themselves, or they run on a TPU."
        " Leave interpret= out, and call it on CPU devices, such as"
        " chip.device_mesh(on='simulator')."
      )
    return Outcome(
      how=how,
      outputs=outputs,
      findings=session.findings,
      kernels=tuple(dict.fromkeys(run.kernel for run in session.runs)),
      turns=sum(run.turns for run in session.runs),
    )


def name_of(fn: Callable[..., Any]) -> str:
  """What to call a function in a message."""
  return getattr(fn, "__name__", None) or repr(fn)


def _on_host(outputs: Any) -> Mapping[str, np.ndarray]:
  leaves, _ = jax.tree.flatten_with_path(outputs)
  return {
    "output" + jax.tree_util.keystr(path): _array(leaf) for path, leaf in leaves
  }


def _array(leaf: Any) -> np.ndarray:
  if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
    leaf.dtype, jax.dtypes.prng_key
  ):
    leaf = jax.random.key_data(leaf)
  return np.array(leaf)


def unstable(outcome: Outcome, reference: Outcome | None) -> Iterator[Finding]:
  """A finding if a run's outputs are not those of an earlier run."""
  if reference is None or outcome.outputs is None:
    return
  assert reference.outputs is not None
  differs = difference(reference.outputs, outcome.outputs)
  if differs is not None:
    yield Finding(
      kind="unstable",
      kernel=", ".join(outcome.kernels),
      text=(
        f"{differs} as it was under {reference.how}. The result depends on the"
        " order in which cores and DMAs run. Look for elements that several"
        " write, for sums whose terms come in any order, and for outputs never"
        " written."
      ),
    )


def difference(
  first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> str | None:
  """How the second outputs differ from the first, None if they do not.

  Bit for bit: a NaN equals itself, and 0.0 is not -0.0.
  """
  if list(first) != list(second):
    return f"it returns {list(second)}, not {list(first)}"
  for name, a in first.items():
    b = second[name]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      return f"{name} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
    if a.tobytes() != b.tobytes():
      return _differing_elements(name, a, b)
  return None


def _differing_elements(name: str, a: np.ndarray, b: np.ndarray) -> str:
  bits = [
    np.frombuffer(x.tobytes(), np.uint8).reshape(a.size, -1) for x in (a, b)
  ]
  differs = (bits[0] != bits[1]).any(axis=1)
  place = np.unravel_index(int(differs.argmax()), a.shape)
  where = f"{list(map(int, place))}: " if place else ""
  return (
    f"{name} differs in {int(differs.sum())} of {a.size} elements, the first"
    f" {'at ' if place else ''}{where}{b[place]}, not {a[place]}"
  )


def checked_dma(dma: DmaMode | Iterable[DmaMode]) -> tuple[DmaMode, ...]:
  """One DMA mode or several, checked.

  Raises:
    UnsupportedError: there is none, or one that is not known.
  """
  modes: tuple[Any, ...] = (dma,) if isinstance(dma, str) else tuple(dma)
  if not modes or any(mode not in DMA_MODES for mode in modes):
    raise errors.UnsupportedError(
      f"dma must be one or several of {', '.join(map(repr, DMA_MODES))}; got"
      f" {dma!r}."
    )
  return modes


def checked_seeds(seeds: Any) -> Sequence[int]:
  """How many seeds, or which, checked.

  Raises:
    UnsupportedError: there is none, or one is no integer.
  """
  if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
    return range(seeds)
  if isinstance(seeds, Sequence) and not isinstance(seeds, str) and seeds:
    if all(isinstance(s, int) and not isinstance(s, bool) for s in seeds):
      return seeds
  raise errors.UnsupportedError(
    "seeds must be how many seeds to try, at least 1, or a sequence of ints;"
    f" got {seeds!r}."
  )


def check_function(fn: Any) -> None:
  """Checks that there is something to call.

  Raises:
    UnsupportedError: it is no function.
  """
  if not callable(fn):
    raise errors.UnsupportedError(
      "fn must be a function that contains kernels, with its arguments after"
      f" it; got {type(fn).__name__}. Do not call it yourself."
    )
