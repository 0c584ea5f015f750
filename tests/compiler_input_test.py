"""What `cm.compile` is given or finds that is not as it must be."""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh.compiler import dumps

_X = jax.ShapeDtypeStruct((8, 128), jnp.float32)
every_entry = pytest.mark.parametrize(
  "entry", [cm.compile, cm.ledgers, cm.predict], ids=lambda f: f.__name__
)


def _double(x_ref, o_ref):
  o_ref[...] = x_ref[...] * 2


@every_entry
@pytest.mark.parametrize("fn", [3, None, _X])
def test_what_is_no_function_is_refused(fn, entry):
  with pytest.raises(cm.UnsupportedError, match="fn must be a function, jitt"):
    entry(fn, _X, chip="v6e:2x2")


@every_entry
def test_an_argument_that_is_no_array_is_refused(entry):
  with pytest.raises(
    cm.DTypeError, match="must be arrays, numbers or.*got str"
  ):
    entry(lambda x: x, "text", chip="v6e:2x2")


@every_entry
def test_what_jax_has_compiled_is_refused(entry):
  compiled = jax.jit(lambda x: x).lower(jnp.zeros(8)).compile()
  with pytest.raises(cm.UnsupportedError, match="got one that JAX has compile"):
    entry(compiled, jnp.zeros(8), chip="v6e:2x2")


@pytest.mark.parametrize("number", [2.5, jnp.asarray(2.5)], ids=type)
def test_a_number_has_the_type_it_has_in_a_call(number):
  """As bfloat16 times a number of Python's is bfloat16."""
  x = jnp.ones((8, 128), jnp.bfloat16)
  fn = jax.jit(lambda x, n: x * n)
  result = cm.compile(fn, x, number, chip="v6e:2x2").text("hlo")
  assert fn(x, number).dtype == jnp.bfloat16
  assert "->bf16[8,128]" in result


def test_a_number_may_be_a_static_argument():
  @functools.partial(jax.jit, static_argnums=1)
  def repeated(x, times):
    for _ in range(times):
      x = jnp.sin(x)
    return x

  text = cm.compile(repeated, _X, 3, chip="v6e:2x2").text("stablehlo")
  assert text.count("stablehlo.sine") == 3


@every_entry
@pytest.mark.parametrize(
  ("chip", "reason"),
  [("v9", "There is no chip 'v9'"), (5, "chip must be a name such as")],
)
def test_a_chip_that_is_not_there_is_refused(chip, reason, entry):
  with pytest.raises(cm.ChipError, match=reason):
    entry(lambda x: x, _X, chip=chip)


def test_machine_code_that_is_not_where_it_must_be_is_an_error(monkeypatch):
  """As if the disk were full, or libtpu named its files otherwise."""
  flags = dumps.flags
  monkeypatch.setattr(
    dumps,
    "flags",
    lambda folder: [
      word.replace("^packed-bundles-post-ra", "^nothing")
      for word in flags(folder)
    ],
  )
  kernel = pl.pallas_call(_double, out_shape=_X)
  with pytest.raises(cm.CompileError) as caught:
    # A flag that no other test gives, as the worker must be one of its own.
    flag = {"xla_tpu_scoped_vmem_limit_kib": 12345}
    cm.compile(kernel, _X, chip="v6e:2x2", flags=flag)
  text = str(caught.value)
  assert "What libtpu writes must be of the form coremesh reads" in text
  assert "libtpu wrote no machine code of _double where" in text
