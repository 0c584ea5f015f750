"""A test whose kernels are simulated: what the pytest plugin enters."""

from collections.abc import Callable, Iterator
import contextlib

import jax

from coremesh.simulate import repeat
from coremesh.simulate.findings import error_of
from coremesh.simulate.params import SimulatorParams, reset
from coremesh.simulate.session import Simulation
from coremesh.simulate.transfer import DMA_MODES, DmaMode


@contextlib.contextmanager
def simulated_test(
  *, seed: int, races: bool, has_failed: Callable[[], bool]
) -> Iterator[Simulation]:
  """Simulates the kernels of a test, and fails if one of them did wrong.

  Args:
    seed: decides every interleaving, and takes the DMA modes in turn, as
      `cm.explore` does.
    races: look for data races.
    has_failed: whether the test has failed by itself, asked when it is over.

  Raises:
    SimulationError, DeadlockError: a kernel did wrong, and the test passed.
  """
  session = Simulation()
  params = SimulatorParams(
    seed=seed, dma=dma_of(seed), detect_races=races, session=session
  )
  with repeat.simulating(params):
    yield session
    if has_failed():
      reset()  # What its kernels raised has been told.
      return
  check(session)


def check(session: Simulation) -> None:
  """Waits for the kernels of a session.

  Raises:
    SimulationError, DeadlockError: one of them did wrong, even if what it
      raised was caught.
  """
  try:
    jax.effects_barrier()
  except Exception as error:
    raise session.error() or error from error
  faults = [f for f in session.findings if not f.is_warning]
  if faults:
    raise error_of(faults)


def dma_of(seed: int) -> DmaMode:
  """When the DMAs of a test's seed move their bytes."""
  return DMA_MODES[seed % len(DMA_MODES)]


def report(session: Simulation, *, seed: int, races: bool) -> str:
  """What a simulation did and found, for the report of a test that failed."""
  how = f"seed={seed}, dma={dma_of(seed)!r}, races={races}"
  return f"with cm.simulation({how}): ...\n{session.report}"
