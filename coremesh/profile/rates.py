"""What the predictor takes a TensorCore of each chip to do in a cycle.

Nothing here was measured by us on a TPU. Where a number comes from stands
beside it: "bundles" is the spacing libtpu itself keeps between instructions;
"published" are the times in the wheel of tokamax 0.0.17, to which bandwidth,
latency and clock were fitted: 90 programs on v5p, 88 kernels on the other
chips, compiled offline with libtpu 0.0.50.
"""

import dataclasses

from coremesh import chips, errors
from coremesh.profile import dma


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
  """A number that is not known well.

  Attributes:
    fast: what makes the program fastest.
    central: the best guess.
    slow: what makes the program slowest.
  """

  fast: float
  central: float
  slow: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
  """One TensorCore, and the HBM of its device.

  Attributes:
    clock_hz: cycles a second.
    hbm_bytes_per_second_per_device: reads and writes of all cores together.
    hbm_latency_seconds: of a copy, beside its transfer.
    delay_slots: bundles after a branch that are issued before it is taken.
    hbm_unit_bytes: what an HBM pointer counts.
    mxus: matrix units.
    matmul_cycles_bf16: a `vmatmul` of 16 rows holds its unit.
    matmul_cycles_f32: a `vmatmul` of 8 rows holds its unit.
    xlus: units that move data across lanes.
    xlu_cycles: a reduction across lanes holds its unit.
    vector_slots: arithmetic instructions a bundle has room for.
    load_slots: vector loads a bundle has room for.
    store_slots: vector stores a bundle has room for.
  """

  clock_hz: Spread
  hbm_bytes_per_second_per_device: Spread
  hbm_latency_seconds: Spread
  delay_slots: int = 4
  hbm_unit_bytes: int = 32
  mxus: int
  matmul_cycles_bf16: int
  matmul_cycles_f32: int
  xlus: int
  xlu_cycles: int
  vector_slots: int
  load_slots: int = 3
  store_slots: int

  def hbm(self, which: str) -> dma.Hbm:
    """The HBM in cycles, "fast", "central" or "slow"."""
    clock = getattr(self.clock_hz, which)
    rate = getattr(self.hbm_bytes_per_second_per_device, which)
    return dma.Hbm(
      bytes_per_cycle=rate / clock,
      latency_cycles=getattr(self.hbm_latency_seconds, which) * clock,
    )


# Of a copy, where it was not fitted; 657 cycles of v5p, 375 ns, is the latency
# in libtpu's own model.
_LATENCY = Spread(fast=375e-9, central=600e-9, slow=1000e-9)

_RATES = {
  "v5p": Rates(
    # 229.5 TFLOP/s a core over 4 units of 128 x 128; published programs that
    # hardly wait for HBM fit 1.7505.
    clock_hz=Spread(fast=1.7526e9, central=1.75e9, slow=1.7474e9),
    # Bandwidth and latency stand in for each other. 47 published programs,
    # every other one, fit (2.43 TB/s, 760 ns), the 43 between them
    # (2.26, 650). JAX's table says 2.46, which one that only reads reaches. See
    # benchmarks.predict_vs_published, which fits and scores them.
    hbm_bytes_per_second_per_device=Spread(
      fast=2.46e12, central=2.43e12, slow=2.2e12
    ),
    hbm_latency_seconds=Spread(fast=500e-9, central=760e-9, slow=1000e-9),
    mxus=4,
    matmul_cycles_bf16=16,  # bundles: 5610 of 5620
    matmul_cycles_f32=8,  # bundles
    xlus=3,
    xlu_cycles=8,  # bundles: least and most frequent
    vector_slots=4,
    store_slots=1,
  ),
  "v5e": Rates(
    # From the table's peak; v5e has no published kernel that settles it.
    clock_hz=Spread(fast=1.51e9, central=1.503e9, slow=1.48e9),
    # The table says 0.82; 0.70 and 0.76 were tried, none fits all.
    hbm_bytes_per_second_per_device=Spread(
      fast=0.82e12, central=0.76e12, slow=0.70e12
    ),
    hbm_latency_seconds=_LATENCY,
    hbm_unit_bytes=512,
    mxus=4,
    matmul_cycles_bf16=16,
    matmul_cycles_f32=8,
    xlus=3,
    xlu_cycles=8,
    vector_slots=4,
    store_slots=1,
  ),
  "v6e": Rates(
    # 1.7236 from seven published bf16 kernels (1.695 to 1.732).
    clock_hz=Spread(fast=1.732e9, central=1.7236e9, slow=1.695e9),
    # The table says 1.64; published memory-bound kernels fit 1.4 to 1.5.
    hbm_bytes_per_second_per_device=Spread(
      fast=1.64e12, central=1.45e12, slow=1.3e12
    ),
    hbm_latency_seconds=_LATENCY,
    mxus=2,
    matmul_cycles_bf16=8,  # bundles
    matmul_cycles_f32=4,  # bundles
    xlus=2,
    xlu_cycles=4,  # bundles: least
    vector_slots=4,
    store_slots=2,
  ),
  "tpu7x": Rates(
    # 1.862 from seven published bf16 kernels; 2.203 of the table's peak would
    # be 15 % off, and why is not known.
    clock_hz=Spread(fast=1.902e9, central=1.862e9, slow=1.832e9),
    # The table says 3.7 a core; published kernels fit 2.6 to 2.8.
    hbm_bytes_per_second_per_device=Spread(
      fast=3.7e12, central=2.7e12, slow=2.5e12
    ),
    hbm_latency_seconds=_LATENCY,
    delay_slots=6,
    mxus=2,
    matmul_cycles_bf16=8,  # bundles
    matmul_cycles_f32=4,  # bundles
    xlus=2,
    xlu_cycles=4,  # bundles: least
    vector_slots=4,
    store_slots=2,
  ),
}


def rates(chip: chips.Chip) -> Rates:
  """The rates of a chip.

  Raises:
    UnsupportedError: there are none for its generation.
  """
  if chip.generation not in _RATES:
    raise errors.UnsupportedError(
      f"chip must be one of {', '.join(_RATES)}, whose rates are known; got"
      f" {chip.name}."
    )
  return _RATES[chip.generation]
