"""Tables of what became of JAX's tests."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.jax_suites.suites import Explained

type Runs = Mapping[tuple[str, str], Sequence[Explained]]  # By file and chip.

_OUTCOMES = ("passed", "failed", "skipped", "timed out", "crashed")


def outcomes(runs: Runs) -> Table:
  """A table of how many tests of each file passed on each chip."""
  table = Table(
    "file", "chip", *_OUTCOMES, "of passed: findings",
    title="JAX's TPU tests in coremesh's simulator",
  )  # fmt: skip
  totals: dict[str, Counter[str]] = {}
  for (file, chip), tests in runs.items():
    counts = Counter(test.result.outcome for test in tests)
    counts["findings"] = sum(
      test.result.outcome == "passed" and bool(test.result.findings)
      for test in tests
    )
    totals.setdefault(chip, Counter()).update(counts)
    table.add_row(file, chip, *_cells(counts))
  table.add_section()
  for chip, counts in totals.items():
    table.add_row("all", chip, *_cells(counts))
  return table


def _cells(counts: Counter[str]) -> list[str]:
  return [str(counts[name]) for name in (*_OUTCOMES, "findings")]


def why(runs: Runs) -> Table:
  """A table of the reasons of what failed."""
  chips = list(dict.fromkeys(chip for _, chip in runs))
  counts: Counter[tuple[str, str]] = Counter()
  for (_, chip), tests in runs.items():
    counts.update((test.reason, chip) for test in tests if test.reason)
  names = sorted({name for name, _ in counts}, key=lambda n: (n[0] == "u", n))
  table = Table("why it failed", *chips)
  for name in names:
    table.add_row(name, *(str(counts[name, chip]) for chip in chips))
  return table
