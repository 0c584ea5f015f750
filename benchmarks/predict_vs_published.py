r"""cm.predict against the times that tokamax publishes for v5p, v6e and others.

Each kernel is compiled here for the chip with its published configuration and
predicted, all operations of its program together, for that is what was timed.
Nothing runs on a TPU. Bandwidth, latency and clock are fitted on every other
entry and scored on the rest; the table shows both halves.

What cannot be compiled or predicted is named with the reason. What came of an
entry is kept in OUT/records.jsonl at once, so that a run which is interrupted
goes on where it was; `--again` starts afresh, `--rescore` only scores.

To run, in an environment of its own, since tokamax brings much:
  pip install -e . matplotlib tokamax
  python -m benchmarks.predict_vs_published --quick=3
  python -m benchmarks.predict_vs_published --chip=v5p --family="ragged dot v1"
  python -m benchmarks.predict_vs_published --rescore \
    --picture=docs/images/predict_vs_published.png
"""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.progress import track

from benchmarks.published import entries, record, score, show
from benchmarks.published.entries import Entry
from benchmarks.published.record import Record, Records
from benchmarks.published.score import Constants
from coremesh import chips, errors
from coremesh.profile import rates

_OUT = pathlib.Path("benchmarks/out/predict_vs_published")
_WIDTH = 150


def _options(argv: Sequence[str]) -> argparse.Namespace:
  # Not flags of absl, which are one set for all programs that tests import.
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.predict_vs_published",
    description="cm.predict against the times that tokamax publishes.",
  )
  add = parser.add_argument
  add("--chip", default="", help="only these generations, with commas")
  add("--family", default="", help="only these kernels, with commas")
  add("--quick", type=int, help="only so many of each chip and family")
  add("--most_ms", type=float, help="leave out longer ones")
  add("--timeout_seconds", type=float, default=600.0, help="to compile one")
  add("--again", action="store_true", help="forget what is kept")
  add("--rescore", action="store_true", help="only score what is kept")
  add("--out", type=pathlib.Path, default=_OUT, help="folder of all results")
  add("--picture", type=pathlib.Path, help="also write the picture here, small")
  options = parser.parse_args(argv)
  try:
    entries.tokamax_version()
    options.chip = entries.choose("--chip", options.chip, entries.CHIPS)
    options.family = entries.choose(
      "--family", options.family, entries.FAMILIES
    )
    if options.quick is not None and options.quick < 1:
      raise ValueError(f"--quick must be at least 1; got {options.quick}.")
  except (ValueError, errors.UnsupportedError) as error:
    sys.exit(str(error))
  return options


def chosen(found: Sequence[Entry], quick: int | None) -> list[Entry]:
  """Usable entries, or `quick` of them, evenly over their times."""
  usable = [e for e in found if not e.unusable]
  if quick is None or quick >= len(usable):
    return usable
  places = np.linspace(0, len(usable) - 1, quick).astype(int)
  return [usable[i] for i in sorted(set(places))]


def spread(wanted: Sequence[Entry]) -> list[Entry]:
  """In another order: whatever is done first lies evenly over all.

  The place of an entry in it is its own with the bits reversed.
  """
  bits = max(1, len(wanted) - 1).bit_length()
  backwards = lambda i: int(f"{i:0{bits}b}"[::-1], 2)
  return [wanted[i] for i in sorted(range(len(wanted)), key=backwards)]


def library_constants(chip: str, which: str = "central") -> Constants:
  """What `cm.predict` uses."""
  rate = rates.rates(chips.chip(entries.CHIPS[chip][0]))
  return Constants(
    bytes_per_second=getattr(rate.hbm_bytes_per_second_per_device, which),
    latency_seconds=getattr(rate.hbm_latency_seconds, which),
    clock_hz=getattr(rate.clock_hz, which),
  )


def _made(
  wanted: Sequence[Entry], kept: Records, options: argparse.Namespace
) -> list[Record]:
  """A record of each entry, those that are kept or made now."""
  found = kept.read()
  missing = [e for e in spread(wanted) if e.name not in found]
  if options.rescore:
    missing = []
  for entry in track(missing, description="compile and predict"):
    found[entry.name] = record.made(entry, options.timeout_seconds)
    kept.add(found[entry.name])
  return [found[e.name] for e in wanted if e.name in found]


