"""What the predictor takes the ways between cores and devices to do.

None of it is calibrated: no published time of a kernel that sends is known to
us. Sources: "book" is the table "ICI BW/link (one-way)" of "How to Scale Your
Model"; "Cloud" are the pages of Cloud TPU on each chip, ICI a chip divided by
its links, 6 on v4, v5p and tpu7x, else 4.
"""

from coremesh import chips, errors
from coremesh.profile.events import Way
from coremesh.profile.rates import Rates, Spread
from coremesh.profile.servers import Links

# Bytes a second, one way over one link. Fast is Cloud, central the book, slow
# three quarters of the book: an assumption.
_LINK_BYTES_PER_SECOND = {
  "v5p": Spread(fast=100e9, central=90e9, slow=68e9),
  "v5e": Spread(fast=50e9, central=45e9, slow=34e9),
  "v6e": Spread(fast=112e9, central=90e9, slow=68e9),
  "tpu7x": Spread(fast=100e9, central=90e9, slow=68e9),
}
# Cloud, tpu7x: the way between the dies of a chip is six times a link.
_DIE_LINKS = 6
# The book takes a hop for about a microsecond; half and one and a half of it.
_HOP_SECONDS = Spread(fast=0.5e-6, central=1e-6, slow=1.5e-6)
# 36 bundles lie between a word sent to the other core of v5p and its use: that
# is fast. A tenth and half of a microsecond are assumptions.
_CORE_SECONDS = Spread(fast=36 / 1.75e9, central=0.1e-6, slow=0.5e-6)

ASSUMED = (
  "it sends to other cores or devices: bandwidth and latency of the ways there"
  " are from tables and assumptions, not from measured kernels"
)


def links(chip: chips.Chip, rates: Rates, which: str) -> Links:
  """The ways in cycles, "fast", "central" or "slow".

  Raises:
    UnsupportedError: there are none for the generation of the chip.
  """
  clock = getattr(rates.clock_hz, which)
  link = getattr(_link_bytes_per_second(chip), which)
  return Links(
    bytes_per_cycle=link / clock,
    die_bytes_per_cycle=_DIE_LINKS * link / clock,
    hop_cycles=getattr(_HOP_SECONDS, which) * clock,
    core_cycles=getattr(_CORE_SECONDS, which) * clock,
  )


def bytes_per_second(way: Way, *, chip: chips.Chip, rates: Rates) -> float:
  """What one way is taken to carry, in one direction: "central" of `links`.

  Between cores of a device that is what HBM is taken for: no source says how
  fast they are.

  Raises:
    UnsupportedError: it is not known for the generation of the chip.
  """
  if way == "core":
    return rates.hbm_bytes_per_second_per_device.central
  link = _link_bytes_per_second(chip).central
  return link * _DIE_LINKS if way == "die" else link


def _link_bytes_per_second(chip: chips.Chip) -> Spread:
  if chip.generation not in _LINK_BYTES_PER_SECOND:
    raise errors.UnsupportedError(
      f"chip must be one of {', '.join(_LINK_BYTES_PER_SECOND)}, whose links"
      f" are known; got {chip.name}."
    )
  return _LINK_BYTES_PER_SECOND[chip.generation]
