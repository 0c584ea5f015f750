"""JAX's suites: a tiny suite run for real, and why tests fail."""

import pathlib

import pytest
from rich.console import Console

from benchmarks.jax_suites import reasons, report, runner, suites
from benchmarks.jax_suites.runner import Result, Suite

_SUITE = """
import threading
import unittest

import jax
from jax._src import test_util as jtu
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

X = jnp.ones((8, 128), jnp.float32)


def add_one(x_ref, o_ref):
  o_ref[...] = x_ref[...] + 1


class KernelTest(unittest.TestCase):

  def test_a_kernel(self):
    assert jtu.is_device_tpu(6, "e") and pltpu.get_tpu_info().num_cores == 1
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    assert mesh.abstract_mesh.abstract_device.num_cores == 1
    kernel = pl.pallas_call(add_one, out_shape=X)
    np.testing.assert_array_equal(kernel(X), X + 1)

  def test_hang(self):
    threading.Event().wait()

  def test_refused(self):
    def cumsum(x_ref, o_ref):
      o_ref[...] = jnp.cumsum(x_ref[...], axis=0)

    with self.assertRaisesRegex(NotImplementedError, "in Pallas TPU lowering"):
      kernel = pl.pallas_call(cumsum, out_shape=X)
      kernel(X)

  def test_taken(self):
    with self.assertRaisesRegex(ValueError, "no such words"):
      pl.pallas_call(add_one, out_shape=X)(X)

  def test_skipped(self):
    if jax.device_count() > 2:
      self.skipTest("for two devices")

  def test_subtests(self):
    for number in (1, 2):
      with self.subTest(number):
        self.assertEqual(number, 1)
"""


def _suite(folder: pathlib.Path, seconds: float = 10.0) -> Suite:
  file = folder / "tpu_pallas_state_test.py"
  file.write_text(_SUITE)
  return Suite(file=file, chip="v6e:2x2", seconds=seconds)


def test_one_test_that_hangs_does_not_keep_the_others_from_running(tmp_path):
  counts = []
  results = runner.run(
    _suite(tmp_path),
    num_devices=4,
    report=lambda done, total: counts.append((done, total)),
  )
  outcomes = {name: result.outcome for name, result in results.items()}
  assert outcomes == {
    "KernelTest.test_a_kernel": "passed",
    "KernelTest.test_hang": "timed out",
    "KernelTest.test_refused": "failed",
    "KernelTest.test_skipped": "skipped",
    "KernelTest.test_subtests": "failed",
    "KernelTest.test_taken": "failed",
  }
  assert counts == [(n, 6) for n in range(1, 7)]
  assert results["KernelTest.test_a_kernel"].kernels == 1
  assert "in test_hang" in results["KernelTest.test_hang"].error
  assert "2 != 1" in results["KernelTest.test_subtests"].error


def test_a_refusal_is_asked_of_the_compiler(tmp_path):
  names = ["KernelTest.test_refused", "KernelTest.test_taken"]
  results = runner.run(
    _suite(tmp_path, 60.0), num_devices=1, tests=names, kernels="compile"
  )
  outcomes = [results[name].outcome for name in names]
  assert outcomes == ["passed", "failed"], results
  assert "AcceptedError" in results[names[1]].error


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path):
  file = tmp_path / "tpu_pallas_state_test.py"
  file.write_text("import jax.no_such_module")
  with pytest.raises(runner.LoadError, match="no_such_module"):
    runner.run(Suite(file=file, chip="v5p:2x2x1", seconds=10.0), num_devices=1)


def _failed(error: str, name: str = "SomeTest.test_some") -> Result:
  return Result(name=name, outcome="failed", error=error)


_NOT_RAISED = "raise it\nAssertionError: NotImplementedError not raised"
_OTHER_WORDS = 'AssertionError: "must be 1-D" does not match "rank is 2"'


_OWN_WORDS = "coremesh.errors.AxisError: 'scratch_ref' is on the cores of"


@pytest.mark.parametrize("error", [_NOT_RAISED, _OTHER_WORDS, _OWN_WORDS])
def test_who_expects_a_refusal_is_told_by_the_compiler(error):
  failed = _failed(error)
  assert reasons.expects_refusal(failed)
  passed = Result(name=failed.name, outcome="passed")
  assert reasons.reason(failed, passed) == reasons.REFUSED
  assert reasons.reason(failed, failed) == reasons.NOT_REFUSED


_FAR = "Max relative difference among violations: "
_NEAR = f"""Not equal to tolerance rtol=1e-07, atol=0
Max absolute difference among violations: 9.1e-05
{_FAR}0.068
"""
_IN_JAX = """in lower_jaxpr_to_fun
    for pom, mk, types in zip(propagated_out_mem_kinds, result_memory_kinds,
                              output_types):
ValueError: safe_zip() argument 1 has length 2"""


