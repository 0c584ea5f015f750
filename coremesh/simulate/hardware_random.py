"""A stand-in for the random number generator of a TPU core.

The bits are not the hardware's. What holds is what a kernel may rely on: the
same seeds give the same bits, other seeds other bits, and each call new ones.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

type Rule = Callable[
  [Mapping[str, Any], Sequence[Any], Sequence[Any]], Callable[..., Any]
]

_PALLAS = "key<pl>"  # what `pltpu.to_pallas_key` makes: data uint32 [1, 2]
_STATEFUL = "key<_pl_stateful>"  # the empty key of `pltpu.stateful_uniform`


class Prng:
  """One core's generator: Philox, seeded by all words of the seed values."""

  def __init__(self, *values: Any) -> None:
    """Starts with these seeds; a TPU starts in a state nobody may rely on."""
    self.seed(*values)

  def seed(self, *values: Any) -> None:
    """Starts anew from integers, or from the data of a key."""
    words = [
      int(word) & 0xFFFFFFFF for v in values for word in np.ravel(np.asarray(v))
    ]
    # SeedSequence pads with zeros: without the number, (1,) would be (1, 0).
    sequence = np.random.SeedSequence([len(words), *words])
    self._generator = np.random.Generator(np.random.Philox(sequence))

  def random_bits(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """The next bits, uniform, of a 32-bit integer `dtype`."""
    bits = self._generator.integers(0, 1 << 32, size=shape, dtype=np.uint32)
    return bits.view(dtype)


def is_foreign(type_: Any) -> bool:
  """Whether a type is of keys for other generators than a core's."""
  is_key = str(type_.dtype).startswith("key<")
  return is_key and str(type_.dtype) not in (_PALLAS, _STATEFUL)


def _seed(params, in_avals, out_avals):
  del params, in_avals, out_avals

  def seed(prng, *values):
    prng.seed(*values)
    return ()

  return seed


def _hardware_bits(params, in_avals, out_avals):
  del params, in_avals
  (out,) = out_avals
  return lambda prng: prng.random_bits(out.shape, out.dtype)


def _random_seed(params, in_avals, out_avals):
  """`jax.random.key`: the seed in every word, or the empty stateful key."""
  del params, in_avals
  kind = str(out_avals[0].dtype)
  if kind == _STATEFUL:
    return lambda prng, seed: np.zeros((), np.int32)
  return lambda prng, seed: np.full((1, 2), int(seed) & 0xFFFFFFFF, np.uint32)


def _random_bits(params, in_avals, out_avals):
  """`jax.random.bits`: a Pallas key seeds the generator anew each time."""
  del params
  (out,), kind = out_avals, str(in_avals[0].dtype)
  if kind == _STATEFUL:
    return lambda prng, key: prng.random_bits(out.shape, out.dtype)

  def random_bits(prng, key):
    prng.seed(key)
    return prng.random_bits(out.shape, out.dtype)

  return random_bits


def _random_fold_in(params, in_avals, out_avals):
  """`jax.random.fold_in`: adds to the second word, then one threefry round."""
  del params, in_avals, out_avals

  def fold_in(prng, key, data):
    del prng
    first, second = (int(word) for word in key.reshape(-1))
    second = (second + int(data)) & 0xFFFFFFFF
    first = (first + second) & 0xFFFFFFFF
    second = (second << 13 | second >> 19) & 0xFFFFFFFF
    return np.array([[first, second ^ first]], np.uint32)

  return fold_in


# As `tensor_core.RULES`, but the functions take a `Prng` first. "random." are
# the primitives of `jax.random` that keys of these two kinds lower to.
STATEFUL: Mapping[str, Rule] = {
  "random.random_bits": _random_bits,
  "random.random_fold_in": _random_fold_in,
  "random.random_seed": _random_seed,
  "tpu.prng_random_bits": _hardware_bits,
  "tpu.prng_seed": _seed,
}
