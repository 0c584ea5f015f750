"""Tests for coremesh.guard: figures, golden files and verdicts."""

import dataclasses
import subprocess
import sys
import textwrap

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh.guard import compare, counting, figures, golden, outcomes
from coremesh.guard.compare import Verdict
from coremesh.guard.figures import OTHERS, OperationFigures
from coremesh.guard.golden import Golden, GoldenError
from tests import profiling

_CHIP = "v6e:2x2"
_VERSIONS = {"jax": "1.0", "jaxlib": "1.0", "libtpu": "1.0"}


def _figures(make) -> figures.Figures:
  found = counting.figures_of(outcomes.outcome(make, cm.chip(_CHIP)))
  assert found is not None
  return found


def _golden(**changes) -> Golden:
  """A golden of one kernel, with changes to its figures."""
  operation = dict(
    name="kernel",
    bundles=100,
    code="c0de",
    cycles=1000,
    vmem_bytes_per_core=4096,
    operations_beside=None,
  )
  of_operation = {n: changes.pop(n) for n in tuple(changes) if n in operation}
  program = dict(
    code_bytes=1000,
    arguments="a",
    operations=(OperationFigures(**(operation | of_operation)),),
    unpredicted=None,
    num_assumed=0,
  )
  of_program = {n: changes.pop(n) for n in tuple(changes) if n in program}
  fields = dict(
    target="module:f",
    chip=_CHIP,
    versions=_VERSIONS,
    figures=figures.Figures(**(program | of_program)),
    refusal=None,
  )
  return Golden(**(fields | changes))


_REFUSED = _golden(figures=None, refusal="CompileError: no")


def _verdicts(before, now, **options):
  [row] = compare.compare(before, now, **options)
  return row.verdicts


# --- verdicts --------------------------------------------------------------


@pytest.mark.parametrize(
  ("changes", "verdict", "is_worse"),
  [
    (dict(), Verdict.SAME, False),
    (dict(code="other"), Verdict.SAME, False),
    (dict(code="other", cycles=1001), Verdict.SLOWER, True),
    (dict(code="other", cycles=999), Verdict.FASTER, False),
    (dict(arguments="b", cycles=1001), Verdict.SLOWER, True),
    (dict(cycles=1100), Verdict.OTHER_MODEL, False),
    (dict(cycles=None), Verdict.NOT_PREDICTED, True),
    (dict(vmem_bytes_per_core=4097), Verdict.MORE_VMEM, True),
    (dict(vmem_bytes_per_core=4095), Verdict.SAME, False),
    (dict(code="other", bundles=110), Verdict.SAME, False),
    (dict(code="other", bundles=111), Verdict.LONGER_CODE, False),
    (dict(figures=None, refusal="no"), Verdict.COMPILE_BREAK, True),
  ],
)
def test_each_change_has_its_verdict(changes, verdict, is_worse):
  [row] = compare.compare(_golden(), _golden(**changes))
  assert row.verdicts == (verdict,)
  assert row.is_worse == is_worse


@pytest.mark.parametrize(
  ("changes", "verdict", "is_worse"),
  [
    (dict(code="other", bundles=101), Verdict.MORE_BUNDLES, True),
    (dict(code="other", bundles=100), Verdict.OTHER_CODE, False),
    (dict(code="other", bundles=99), Verdict.OTHER_CODE, False),
    (dict(cycles=1000), Verdict.OTHER_MODEL, False),
    (dict(), Verdict.SAME, False),
  ],
)
def test_without_a_prediction_the_length_of_the_code_speaks(
  changes, verdict, is_worse
):
  [row] = compare.compare(
    _golden(cycles=None), _golden(**{"cycles": None, **changes})
  )
  assert row.verdicts == (verdict,)
  assert row.is_worse == is_worse


def test_several_things_may_be_said_of_one_kernel():
  now = _golden(code="other", cycles=900, vmem_bytes_per_core=8192)
  [row] = compare.compare(_golden(), now)
  assert row.verdicts == (Verdict.FASTER, Verdict.MORE_VMEM)
  assert row.is_worse


@pytest.mark.parametrize(
  ("number", "words"), [(1, "1 assumption"), (2, "2 assumptions")]
)
def test_what_a_prediction_assumes_is_counted(number, words):
  [row] = compare.compare(_golden(), _golden(num_assumed=number))
  assert row.note == f"the prediction rests on {words}"


def test_refusals_are_not_news_but_their_end_is():
  assert _verdicts(_REFUSED, _REFUSED) == (Verdict.REFUSED,)
  assert _verdicts(_REFUSED, _golden()) == (Verdict.COMPILES_NOW,)
  assert compare.new(_REFUSED).note == "CompileError: no"


