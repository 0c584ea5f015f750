"""Tests of cm.mutate; every mutant of every example is caught."""

import importlib
import re

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.simulate import launch, synchronisation
from tests import support

# Settings under which workers come to every operation, and how many mutants
# there are then: that some are lost is not to go unseen.
_EXAMPLES = {
  "add_one": ("v5p:2x2x1", {}, 7),
  "indexed_add_one": ("v5p:2x2x1", {}, 9),
  "matmul_study": ("v5p:1x1x1", dict(size=256), 20),
  "ring_shift": ("v5p:2x2x1", {}, 17),
  "sc_add_one": ("v6e:1x1", dict(rows_per_device=512), 7),
  "softmax_rows": ("v5p:1x1x1", dict(rows_per_device=4096, columns=512), 9),
  "sum_blocks": ("v5p:2x2x1", dict(rows_per_device=32, columns=256), 7),
  "swap_cores": ("v5p:2x2x1", {}, 18),
}
# By example: the mutants that survive, and why they do no harm.
_HARMLESS: dict[str, dict[str, str]] = {}

_X = np.arange(4 * 8 * 256, dtype=np.float32).reshape(32, 256)


@pytest.mark.parametrize("name", _EXAMPLES)
def test_every_mutant_of_an_example_is_caught_or_known_to_be_harmless(name):
  chip_name, changes, num_mutants = _EXAMPLES[name]
  report = _mutate_example(name, chip_name, changes)
  assert set(map(str, report.survivors)) == set(_HARMLESS.get(name, {}))
  assert len(report.mutants) == num_mutants
  assert all(m.is_reached for m in report.mutants)


@pytest.mark.parametrize("name", ["flash_attention", "fused_mlp"])
def test_mutants_of_ready_kernels_in_an_example_are_caught(name):
  # Its arrays fill a block or two, so that workers do not come to the waits for
  # blocks before: tests of the kernels themselves come to those.
  report = _mutate_example(name, "v5p:1x1x1", {}, seeds=1)
  reached = [m for m in report.mutants if m.is_reached]
  assert len(reached) >= 20, report.table()
  assert not [m for m in reached if m in report.survivors], str(report)


def _mutate_example(name, chip_name, changes, **options):
  config = importlib.import_module(f"configs.{name}").get_config()
  config.update(changes)
  chip = cm.chip(chip_name)
  build, args = importlib.import_module(f"examples.{name}").case(chip, config)
  fn = build(chip, chip.device_mesh("device", on="simulator"))
  return cm.mutate(fn, *args, **options)


def _met(*, times: int = 1):
  """Cores swap halves after meeting in so many barriers."""
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(mine=cm.vmem_slab(0, axis=1), theirs=cm.vmem_slab(0, axis=1)),
  )
  def met(x_hbm, o_hbm, *, mine, theirs):
    columns = cm.slab(x_hbm, axis=1)
    cm.copy(x_hbm.at[:, columns], mine)
    cm.core_barrier("core")
    if times == 2:
      cm.core_barrier("core")
    cm.put(mine, theirs, to={"core": cm.next_core("core")}).wait()
    cm.copy(theirs, o_hbm.at[:, columns])

  return support.over_devices(met, mesh)


def _by_change(report, change):
  return [m for m in report.mutants if m.change == change]


def test_a_barrier_that_another_implies_survives_its_deletion():
  report = cm.mutate(_met(times=2), _X)
  # Signals to itself, and those of two cores sent one further, are of no effect
  # but leave the counts right: as good as deleted.
  harmless = {"delete line", "own target", "next target"}
  barriers = {m.place for m in report.mutants if "'barrier'" in m.operation}
  assert len(barriers) == 2
  assert {(m.place, m.change) for m in report.survivors} == {
    (place, change) for place in barriers for change in harmless
  }
  told = str(report).splitlines()
  assert told[0].endswith("mutants caught.")
  assert told[1] == "Nobody noticed:"
  assert told[2:-2] == [f"  {mutant}" for mutant in report.survivors]
  assert told[-2] == "#2 is the second operation that its line makes."
  assert told[-1].endswith("print(report.table()).")
  rows = report.table().splitlines()
  assert len(rows) == len(report.mutants)
  for row, mutant in zip(rows, report.mutants, strict=True):
    assert row.startswith(f"{mutant} ")
    assert row.endswith(mutant.caught_by or "  nobody noticed")
  assert f"  {min(barriers)} delete line" in told
  assert not cm.mutate(_met(), _X).survivors


