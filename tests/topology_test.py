"""Tests for coremesh.topology, most of them in a Python of their own."""

import os
import re
import subprocess
import sys
import textwrap

import jax
from jax.experimental import topologies
import pytest

import coremesh as cm
from coremesh import _compat, topology
from coremesh.errors import ChipError

# All that a program is told; nothing says which devices to use.
_KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")

_DOUBLE = """
  import jax
  import jax.numpy as jnp
  from jax.sharding import PartitionSpec as P
  import coremesh as cm

  chip = cm.chip("v5p:2x2x1")
  cores = chip.tensor_cores()

  @cm.kernel(mesh=cores, out=cm.like(0), scratch=dict(mine=cm.vmem_slab(0)))
  def double(x_hbm, o_hbm, *, mine):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    cm.core_barrier()
    mine[...] = mine[...] * 2
    cm.copy(mine, o_hbm.at[rows])

  def over(mesh):
    return jax.shard_map(
      double, mesh=mesh, in_specs=P("device"), out_specs=P("device")
    )
"""


def _environment(**changes: str) -> dict[str, str]:
  return {k: os.environ[k] for k in _KEPT if k in os.environ} | changes


def _start(program: str, **changes: str) -> subprocess.Popen[str]:
  return subprocess.Popen(
    [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=_environment(**changes),
  )


def _run(program: str, **changes: str) -> str:
  """What a program prints; it must succeed, warn of nothing and be quiet."""
  return _finish(_start(program, **changes))


def _finish(process: subprocess.Popen[str]) -> str:
  try:
    out, err = process.communicate(timeout=60)
  finally:
    process.kill()
  assert (process.returncode, err) == (0, ""), err[-2000:]
  return out.strip()


# --- no effects ------------------------------------------------------------


def test_importing_coremesh_and_making_chips_changes_nothing():
  _run("""
    import os
    import jax
    from jax._src import xla_bridge

    def everything():
      return dict(os.environ), dict(jax.config.values)

    before = everything()
    import coremesh as cm
    [getattr(cm, name) for name in cm.__all__]
    for name in ("v4", "v5e", "v5p", "v6e", "tpu7x", None):
      cm.chip(name).tensor_cores()
    cm.chip("v5p").vector_subcores(), cm.chip("v6e").scalar_subcores()
    assert everything() == before
    assert not xla_bridge.backends_are_initialized()
  """)


def test_a_compile_only_mesh_restores_the_environment():
  _run("""
    import os
    import jax
    from jax._src import xla_bridge

    before, config = dict(os.environ), dict(jax.config.values)
    import coremesh as cm
    for name in ("v5p:2x2x1", "v6e:3x3", "tpu7x"):
      assert cm.chip(name).device_mesh(on="compiler").size
    assert dict(os.environ) == before
    # JAX is not to look for the TPU that is not there.
    assert dict(jax.config.values) == config | dict(jax_platforms="cpu")
    assert not xla_bridge.backends_are_initialized()
  """)


# --- no noise --------------------------------------------------------------


def test_compiling_a_kernel_is_silent():
  _run(
    _DOUBLE
    + """
  mesh = chip.device_mesh(on="compiler")
  x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
  assert cm.compile(over(mesh), x).code_bytes
  """
  )


def test_simulating_a_kernel_is_silent():
  _run(
    _DOUBLE
    + """
  mesh = chip.device_mesh()
  assert jax.jit(over(mesh))(jnp.ones((64, 128))).sum() == 2 * 64 * 128
  assert jax.device_count() == 4
  """
  )


def test_a_kernel_without_a_mesh_is_silent():
  # An array of numpy's, because making one of JAX's starts JAX.
  _run(
    _DOUBLE
    + """
  import numpy as np
  x = np.ones((16, 128), np.float32)
  assert double(x).sum() == 2 * x.size
  """
  )


def test_two_processes_can_compile_at_once():
  program = """
    import sys
    import coremesh as cm
    cm.chip("v5p").device_mesh(on="compiler")
    print("loaded", flush=True)
    sys.stdin.read()
  """
  first = subprocess.Popen(
    [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=_environment(),
  )
  try:
    assert first.stdout.readline() == "loaded\n"
    _run(program.replace("sys.stdin.read()", ""))
  finally:
    _, err = first.communicate("")
  assert not err


# --- simulated devices -----------------------------------------------------

_COUNT = """
  import jax
  import coremesh as cm
  mesh = cm.chip("v5p:2x2x2").device_mesh(on="simulator")
  print(mesh.size, jax.device_count(), jax.default_backend())
"""


@pytest.mark.parametrize(
  ("told", "expected"),
  [
    ({}, "8 8 cpu"),
    ({"JAX_PLATFORMS": "cpu"}, "8 8 cpu"),
    ({"JAX_NUM_CPU_DEVICES": "3"}, "8 8 cpu"),
    ({"JAX_NUM_CPU_DEVICES": "9"}, "8 9 cpu"),
    (
      {"XLA_FLAGS": "--xla_force_host_platform_device_count=9"},
      "8 9 cpu",
    ),
  ],
)
def test_asks_for_cpu_devices_unless_the_user_has(told, expected):
  assert _run(_COUNT, **told) == expected


_STARTED = """
  import jax
  jax.numpy.zeros(3)  # JAX starts here.
  import coremesh as cm
  import numpy as np
  from jax.experimental.pallas import tpu as pltpu
  from jax.sharding import PartitionSpec as P

  interpret = None

  def body(x_hbm, o_hbm, *, mine):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    cm.global_barrier()
    mine[...] = mine[...] * 2
    cm.copy(mine, o_hbm.at[rows])

  chip = cm.chip("v5p:2x2x2")
  try:
    mesh = chip.device_mesh(on="simulator")
    memory = dict(mine=cm.vmem_slab(0))
    kernel = cm.kernel(
      body,
      mesh=chip.tensor_cores(),
      out=cm.like(0),
      scratch=memory,
      interpret=interpret,
    )
    spec = P("device")
    fn = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec)
    x = np.full((128, 128), 1 / 4096, np.float32)
    print(int(jax.jit(fn)(x).sum()))
  except (cm.ChipError, cm.UnsupportedError) as error:
    print(error)
"""


def test_the_remedies_for_too_few_cpu_devices_work():
  # On two processors, where a pool of threads is as small as it gets.
  error = _run(_STARTED, JAX_PLATFORMS="cpu", NPROC="2")
  assert "needs 8 CPU devices, but JAX has already started with 1." in error
  [remedy] = re.findall(r"put (jax\.config\.update\(.*\)) at the top", error)
  program = _STARTED.replace("import jax\n", f"import jax; {remedy}\n", 1)
  assert _run(program, JAX_PLATFORMS="cpu", NPROC="2") == "8"
  assert "or put" in error and "Call chip.device_mesh(...) before" in error
  program = _STARTED.replace("jax.numpy.zeros(3)", "", 1)
  assert _run(program, JAX_PLATFORMS="cpu", NPROC="2") == "8"


@pytest.mark.parametrize(
  ("interpret", "num_devices", "started"),
  [
    ("None", "8", True),
    ("None", "9", False),
    ("pltpu.InterpretParams()", "9", True),
    ("pltpu.InterpretParams()", "8", False),
  ],
)
def test_a_barrier_on_all_devices_ends_or_is_refused(
  interpret, num_devices, started
):
  # With the threads of two processors and eight devices, which JAX has made if
  # it has started, it would never end in JAX's interpreter.
  program = _STARTED.replace("interpret = None", f"interpret = {interpret}", 1)
  if not started:
    program = program.replace("jax.numpy.zeros(3)", "", 1)
  told = dict(JAX_NUM_CPU_DEVICES=num_devices, JAX_PLATFORMS="cpu", NPROC="2")
  found = _run(program, **told)
  if not started or interpret == "None":
    assert found == "8"
    return
  assert "makes 16 simulated cores wait for one another" in found
  [remedy] = re.findall(r"environment variable NPROC=(\d+)", found)
  assert _run(program, **told | dict(NPROC=remedy)) == "8"


def test_starting_jax_restores_the_environment():
  program = """
    import os
    import coremesh as cm
    before = dict(os.environ)
    cm.chip("v5p:2x2x2").device_mesh(on="simulator")
    from jax._src import xla_bridge
    assert xla_bridge.backends_are_initialized()
    assert os.environ.get("NPROC") == before.get("NPROC")
  """
  _run(program)
  _run(program, NPROC="3")


def test_too_few_devices_by_a_flag_is_an_error():
  flags = "--xla_force_host_platform_device_count=2"
  with pytest.raises(AssertionError, match="needs 8 CPU devices.*with 2"):
    _run(_COUNT, XLA_FLAGS=flags)


# --- attached or not -------------------------------------------------------


@pytest.mark.parametrize(
  ("platforms", "num_chips", "expected"),
  [
    (None, 0, False),
    (None, 4, True),
    ("cpu", 4, False),
    ("tpu", 4, True),
    ("tpu,cpu", 4, True),
    ("tpu", 0, False),
  ],
)
def test_looks_for_a_tpu_without_starting_jax(
  platforms, num_chips, expected, monkeypatch
):
  monkeypatch.setattr(_compat, "backends_started", lambda: False)
  monkeypatch.setattr(_compat, "requested_platforms", lambda: platforms)
  monkeypatch.setattr(_compat, "num_attached_tpu_chips", lambda: num_chips)
  monkeypatch.setattr(jax, "default_backend", None)
  assert topology.tpu_is_attached() is expected


@pytest.mark.parametrize("has_tpu", [False, True])
def test_asks_a_jax_that_has_started(has_tpu, monkeypatch):
  monkeypatch.setattr(_compat, "backends_started", lambda: True)
  backend = "tpu" if has_tpu else "cpu"
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  assert topology.tpu_is_attached() is has_tpu


def test_an_attached_tpu_is_left_alone(monkeypatch):
  monkeypatch.setattr(topology, "tpu_is_attached", lambda: True)
  before = dict(os.environ)
  with topology.offline_libtpu():
    assert dict(os.environ) == before


def test_the_environment_is_restored_after_an_error(monkeypatch):
  monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "elsewhere")
  monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
  before = dict(os.environ)
  with pytest.raises(ZeroDivisionError), topology.offline_libtpu():
    assert os.environ["TPU_ACCELERATOR_TYPE"]
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "elsewhere"
    raise ZeroDivisionError
  assert dict(os.environ) == before


# --- libtpu's refusals -----------------------------------------------------


def test_a_slice_that_libtpu_does_not_know_is_an_error():
  with pytest.raises(ChipError, match="cannot describe 'v9:2x2x1': .*jax.tpu."):
    topology.compile_only_devices("v9:2x2x1", megacore=False)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_a_missing_libtpu_is_an_error_that_says_what_to_install(
  error, monkeypatch
):
  def missing(**_):
    raise error("no libtpu.so.")

  monkeypatch.setattr(topologies, "get_topology_desc", missing)
  with pytest.raises(ChipError, match=r"no libtpu\.so\. Install it .*jax.tpu."):
    cm.chip("v5p:5x5x5").device_mesh(on="compiler")
