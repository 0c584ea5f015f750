"""What is found out about a compiled function."""

from collections.abc import Mapping
import dataclasses

from coremesh.compiler.ledger import Ledger
from coremesh.explanation.hot_lines import HotLine
from coremesh.explanation.roofline import Roofline
from coremesh.profile.activity import CoreActivity
from coremesh.profile.prediction import Prediction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
  """What an explanation says, as values.

  Attributes:
    name: of the function.
    chip: what it was compiled for.
    versions: of jax, jaxlib, libtpu and coremesh.
    arguments: a digest of their types, and of integers, which may steer.
    codes: a digest of the machine code of each operation.
    compile_seconds: wall time on this machine.
    is_from_cache: whether the disk had the compiled program.
    memory_bytes_per_device: HBM, and the code, as libtpu counts them.
    ledgers: the buffers of each kernel.
    prediction: the time of each operation; those of `unpredicted` are not in
      it.
    unpredicted: kernels without a time and why, by operation.
    rooflines: by operation.
    hot_lines: by operation, of its slowest core.
    activities: what each core does when, by operation.
  """

  name: str
  chip: str
  versions: Mapping[str, str]
  arguments: str
  codes: Mapping[str, str]
  compile_seconds: float
  is_from_cache: bool
  memory_bytes_per_device: Mapping[str, int]
  ledgers: tuple[Ledger, ...]
  prediction: Prediction
  unpredicted: Mapping[str, str]
  rooflines: Mapping[str, Roofline]
  hot_lines: Mapping[str, tuple[HotLine, ...]]
  activities: Mapping[str, tuple[CoreActivity, ...]] = dataclasses.field(
    repr=False
  )