def test_semaphores_that_coremesh_adds_are_named_for_what_uses_them():
  report = cm.mutate(_met(), _X, seeds=1)
  operations = {m.operation for m in report.mutants}
  assert {
    "wait for the copy of 'cm.copy'",
    "wait for the copy of 'cm.put send[0]'",
    "wait for the copy of 'cm.put receive[0]'",
  } <= operations
  assert "coremesh_" not in report.table() + "".join(
    m.detail for m in report.mutants
  )


def test_each_operation_is_deleted_doubled_and_sent_elsewhere():
  report = cm.mutate(_met(), _X)
  of_barrier = [m for m in report.mutants if "'barrier'" in m.operation]
  assert [(m.operation, m.change) for m in of_barrier] == [
    ("signal of 'barrier'", "delete"),
    ("signal of 'barrier'", "duplicate"),
    ("signal of 'barrier'", "own target"),
    ("signal of 'barrier'", "next target"),
    ("wait for 'barrier'", "delete"),
    ("wait for 'barrier'", "duplicate"),
    ("signal of 'barrier'", "delete line"),
  ]
  assert [m.ordinal for m in of_barrier] == [1, 1, 1, 1, 2, 2, 1]
  assert {m.place for m in of_barrier} == {of_barrier[0].place}
  assert re.fullmatch(r"simulate_mutate_test\.py:\d+", of_barrier[0].place)
  caught = {(m.operation, m.change): m.caught_by or "" for m in of_barrier}
  assert caught["signal of 'barrier'", "delete"] == "deadlock"
  assert "leftover" in caught["signal of 'barrier'", "duplicate"]
  assert "scope" in caught["signal of 'barrier'", "delete line"]
  # A copy is never left out: that is no fault of synchronisation.
  copies = [m for m in report.mutants if m.operation.startswith("copy")]
  assert [m.change for m in copies] == ["own target", "next target"]


def test_a_mutant_says_what_was_found():
  [first] = [
    m
    for m in _by_change(cm.mutate(_met(), _X), "delete")
    if m.operation == "signal of 'barrier'"
  ]
  assert "wait for ever" in first.detail
  assert first.kernel == "met"
  assert str(first) == f"{first.place} #1 delete (signal of 'barrier')"


def test_a_function_is_compiled_once_for_all_mutants(monkeypatch):
  made = []
  start = launch.Launch.__init__

  def counted(self, kernel, params):
    made.append(kernel.name)
    start(self, kernel, params)

  monkeypatch.setattr(launch.Launch, "__init__", counted)
  cm.mutate(_met(), _X)
  assert made == ["met"]


def test_a_function_that_compiles_anew_each_time_has_the_same_mutants():
  once = cm.mutate(_met(), _X, seeds=1)
  anew = cm.mutate(lambda: _met()(_X), seeds=1)
  assert anew.mutants == once.mutants


def test_a_subcore_barrier_is_deleted_too():
  chip, mesh = support.simulated("v6e:1x1")

  @cm.kernel(
    mesh=chip.vector_subcores("core", "subcore"),
    out=cm.like(0),
    scratch=dict(
      shared=pltpu.VMEM_SHARED((16, 16), jnp.int32),
      row=pltpu.VMEM((16,), jnp.int32),
    ),
  )
  def passes_on(x_hbm, o_hbm, *, shared, row):
    core, subcore = jax.lax.axis_index("core"), jax.lax.axis_index("subcore")
    cm.copy(x_hbm.at[core, subcore], row)
    cm.copy(row, shared.at[subcore])
    plsc.subcore_barrier()
    cm.copy(shared.at[(subcore + 1) % 16], row)
    cm.copy(row, o_hbm.at[core, subcore])

  x = np.arange(2 * 16 * 16, dtype=np.int32).reshape(2, 16, 16)
  fn = support.over_devices(
    passes_on, mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
  )
  report = cm.mutate(fn, x, seeds=1)
  [mutant] = [m for m in report.mutants if m.operation == "subcore_barrier"]
  assert mutant.change == "delete"
  assert "race" in (mutant.caught_by or "")