def test_with_other_versions_little_more_is_not_worse_yet():
  other = {**_VERSIONS, "libtpu": "1.1"}
  now = _golden(code="other", cycles=1019, versions=other)
  [row] = compare.compare(_golden(), now)
  assert row.verdicts == (Verdict.SAME,)
  assert row.note == "versions differ: libtpu 1.0 -> 1.1"
  now = _golden(code="other", cycles=1021, versions=other)
  assert _verdicts(_golden(), now) == (Verdict.SLOWER,)
  assert _verdicts(_golden(), now, tolerance=0.05) == (Verdict.SAME,)


def test_kernels_that_come_and_go_are_named():
  before = _golden(name="old")
  rows = compare.compare(before, _golden(name="new"))
  assert {r.operation: r.verdicts for r in rows} == {
    "old": (Verdict.MISSING,),
    "new": (Verdict.NEW,),
  }


def test_operations_of_xlas_around_the_kernels_cost_what_they_take():
  kernel = _golden().figures
  assert kernel is not None

  def with_copy(cycles, bundles):
    copy = OperationFigures(
      name=OTHERS, bundles=bundles, code="copy", cycles=cycles
    )
    operations = (*kernel.operations, copy)
    return _golden(operations=operations)

  one, two = compare.compare(_golden(), with_copy(50, 10))
  assert one.verdicts == (Verdict.SAME,)
  assert two.verdicts == (Verdict.SLOWER,) and two.operation == OTHERS
  _, two = compare.compare(with_copy(50, 10), _golden())
  assert two.verdicts == (Verdict.FASTER,)


# --- figures ---------------------------------------------------------------


def _sparse(chip, *, is_beside: bool):
  """A SparseCore kernel and a product, which may run meanwhile or must not."""

  @cm.kernel(mesh=chip.vector_subcores(), out=cm.like(0))
  def copies(x_hbm, o_hbm):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], o_hbm.at[rows])

  def fn(x, y):
    found = copies(x)
    if not is_beside:
      y, found = jax.lax.optimization_barrier((y, found))
    return found, y @ y

  x = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
  return fn, (x, jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16))


def test_what_runs_beside_a_sparse_core_kernel_is_counted():
  """The public slow-down of pl.kernel on SparseCores was such a loss."""
  beside, alone = (
    _golden(figures=_figures(lambda chip: _sparse(chip, is_beside=is_beside)))
    for is_beside in (True, False)
  )
  counts = [
    g.figures.operation("copies").operations_beside for g in (beside, alone)
  ]
  assert counts == [1, 0]
  rows = compare.compare(beside, alone)
  assert rows[0].verdicts == (Verdict.LESS_OVERLAP,) and rows[0].is_worse
  assert compare.compare(alone, beside)[0].verdicts == (Verdict.SAME,)


def test_figures_are_the_same_each_time_and_wherever_the_kernel_stands(
  tmp_path,
):
  source = """
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
def case(chip):
  def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2
  x = jax.ShapeDtypeStruct((256, 128), "float32")
  return pl.pallas_call(double, out_shape=x), (x,)
"""
  found = []
  for name, lines in (("a.py", ""), ("b.py", "\n\n")):
    names: dict = {}
    path = str(tmp_path / name)
    exec(compile(lines + source, path, "exec"), names)
    found.append(_figures(names["case"]))
  assert found[0] == found[1]
  assert found[0] == _figures(names["case"])


def test_values_that_may_steer_a_kernel_are_part_of_the_figures():
  def with_table(table):
    fn, (_, x) = profiling.gather(16)
    return _figures(lambda chip: (fn, (np.array(table, np.int32), x)))

  same, other = with_table([3] * 16), with_table([1, 2] * 8)
  [one], [two] = same.operations, other.operations
  assert one.code == two.code and one.cycles < two.cycles
  verdicts = _verdicts(_golden(figures=same), _golden(figures=other))
  assert verdicts == (Verdict.SLOWER,)


def test_kernels_of_one_name_are_numbered():
  x = jax.ShapeDtypeStruct((256, 128), jnp.float32)

  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

  kernel = pl.pallas_call(body, out_shape=x)
  found = _figures(lambda chip: (lambda x: kernel(kernel(x)), (x,)))
  assert [o.name for o in found.operations] == ["body", "body #2"]


def test_code_of_an_unknown_form_is_an_error():
  compiled = cm.compile(*_sparse_program(), chip=_CHIP)
  changed = tuple(
    dataclasses.replace(o, texts={"sparsecore": "no bundles at all"})
    if o.kernel
    else o
    for o in compiled.operations
  )
  found = outcomes.Outcome(
    compiled=dataclasses.replace(compiled, operations=changed)
  )
  with pytest.raises(cm.UnsupportedError, match="must have lines such as"):
    counting.figures_of(found)


