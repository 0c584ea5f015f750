"""Tests of cm.explore: many interleavings, and what it says of them."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.simulate import params, program
from tests import support

_X = np.arange(4 * 8 * 256, dtype=np.float32).reshape(32, 256)


def _swap(*, waits: bool = True):
  """The cores of a device exchange halves, and may look too early."""
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(mine=cm.vmem_slab(0, axis=1), theirs=cm.vmem_slab(0, axis=1)),
  )
  def swap(x_hbm, o_hbm, *, mine, theirs):
    columns = cm.slab(x_hbm, axis=1)
    cm.copy(x_hbm.at[:, columns], mine)
    cm.core_barrier("core")
    if waits:
      cm.put(mine, theirs, to={"core": cm.next_core("core")}).wait()
    else:
      copy = cm.put(mine, theirs, to={"core": cm.next_core("core")})
      mine[...] = theirs[...] * 2
      copy.wait()
    mine[...] = theirs[...] * 2
    cm.copy(mine, o_hbm.at[:, columns])

  return support.over_devices(swap, mesh)


def _last_writer():
  """Both cores write their number to one place: whoever is last is seen."""
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=jax.ShapeDtypeStruct((8, 128), jnp.int32),
    scratch=dict(mine=pltpu.VMEM((8, 128), jnp.int32)),
  )
  def last_writer(o_hbm, *, mine):
    mine[...] = jnp.full((8, 128), jax.lax.axis_index("core"), jnp.int32)
    cm.core_barrier("core")
    cm.copy(mine, o_hbm)

  return jax.jit(
    jax.shard_map(
      last_writer, mesh=mesh, in_specs=(), out_specs=jax.P("device")
    )
  )


def _stuck():
  """Each core waits for a signal that nobody sends."""
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(sem=pltpu.SemaphoreType.REGULAR),
  )
  def stuck(x_hbm, o_hbm, *, sem):
    cm.wait(sem)
    cm.copy(x_hbm, o_hbm)

  return support.over_devices(stuck, mesh)


def test_a_right_kernel_is_right_in_every_interleaving():
  found = cm.explore(_swap(), _X, seeds=9)
  assert found.ok
  assert found == cm.Exploration(name="swap", num_runs=9)
  assert (found.first, found.smallest, found.findings) == (None, None, ())
  assert str(found) == "swap: nothing wrong in 9 interleavings."
  found.raise_if_failed()


def test_a_race_is_found_by_the_first_seed():
  found = cm.explore(_swap(waits=False), _X, seeds=9)
  assert not found.ok
  assert found.num_runs == 1
  assert found.first is found.smallest
  assert (found.first.seed, found.first.dma) == (0, "late")
  assert "race" in {f.kind for f in found.findings}
  assert "swap: 1 of 1 interleaving went wrong." in str(found)
  assert "with cm.simulation(seed=0, dma='late'): ..." in str(found)
  assert "[race] kernel 'swap'" in str(found)
  with pytest.raises(cm.SimulationError, match="not ordered") as raised:
    found.raise_if_failed()
  assert "seed=0, dma='late'" in raised.value.__notes__[0]


def test_all_seeds_are_tried_if_asked_for():
  fn = _swap(waits=False)
  found = cm.explore(fn, _X, seeds=[7, 3, 5], stop_at_first=False)
  assert [(f.seed, f.dma) for f in found.failures] == [
    (7, "late"),
    (3, "early"),
    (5, "random"),
  ]
  assert (found.first.seed, found.smallest.seed) == (7, 3)
  assert "Smallest seed: seed=3, dma='early'" in str(found)


def test_a_fault_that_several_runs_show_is_told_once():
  x = np.ones((32, 128), np.float32)
  found = cm.explore(_stuck(), x, seeds=4, stop_at_first=False)
  assert len(found.failures) == 4
  shown = [finding for f in found.failures for finding in f.findings]
  assert len(found.findings) == len(set(shown)) < len(shown)


def test_a_result_that_depends_on_the_interleaving_is_a_finding():
  found = cm.explore(_last_writer(), seeds=50, races=False)
  [finding] = found.findings
  assert finding.kind == "unstable"
  assert finding.kernel == "last_writer"
  assert "of 4096 elements, the first at [" in finding.text
  assert " as it was under seed=0, dma='late'" in finding.text
  assert found.num_runs == found.first.seed + 1 > 1
  assert f"compare the result under cm.simulation({found.first})" in str(found)


def test_the_seed_it_names_shows_the_fault_again():
  fn = _last_writer()
  first = cm.explore(fn, seeds=50, races=False).first
  results = []
  for seed, dma in ((0, "late"), (first.seed, first.dma)):
    with cm.simulation(seed=seed, dma=dma, races=False):
      results.append(np.asarray(fn()))
  assert (results[0] != results[1]).any()


def test_dma_modes_are_those_asked_for():
  fn = _swap(waits=False)
  found = cm.explore(fn, _X, seeds=2, dma="early", stop_at_first=False)
  assert [f.dma for f in found.failures] == ["early", "early"]


def test_a_deadlock_is_found_and_leaves_nothing_behind(capfd):
  found = cm.explore(_stuck(), np.ones((32, 128), np.float32), seeds=3)
  assert {f.kind for f in found.findings} == {"deadlock"}
  with pytest.raises(cm.DeadlockError, match="wait for ever"):
    found.raise_if_failed()
  assert cm.explore(_swap(), _X, seeds=2).ok
  out, err = capfd.readouterr()
  assert "Traceback" not in out + err


def test_a_kernel_is_compiled_once_for_all_seeds(monkeypatch):
  compiled = []
  compile_program = program.compile_program

  def counted(kernel, *args, **kwargs):
    compiled.append(kernel.name)
    return compile_program(kernel, *args, **kwargs)

  monkeypatch.setattr(program, "compile_program", counted)
  assert cm.explore(_swap(), _X, seeds=6).ok
  assert compiled == ["swap"]


def test_a_plain_function_of_several_kernels_is_explored():
  swap = _swap()

  def twice(x):
    return {"once": swap(x), "twice": swap(swap(x)), "none": None, "two": 2}

  found = cm.explore(twice, _X, seeds=2)
  assert found.ok
  assert found.name == "twice"


def test_what_the_function_raises_is_raised_with_its_seed():
  swap = _swap()

  def wrong(x):
    if np.asarray(swap(x)).any():
      raise ValueError("mine")

  with pytest.raises(ValueError, match="mine") as raised:
    cm.explore(wrong, _X)
  assert raised.value.__notes__ == ["Raised under seed=0, dma='late'."]


@pytest.mark.parametrize(
  ("fn", "options", "text"),
  [
    (3, {}, "fn must be a function that contains kernels"),
    (_swap, dict(seeds=0), "seeds must be how many"),
    (_swap, dict(seeds=True), "seeds must be how many"),
    (_swap, dict(seeds=[]), "seeds must be how many"),
    (_swap, dict(seeds="12"), "seeds must be how many"),
    (_swap, dict(seeds=[1, 2.5]), "a sequence of ints"),
    (_swap, dict(dma="sometimes"), "'late', 'early', 'random'"),
    (_swap, dict(dma=()), "dma must be one or several"),
    (_swap, dict(progress="yes"), "progress must be True, False or None"),
    (lambda: jnp.ones(3), {}, "ran no kernel in coremesh's simulator"),
  ],
)
def test_what_cannot_be_explored_is_refused(fn, options, text):
  with pytest.raises(cm.UnsupportedError, match=text):
    cm.explore(fn, **options)


def test_a_kernel_that_chooses_its_interpreter_is_not_explored():
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    interpret=cm.SimulatorParams(),
  )
  def copies(x_hbm, o_hbm):
    cm.copy(x_hbm, o_hbm)

  with pytest.raises(cm.UnsupportedError, match="say interpret= themselves"):
    cm.explore(support.over_devices(copies, mesh), _X, seeds=1)


def test_progress_is_shown_if_asked_for_and_else_on_a_terminal_only(capsys):
  fn = _swap()
  cm.explore(fn, _X, seeds=2)
  assert capsys.readouterr().err == ""
  cm.explore(fn, _X, seeds=2, progress=True)
  assert "exploring swap" in capsys.readouterr().err


def test_a_worker_that_polls_for_ever_is_stopped():
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(sem=pltpu.SemaphoreType.REGULAR),
    interpret=params.SimulatorParams(max_turns=1000),
  )
  def polls(x_hbm, o_hbm, *, sem):
    jax.lax.while_loop(
      lambda n: n == 0, lambda n: pl.semaphore_read(sem), pl.semaphore_read(sem)
    )
    cm.copy(x_hbm, o_hbm)

  with pytest.raises(Exception, match="taken 1001 turns and still run"):
    np.asarray(support.over_devices(polls, mesh)(np.ones((32, 128), "f4")))
