"""What makes JAX's tests take CPU devices for those of a TPU.

No file of JAX is edited. In a process of its own, the class of devices says
what it would on the chip, and so does what a mesh says of its devices; and a
flag of JAX's tests says that they run on TPUs.
"""

import importlib.util
import os
import sys
import types
from typing import Any

import hypothesis
import jax
from jax._src import core as jax_core  # noqa: TID251  What JAX's tests import.
from jax._src import hijax  # noqa: TID251
from jax._src import mesh as jax_mesh  # noqa: TID251
from jax._src import test_util as jtu  # noqa: TID251

import coremesh as cm

_HYPOTHESIS_EXAMPLES = 5  # Of those a test asks for, tens to hundreds.


def environment(*, chip: str, num_devices: int) -> dict[str, str]:
  """The environment of a process whose devices pretend to be a chip's."""
  flags = f"--xla_force_host_platform_device_count={num_devices}"
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": flags,
    "COREMESH_CHIP": chip,
    # The tests look at errors as JAX raises them.
    "JAX_TRACEBACK_FILTERING": "off",
  }


def pretend(chip: cm.Chip) -> None:
  """Makes this process's CPU devices say that they are of `chip`."""
  device_class = type(jax.devices()[0])
  device_class.device_kind = chip.device_kind
  device_class.num_cores = chip.tensor_cores_per_device
  described = jax.sharding.AbstractDevice(
    device_kind=chip.device_kind,
    num_cores=chip.tensor_cores_per_device,
    platform="cpu",
  )
  # JAX leaves out the cores of a device whose platform is not "tpu".
  jax_mesh.abstract_device_from = lambda device: described
  jax.config.update("jax_test_dut", "tpu")
  _provide_hypothesis_util()
  if not hasattr(hijax, "HiPrimitive"):  # A base class in older suites.
    module: Any = hijax
    module.HiPrimitive = type("HiPrimitive", (jax_core.Primitive,), {})


def _provide_hypothesis_util() -> None:
  """A module that the tests import and that JAX's wheels leave out."""
  name = "jax._src.hypothesis_test_util"
  if importlib.util.find_spec(name) is not None:
    return
  module: Any = types.ModuleType(name)

  def setup_hypothesis(max_examples: int = 30) -> None:
    hypothesis.settings.register_profile(
      "jax_suites",
      database=None,
      derandomize=True,
      deadline=None,
      max_examples=min(max_examples, _HYPOTHESIS_EXAMPLES),
      suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("jax_suites")

  module.setup_hypothesis = setup_hypothesis
  module.hypothesis_is_thread_safe = lambda: True
  module.HypothesisShardedTestCase = jtu.JaxTestCase
  module.HypothesisShardedTestLoader = jtu.JaxTestLoader
  package: Any = sys.modules["jax._src"]
  package.hypothesis_test_util = sys.modules[name] = module
