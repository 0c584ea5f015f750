"""A plugin of pytest: the fixture `simulation`, under as many seeds as asked.

It is loaded with every run of pytest where coremesh is installed, so it imports
nothing heavy until a test asks for the fixture.
"""

from collections.abc import Iterator
import importlib
from typing import Any

import pytest

_SEED = "_coremesh_seed"
_CHECK = pytest.StashKey[Any]()
_HAS_FAILED = pytest.StashKey[bool]()
_REPORT = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
  """Declares the options."""
  group = parser.getgroup("coremesh", "simulated TPU kernels")
  group.addoption(
    "--coremesh-seeds",
    type=int,
    default=None,
    metavar="N",
    help="run each test that uses the fixture `simulation` under N seeds",
  )
  group.addoption(
    "--coremesh-races",
    action="store_true",
    default=True,
    help="look for data races in simulated kernels; the default",
  )
  group.addoption(
    "--no-coremesh-races",
    action="store_false",
    dest="coremesh_races",
    help="do not look for data races, which is faster",
  )


def pytest_configure(config: pytest.Config) -> None:
  """Checks the options."""
  seeds = config.getoption("coremesh_seeds")
  if seeds is not None and seeds < 1:
    raise pytest.UsageError(f"--coremesh-seeds must be at least 1; got {seeds}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
  """One test for each seed, of those that use the fixture."""
  seeds = metafunc.config.getoption("coremesh_seeds")
  # Another fixture called `simulation`, of the project, does not ask for it.
  if seeds is not None and _SEED in metafunc.fixturenames:
    ids = [f"seed{seed}" for seed in range(seeds)]
    metafunc.parametrize(_SEED, range(seeds), ids=ids)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
  """Fails the test, and not its end, for what its kernels did."""
  try:
    result = yield
    if check := item.stash.get(_CHECK, None):
      check()
  except pytest.skip.Exception:
    raise  # What went wrong before is told when the test is left.
  except BaseException:
    item.stash[_HAS_FAILED] = True
    raise
  return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
  """Adds what the simulator found to the report of a test that failed."""
  report: Any = yield
  describe = item.stash.get(_REPORT, None)
  if report.failed and describe is not None:
    report.sections.append(("coremesh simulation", describe()))
  return report


@pytest.fixture(name=_SEED)
def _seed() -> int:
  return 0


@pytest.fixture
def simulation(
  request: pytest.FixtureRequest, _coremesh_seed: int
) -> Iterator[Any]:
  """The kernels of the test run in coremesh's simulator: a `cm.Simulation`.

  The test fails if one of them does what it must not, even if it catches what
  is raised; a test of a wrong kernel uses `with cm.simulation()` itself. The
  options --coremesh-seeds and --no-coremesh-races choose seeds and races.
  """
  # Here and not above: pytest loads this plugin for tests without kernels too.
  testing = importlib.import_module("coremesh.simulate.testing")
  stash = request.node.stash
  seed = _coremesh_seed
  races = request.config.getoption("coremesh_races")
  with testing.simulated_test(
    seed=seed, races=races, has_failed=lambda: stash.get(_HAS_FAILED, False)
  ) as run:
    stash[_CHECK] = lambda: testing.check(run)
    stash[_REPORT] = lambda: testing.report(run, seed=seed, races=races)
    yield run