def _sparse_program():
  fn, args = _sparse(cm.chip(_CHIP), is_beside=True)
  return fn, *args


def test_a_kernel_that_cannot_be_made_traced_or_compiled_is_refused():
  def outcome(make):
    found = outcomes.outcome(make, cm.chip(_CHIP))
    assert counting.figures_of(found) is None
    return found.refusal

  x = jax.ShapeDtypeStruct((256, 128), jnp.float32)

  def body(x_ref, o_ref, scratch):
    scratch[:256] = x_ref[...]
    o_ref[...] = scratch[-256:]

  large = pl.pallas_call(
    body, out_shape=x, scratch_shapes=[pltpu.VMEM((2**20, 128), x.dtype)]
  )
  assert outcome(lambda chip: 1 / 0) == "ZeroDivisionError: division by zero"
  assert outcome(lambda chip: (jnp.dot, (x, x))).startswith("TypeError: dot")
  refusal = outcome(lambda chip: (large, (x,)))
  assert refusal.startswith("CompileError: ") and "fit the VMEM" in refusal


# --- golden files ----------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
  for one in (_golden(), _golden(cycles=None, unpredicted="why"), _REFUSED):
    golden.write(tmp_path, one)
    assert golden.read(tmp_path, one.target, one.chip) == one
    assert list(golden.read_all(tmp_path)) == [one]
  assert golden.read(tmp_path, "module:g", _CHIP) is None
  path = golden.path_of(tmp_path, "module:f", _CHIP)
  assert path == tmp_path / "v6e-2x2" / "module-f.json"


@pytest.mark.parametrize(
  ("spoil", "reason"),
  [
    (lambda text: text[: len(text) // 2], "JSONDecodeError"),
    (lambda text: "", "JSONDecodeError"),
    (lambda text: "[]", "dict|ValueError|KeyError"),
    (lambda text: text.replace("guard-1", "guard-9"), "its format must be"),
    (lambda text: text.replace('"cycles"', '"circles"'), "circles"),
    (lambda text: text.replace("1000,", '"many",'), "must be of type int"),
    (lambda text: text.replace('"bundles": 100,', ""), "bundles"),
  ],
)
def test_a_corrupt_golden_is_an_error_that_names_it(spoil, reason, tmp_path):
  path = golden.write(tmp_path, _golden())
  path.write_text(spoil(path.read_text()))
  with pytest.raises(GoldenError, match=reason) as error:
    golden.read(tmp_path, "module:f", _CHIP)
  assert str(path) in str(error.value)
  assert "Record it again" in str(error.value)


def test_a_golden_of_another_target_is_not_taken_for_it(tmp_path):
  golden.write(tmp_path, _golden())
  with pytest.raises(GoldenError, match="must be the golden of module-f on"):
    golden.read(tmp_path, "module-f", _CHIP)


def test_a_golden_says_figures_or_a_refusal():
  with pytest.raises(ValueError, match="either figures or a refusal"):
    _golden(refusal="no")


def test_a_disk_that_takes_no_golden_is_an_error_and_keeps_the_old(
  tmp_path, monkeypatch
):
  path = golden.write(tmp_path, _golden())
  before = path.read_text()

  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(golden.os, "replace", full)
  with pytest.raises(GoldenError, match="cannot be written.*No space left"):
    golden.write(tmp_path, _golden(cycles=1))
  assert path.read_text() == before
  assert list(path.parent.iterdir()) == [path]


_WRITER = """
  import pathlib, sys, time
  from coremesh.guard import figures, golden

  folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
  end = time.monotonic() + 1
  while time.monotonic() < end:
    found = golden.Golden(
      target="f", chip="v6e", versions={"jax": "1"}, refusal="no" * number,
      figures=None,
    )
    golden.write(folder, found)
    assert golden.read(folder, "f", "v6e").refusal in ("no" * 1000, "no" * 9000)
"""


def test_processes_that_record_at_once_read_and_leave_a_whole_golden(tmp_path):
  words = [sys.executable, "-W", "error", "-c", textwrap.dedent(_WRITER)]
  processes = [
    subprocess.Popen([*words, str(tmp_path), number], stderr=subprocess.PIPE)
    for number in ("1000", "9000")
  ]
  printed = [p.communicate(timeout=60)[1] for p in processes]
  assert printed == [b""] * 2
  assert [p.name for p in tmp_path.glob("*/*")] == ["f.json"]
