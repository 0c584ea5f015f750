"""Numbers of the three models of HBM and clock, as one range."""

from collections.abc import Mapping

from coremesh.profile.prediction import Estimate
from coremesh.profile.rates import Rates

MODELS = ("fast", "central", "slow")


def of_models(values: Mapping[str, float]) -> Estimate:
  """Values of the three models; they may cross where cores race each other."""
  central = values["central"]
  return Estimate(
    low=min(values.values()), central=central, high=max(values.values())
  )


def bounded_by_bytes(
  cycles: Mapping[str, float], num_bytes: int, rate: Rates
) -> Estimate:
  """The cycles of an operation, no fewer than its bytes take."""
  return of_models(
    {
      w: max(c, num_bytes / rate.hbm(w).bytes_per_cycle)
      for w, c in cycles.items()
    }
  )


def microseconds(cycles: Estimate, rate: Rates) -> Estimate:
  """Cycles as time."""
  return Estimate(
    low=cycles.low / rate.clock_hz.fast * 1e6,
    central=cycles.central / rate.clock_hz.central * 1e6,
    high=cycles.high / rate.clock_hz.slow * 1e6,
  )
