"""Tests of the pytest plugin, by runs of pytest inside this one."""

from importlib import metadata

import pytest

# Loaded here, or each run of pytest inside would load its own.
from coremesh.simulate import testing  # noqa: F401

pytest_plugins = ["pytester"]

_KERNELS = """
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from tests import support

CHIP, MESH = support.simulated()
X = np.ones((32, 128), np.float32)


@cm.kernel(mesh=CHIP.tensor_cores("core"), out=cm.like(0))
def right(x_hbm, o_hbm):
  rows = cm.slab(x_hbm)
  cm.copy(x_hbm.at[rows], o_hbm.at[rows])


@cm.kernel(
  mesh=CHIP.tensor_cores("core"),
  out=cm.like(0),
  scratch=dict(mine=cm.vmem_slab(0), sem=pltpu.SemaphoreType.DMA),
)
def races(x_hbm, o_hbm, *, mine, sem):
  rows = cm.slab(x_hbm)
  copy = cm.start_copy(x_hbm.at[rows], mine, sem=sem)
  mine[...] = jnp.zeros(mine.shape)
  copy.wait()
  cm.copy(mine, o_hbm.at[rows])


@cm.kernel(
  mesh=CHIP.tensor_cores("core"),
  out=cm.like(0),
  scratch=dict(sem=pltpu.SemaphoreType.REGULAR),
)
def stuck(x_hbm, o_hbm, *, sem):
  cm.wait(sem)


right, races, stuck = (
  support.over_devices(kernel, MESH) for kernel in (right, races, stuck)
)
"""


def _run(pytester, tests: str, *options: str):
  """Runs tests in a project of their own."""
  pytester.makepyfile(_KERNELS + tests)
  options = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", *options)
  return pytester.runpytest_inprocess(*options)


def test_pytest_finds_the_plugin_where_coremesh_is_installed():
  found = metadata.entry_points(group="pytest11", name="coremesh")
  assert {entry.value for entry in found} == {"coremesh.pytest_plugin"}


def test_the_fixture_simulates_and_gives_the_run(pytester):
  tests = """
def test_right(simulation):
  np.testing.assert_array_equal(right(X), X)
  assert {run.kernel for run in simulation.runs} == {"right"}
  assert {run.seed for run in simulation.runs} == {0}
  assert simulation.findings == ()
"""
  result = _run(pytester, tests)
  result.assert_outcomes(passed=1)


def test_a_test_runs_under_as_many_seeds_as_asked_for(pytester):
  tests = """
@pytest.mark.parametrize("factor", [1, 2])
def test_right(simulation, factor):
  right(X).block_until_ready()
  print("seed", simulation.runs[0].seed)

@pytest.mark.usefixtures("simulation")
class TestMore:
  def test_right(self):
    pass

def test_without_the_fixture():
  pass
"""
  result = _run(pytester, tests, "--coremesh-seeds", "3", "-rP", "-v")
  result.assert_outcomes(passed=6 + 3 + 1)
  printed = result.stdout.str()
  for seed in range(3):
    assert printed.count(f"\nseed {seed}\n") == 2
  assert "test_right[seed2-1]" in printed or "test_right[1-seed2]" in printed


def test_a_failure_reports_what_was_found(pytester):
  tests = """
def test_races(simulation):
  np.asarray(races(X))
"""
  result = _run(pytester, tests, "--coremesh-seeds", "2")
  result.assert_outcomes(failed=2)  # And no errors when the tests are left.
  result.stdout.fnmatch_lines(
    [
      "*- coremesh simulation -*",
      "with cm.simulation(seed=0, dma='late', races=True): ...",
      "*races*",
      "*race*kernel 'races'*are not ordered*",
      "*- coremesh simulation -*",
      "with cm.simulation(seed=1, dma='early', races=True): ...",
    ]
  )


def test_a_failure_without_findings_says_so(pytester):
  tests = """
def test_wrong(simulation):
  assert right(X).sum() == 3
"""
  result = _run(pytester, tests)
  result.assert_outcomes(failed=1)
  result.stdout.fnmatch_lines(
    ["*- coremesh simulation -*", "*right*", "Findings: 0 errors, 0 warnings.*"]
  )


