"""How near an operation comes to what its chip can compute and copy."""

from collections.abc import Iterable
import dataclasses

from coremesh import chips
from coremesh.profile import rates, sending
from coremesh.profile.events import Trace
from coremesh.profile.prediction import Estimate, OperationPrediction
from coremesh.profile.sending import Sending

_ROWS = 16  # of a bf16 `vmatmul`
_FLOPS_PER_PRODUCT = 2  # a multiplication and an addition


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
  """The work of one operation on one device, against the device's peaks.

  Work is counted from the instructions that are issued, so that padding to
  tiles counts and skipped blocks do not.

  Attributes:
    operation: its label.
    matmul_flops: of the MXUs; an addition and a multiplication are two.
    vector_ops: instructions of the VPUs, times the elements of a register of
      32-bit words; a packed instruction does more.
    hbm_bytes: read and written by copies.
    sendings: what goes to other cores and devices, by kind of way; () if
      nothing does.
    microseconds: predicted.
    peak_matmul_flops_per_second: all MXUs of the device on bf16, from JAX's
      table.
    peak_vector_ops_per_second: all VPUs of the device.
    peak_hbm_bytes_per_second: of the device, from JAX's table.
  """

  operation: str
  matmul_flops: float
  vector_ops: float
  hbm_bytes: int
  sendings: tuple[Sending, ...]
  microseconds: Estimate
  peak_matmul_flops_per_second: float
  peak_vector_ops_per_second: float
  peak_hbm_bytes_per_second: float

  @property
  def matmul_flops_per_second(self) -> float:
    """Predicted, at the central time."""
    return self.per_second(self.matmul_flops)

  @property
  def vector_ops_per_second(self) -> float:
    """Predicted, at the central time."""
    return self.per_second(self.vector_ops)

  @property
  def hbm_bytes_per_second(self) -> float:
    """Predicted, at the central time."""
    return self.per_second(self.hbm_bytes)

  def per_second(self, amount: float) -> float:
    """An amount of the whole operation, by its central time."""
    seconds = self.microseconds.central * 1e-6
    return amount / seconds if seconds else 0.0

  def share_of_way(self, sent: Sending) -> float:
    """Of the central time, the part in which its busiest way is held."""
    return self.per_second(sent.busiest_bytes) / sent.assumed_bytes_per_second

  @property
  def floor_microseconds(self) -> float:
    """What the slowest of MXU, VPU, HBM and ways out needs, alone.

    Each at its peak, a way out at its assumed rate; latency is left out.
    """
    return max(self._floor_seconds().values()) * 1e6

  @property
  def roof(self) -> str:
    """Which that is: "MXU", "VPU", "HBM" or the way of a sending."""
    floors = self._floor_seconds()
    return max(floors, key=lambda name: floors[name])

  @property
  def is_roof_assumed(self) -> bool:
    """Whether that is one of the ways out, whose rate nobody measured."""
    return self.roof in [one.way for one in self.sendings]

  def _floor_seconds(self) -> dict[str, float]:
    return {
      "MXU": self.matmul_flops / self.peak_matmul_flops_per_second,
      "VPU": self.vector_ops / self.peak_vector_ops_per_second,
      "HBM": self.hbm_bytes / self.peak_hbm_bytes_per_second,
      **{one.way: one.floor_seconds for one in self.sendings},
    }

  @property
  def share_of_roof(self) -> float:
    """The floor as a part of the central time; 1 cannot be bettered."""
    central = self.microseconds.central
    return self.floor_microseconds / central if central else 0.0


def of_operation(
  operation: OperationPrediction, chip: chips.Chip, traces: Iterable[Trace]
) -> Roofline | None:
  """The roofline of an operation of TensorCores; None without its cores.

  Args:
    operation: what it is of.
    chip: its slice.
    traces: of each of its cores.
  """
  cores = operation.cores
  if not cores:
    return None
  rate = rates.rates(chip)
  held = {
    unit: sum(core.shares[unit] * core.cycles.central for core in cores)
    for unit in ("MXU", "VPU")
  }
  products = rate.mxus * _ROWS / rate.matmul_cycles_bf16 * chip.mxu_columns**2
  matmul_per_cycle = products * _FLOPS_PER_PRODUCT
  vector_per_cycle = rate.vector_slots * chip.lanes * chip.sublanes
  clock_hz = rate.clock_hz.central
  num_cores = chip.tensor_cores_per_device
  peak = chip.bf16_flops_per_second_per_tensor_core
  return Roofline(
    operation=operation.label,
    matmul_flops=held["MXU"] * matmul_per_cycle,
    vector_ops=held["VPU"] * vector_per_cycle,
    hbm_bytes=sum(core.read_bytes + core.written_bytes for core in cores),
    sendings=sending.of_traces(traces, chip=chip, rates=rate),
    microseconds=operation.microseconds,
    peak_matmul_flops_per_second=num_cores
    * (peak or matmul_per_cycle * clock_hz),
    peak_vector_ops_per_second=num_cores * vector_per_cycle * clock_hz,
    peak_hbm_bytes_per_second=chip.hbm_bytes_per_second_per_device,
  )
