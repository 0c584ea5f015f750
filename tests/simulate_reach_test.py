"""What a core may load from and store to is checked before anything runs."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm

_SLAB = (8, 128)


_TENSOR_CORE = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
_LANES = 8


@pytest.fixture
def subcores():
  """The mesh of one vector subcore."""
  return cm.chip("v5p").vector_subcores(num_cores=1, num_subcores=1)


_X = np.arange(1024, dtype=np.float32).reshape(_SLAB)


def _kernel(body, mesh, scratch, interpret):
  return pl.kernel(
    body,
    out_type=_X,
    mesh=mesh,
    scratch_types=scratch,
    interpret=interpret,
  )


def _run(body, mesh, *scratch):
  return np.asarray(_kernel(body, mesh, scratch, cm.SimulatorParams())(_X))


def _refusal(body, mesh, *scratch):
  """What the simulator says; the TPU compiler must refuse it, too."""
  with pytest.raises(cm.CompileError):
    cm.compile(_kernel(body, mesh, scratch, False), _X, chip="v5p")
  with pytest.raises(cm.UnsupportedError) as raised:
    _run(body, mesh, *scratch)
  return str(raised.value)


def _load_far(x_hbm, o_hbm, near):
  near[...] = x_hbm[0, :_LANES]
  pltpu.sync_copy(near, o_hbm.at[0, :_LANES])


def _store_far(x_hbm, o_hbm, near):
  del x_hbm
  o_hbm[0, :_LANES] = near[...]


def _copied(x_hbm, o_hbm, near):
  pltpu.sync_copy(x_hbm, near)
  near[0, :_LANES] = near[0, :_LANES] + 1
  pltpu.sync_copy(near, o_hbm)


_NEAR = pltpu.VMEM((_LANES,), jnp.float32)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(
  "body, what",
  [(_load_far, "load of 'x_hbm'"), (_store_far, "store to 'o_hbm'")],
)
def test_a_core_reaches_hbm_by_copies_only(body, what, is_sparse, subcores):
  mesh = subcores if is_sparse else _TENSOR_CORE
  text = _refusal(body, mesh, _NEAR)
  assert text.startswith(f"{what} at simulate_reach_test.py:")
  assert "is in HBM, and a core loads from and stores to its own" in text
  expected = _X.copy()
  expected[0, :_LANES] += 1
  o = _run(_copied, mesh, pltpu.VMEM(_SLAB, jnp.float32))
  np.testing.assert_array_equal(o, expected)


def test_a_subcore_reaches_the_shared_vmem_by_copies_only(subcores):
  def body(x_hbm, o_hbm, near, shared):
    pltpu.sync_copy(x_hbm.at[0, :_LANES], near)
    shared[...] = near[...]
    pltpu.sync_copy(shared, o_hbm.at[0, :_LANES])

  shared = pltpu.VMEM_SHARED((_LANES,), jnp.float32)
  text = _refusal(body, subcores, _NEAR, shared)
  assert "is in the VMEM that subcores share, and a core" in text


def test_a_number_of_a_subcores_vmem_is_taken_from_a_register(subcores):
  def body(x_hbm, o_hbm, near):
    pltpu.sync_copy(x_hbm.at[0, :_LANES], near)
    near[...] = jnp.full((_LANES,), near[3])
    pltpu.sync_copy(near, o_hbm.at[0, :_LANES])

  def by_register(x_hbm, o_hbm, near):
    pltpu.sync_copy(x_hbm.at[0, :_LANES], near)
    near[...] = jnp.full((_LANES,), near[...][3])
    pltpu.sync_copy(near, o_hbm.at[0, :_LANES])

  assert "not single numbers. Load a register" in _refusal(
    body, subcores, _NEAR
  )
  o = _run(by_register, subcores, _NEAR)
  np.testing.assert_array_equal(o[0, :_LANES], np.full(_LANES, _X[0, 3]))


def test_a_tensor_core_loads_a_number_of_its_vmem():
  def body(x_hbm, o_hbm, near):
    pltpu.sync_copy(x_hbm, near)
    near[...] = jnp.full(_SLAB, near[2, 3])
    pltpu.sync_copy(near, o_hbm)

  o = _run(body, _TENSOR_CORE, pltpu.VMEM(_SLAB, jnp.float32))
  np.testing.assert_array_equal(o, np.full(_SLAB, _X[2, 3]))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_smem_is_loaded_a_number_at_a_time(is_sparse, subcores):
  def body(x_hbm, o_hbm, near, numbers):
    del x_hbm
    numbers[0] = 1.0
    near[...] = near[...] + numbers[...]
    pltpu.sync_copy(near, o_hbm.at[0, :_LANES])

  mesh = subcores if is_sparse else _TENSOR_CORE
  numbers = pltpu.SMEM((_LANES,), jnp.float32)
  with pytest.raises(
    cm.UnsupportedError, match=r"one number at a time.*\(8,\)"
  ):
    _run(body, mesh, _NEAR, numbers)


def test_a_ref_whose_memory_is_not_said_may_be_near():
  def put(x_ref, near, arrived, sent):
    pltpu.async_remote_copy(
      x_ref, near, sent, arrived, device_id={"core": 0}
    ).wait_send()

  def add_one(x_ref, near, arrived):
    pltpu.make_async_copy(x_ref, near, arrived).wait()
    near[...] += 1

  subcore = cm.chip("v5p").scalar_subcores("scalar", num_cores=1)

  @jax.jit
  def call(x):
    x_ref = jax.new_ref(x)
    outs = pl.kernel(
      put,
      mesh=subcore,
      out_type=(
        pltpu.VMEM(x.shape, x.dtype) @ _TENSOR_CORE,
        pltpu.SemaphoreType.DMA(()) @ _TENSOR_CORE,
      ),
      scratch_types=[pltpu.SemaphoreType.DMA],
    )(x_ref)
    near, arrived = map(jax.new_ref, outs)
    pl.kernel(add_one, mesh=_TENSOR_CORE)(x_ref, near, arrived)
    return jax.freeze(near)

  with cm.simulation():
    np.testing.assert_array_equal(call(_X), _X + 1)