def test_a_failure_without_the_fixture_has_no_section(pytester):
  result = _run(pytester, "def test_wrong():\n  assert False\n")
  result.assert_outcomes(failed=1)
  result.stdout.no_fnmatch_line("*coremesh simulation*")


def test_a_failed_kernel_does_not_fail_the_next_test(pytester):
  tests = """
def test_stuck(simulation):
  np.asarray(stuck(X))

def test_right(simulation):
  np.testing.assert_array_equal(right(X), X)

def test_right_without_the_fixture():
  np.testing.assert_array_equal(right(X), X)
"""
  result = _run(pytester, tests)
  result.assert_outcomes(failed=1, passed=2)
  result.stdout.fnmatch_lines(["*wait for ever*"])


def test_a_kernel_whose_result_nobody_looks_at_fails_its_test(pytester):
  result = _run(pytester, "def test_races(simulation):\n  races(X)\n")
  result.assert_outcomes(failed=1)
  result.stdout.fnmatch_lines(["*are not ordered*"])


def test_what_the_test_catches_fails_it_all_the_same(pytester):
  tests = """
def test_races(simulation):
  with pytest.raises(Exception):
    np.asarray(races(X))
"""
  result = _run(pytester, tests)
  result.assert_outcomes(failed=1)
  result.stdout.fnmatch_lines(["*SimulationError*are not ordered*"])


def test_a_fault_is_one_failure_whenever_it_is_seen(pytester):
  tests = """
def test_nobody_looks(simulation):
  races(X)

@pytest.mark.xfail(strict=True)
def test_is_expected(simulation):
  races(X)

@pytest.mark.xfail(strict=True)
def test_is_expected_and_seen(simulation):
  np.asarray(races(X))

@pytest.fixture
def at_the_end(simulation):
  yield
  with pytest.raises(Exception):
    np.asarray(races(X))

def test_right(at_the_end):
  np.asarray(right(X))
"""
  result = _run(pytester, tests)
  # The last is left when its kernel runs: pytest calls that an error.
  result.assert_outcomes(failed=1, xfailed=2, passed=1, errors=1)


def test_a_wrong_kernel_is_tested_in_a_simulation_of_its_own(pytester):
  tests = """
def test_races(simulation):
  with pytest.raises(cm.SimulationError, match="not ordered"):
    with cm.simulation():
      np.asarray(races(X))
"""
  _run(pytester, tests).assert_outcomes(passed=1)


def test_races_can_be_left_alone(pytester):
  tests = """
def test_races(simulation):
  np.asarray(races(X))
"""
  result = _run(pytester, tests, "--no-coremesh-races")
  result.assert_outcomes(passed=1)
  result = _run(pytester, tests, "--no-coremesh-races", "--coremesh-races")
  result.assert_outcomes(failed=1)


@pytest.mark.parametrize("seeds", ["0", "-1"])
def test_a_number_of_seeds_below_one_is_refused(seeds, pytester):
  result = _run(pytester, "", f"--coremesh-seeds={seeds}")
  assert result.ret == pytest.ExitCode.USAGE_ERROR
  result.stderr.fnmatch_lines(["*--coremesh-seeds must be at least 1; got*"])


def test_a_project_may_have_its_own_fixture_of_that_name(pytester):
  tests = """
@pytest.fixture
def simulation():
  return "mine"

def test_mine(simulation):
  assert simulation == "mine"
"""
  result = _run(pytester, tests, "--coremesh-seeds", "5")
  result.assert_outcomes(passed=1)


def test_the_plugin_loads_nothing_until_the_fixture_is_used(pytester):
  pytester.makepyfile(
    """
    import sys

    def test_light():
      heavy = {"jax", "numpy", "rich"} & set(sys.modules)
      assert "coremesh.pytest_plugin" in sys.modules and not heavy
    """
  )
  options = ("-p", "no:xdist", "-p", "no:hypothesispytest")
  result = pytester.runpytest_subprocess(*options, timeout=60)
  result.assert_outcomes(passed=1)
