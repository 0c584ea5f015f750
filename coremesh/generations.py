"""The generations of TPU that coremesh knows, and where their numbers are."""

from collections.abc import Sequence
import dataclasses
import difflib
import functools

from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
  """What libtpu lets the cores of a chip hold that JAX's table does not have.

  Read from what libtpu 0.0.50.1 answers to kernels that hold too much, such as
  "sflag capacity 2.0K", "smem_tile: 2046 is the last word". It takes some of
  them for itself, so that a kernel that is just within them may not fit.
  """

  semaphores_per_tensor_core: int
  semaphores_per_vector_subcore: int
  semaphores_per_scalar_subcore: int
  smem_words_per_vector_subcore: int = 2047
  smem_words_per_scalar_subcore: int = 16329


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
  """How one TPU generation is named; its numbers come from JAX's table.

  Attributes:
    limits: what JAX's table has not, None if libtpu was not asked.
  """

  version: pltpu.ChipVersion
  device_kind: str
  one_host: tuple[int, ...]
  limits: Limits | None = None


FAMILIES = {
  "v4": Family(
    version=pltpu.ChipVersion.TPU_V4,
    device_kind="TPU v4",
    one_host=(2, 2, 1),
  ),
  "v5e": Family(
    version=pltpu.ChipVersion.TPU_V5E,
    device_kind="TPU v5 lite",
    one_host=(2, 2),
  ),
  "v5p": Family(
    version=pltpu.ChipVersion.TPU_V5P,
    device_kind="TPU v5",
    one_host=(2, 2, 1),
    limits=Limits(
      semaphores_per_tensor_core=512,
      semaphores_per_vector_subcore=28,
      semaphores_per_scalar_subcore=7041,
    ),
  ),
  "v6e": Family(
    version=pltpu.ChipVersion.TPU_V6E,
    device_kind="TPU v6 lite",
    one_host=(2, 2),
    limits=Limits(
      semaphores_per_tensor_core=512,
      semaphores_per_vector_subcore=28,
      semaphores_per_scalar_subcore=7051,
    ),
  ),
  "tpu7x": Family(
    version=pltpu.ChipVersion.TPU_7X,
    device_kind="TPU7x",
    one_host=(2, 2, 1),
    limits=Limits(
      semaphores_per_tensor_core=4096,
      semaphores_per_vector_subcore=60,
      semaphores_per_scalar_subcore=7051,
    ),
  ),
}


def names() -> tuple[str, ...]:
  """The generations `cm.chip` knows, oldest first."""
  return tuple(FAMILIES)


@functools.cache
def table(version: pltpu.ChipVersion) -> pltpu.TpuInfo:
  """JAX's table entry of a generation."""
  num_cores = 2 if version.supports_megacore else 1
  return pltpu.get_tpu_info_for_chip(version, num_cores)


def format_topology(sizes: Sequence[int]) -> str:
  """A topology as a slice is named, such as "2x2x1"."""
  return "x".join(str(n) for n in sizes)


def unknown(name: str) -> str:
  """What to say of a chip that does not exist."""
  known = ", ".join(
    f"{g}:{format_topology(f.one_host)}" for g, f in FAMILIES.items()
  )
  asked = name.strip().lower().partition(":")[0]
  close = difflib.get_close_matches(asked, FAMILIES, n=1)
  hint = f" Did you mean {close[0]!r}?" if close else ""
  return (
    f"There is no chip {name!r}; coremesh knows {known}, and slices of other"
    f" shapes, in chips along each axis.{hint}"
  )
