"""Counts, memories and rates of a slice of TPU chips."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, Literal

from jax.experimental.pallas import tpu as pltpu

from coremesh import errors, generations


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChipFacts:
  """What is known of a slice of chips of one generation.

  Attributes: see `cm.Chip`.
  """

  generation: str
  topology: tuple[int, ...]

  def __post_init__(self):
    if self.generation not in generations.FAMILIES:
      raise errors.ChipError(generations.unknown(self.generation))
    one_host = generations.FAMILIES[self.generation].one_host
    is_tuple = isinstance(self.topology, tuple) and all_counts(self.topology)
    if not is_tuple or len(self.topology) != len(one_host):
      raise errors.ChipError(
        f"topology of {self.generation} must be a tuple of {len(one_host)}"
        f" positive numbers of chips, such as {one_host}; got"
        f" {self.topology}."
      )

  # --- identity ---

  @property
  def name(self) -> str:
    """The slice in one word, such as "v5p:2x2x1"."""
    return f"{self.generation}:{generations.format_topology(self.topology)}"

  @property
  def version(self) -> pltpu.ChipVersion:
    """JAX's name of the generation."""
    return generations.FAMILIES[self.generation].version

  @property
  def device_kind(self) -> str:
    """What `jax.Device.device_kind` says on this chip."""
    return generations.FAMILIES[self.generation].device_kind

  @property
  def info(self) -> pltpu.TpuInfo:
    """JAX's table entry; its numbers are for one TensorCore."""
    return generations.table(self.version)

  # --- counts ---

  @property
  def num_chips(self) -> int:
    """Chips in the slice."""
    return math.prod(self.topology)

  @property
  def devices_per_chip(self) -> int:
    """JAX devices a chip: 2 on tpu7x, else 1."""
    cores = self.version.num_physical_tensor_cores_per_chip
    return cores // self.tensor_cores_per_device

  @property
  def num_devices(self) -> int:
    """JAX devices in the slice."""
    return self.num_chips * self.devices_per_chip

  @property
  def tensor_cores_per_device(self) -> int:
    """TensorCores a device: 2 on the megacore chips v4 and v5p, else 1."""
    return self.info.num_cores

  @property
  def sparse_cores_per_device(self) -> int:
    """SparseCores a device, 0 if the chip has none."""
    return self._sparse_core("num_cores")

  @property
  def vector_subcores_per_sparse_core(self) -> int:
    """Vector subcores (tiles) a SparseCore, 0 if the chip has none."""
    return self._sparse_core("num_subcores")

  @property
  def lanes(self) -> int:
    """Lanes of a TensorCore vector register, the last axis of a tile."""
    return self.info.num_lanes

  @property
  def sublanes(self) -> int:
    """32-bit sublanes of a TensorCore vector register."""
    return self.info.num_sublanes

  @property
  def sparse_core_lanes(self) -> int:
    """32-bit lanes of a vector-subcore register, 0 if there are none."""
    return self._sparse_core("num_lanes")

  @property
  def mxus_per_tensor_core(self) -> int:
    """Matrix units of a TensorCore."""
    return self.info.num_mxus

  @property
  def mxu_columns(self) -> int:
    """Columns (and rows) of a matrix unit."""
    return self.info.mxu_column_size

  # --- memories, bytes ---

  @property
  def hbm_bytes_per_device(self) -> int:
    """HBM of a device, shared by all its cores."""
    return self.info.hbm_capacity_bytes * self.tensor_cores_per_device

  @property
  def vmem_bytes_per_tensor_core(self) -> int:
    """Vector memory of a TensorCore."""
    return self.info.vmem_capacity_bytes

  @property
  def smem_bytes_per_tensor_core(self) -> int:
    """Scalar memory of a TensorCore."""
    return self.info.smem_capacity_bytes

  @property
  def vmem_bytes_per_vector_subcore(self) -> int:
    """Private vector memory of a vector subcore, 0 if there are none."""
    return self._sparse_core("vmem_capacity_bytes")

  @property
  def shared_vmem_bytes_per_sparse_core(self) -> int:
    """Memory that VMEM of all vector subcores and VMEM_SHARED are parts of.

    libtpu counts the VMEM of all subcores, of those that a mesh leaves out too.
    """
    return (
      self.vmem_bytes_per_vector_subcore * self.vector_subcores_per_sparse_core
    )

  def smem_bytes_per_subcore(self, kind: Literal["vector", "scalar"]) -> int:
    """Scalar memory of a subcore, 0 if it is not known; libtpu 0.0.50.1's."""
    limits = generations.FAMILIES[self.generation].limits
    if limits is None:
      return 0
    if kind == "scalar":
      return 4 * limits.smem_words_per_scalar_subcore
    return 4 * limits.smem_words_per_vector_subcore

  def semaphores_per_core(
    self, kind: Literal["tensor", "vector", "scalar"]
  ) -> int:
    """Semaphores of a TensorCore, or of a vector or scalar subcore.

    0 if it is not known. libtpu 0.0.50.1's; some of them it needs itself.
    """
    limits = generations.FAMILIES[self.generation].limits
    if limits is None:
      return 0
    return {
      "tensor": limits.semaphores_per_tensor_core,
      "vector": limits.semaphores_per_vector_subcore,
      "scalar": limits.semaphores_per_scalar_subcore,
    }[kind]

  @property
  def sparse_core_dma_granule_bytes(self) -> int:
    """Smallest unit a SparseCore DMA moves, 0 if there are none."""
    return self._sparse_core("dma_granule_size_bytes")

  # --- peak rates ---

  @property
  def hbm_bytes_per_second_per_device(self) -> int:
    """HBM bandwidth of a device, shared by all its cores."""
    return self.info.mem_bw_bytes_per_second * self.tensor_cores_per_device

  @property
  def bf16_flops_per_second_per_tensor_core(self) -> int | None:
    """Peak bfloat16 matmul rate of a TensorCore; a multiply-add is two."""
    return self.info.bf16_ops_per_second or None

  @property
  def int8_ops_per_second_per_tensor_core(self) -> int | None:
    """Peak int8 matmul rate of a TensorCore; None if it has none."""
    return self.info.int8_ops_per_second or None

  @property
  def fp8_flops_per_second_per_tensor_core(self) -> int | None:
    """Peak float8 matmul rate of a TensorCore; None if it has none."""
    return self.info.fp8_ops_per_second or None

  @property
  def int4_ops_per_second_per_tensor_core(self) -> int | None:
    """Peak int4 matmul rate of a TensorCore; None if it has none."""
    return self.info.int4_ops_per_second or None

  def _sparse_core(self, field: str) -> int:
    sparse_core = self.info.sparse_core
    return 0 if sparse_core is None else getattr(sparse_core, field)


def all_counts(values: Sequence[Any]) -> bool:
  """Whether all values are positive ints."""
  return all(type(n) is int and n > 0 for n in values)
