"""Tests of the command `coremesh matrix`."""

import json
import pathlib
import re

import pytest

from coremesh.cli import main, matrix, targets

_ROOT = pathlib.Path(__file__).parents[1]
_PAGE = _ROOT / "docs" / "matrix.md"


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
  monkeypatch.chdir(_ROOT)


def _rows(page: str) -> set[str]:
  """The rows of a table; which number a reason has depends on the others."""
  rows = [line for line in page.splitlines() if line.startswith("|")]
  return {re.sub(r"\[\d+\]", "", row) for row in rows}


def _reasons(page: str) -> set[str]:
  return set(re.findall(r"^\d+\. (.*)$", page, re.MULTILINE))


def test_the_page_in_the_docs_is_what_the_command_writes(tmp_path, capsys):
  """If it is not: coremesh matrix --markdown docs/matrix.md."""
  page = tmp_path / "matrix.md"
  assert (
    main.main(["matrix", *targets.examples(), "--markdown", str(page)]) == 0
  )
  written, kept = page.read_text(), _PAGE.read_text()
  assert len(_rows(written)) == 2 + 5 * len(targets.examples())
  assert not _rows(written) - _rows(kept)
  assert not _reasons(written) - _reasons(kept)
  assert written.split("|")[0] == kept.split("|")[0]


def test_each_program_and_chip_has_a_row_and_each_reason_a_note(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setenv("COLUMNS", "160")
  data = tmp_path / "matrix.json"
  argv = ["matrix", "swap_cores", "sum_blocks", "--chips", "v5p:2x2x1,v6e:2x2"]
  assert main.main([*argv, "--json", str(data)]) == 0
  printed = capsys.readouterr().out
  rows = [r.split() for r in printed.splitlines()[1:5]]
  assert [r[:2] for r in rows] == [
    [program, chip]
    for program in ("swap_cores", "sum_blocks")
    for chip in ("v5p:2x2x1", "v6e:2x2")
  ]
  assert rows[1][-2] == "refused"
  number = rows[1][-1]
  assert f"{number} CollectiveError: to names ['core']" in printed
  cells = json.loads(data.read_text())
  sums = cells[2]
  assert sums["vmem_bytes_per_core"] == sums["vmem_expected_bytes_per_core"]
  assert sums["vmem_limit_bytes_per_core"] == 16 * 2**20
  times = sums["microseconds"]
  assert 0 < times["low"] <= times["central"] <= times["high"]
  [kernel] = sums["kernels"]
  assert kernel["used_bytes"] == sums["vmem_bytes_per_core"]
  assert cells[1]["code_bytes"] is None


def _kernel(used, predicted, expected):
  return matrix.KernelVmem(
    kernel="k",
    used_bytes=used,
    predicted_bytes=predicted,
    expected_bytes=expected,
  )


@pytest.mark.parametrize(
  ("kernels", "text"),
  [
    ([], "-"),
    ([_kernel(8, 8, 8)], "exact"),
    ([_kernel(8, 9, 8)], "explained"),
    ([_kernel(100, 90, 90)], "-10.0%"),
    ([_kernel(8, 8, 8)] * 2, "exact"),
    ([_kernel(8, 8, 8), _kernel(8, 9, 8)], "explained"),
    # The smaller kernel is the one that is off.
    ([_kernel(800, 800, 800), _kernel(100, 103, 103)], "+3.0%"),
    ([_kernel(8, 8, 8), _kernel(None, 9, 9)], "-"),
  ],
)
def test_the_ledger_of_a_program_is_the_worst_of_its_kernels(kernels, text):
  found = matrix.Cell(target="t", chip="v5p", kernels=tuple(kernels))
  assert matrix._ledger(found) == text


@pytest.mark.parametrize(
  ("words", "reason"),
  [
    (["nothing"], "there is no module 'examples.nothing' here"),
    (["swap_cores", "--chips", "v9"], "There is no chip 'v9'"),
    (["swap_cores", "--chips", "v5p:2x2x1,,"], "There is no chip ''"),
  ],
)
def test_a_request_that_cannot_be_met_says_why_and_exits_with_2(
  words, reason, capsys
):
  assert main.main(["matrix", *words]) == 2
  assert reason in capsys.readouterr().err