def _polls():
  """Core 1 polls for what core 0 signals."""
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(sem=pltpu.SemaphoreType.REGULAR),
  )
  def polls(x_hbm, o_hbm, *, sem):
    cm.core_barrier("core")
    cm.signal(sem, to={"core": cm.next_core("core")})
    jax.lax.while_loop(
      lambda n: n == 0, lambda n: pl.semaphore_read(sem), pl.semaphore_read(sem)
    )
    cm.wait(sem)

    @pl.when(jax.lax.axis_index("core") == 0)
    def _():
      cm.copy(x_hbm, o_hbm)

  return support.over_devices(polls, mesh)


def test_a_mutant_that_never_ends_is_caught():
  report = cm.mutate(_polls(), _X)
  caught = {m.operation: m.caught_by for m in _by_change(report, "delete")}
  assert caught["signal of 'sem'"] == "endless"
  assert {m.operation for m in report.survivors} == {"signal of 'sem'"}


def test_an_operation_that_no_worker_comes_to_survives_and_says_so():
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(sem=pltpu.SemaphoreType.REGULAR),
  )
  def rarely(x_hbm, o_hbm, *, sem):
    cm.copy(x_hbm, o_hbm)

    @pl.when(jax.lax.axis_index("core") == 7)
    def _():
      cm.wait(sem)

  report = cm.mutate(support.over_devices(rarely, mesh), _X)
  assert [m.is_reached for m in report.survivors] == [False, False]
  assert "where no worker comes" in str(report.survivors[0])


def test_a_mutant_that_cannot_be_compiled_is_caught_by_the_error(monkeypatch):
  write = synchronisation.Operations.write

  def refuses(self, *args):
    mutation = self._mutation
    if mutation is not None and mutation.kind == "duplicate":
      raise cm.AxisError("no such place")
    write(self, *args)

  monkeypatch.setattr(synchronisation.Operations, "write", refuses)
  report = cm.mutate(_met(), _X, seeds=1)
  doubled = _by_change(report, "duplicate")
  assert {m.caught_by for m in doubled} == {"AxisError"}
  assert {m.detail for m in doubled} == {"no such place"}
  assert not report.survivors


def test_the_checks_of_the_function_itself_catch_a_mutant():
  met = _met()

  def checked():
    np.testing.assert_array_equal(met(_X), np.roll(_X, 128, axis=1))

  report = cm.mutate(checked, seeds=1)
  assert "AssertionError" in {m.caught_by for m in report.mutants}


def test_a_function_that_is_wrong_as_it_is_is_refused():
  chip, mesh = support.simulated()

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=cm.like(0),
    scratch=dict(sem=pltpu.SemaphoreType.REGULAR),
  )
  def forgets(x_hbm, o_hbm, *, sem):
    cm.copy(x_hbm, o_hbm)
    cm.signal(sem)

  with pytest.raises(cm.SimulationError, match="leftover") as raised:
    cm.mutate(support.over_devices(forgets, mesh), _X)
  assert "before any change" in raised.value.__notes__[0]


@pytest.mark.parametrize(
  ("words", "is_named"),
  [
    ("swap.py:12", True),
    ("swap.py:12 #2", True),
    ("swap.py:12 delete", True),
    ("swap.py:12 #2 delete", True),
    ("swap.py:1", False),
    ("swap.py:12 #1", False),
    ("swap.py:12 #2 duplicate", False),
    ("swap.py:12 delete line", False),
    ("delete", False),
    ("", False),
  ],
)
def test_a_mutant_is_named_by_its_line_number_and_change(words, is_named):
  mutant = cm.Mutant(
    kernel="swap",
    operation="signal of 'ready'",
    line="swap.py:12 (swap)",
    ordinal=2,
    change="delete",
    caught_by=None,
  )
  assert mutant.is_named_by(words) is is_named


@pytest.mark.parametrize(
  ("fn", "options", "text"),
  [
    (None, {}, "fn must be a function"),
    (_met, dict(seeds=0), "seeds must be how many"),
    (_met, dict(dma="never"), "dma must be one or several"),
    (_met, dict(progress=3), "progress must be True, False or None"),
    (lambda: 3, {}, "ran no kernel in coremesh's simulator"),
  ],
)
def test_what_cannot_be_mutated_is_refused(fn, options, text):
  fn = _met() if fn is _met else fn
  args = (_X,) if options else ()
  with pytest.raises(cm.UnsupportedError, match=text):
    cm.mutate(fn, *args, **options)