@pytest.mark.parametrize(
  "error, name, words",
  [
    (f"{_FAR}2.38e-07\n", "T.test_exp", "rounding on the CPU"),
    (f"{_FAR}5.1e-07\n", "T.test_exp", "unexplained"),
    ("AssertionError: [] has length of 0", "T.test_hlo", "compiler prints"),
    ("IndexError: [] has length of 0", "T.test_hlo", "unexplained"),
    ("No such compile option: 'xla_tpu_x'", "T.test_x", "sets an option"),
    (
      "Effects not supported in AD of `checkpoint`/`remat`: []",
      "T.test_remat",
      "jax.checkpoint",
    ),
    (_IN_JAX, "T.test_host", "memory kinds"),
    (_NEAR, "T.test_pipeline_matmul1", "product"),
    (_NEAR.replace("e-05", "e-01"), "T.test_matmul", "unexplained"),
    (_NEAR, "T.test_sum", "unexplained"),
    ("SimulationError: [deadlock]", "T.test_ring", "unexplained"),
  ],
)
def test_each_reason_is_known_by_the_error_or_the_test(error, name, words):
  assert words in reasons.reason(_failed(error, name), None)


@pytest.mark.parametrize(
  "name, findings, is_fault",
  [
    ("VectorSubcoreTest.test_barrier", ("race", "scope"), True),
    ("VectorSubcoreTestWithTCTiling.test_barrier", ("race",), True),
    ("VectorSubcoreTest.test_barrier", (), False),
    ("VectorSubcoreTest.test_barrier_of_all", ("race",), False),
  ],
)
def test_a_fault_of_a_test_is_one_that_the_simulator_finds(
  name, findings, is_fault
):
  result = Result(name=name, outcome="failed", findings=findings)
  told = reasons.fault(result)
  assert (told is not None and "neighbour" in told) == is_fault
  expected = reasons.TEST_FAULT if is_fault else reasons.UNEXPLAINED
  assert reasons.reason(result, None) == expected


def test_what_is_skipped_is_tried_on_fewer_devices(tmp_path, monkeypatch):
  calls = []

  def run(suite, *, num_devices, tests=None, kernels="simulate", report=None):
    calls.append((num_devices, tests, kernels))
    wanted = {"T.a": 4, "T.b": 2, "T.c": 1, "T.d": 0}
    return {
      name: Result(
        name=name,
        outcome="passed" if devices == num_devices else "skipped",
        num_devices=num_devices,
      )
      for name, devices in wanted.items()
      if tests is None or name in tests
    }

  monkeypatch.setattr(runner, "run", run)
  tests = suites.explained(_suite(tmp_path), lambda done, total: None)
  outcomes = {t.result.name: t.result.outcome for t in tests}
  assert outcomes == dict.fromkeys(("T.a", "T.b", "T.c"), "passed") | {
    "T.d": "skipped"
  }
  assert calls == [
    (4, None, "simulate"),
    (2, ["T.b", "T.c", "T.d"], "simulate"),
    (1, ["T.c", "T.d"], "simulate"),
  ]


def test_suites_are_found_in_a_checkout_and_in_a_folder(tmp_path):
  file = _suite(tmp_path).file
  assert suites.find(tmp_path, ()) == [file]
  inner = tmp_path / "tests" / "pallas"
  inner.mkdir(parents=True)
  file = file.rename(inner / file.name)
  assert suites.find(tmp_path, ()) == [file]


def test_a_folder_without_suites_is_an_error(tmp_path):
  with pytest.raises(suites.NoSuitesError, match="must be a checkout of JAX"):
    suites.find(tmp_path, ())
  _suite(tmp_path)
  with pytest.raises(suites.NoSuitesError, match="holds no other_test.py, and"):
    suites.find(tmp_path, ["tpu_pallas_state_test.py", "other_test.py"])


def test_the_tables_count_outcomes_and_reasons():
  tests = [
    suites.Explained(
      result=Result(name="T.a", outcome="passed", findings=("race",))
    ),
    suites.Explained(result=_failed("", "T.b"), reason="a reason"),
    suites.Explained(result=_failed("", "T.c"), reason="a reason"),
  ]
  runs = {("f_test.py", "v5p"): tests}
  console = Console(width=100, record=True)
  console.print(report.outcomes(runs), report.why(runs))
  lines = [
    [cell.strip() for cell in line.split("│")[1:-1]]
    for line in console.export_text().splitlines()
  ]
  assert ["f_test.py", "v5p", "1", "2", "0", "0", "0", "1"] in lines
  assert ["all", "v5p", "1", "2", "0", "0", "0", "1"] in lines
  assert ["a reason", "2"] in lines
