"""An explanation as plain data, which is what JSON holds and `compare` reads.

A key that goes, or that means something else, raises `VERSION`; a new key does
not.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

from coremesh import errors
from coremesh.compiler.ledger import Ledger
from coremesh.explanation import alike, life, memory
from coremesh.explanation.findings import Findings
from coremesh.explanation.hot_lines import HotLine
from coremesh.explanation.roofline import Roofline
from coremesh.profile.prediction import OperationPrediction

FORMAT = "coremesh explanation"
VERSION = 1
_NUM_STRETCHES = 64
_MOST_GROUPS = 8  # of cores with a life; the fastest and slowest are among them


def of(found: Findings) -> dict[str, Any]:
  """The explanation as lists, dicts, numbers and strings."""
  return {
    "format": FORMAT,
    "version": VERSION,
    "source": "predicted from compiled bundles, not measured",
    "name": found.name,
    "chip": found.chip,
    "versions": dict(found.versions),
    "arguments_digest": found.arguments,
    "compile_seconds": found.compile_seconds,
    "is_from_cache": found.is_from_cache,
    "predict_seconds": found.prediction.predict_seconds,
    "memory_bytes_per_device": dict(found.memory_bytes_per_device),
    "microseconds": dataclasses.asdict(found.prediction.microseconds),
    "overlap_microseconds": found.prediction.overlap_microseconds.central,
    "ledgers": [_ledger(one) for one in found.ledgers],
    "operations": [_operation(o, found) for o in found.prediction.operations],
    "unpredicted": [
      {"operation": name, "label": found.labels[name], "reason": reason}
      for name, reason in found.unpredicted.items()
    ],
    "assumed": list(found.prediction.assumed),
    "left_out": list(found.prediction.left_out),
    "dropped": list(found.dropped),
  }


def load(path: pathlib.Path) -> dict[str, Any]:
  """A record that was written to a file.

  Raises:
    UnsupportedError: it is not there or not such a record.
  """
  try:
    found = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise errors.UnsupportedError(
      f"{path} must be a file that `coremesh explain --json` wrote: {error}"
    ) from error
  return checked(found, str(path))


def checked(found: Any, name: str) -> dict[str, Any]:
  """The record, if it is one of this version.

  Args:
    found: what may be a record.
    name: what to call it.

  Raises:
    UnsupportedError: it is none.
  """
  if not isinstance(found, dict) or found.get("format") != FORMAT:
    raise errors.UnsupportedError(
      f"{name} must hold what `coremesh explain --json` writes, with"
      f' "format": "{FORMAT}"; it holds something else.'
    )
  if found.get("version") != VERSION:
    raise errors.UnsupportedError(
      f"{name} is a record of version {found.get('version')}; this coremesh"
      f" reads version {VERSION}. Let `coremesh explain --json` write it again."
    )
  return found


def _ledger(one: Ledger) -> dict[str, Any]:
  return {
    "kernel": one.kernel,
    "chip": one.chip,
    "is_sparse": one.is_sparse,
    "memories": {
      name: {
        "unit": "count" if name == "semaphores" else "bytes",
        "predicted_per_core": one.predicted(name),
        "used_per_core": one.used(name),
        "limit_per_core": one.limit(name),
      }
      for name in memory.MEMORIES
    },
    "expected_vmem_bytes_per_core": one.expected_vmem_bytes,
    "spilled_bytes_per_core": one.spilled_bytes,
    "spilled_vector_bytes_per_core": one.spilled_vector_bytes,
    "own_vmem_bytes_per_core": dict(one.own_vmem_bytes),
    "collective_id": one.collective_id,
    "buffers": [
      {
        "name": entry.name,
        "memory": entry.memory,
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "copies": entry.copies,
        "amount_per_core": entry.amount_per_core,
        "fate": memory.fate(entry, one),
      }
      for entry in one.entries
    ],
  }


def _operation(
  operation: OperationPrediction, found: Findings
) -> dict[str, Any]:
  roofline = found.rooflines.get(operation.name)
  return {
    "name": operation.name,
    "label": operation.label,
    "kernel": operation.kernel,
    "code_digest": found.codes.get(operation.name),
    "times": operation.times,
    "cycles": dataclasses.asdict(operation.cycles),
    "microseconds": dataclasses.asdict(operation.microseconds),
    "floor_microseconds": operation.floor_microseconds,
    "limit": operation.limit,
    "busy_shares": dict(operation.shares),
    "cores": [
      {
        "core": core.core,
        "cycles": dataclasses.asdict(core.cycles),
        "issued_cycles": core.issued_cycles,
        "waiting_cycles": core.waiting_cycles,
        "busy_shares": dict(core.shares),
        "read_bytes": core.read_bytes,
        "written_bytes": core.written_bytes,
      }
      for core in operation.cores
    ],
    "assumed": list(operation.assumed),
    "roofline": roofline and _roofline(roofline),
    "lines": [_line(line) for line in found.hot_lines.get(operation.name, ())],
    "life": _life(operation, found),
  }


def _roofline(one: Roofline) -> dict[str, Any]:
  return {
    "matmul_flops": one.matmul_flops,
    "vector_ops": one.vector_ops,
    "hbm_bytes": one.hbm_bytes,
    "peak_matmul_flops_per_second": one.peak_matmul_flops_per_second,
    "peak_vector_ops_per_second": one.peak_vector_ops_per_second,
    "peak_hbm_bytes_per_second": one.peak_hbm_bytes_per_second,
    "sendings": [
      {
        **dataclasses.asdict(sent),
        "busiest_bytes_per_second": one.per_second(sent.busiest_bytes),
        "share_of_way": one.share_of_way(sent),
        "is_assumed": True,
      }
      for sent in one.sendings
    ],
    "roof": one.roof,
    "floor_microseconds": one.floor_microseconds,
    "share_of_roof": one.share_of_roof,
  }


def _line(line: HotLine) -> dict[str, Any]:
  return dataclasses.asdict(line) | {
    "ranges": [list(span) for span in line.ranges],
    "bundles": [
      dataclasses.asdict(bundle) | {"opcodes": list(bundle.opcodes)}
      for bundle in line.bundles
    ],
  }


def _life(
  operation: OperationPrediction, found: Findings
) -> Mapping[str, Any] | None:
  """Busy shares over the operation's life, in stretches of equal length."""
  activities = found.activities.get(operation.name)
  if not activities:
    return None
  edges = life.edges(activities, _NUM_STRETCHES)
  return {
    "edges_cycles": [float(edge) for edge in edges],
    "groups": [
      {
        "cores": [activity.core for activity in group],
        "busy_shares": {
          name: [round(float(s), 4) for s in share]
          for name, share in life.shares(group[0], edges).items()
        },
      }
      for group in alike.shown(alike.groups(activities), _MOST_GROUPS)
    ],
  }
