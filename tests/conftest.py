"""Eight simulated devices, strict types, and no errors left over."""

import gc
import os
import shutil
import tempfile

from hypothesis import settings
import jax
from jax.experimental.pallas import tpu as pltpu
import pytest

from tests import properties

# The first call of a jitted function compiles, whatever its arguments.
# The same examples in each run, so that a failure is of the change that shows
# it; pytest --hypothesis-profile=explore looks for new ones.
settings.register_profile("coremesh", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("coremesh")

_NUM_DEVICES = 8
_TALLY = properties.Tally()


def pytest_addoption(parser):
  parser.addoption(
    "--chip",
    default=None,
    help="run the tests marked tpu on this attached chip, such as v5p:2x2x1",
  )
  parser.addoption(
    "--no-machine-code",
    action="store_true",
    help="do not check what must hold for the machine code that is compiled",
  )


def pytest_configure(config):
  config.addinivalue_line("markers", "tpu: needs an attached TPU, --chip=NAME")
  if config.getoption("--chip") is None:
    jax.config.update("jax_platforms", "cpu")
  # Hardly any of the many objects that JAX makes while it traces are garbage;
  # to look for it as often as Python does takes a tenth of the time.
  gc.set_threshold(50_000, 20, 50)
  jax.config.update("jax_num_cpu_devices", _NUM_DEVICES)
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  jax.config.update("jax_numpy_rank_promotion", "raise")

  # What the compiler makes is kept for this run, and not in the user's cache.
  # The processes of pytest-xdist share that of the one that starts them.
  if not hasattr(config, "workerinput"):
    folder = tempfile.mkdtemp(prefix="coremesh-cache-")
    os.environ["COREMESH_CACHE_DIR"] = folder
  if not config.getoption("--no-machine-code"):
    properties.watch(_TALLY)


def pytest_unconfigure(config):
  if not hasattr(config, "workerinput"):
    shutil.rmtree(os.environ.pop("COREMESH_CACHE_DIR", ""), ignore_errors=True)


def pytest_sessionfinish(session):
  if hasattr(session.config, "workeroutput"):
    session.config.workeroutput["machine_code"] = _TALLY.data()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
  """Counts what a process of pytest-xdist has looked at."""
  if found := getattr(node, "workeroutput", {}).get("machine_code"):
    _TALLY.add(found)


def pytest_terminal_summary(terminalreporter):
  if _TALLY.checked or _TALLY.not_checked:
    terminalreporter.write_line(str(_TALLY))


def pytest_collection_modifyitems(config, items):
  if config.getoption("--chip") is not None:
    return
  skip = pytest.mark.skip(reason="needs an attached TPU: pytest --chip=NAME")
  for item in items:
    if item.get_closest_marker("tpu"):
      item.add_marker(skip)


@pytest.fixture(autouse=True)
def _no_leftovers():
  """Clears what a failed kernel leaves: JAX raises its error once more."""
  yield
  try:
    jax.effects_barrier()
  except Exception:
    pass
  pltpu.reset_tpu_interpret_mode_state()
