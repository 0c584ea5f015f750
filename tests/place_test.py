"""Tests for coremesh.place; tests/launch_test.py runs kernels there."""

import concurrent.futures
import dataclasses

import jax
from jax.experimental.pallas import tpu as pltpu
import pytest

import coremesh as cm
from coremesh import _compat, place, topology
from coremesh.errors import ChipError, UnsupportedError

_OF_JAX = pltpu.InterpretParams(dma_execution_mode="eager")
_OURS = cm.SimulatorParams(seed=7)


def _within(device=None, size=2):
  """A context in which kernels are traced for a mesh of this device."""
  mesh = jax.sharding.AbstractMesh((size,), ("d",), abstract_device=device)
  return jax.sharding.use_abstract_mesh(mesh)


def _device(kind, platform, num_cores=None):
  return jax.sharding.AbstractDevice(
    device_kind=kind, num_cores=num_cores, platform=platform
  )


# --- find ------------------------------------------------------------------


@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("on", ["simulator", "compiler"])
def test_the_place_of_a_kernel_is_that_of_its_mesh(generation, on):
  mesh = cm.chip(generation).device_mesh(on=on)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    found = place.find(None)
  is_simulated = on == "simulator"
  assert found == place.Place(
    chip=cm.chip(generation),
    is_simulated=is_simulated,
    knows_chip=True,
    params=cm.SimulatorParams() if is_simulated else None,
  )


@pytest.mark.parametrize(
  ("interpret", "is_simulated"),
  [(False, False), (True, True), (_OF_JAX, True), (_OURS, True)],
)
@pytest.mark.parametrize("on", ["simulator", "compiler"])
def test_the_user_may_choose_whether_to_interpret(on, interpret, is_simulated):
  mesh = cm.chip("v6e").device_mesh(on=on)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    found = place.find(interpret)
  assert found.is_simulated is is_simulated
  assert (found.params is None) is not is_simulated
  assert found.uses_jax_interpreter is (interpret is _OF_JAX)


def test_a_plain_cpu_is_taken_for_the_chip_of_this_program(monkeypatch):
  monkeypatch.setenv("COREMESH_CHIP", "v6e:2x2")
  expected = place.Place(
    chip=cm.chip("v6e"),
    is_simulated=True,
    knows_chip=False,
    params=cm.SimulatorParams(),
  )
  assert place.find(None) == expected
  with _within(_device("cpu", "cpu")):
    found = place.find(None)
  assert found == dataclasses.replace(expected, is_plain_mesh=True)


def test_pallas_sees_the_chip_outside_a_mesh(monkeypatch):
  monkeypatch.setenv("COREMESH_CHIP", "v6e:2x2")
  with place.find(None).tracing_context():
    assert pltpu.get_tpu_info().chip_version == pltpu.ChipVersion.TPU_V6E
  with pytest.raises(ValueError, match="Unsupported TPU device kind: cpu"):
    pltpu.get_tpu_info()


def test_a_mesh_in_scope_is_left_as_it_is():
  with _within(_device("cpu", "cpu")):
    before = jax.sharding.get_abstract_mesh()
    with place.find(None).tracing_context():
      assert jax.sharding.get_abstract_mesh() == before


def test_looking_for_the_default_device_keeps_jax_on_the_cpu(monkeypatch):
  asked = []
  monkeypatch.setattr(_compat, "backends_started", lambda: False)
  monkeypatch.setattr(topology, "simulated_devices", asked.append)
  assert place.find(None).is_simulated
  assert asked == [1]


@pytest.mark.parametrize(
  ("kind", "platform", "error", "message"),
  [
    ("TPU v3", "tpu", ChipError, "'TPU v3'; it knows v4, v5e, v5p, v6e, tpu7x"),
    ("H100", "gpu", UnsupportedError, r"'gpu'\. Use .*on='simulator'"),
  ],
)
def test_rejects_a_device_it_does_not_know(kind, platform, error, message):
  with _within(_device(kind, platform)), pytest.raises(error, match=message):
    place.find(None)