def _scored(records: Sequence[Record], constants: Constants) -> score.Score:
  return score.score(
    [r.measured_us for r in records],
    [score.predicted_us(r, constants) for r in records],
  )


def _by_chip(records: Sequence[Record]) -> dict[str, list[Record]]:
  found: dict[str, list[Record]] = {}
  for one in records:
    found.setdefault(one.chip, []).append(one)
  return found


def _evaluate(records: Sequence[Record]) -> dict[str, Any]:
  """Constants, scores and ratios; all that is shown of predictions."""
  constants: dict[str, dict[str, Constants]] = {}
  scores: dict[tuple[str, str, str], score.Score] = {}
  ratios: dict[str, float] = {}
  for chip, of_chip in _by_chip(records).items():
    fit, test = score.halves(of_chip)
    library = library_constants(chip)
    constants[chip] = {"cm.predict": library}
    if fit and test:
      constants[chip]["first half"] = score.fitted(fit, library)
    for one in of_chip:
      ratios[one.name] = score.predicted_us(one, library) / one.measured_us
    for family in (*dict.fromkeys(r.family for r in of_chip), "all"):
      mine = lambda part, f=family: [r for r in part if f in (r.family, "all")]
      halves = {"fitted": fit, "scored": test, "both": of_chip}
      for name, part in halves.items():
        scores[chip, family, name] = _scored(mine(part), library)
    if "first half" in constants[chip]:
      refitted = constants[chip]["first half"]
      scores[chip, "all, fitted again", "scored"] = _scored(test, refitted)
  return {"constants": constants, "scores": scores, "ratios": ratios}


def _plain(found: dict[str, Any]) -> dict[str, Any]:
  return {
    "constants": {
      chip: {n: dataclasses.asdict(c) for n, c in of_chip.items()}
      for chip, of_chip in found["constants"].items()
    },
    "scores": [
      {"chip": chip, "family": family, "half": half} | dataclasses.asdict(one)
      for (chip, family, half), one in found["scores"].items()
    ],
    "ratios": found["ratios"],
  }


def main(argv: Sequence[str] | None = None) -> None:
  options = _options(sys.argv[1:] if argv is None else argv)
  kept = Records(options.out / "records.jsonl")
  if options.again:
    kept.path.unlink(missing_ok=True)
  published, wanted = [], []
  for chip in options.chip:
    for family in options.family:
      found = _published(chip, family, options.most_ms)
      published += found
      wanted += chosen(found, options.quick)
  records = _made(wanted, kept, options)
  _report(records, published, options)


def _published(chip: str, family: str, most_ms: float | None) -> list[Entry]:
  """Entries; those longer than asked for are named unusable."""
  found = entries.published(chip, family)
  if most_ms is None:
    return found
  why = f"longer than {most_ms:g} ms"
  return [
    dataclasses.replace(e, unusable=why)
    if not e.unusable and e.measured_us > most_ms * 1e3
    else e
    for e in found
  ]


def _report(
  records: Sequence[Record],
  published: Sequence[Entry],
  options: argparse.Namespace,
) -> None:
  predicted = [r for r in records if not r.error]
  found = _evaluate(predicted)
  ratios = found["ratios"]
  shapes = {(r.chip, r.family, score.shape(r.operands)) for r in predicted}
  version = entries.tokamax_version()
  Console(width=_WIDTH).print(
    Group(
      show.unusable(published),
      show.failures(records),
      show.outliers(predicted, ratios),
      show.costs(predicted),
      show.constants(found["constants"]),
      show.scores(found["scores"]),
    ),
    f"{len(predicted)} of {len(records)} entries predicted, of {len(shapes)}"
    f" distinct shapes; tokamax {version}. All of it is in {options.out}.",
    sep="\n",
  )
  options.out.mkdir(parents=True, exist_ok=True)
  result = {"tokamax": version} | _plain(found)
  (options.out / "result.json").write_text(json.dumps(result, indent=1))
  if predicted:
    show.plot(predicted, ratios, options.out / "predicted.png")
    if options.picture:
      show.plot(predicted, ratios, options.picture, dpi=110)


if __name__ == "__main__":
  main()
