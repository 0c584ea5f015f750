"""Arguments that stay in HBM where XLA would copy them to VMEM first."""

import functools

import jax
import jax.numpy as jnp
import pytest

import coremesh as cm

_V7 = cm.chip("tpu7x:2x2x1")


@functools.cache
def _copied(chip: cm.Chip):
  """A kernel that copies the first rows of its argument."""

  @cm.kernel(
    mesh=chip.tensor_cores("core"),
    out=lambda x: jax.ShapeDtypeStruct((8, x.shape[1]), x.dtype),
  )
  def copied(x_hbm, o_hbm):
    cm.copy(x_hbm.at[:8], o_hbm)

  return copied


def _copies_before(fn, *args):
  """Copies of XLA's that a program starts with."""
  operations = cm.predict(jax.jit(fn), *args, chip=_V7).operations
  return [o.name for o in operations if o.name.startswith("copy")]


def _array(rows, dtype=jnp.float32):
  return jax.ShapeDtypeStruct((rows, 1024), dtype)


def test_a_long_argument_is_not_copied_before_the_kernel():
  assert not _copies_before(_copied(_V7), _array(512))


def test_a_short_one_goes_where_xla_likes():
  assert _copies_before(_copied(_V7), _array(64))


@pytest.mark.parametrize("in_axes", [0, 1])
def test_vmap_slices_what_stays_in_hbm(in_axes):
  xs = jax.ShapeDtypeStruct((512, 512, 1024), jnp.float32)
  fn = jax.vmap(_copied(_V7), in_axes=in_axes)
  assert cm.compile(jax.jit(fn), xs, chip=_V7).kernels


def test_booleans_and_single_elements_compile():
  @cm.kernel(mesh=_V7.tensor_cores("core"), out=cm.like(0))
  def copied(x_hbm, mask_hbm, scale_hbm, o_hbm):
    cm.copy(x_hbm, o_hbm)

  args = _array(512), _array(2048, jnp.bool), jax.ShapeDtypeStruct((1, 1), "f4")
  assert cm.compile(jax.jit(copied), *args, chip=_V7).kernels
