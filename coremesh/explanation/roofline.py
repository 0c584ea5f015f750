"""How near an operation comes to what its chip can compute and copy."""

import dataclasses

from coremesh import chips
from coremesh.profile import rates
from coremesh.profile.prediction import Estimate, OperationPrediction

_ROWS = 16  # of a bf16 `vmatmul`
_FLOPS_PER_PRODUCT = 2  # a multiplication and an addition


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
  """The work of one operation on one device, against the device's peaks.

  Work is counted from the instructions that are issued, so that padding to
  tiles counts and skipped blocks do not.

  Attributes:
    operation: its name.
    matmul_flops: of the MXUs; an addition and a multiplication are two.
    vector_ops: instructions of the VPUs, times the elements of a register of
      32-bit words; a packed instruction does more.
    hbm_bytes: read and written by copies.
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
  microseconds: Estimate
  peak_matmul_flops_per_second: float
  peak_vector_ops_per_second: float
  peak_hbm_bytes_per_second: float

  @property
  def matmul_flops_per_second(self) -> float:
    """Predicted, at the central time."""
    return self._rate(self.matmul_flops)

  @property
  def vector_ops_per_second(self) -> float:
    """Predicted, at the central time."""
    return self._rate(self.vector_ops)

  @property
  def hbm_bytes_per_second(self) -> float:
    """Predicted, at the central time."""
    return self._rate(self.hbm_bytes)

  def _rate(self, amount: float) -> float:
    seconds = self.microseconds.central * 1e-6
    return amount / seconds if seconds else 0.0

  @property
  def floor_microseconds(self) -> float:
    """What the slowest of MXU, VPU and HBM needs at its peak."""
    seconds = max(
      self.matmul_flops / self.peak_matmul_flops_per_second,
      self.vector_ops / self.peak_vector_ops_per_second,
      self.hbm_bytes / self.peak_hbm_bytes_per_second,
    )
    return seconds * 1e6

  @property
  def roof(self) -> str:
    """Which of "MXU", "VPU" and "HBM" that is."""
    floors = {
      "MXU": self.matmul_flops / self.peak_matmul_flops_per_second,
      "VPU": self.vector_ops / self.peak_vector_ops_per_second,
      "HBM": self.hbm_bytes / self.peak_hbm_bytes_per_second,
    }
    return max(floors, key=lambda name: floors[name])

  @property
  def share_of_roof(self) -> float:
    """The floor as a part of the central time; 1 cannot be bettered."""
    central = self.microseconds.central
    return self.floor_microseconds / central if central else 0.0


def of_operation(
  operation: OperationPrediction, chip: chips.Chip
) -> Roofline | None:
  """The roofline of an operation of TensorCores; None without its cores."""
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
    operation=operation.name,
    matmul_flops=held["MXU"] * matmul_per_cycle,
    vector_ops=held["VPU"] * vector_per_cycle,
    hbm_bytes=sum(core.read_bytes + core.written_bytes for core in cores),
    microseconds=operation.microseconds,
    peak_matmul_flops_per_second=num_cores
    * (peak or matmul_per_cycle * clock_hz),
    peak_vector_ops_per_second=num_cores * vector_per_cycle * clock_hz,
    peak_hbm_bytes_per_second=chip.hbm_bytes_per_second_per_device,
  )
