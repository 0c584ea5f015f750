"""How long things take on a chip, as far as a model without one can say.

The rates come from JAX's table of chips. What it does not have is assumed here,
each with its reason, and `Rates.assumptions` says so to who reads a timeline.

Times are whole picoseconds, so that sums do not depend on their order.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from coremesh import chips

PS_PER_SECOND = 10**12

# One way over one link. Source: "How to Scale Your Model", table "ICI BW/link
# (one-way)"; JAX's table has no such rate.
_ICI_BYTES_PER_SECOND = {
  "v4": 45e9,
  "v5e": 45e9,
  "v5p": 90e9,
  "v6e": 90e9,
  "tpu7x": 90e9,
}
# Between host and device. Source: as above, the usual PCIe rate a TPU.
_HOST_BYTES_PER_SECOND = 16e9

# From the start of a copy to its first byte. No table has it; half a
# microsecond is what a small copy from HBM takes, within a factor of two.
COPY_LATENCY_PS = 500_000
# What a copy or a signal to another device takes more: about a microsecond for
# the way over a link, its switches and the other device's memory.
LINK_LATENCY_PS = 1_000_000
# A signal to another core of a device, or to a semaphore of one's own.
CORE_SIGNAL_PS = 100_000
OWN_SIGNAL_PS = 10_000
# From the arrival of the last subcore at a barrier to its end.
MEETING_PS = 50_000
# Instructions around a signal, a wait that need not wait, or the start of a
# copy: scalar code that writes a descriptor. A bundle a cycle.
ISSUE_CYCLES = 8

# The MXUs of newer chips do more than one multiply-add a cell and cycle, so the
# clock that follows from their peak is too high; no TPU runs at this or more.
_MAX_CLOCK_HZ = 2.5e9

# Instructions of a kind that one bundle holds. A straight-line stretch takes as
# long as its busiest kind: no dependences, no latencies, no spills.
_TENSOR_CORE_SLOTS = {"scalar": 2, "vector": 4, "load": 2, "store": 1}
_SUBCORE_SLOTS = {"scalar": 2, "vector": 3, "load": 1, "store": 1}

# bfloat16 passes that a float32 product takes, by the precision asked for.
_PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
  """The rates of a chip.

  Attributes:
    chip: the chip.
  """

  chip: chips.Chip

  @property
  def clock_hz(self) -> float:
    """Cycles a second of a core, from its peak in matrix products."""
    chip = self.chip
    peak = chip.bf16_flops_per_second_per_tensor_core or 0
    cells = chip.mxus_per_tensor_core * chip.mxu_columns**2
    clock = peak / (2 * cells)
    while clock >= _MAX_CLOCK_HZ:
      clock /= 2
    return clock

  def cycles_ps(self, cycles: float) -> int:
    """The time of some cycles."""
    return math.ceil(cycles * PS_PER_SECOND / self.clock_hz)

  def issue_ps(self) -> int:
    """What a worker spends on a signal, a wait or the start of a copy."""
    return self.cycles_ps(ISSUE_CYCLES)

  def bytes_per_second(self, place: tuple[Any, ...]) -> float:
    """The rate of what copies go through.

    Args:
      place: ("link", device, device), ("host", device), ("hbm", device),
        ("vmem_shared", ...), or the memory of one core: (`cores.Kind`, ...).
    """
    chip, kind = self.chip, place[0]
    granule = chip.sparse_core_dma_granule_bytes * self.clock_hz
    match kind:
      case "link":
        return _ICI_BYTES_PER_SECOND[chip.generation]
      case "host":
        return _HOST_BYTES_PER_SECOND
      case "hbm":
        return chip.hbm_bytes_per_second_per_device
      case "vmem_shared":
        return granule * chip.vector_subcores_per_sparse_core
      case "vector" | "scalar":
        return granule
    cores = chip.tensor_cores_per_device
    return chip.hbm_bytes_per_second_per_device / cores

  def transfer_ps(self, num_bytes: int, place: tuple[Any, ...]) -> int:
    """How long bytes occupy what they go through."""
    return math.ceil(num_bytes * PS_PER_SECOND / self.bytes_per_second(place))

  def registers(self, shape: tuple[int, ...], *, is_sparse: bool) -> int:
    """Vector registers that an array of 32-bit elements fills."""
    chip = self.chip
    if is_sparse:
      return -(-math.prod(shape) // chip.sparse_core_lanes)
    if len(shape) < 2:
      return -(-math.prod(shape) // (chip.lanes * chip.sublanes))
    *outer, rows, columns = shape
    tiles = -(-rows // chip.sublanes) * -(-columns // chip.lanes)
    return math.prod(outer) * tiles

  def slots(self, *, is_sparse: bool) -> Mapping[str, int]:
    """Instructions of each kind that a cycle issues."""
    return _SUBCORE_SLOTS if is_sparse else _TENSOR_CORE_SLOTS

  def product_ps(self, flops: float, dtype_name: str, precision: str) -> int:
    """The time of a matrix product; a multiply-add is two operations."""
    chip = self.chip
    bf16 = chip.bf16_flops_per_second_per_tensor_core
    passes = _PASSES.get(precision, 1) if dtype_name == "float32" else 1
    rate = bf16
    if dtype_name.startswith("float8"):
      rate = chip.fp8_flops_per_second_per_tensor_core
    elif dtype_name in ("int8", "uint8"):
      rate = chip.int8_ops_per_second_per_tensor_core
    elif dtype_name in ("int4", "uint4"):
      rate = chip.int4_ops_per_second_per_tensor_core
    rate = rate or bf16
    assert rate is not None  # Every chip's table has bfloat16.
    return math.ceil(flops * passes * PS_PER_SECOND / rate)

  def assumptions(self) -> tuple[str, ...]:
    """What the model takes for granted, in sentences."""
    chip = self.chip
    hbm, cores = self.bytes_per_second(("hbm", 0)), chip.tensor_cores_per_device
    link = self.bytes_per_second(("link", 0, 1))
    lines = [
      "Modelled, not measured: nothing here ran on a TPU.",
      f"HBM of a device moves {_rate(hbm)}, shared by its cores (JAX's table);"
      f" the memory of a TensorCore 1/{cores} of that.",
      f"Each two devices have one link of {_rate(link)} one way (assumed, from"
      ' "How to Scale Your Model"; JAX\'s table has no rate), whatever the'
      " topology.",
      f"A copy takes {_us(COPY_LATENCY_PS)} and its bytes over the slower end;"
      f" {_us(LINK_LATENCY_PS)} more to another device. A signal takes"
      f" {_us(CORE_SIGNAL_PS)} to another core (assumed).",
      "Each memory and link serves copies in the order in which they start.",
      f"Cores run at {self.clock_hz / 1e9:.3g} GHz (from their peak in matrix"
      " products), a bundle a cycle, without stalls: a lower bound.",
    ]
    if chip.sparse_core_lanes:
      subcore = self.bytes_per_second(("vector",))
      lines.append(
        "The memory of a SparseCore subcore moves one DMA granule a cycle,"
        f" {_rate(subcore)} (assumed)."
      )
    return tuple(lines)


def _rate(rate: float) -> str:
  if rate >= 1e12:
    return f"{rate / 1e12:.3g} TB/s"
  return f"{rate / 1e9:.3g} GB/s"


def _us(ps: int) -> str:
  return f"{ps / 1e6:g} us"