# --- processes -------------------------------------------------------------


def _simulated_device(num_processes):
  return _compat.SimulatedDevice(
    device_kind="TPU v5",
    num_cores=2,
    platform="cpu",
    num_processes=num_processes,
  )


@pytest.mark.parametrize(
  ("device", "size", "processes"),
  [
    (None, 16, 1),
    (_simulated_device(1), 2, 1),
    (_simulated_device(3), 2, 3),
    (_device("cpu", "cpu"), 8, 1),
    (_device("cpu", "cpu"), 16, 2),
    (_device("TPU v5", "tpu", 2), 16, 1),
  ],
)
def test_counts_the_processes_of_a_cpu_mesh(
  device, size, processes, monkeypatch
):
  monkeypatch.setattr(_compat, "num_processes", lambda: 2)
  with _within(device, size):
    assert place.find(None).num_processes == processes


def test_rejects_a_simulation_across_processes():
  cores = cm.chip("v5p").tensor_cores()
  with _within(_simulated_device(2)):
    across, compiled = place.find(None), place.find(False)
  message = (
    "Kernel 'k' runs over a device mesh of 2 processes.*jax.local_devices.*"
    'Only a TPU runs it across.*a compile checks it: .*on="compiler"'
  )
  with pytest.raises(UnsupportedError, match=message):
    place.check("k", [cores], across)
  place.check("k", [cores], compiled)


# --- core meshes -----------------------------------------------------------


def _place(generation, params=None, **changes):
  """Where a kernel is simulated by `params`, or compiled if there are none."""
  return place.Place(
    chip=cm.chip(generation),
    is_simulated=params is not None,
    knows_chip=True,
    params=params,
    **changes,
  )


@pytest.mark.parametrize("generation", ["v5p", "v6e", "tpu7x"])
def test_accepts_the_cores_of_the_chip(generation):
  chip = cm.chip(generation)
  own = [chip.tensor_cores(), chip.vector_subcores(), chip.scalar_subcores()]
  place.check("k", own, _place(generation))
  place.check("k", own, _place(generation, _OURS))
  place.check("k", own[:1], _place(generation, _OF_JAX))


@pytest.mark.parametrize(
  ("mesh", "generation", "message"),
  [
    (
      cm.chip("v5p").tensor_cores(),
      "v6e",
      r"'k' is launched on .*but a device of v6e has 1 TensorCores\.$",
    ),
    (
      cm.chip("v5p").vector_subcores(),
      "tpu7x",
      r"device of tpu7x has 2 SparseCores of 16 vector subcores\.$",
    ),
    (
      cm.chip("v6e").scalar_subcores(),
      "v5e",
      r"device of v5e has 0 SparseCores\.$",
    ),
  ],
)
def test_rejects_more_cores_than_the_chip_has(mesh, generation, message):
  with pytest.raises(ChipError, match=message):
    place.check("k", [mesh], _place(generation))


@pytest.mark.parametrize("mesh", [None, "core", 2, ("core", 2)])
def test_rejects_what_is_no_mesh_of_cores(mesh):
  message = "mesh of kernel 'k' must be a TensorCoreMesh, .*tensor_cores"
  with pytest.raises(ChipError, match=message):
    place.check("k", [mesh], _place("v5p"))


def test_rejects_a_device_mesh_in_place_of_a_core_mesh():
  chip = cm.chip("v5p")
  with pytest.raises(ChipError, match="must be a TensorCoreMesh"):
    place.check("k", [chip.device_mesh(on="compiler")], _place("v5p"))


def test_rejects_a_mesh_without_a_number_of_cores():
  mesh = pltpu.TensorCoreMesh(axis_name="c", num_cores=None)
  with pytest.raises(ChipError, match=r"no number of cores.*tensor_cores\(\)"):
    place.check("k", [mesh], _place("v5p"))


