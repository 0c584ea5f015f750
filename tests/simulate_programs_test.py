"""Random programs of jax.numpy in a kernel: the simulator against JAX's own.

Each program is made of all operations of its dtype, in a random order, on
arrays of a random shape; numbers stay small integers, so that every order of
summation and every fusion of XLA's gives the same, bit for bit.
"""

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm

type _Op = Callable[[Any, Any], Any]  # of two values of one type, to such a one

# Compiled code runs once: what XLA spends on speed is lost.
_OPTIONS: Any = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}


def _small(x):
  """Within what all dtypes hold exactly, and their sums of few too."""
  return jnp.clip(
    x, 0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else -9, 9
  )


def _rows_of(x):
  return x.reshape(x.shape[0], -1)


def _first(x):
  """A place along the first axis, known only when the kernel runs."""
  return jnp.argmax(_rows_of(x)[:, 0]).astype(jnp.int32)


def _moved(x, y):
  """A slice of x from a computed place, written to another one of y.

  A place beyond the end is moved back to where the slice fits.
  """
  size = (max(1, x.shape[0] // 2), *x.shape[1:])
  zeros = (0,) * (x.ndim - 1)
  part = lax.dynamic_slice(x, (2 * _first(y), *zeros), size)
  return lax.dynamic_update_slice(y, part, (2 * _first(x), *zeros))


def _while(x, y):
  def step(state):
    i, x = state
    return i + 1, jnp.where(y > x, y, jnp.roll(x, 1, 0))

  more = lambda state: state[0] < _first(y) % 3 + 1
  return lax.while_loop(more, step, (jnp.int32(0), x))[1]


def _scan(x, y):
  def step(carry, row):
    carry = jnp.where(row > carry, row, carry)
    return carry, carry

  last, rows = lax.scan(step, y[0], x)
  return jnp.where(rows > last[None], y, rows)


_MOVES: Mapping[str, _Op] = {
  "where": lambda x, y: jnp.where(x > y, x, y),
  "flip": lambda x, y: jnp.flip(x, -1),
  "roll": lambda x, y: jnp.roll(x, 1, 0),
  "concatenate": lambda x, y: jnp.concatenate([y[1:], x[:1]], 0),
  "pad": lambda x, y: jnp.pad(x, [(1, 0)] + [(0, 0)] * (x.ndim - 1))[:-1],
  "reshape": lambda x, y: x.reshape(-1)[::-1].reshape(x.shape),
  "transpose": lambda x, y: _rows_of(x).T.reshape(x.shape),
  "broadcast": lambda x, y: jnp.broadcast_to(x[:1], x.shape),
  "sort": lambda x, y: jnp.sort(x, 0),
  "gather": lambda x, y: x[_rows_of(y).argmax(1) % x.shape[0]],
  "scatter": lambda x, y: x.at[_first(y)].set(y[0]),
  "move": _moved,
  "cond": lambda x, y: lax.cond(_first(x) % 2 == 0, lambda: y, lambda: x),
  "switch": lambda x, y: lax.switch(  # The last one if there are too few.
    _first(y) - 1, [lambda: x, lambda: y, lambda: jnp.flip(x, 0)]
  ),
  "fori": lambda x, y: lax.fori_loop(
    0, _first(x) % 4, lambda i, v: jnp.roll(jnp.where(y > v, y, v), 1, -1), x
  ),
  "while": _while,
  "scan": _scan,
}
_ARITHMETIC: Mapping[str, _Op] = {
  "add": lambda x, y: _small(x + y),
  "subtract": lambda x, y: _small(jnp.maximum(x, y) - jnp.minimum(x, y)),
  "multiply": lambda x, y: _small(x * _small(y)),
  "maximum": jnp.maximum,
  "minimum": jnp.minimum,
  "remainder": lambda x, y: lax.rem(x, jnp.full_like(x, 4)),
  "sum": lambda x, y: _small(
    x + jnp.sum(_small(y), -1, keepdims=True, dtype=x.dtype)
  ),
  "max": lambda x, y: x - x + jnp.max(y, 0, keepdims=True),
  "product": lambda x, y: _small(
    jnp.cumprod(jnp.clip(x, 0, 1), 0, dtype=x.dtype) + y
  ),
  "cumsum": lambda x, y: _small(
    jnp.cumsum(jnp.clip(x, 0, 1), 0, dtype=x.dtype) + y
  ),
  "iota": lambda x, y: _small(x + lax.broadcasted_iota(x.dtype, x.shape, 0)),
  "convert": lambda x, y: (
    x.astype(jnp.float32).astype(jnp.int8).astype(x.dtype)
  ),
  "argmax": lambda x, y: _small(
    y + jnp.argmax(x, -1, keepdims=True).astype(x.dtype)
  ),
  "compare": lambda x, y: (x >= y).astype(x.dtype) + (x != y).astype(x.dtype),
  "sign": lambda x, y: y * jnp.sign(x) * jnp.sign(x),
}
_SIGNED: Mapping[str, _Op] = {
  "negate": lambda x, y: -x,
  "absolute": lambda x, y: jnp.abs(x) - jnp.abs(y),
}
_FLOATS: Mapping[str, _Op] = {
  "divide": lambda x, y: jnp.round(x / 4),
  "floor": lambda x, y: jnp.floor(x / 2) + jnp.ceil(y / 2),
  "truncate": lambda x, y: (x / 4).astype(jnp.int32).astype(x.dtype) + y,
  "dot": lambda x, y: _small(
    jnp.dot(_rows_of(x), _rows_of(y).T, preferred_element_type=jnp.float32)
    .astype(x.dtype)[:, :1]
    .reshape(-1, *[1] * (x.ndim - 1))
    + y
  ),
  "finite": lambda x, y: jnp.where(jnp.isfinite(x / (y - y)), x, y),
}
_INTEGERS: Mapping[str, _Op] = {
  "shift": lambda x, y: _small(x << 1) + (y >> 1),
  "count": lambda x, y: lax.population_count(x) % 4 + lax.clz(y) % 5,
  "divide": lambda x, y: lax.div(x, jnp.full_like(x, 3)),
}
_BITS: Mapping[str, _Op] = {
  "and": lambda x, y: x & y,
  "or": lambda x, y: x | y,
  "xor": lambda x, y: x ^ y,
  "not": lambda x, y: ~x & ~y,
}
_OPS: Mapping[str, Mapping[str, _Op]] = {
  "float32": {**_MOVES, **_ARITHMETIC, **_SIGNED, **_FLOATS},
  "bfloat16": {**_MOVES, **_ARITHMETIC, **_SIGNED, **_FLOATS},
  "int32": {**_MOVES, **_ARITHMETIC, **_SIGNED, **_INTEGERS, **_BITS},
  "int8": {**_MOVES, **_ARITHMETIC, **_SIGNED, **_INTEGERS, **_BITS},
  "uint8": {**_MOVES, **_ARITHMETIC, **_INTEGERS, **_BITS},
  "bool": {**_MOVES, **_BITS},
}


def _kernel(ops, interpret=None):
  """A kernel that keeps what each operation gives."""

  def body(x_ref, y_ref, o_ref):
    x, y = x_ref[...], y_ref[...]
    for i, op in enumerate(ops):
      x, y = op(x, y).astype(x.dtype), x
      o_ref[i] = x
      if i % 3 == 2:  # Operations leave ever fewer different values.
        x = jnp.roll(x_ref[...], i, 0)
      if i % 5 == 4:  # Goes on with what was stored, from a computed place.
        y = o_ref[pl.ds(_first(x) % i, 1)].reshape(x.shape)

  def call(x, y):
    out = jax.ShapeDtypeStruct((len(ops), *x.shape), x.dtype)
    options = {} if interpret is None else {"interpret": interpret}
    return pl.pallas_call(body, out, **options)(x, y)

  return call


def _equal_to_jax(dtype, names, shape, seed):
  ops = [_OPS[dtype][name] for name in names]
  low = 0 if dtype in ("uint8", "bool") else -9
  high = 2 if dtype == "bool" else 10
  drawn = np.random.default_rng(seed).integers(low, high, (2, *shape))
  x, y = (jnp.asarray(v).astype(dtype) for v in drawn)
  with cm.simulation() as run:
    found = np.asarray(_kernel(ops)(x, y))
  assert len(run.runs) == 1 and not run.findings
  jitted = jax.jit(
    _kernel(ops, pltpu.InterpretParams()), compiler_options=_OPTIONS
  )
  expected = np.asarray(jitted(x, y))
  for i, name in enumerate(names):
    same = found[i] == expected[i]
    assert same.all(), f"{name}, after {names[:i]}: {found[i]} {expected[i]}"


_shapes = st.lists(st.integers(2, 19), min_size=2, max_size=3).map(tuple)


@pytest.mark.parametrize("dtype", _OPS)
@given(st.data())
# To shrink a failure takes minutes, and it names the operation as it is.
@settings(max_examples=1, phases=[Phase.explicit, Phase.generate])
def test_random_programs_equal_those_of_jax(dtype, data):
  names = data.draw(st.permutations(sorted(_OPS[dtype])))
  shape, seed = data.draw(_shapes), data.draw(st.integers(0, 99))
  assume(names != sorted(names))  # What hypothesis tries first is not random.
  _equal_to_jax(dtype, names, shape, seed)
