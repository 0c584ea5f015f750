"""Roots, exponentials, trigonometry, rounding to integers.

float32 is computed by numpy and scipy, whose last bits may differ from XLA's;
narrower floats are computed in float32 and rounded once.
"""

from collections.abc import Mapping

from jax import lax
import numpy as np
from scipy import special

from coremesh.simulate.values.kinds import Function, Rule, lifted, wide


def _function(function: Function) -> Rule:
  def rule(params, in_avals, out_avals):
    return lifted(function, in_avals, out_avals[0].dtype)

  return rule


def _pow(params, in_avals, out_avals):
  dtype = wide(out_avals[0].dtype)
  power = np.power
  if in_avals[1].dtype != in_avals[0].dtype:
    power = lambda x, y: np.power(x, y.astype(dtype))
  return lifted(power, in_avals, out_avals[0].dtype)


def _rsqrt(x):
  return np.reciprocal(np.sqrt(x))


def _round_away(x):
  whole = np.trunc(x)
  # Adding a half first would round 0.49999997 up.
  return np.copysign(whole + np.copysign(np.abs(x - whole) >= 0.5, x), x)


def _round(params, in_avals, out_avals):
  even = params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
  function = np.rint if even else _round_away
  return lifted(function, in_avals, out_avals[0].dtype)


def _lgamma(x):
  # scipy's is -inf at -inf, XLA's inf.
  return np.where(x == -np.inf, -x, special.gammaln(x))[()]


def _digamma(x):
  # XLA has -inf at both zeros, and this sum is never -0.
  return special.digamma(x + np.float32(0))


def _erf_inv(x):
  # scipy loses the sign of zero.
  return np.copysign(special.erfinv(x), x)


RULES: Mapping[str, Rule] = {
  "acos": _function(np.arccos),
  "acosh": _function(np.arccosh),
  "asin": _function(np.arcsin),
  "asinh": _function(np.arcsinh),
  "atan": _function(np.arctan),
  "atan2": _function(np.arctan2),
  "atanh": _function(np.arctanh),
  "cbrt": _function(np.cbrt),
  "ceil": _function(np.ceil),
  "cos": _function(np.cos),
  "cosh": _function(np.cosh),
  "digamma": _function(_digamma),
  "erf": _function(special.erf),
  "erf_inv": _function(_erf_inv),
  "erfc": _function(special.erfc),
  "exp": _function(np.exp),
  "exp2": _function(np.exp2),
  "expm1": _function(np.expm1),
  "floor": _function(np.floor),
  "lgamma": _function(_lgamma),
  "log": _function(np.log),
  "log1p": _function(np.log1p),
  "log2": _function(np.log2),
  "logistic": _function(special.expit),
  "pow": _pow,
  "round": _round,
  "rsqrt": _function(_rsqrt),
  "sin": _function(np.sin),
  "sinh": _function(np.sinh),
  "sqrt": _function(np.sqrt),
  "tan": _function(np.tan),
  "tanh": _function(np.tanh),
}