@pytest.mark.parametrize("kind", ["vector_subcores", "scalar_subcores"])
def test_rejects_sparse_cores_in_jaxs_interpreter_and_says_the_way_out(kind):
  chip = cm.chip("v5p")
  meshes = [chip.tensor_cores(), getattr(chip, kind)()]
  with pytest.raises(UnsupportedError) as caught:
    place.check("k", meshes, _place("v5p", _OF_JAX))
  assert str(caught.value) == (
    "Kernel 'k' runs on SparseCore subcores, which JAX's TPU interpret mode"
    " simulates wrongly: every subcore believes it is subcore 0. Leave"
    " `interpret` out, or pass cm.SimulatorParams(): coremesh's simulator runs"
    " it."
  )
  place.check("k", meshes, _place("v5p", _OURS))
  place.check("k", meshes, _place("v5p"))


# --- threads ---------------------------------------------------------------


@pytest.mark.parametrize(
  ("devices", "cores", "threads", "is_enough"),
  [
    # The two pools that XLA makes, and whether a barrier over all ended.
    (2, 2, 2 * 2, False),
    (2, 2, 2 * 3, False),
    (4, 2, 2 * 6, False),
    (4, 2, 2 * 7, True),
    (8, 2, 2 * 12, False),
    (8, 2, 2 * 13, True),
    (4, 1, 2 * 4, True),
    (16, 1, 2 * 16, True),
  ],
)
def test_cores_wait_only_where_each_has_a_thread(
  devices, cores, threads, is_enough, monkeypatch
):
  monkeypatch.setattr(topology, "num_simulation_threads", lambda: threads)
  with _within(_device("cpu", "cpu"), devices):
    if is_enough:
      place.check_waiting("k", cores, _place("v5p", _OF_JAX))
      return
    message = (
      rf"'k' makes {devices * cores} simulated cores wait.*too few CPU threads"
      rf" \({threads}\).*chip\.device_mesh.*NPROC={4 * devices} before"
    )
    with pytest.raises(UnsupportedError, match=message):
      place.check_waiting("k", cores, _place("v5p", _OF_JAX))


def test_a_kernel_on_one_device_waits_as_well(monkeypatch):
  monkeypatch.setattr(topology, "num_simulation_threads", lambda: 3)
  with pytest.raises(UnsupportedError, match="makes 2 simulated cores wait"):
    place.check_waiting("k", 2, _place("v5p", _OF_JAX))


@pytest.mark.parametrize(
  ("devices", "cores", "is_few"), [(14, 2, True), (15, 2, False), (32, 1, True)]
)
def test_refuses_more_waiting_cores_than_jax_runs_at_once(
  devices, cores, is_few, monkeypatch
):
  monkeypatch.setattr(topology, "num_simulation_threads", lambda: 1000)
  with _within(_device("cpu", "cpu"), devices):
    if is_few:
      place.check_waiting("k", cores, _place("v5p", _OF_JAX))
      return
    with pytest.raises(UnsupportedError, match='28 at once.*on="compiler"'):
      place.check_waiting("k", cores, _place("v5p", _OF_JAX))


@pytest.mark.parametrize("params", [_OURS, cm.SimulatorParams(dma="random")])
def test_the_simulator_needs_no_thread_for_a_core(params, monkeypatch):
  monkeypatch.setattr(topology, "num_simulation_threads", lambda: 3)
  with _within(_device("cpu", "cpu"), 512):
    place.check_waiting("k", 2, _place("v5p", params))


@pytest.mark.parametrize(
  ("nproc", "told", "threads"),
  [(None, [], 16), ("3", [], 16), ("20", [], 40), (None, [12], 24)],
)
def test_xla_has_threads_for_processors_and_for_devices(
  nproc, told, threads, monkeypatch
):
  monkeypatch.delenv("NPROC", raising=False)
  if nproc:
    monkeypatch.setenv("NPROC", nproc)
  monkeypatch.setattr(topology, "_PROCESSORS_TOLD", told)
  monkeypatch.setattr(topology.os, "sched_getaffinity", lambda _: {0, 1})
  assert topology.num_simulation_threads() == threads  # eight CPU devices


# --- parameters -------------------------------------------------------------


def _params(interpret=None):
  return place.find(interpret).params


@pytest.mark.parametrize("interpret", [None, True])
def test_the_simulator_hides_nothing_by_default(interpret):
  params = _params(interpret)
  assert params == cm.SimulatorParams()
  assert (params.seed, params.dma, params.detect_races) == (0, "late", True)
  assert params.on_finding == "raise" and params.session is None


@pytest.mark.parametrize("of_kernel", [_OURS, _OF_JAX])
@pytest.mark.parametrize(
  "of_context", [cm.SimulatorParams(seed=8), pltpu.InterpretParams()]
)
def test_the_kernels_own_params_come_before_the_contexts(of_kernel, of_context):
  with pltpu.force_tpu_interpret_mode(of_context):
    assert _params() is of_context
    assert _params(True) is of_context
    assert _params(of_kernel) is of_kernel
    assert _params(False) is None


def test_the_simulators_params_are_passed_on_as_they_are():
  for is_plain_mesh in (True, False):
    here = _place("v5p", _OURS, is_plain_mesh=is_plain_mesh)
    assert place.interpret_params(num_cores=2, place=here) is _OURS


@pytest.mark.parametrize("is_plain_mesh", [True, False])
def test_jaxs_interpreter_is_told_of_cores_and_of_tiles(is_plain_mesh):
  # Padding needs the size of the chip's tiles, which a plain mesh hides.
  params = place.interpret_params(
    num_cores=2, place=_place("v5p", _OF_JAX, is_plain_mesh=is_plain_mesh)
  )
  bounds = "logical" if is_plain_mesh else _OF_JAX.buffer_bounds
  assert params == dataclasses.replace(
    _OF_JAX, num_cores_or_threads=2, buffer_bounds=bounds
  )
  assert not isinstance(params, cm.SimulatorParams)


# --- simulation -------------------------------------------------------------


@pytest.mark.parametrize("races", [True, False])
@pytest.mark.parametrize("dma", ["late", "early", "random"])
@pytest.mark.parametrize("on_finding", ["raise", "record"])
def test_a_simulation_sets_what_kernels_inside_use(races, dma, on_finding):
  options = dict(dma=dma, on_finding=on_finding)
  with cm.simulation(seed=3, races=races, **options) as run:
    params = _params()
    with _within(_device("TPU v5", "tpu", 2)):
      assert place.find(None).is_simulated
  assert params == cm.SimulatorParams(
    seed=3, detect_races=races, session=run, **options
  )
  assert _params() == cm.SimulatorParams()


def test_a_simulation_hides_nothing_unless_told_to():
  with cm.simulation() as run:
    assert _params() == cm.SimulatorParams(session=run)
  assert isinstance(run, cm.Simulation)
  assert run.runs == [] and run.findings == () and run.error() is None


def test_a_simulation_ends_with_an_error_too():
  with pytest.raises(ZeroDivisionError), cm.simulation(seed=3):
    raise ZeroDivisionError
  assert _params() == cm.SimulatorParams()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(dma="eager"), "'late', 'early' or 'random'; got 'eager'"),
    (dict(on_finding="print"), "'raise' or 'record'; got 'print'"),
    (dict(seed=1.5), r"seed must be an int; got 1\.5"),
    (dict(seed=True), "seed must be an int; got True"),
  ],
)
def test_a_simulation_refuses_what_it_does_not_know(options, message):
  with pytest.raises(UnsupportedError, match=message):
    with cm.simulation(**options):
      pass


def test_each_collective_id_has_one_small_number_in_the_interpreter():
  ids = [2**30 + 7919 * i for i in range(200)]
  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    numbers = list(threads.map(place.interpreter_collective_id, ids * 4))
  assert numbers == numbers[:200] * 4
  assert len(set(numbers)) == 200
  assert 0 <= min(numbers) and max(numbers) < 2**16
