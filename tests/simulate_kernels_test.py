"""Kernels of many kinds in the simulator, against NumPy and JAX's interpreter.

All are plain `pl.kernel` code. Each runs under several seeds, which decide the
order of workers and DMAs, and must return the same under all.
"""

import functools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from tests import simulating, small_kernels, support

_DMA = pltpu.SemaphoreType.DMA
_SLAB = (8, 128)
_SEEDS = range(4)
_CHIPS = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
_ID = pltpu.CompilerParams(collective_id=0)
_on_chips = pytest.mark.parametrize("chip", _CHIPS)


def _floats(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _ints(*shape, low=0, high=1000, seed=0):
  return np.random.default_rng(seed).integers(low, high, shape, np.int32)


def _out(*shape, dtype: Any = np.float32) -> Any:
  return jax.ShapeDtypeStruct(shape, dtype)


def _run(body, *args, out, seeds: Any = _SEEDS, **options) -> Any:
  """The outputs of a kernel, the same under every seed."""
  made = simulating.kernel(body, *args, out=out, **options)
  outs = simulating.silent(made, *args, seeds=seeds)
  return outs[0] if len(outs) == 1 else outs


# --- TensorCore --------------------------------------------------------------


def _through_vmem(compute, *args, out, scratch=(), **options):
  """Runs `compute(*vmem refs, *scratch)` on one core, outputs last."""
  outs = out if isinstance(out, tuple) else (out,)
  types = [*args, *outs]
  return _run(
    small_kernels.copied_in_and_out(compute, len(args), len(outs)),
    *args,
    out=out,
    cores=options.pop("cores", small_kernels.one_core),
    scratch_types=[pltpu.VMEM(t.shape, t.dtype) for t in types] + list(scratch),
    **options,
  )


@_on_chips
@pytest.mark.parametrize(
  "dtype",
  [np.float32, np.int32, np.uint32, np.int16, np.int8, jnp.bfloat16],
)
def test_a_sum_of_two_arrays(chip, dtype):
  x, y = (_ints(32, 128, high=60, seed=s).astype(dtype) for s in (0, 1))

  def compute(x_vmem, y_vmem, o_vmem):
    o_vmem[...] = x_vmem[...] + y_vmem[...]

  o = _through_vmem(compute, x, y, out=_out(32, 128, dtype=dtype), chip=chip)
  np.testing.assert_array_equal(o, x + y)


@pytest.mark.parametrize(
  "dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4, jnp.uint4]
)
def test_narrow_values_are_converted(dtype):
  x = _ints(32, 128, low=0, high=7).astype(dtype)

  def compute(x_vmem, o_vmem):
    o_vmem[...] = (x_vmem[...].astype(np.float32) * 2).astype(dtype)

  o = _through_vmem(compute, x, out=_out(32, 128, dtype=dtype))
  wide = np.asarray(x).astype(np.float32) * 2
  np.testing.assert_array_equal(
    o.astype(np.float32), jnp.asarray(wide).astype(dtype).astype(np.float32)
  )


def test_bfloat16_rounds_once_to_even():
  x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
  x = np.resize(x, _SLAB)

  def compute(x_vmem, o_vmem):
    o_vmem[...] = x_vmem[...].astype(jnp.bfloat16)

  o = _through_vmem(compute, x, out=_out(*_SLAB, dtype=jnp.bfloat16))
  expected = [1, 1 + 2**-6, 1 + 2**-7]
  np.testing.assert_array_equal(o.astype(np.float32)[0, :3], expected)


def test_a_product_of_matrices():
  x, y = _ints(16, 128, high=8), _ints(128, 256, high=8, seed=1)
  x, y = x.astype(np.float32), y.astype(np.float32)

  def compute(x_vmem, y_vmem, o_vmem):
    o_vmem[...] = jnp.dot(
      x_vmem[...], y_vmem[...], preferred_element_type=jnp.float32
    )

  o = _through_vmem(compute, x, y, out=_out(16, 256))
  np.testing.assert_array_equal(o, x @ y)


@pytest.mark.parametrize("rows", [13, 100, 260])
def test_a_product_in_stripes_is_the_product(rows):
  x, y = _ints(rows, 100, high=8), _ints(100, 200, high=8, seed=1)
  x, y = x.astype(np.float32), y.astype(np.float32)

  def compute(x_vmem, y_vmem, o_vmem):
    o_vmem[...] = jnp.dot(
      x_vmem[...], y_vmem[...], preferred_element_type=jnp.float32
    )

  o = _through_vmem(compute, x, y, out=_out(rows, 200), seeds=[0])
  np.testing.assert_array_equal(o, x @ y)


def _transform(name):
  def body(x_hbm, o_hbm, x_vmem, o_vmem):
    pltpu.sync_copy(x_hbm, x_vmem)
    match name:
      case "slices":
        o_vmem[pl.ds(0, 4), :] = x_vmem[pl.ds(4, 4), :]
        o_vmem[4:8, 0:64] = x_vmem[0:4, 64:128]
        o_vmem[4:8, 64:128] = x_vmem[4:8, 0:64]
      case "strided":
        o_vmem[pl.ds(0, 4, 2), :] = x_vmem[pl.ds(1, 4, 2), :]
        o_vmem[pl.ds(1, 4, 2), :] = x_vmem[pl.ds(0, 4, 2), :]
      case "nested":
        part = x_vmem.at[pl.ds(2, 4)].at[pl.ds(1, 2), pl.ds(64, 64)]
        o_vmem[...] = jnp.zeros(_SLAB, jnp.int32)
        o_vmem.at[pl.ds(4, 4)].at[pl.ds(2, 2), pl.ds(0, 64)][...] = part[...]
      case "reshape":
        o_vmem.reshape(4, 256)[...] = x_vmem.reshape(4, 256)[...] + 1
      case "transpose":
        square = x_vmem.at[:, pl.ds(0, 8)]
        o_vmem[...] = x_vmem[...]
        o_vmem[:, pl.ds(0, 8)] = square[...].T
      case "bitcast":
        o_vmem.bitcast(np.float32)[...] = -x_vmem.bitcast(np.float32)[...]
      case "narrow":
        bytes_ = x_vmem.bitcast(np.int16)
        o_vmem.bitcast(np.int16)[...] = bytes_[...]
      case "row":
        o_vmem[...] = x_vmem[...]
        o_vmem[3] = x_vmem[5]
    pltpu.sync_copy(o_vmem, o_hbm)

  return body


def _transformed(name, x):
  o = x.copy()
  match name:
    case "slices":
      o[0:4], o[4:8, :64], o[4:8, 64:] = x[4:8], x[0:4, 64:], x[4:8, :64]
    case "strided":
      o[0::2], o[1::2] = x[1::2], x[0::2]
    case "nested":
      o[...] = 0
      o[6:8, :64] = x[3:5, 64:]
    case "reshape":
      o += 1
    case "transpose":
      o[:, :8] = x[:, :8].T
    case "bitcast":
      o = (-x.view(np.float32)).view(np.int32)
    case "row":
      o[3] = x[5]
  return o


@pytest.mark.parametrize(
  "name",
  [
    *("slices", "strided", "nested", "reshape", "transpose", "bitcast"),
    *("narrow", "row"),
  ],
)
def test_parts_of_refs(name):
  x = _ints(*_SLAB)
  vmem = pltpu.VMEM(_SLAB, np.int32)
  o = _run(
    _transform(name),
    x,
    out=_out(*_SLAB, dtype=np.int32),
    cores=small_kernels.one_core,
    scratch_types=[vmem, vmem],
  )
  np.testing.assert_array_equal(o, _transformed(name, x))


@pytest.mark.parametrize("width", [4, 8])
def test_a_ref_of_words_seen_as_narrow_integers(width):
  x = _ints(*_SLAB, low=-(2**31), high=2**31 - 1)
  narrow = jnp.dtype(f"int{width}")

  def compute(x_vmem, o_vmem):
    o_vmem.bitcast(narrow)[...] = x_vmem.bitcast(narrow)[...]
    third = x_vmem.bitcast(narrow)[2:3].astype(jnp.int32)
    o_vmem[0:1] = third

  o = _through_vmem(compute, x, out=_out(*_SLAB, dtype=np.int32))
  third = x[0] << (32 - 3 * width) >> (32 - width)
  np.testing.assert_array_equal(o, np.concatenate([third[None], x[1:]]))


def test_a_copy_of_narrow_integers_is_as_long_as_one_of_their_words():
  x = np.arange(64 * 128, dtype=np.int32).reshape(64, 128) % 16 - 8

  def compute(x_vmem, o_vmem, narrow, copied, sem):
    narrow[...] = x_vmem[...].astype(jnp.int4)
    pltpu.async_copy(narrow, copied, sem)
    pltpu.make_async_copy(o_vmem, o_vmem, sem).wait()
    o_vmem[...] = copied.bitcast(jnp.int32)[...]

  vmem = pltpu.VMEM((64, 128), jnp.int4)
  out = _out(*_SLAB, dtype=np.int32)
  o = _through_vmem(compute, x, out=out, scratch=[vmem, vmem, _DMA])
  nibbles = x.reshape(8, 8, 128) & 15
  shifts = 4 * np.arange(8, dtype=np.int32).reshape(1, 8, 1)
  words = np.bitwise_or.reduce(nibbles << shifts, axis=1)
  np.testing.assert_array_equal(o, words)


def test_masked_loads_and_stores():
  x = _ints(*_SLAB)

  def compute(x_vmem, o_vmem):
    lane = lax.broadcasted_iota(jnp.int32, _SLAB, 1)
    o_vmem[...] = jnp.full(_SLAB, -1)
    value = pltpu.load(x_vmem, mask=lane < 100)
    pltpu.store(o_vmem, value, mask=lane < 50)

  o = _through_vmem(compute, x, out=_out(*_SLAB, dtype=np.int32))
  expected = np.where(np.arange(128) < 50, x, -1)
  np.testing.assert_array_equal(o, expected)


@pytest.mark.parametrize("kind", ["fori", "while", "scan", "cond", "switch"])
@pytest.mark.parametrize("count", [0, 3, 7])
def test_control_flow(kind, count):
  n, x = np.array([count], np.int32), _ints(*_SLAB)

  def body(n_hbm, x_hbm, o_hbm, n_smem, acc):
    pltpu.sync_copy(n_hbm, n_smem)
    pltpu.sync_copy(x_hbm, acc)
    n, total = n_smem[0], jnp.int32(0)
    match kind:
      case "fori":

        def step(i, total):
          acc[...] += i
          return total + i

        total = lax.fori_loop(0, n, step, jnp.int32(0))
      case "while":
        _, total = lax.while_loop(
          lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] + s[0]), (0, 0)
        )
        acc[...] += total
      case "scan":
        _, rows = lax.scan(
          lambda c, i: (c + i, c * 2), jnp.int32(0), jnp.arange(4)
        )
        total = jnp.sum(rows)
        acc[...] += total
      case "cond":
        total = lax.cond(n > 2, lambda: n * 2, lambda: n - 1)
        acc[...] += total
      case "switch":
        total = lax.switch(n, [lambda: 10, lambda: 20, lambda: 30])
        acc[...] += total
    acc[0, :] = jnp.full(128, total)
    pltpu.sync_copy(acc, o_hbm)

  triangle = sum(range(count))
  total = {
    "fori": triangle,
    "while": triangle,
    "scan": 2 * (0 + 0 + 1 + 3),
    "cond": count * 2 if count > 2 else count - 1,
    "switch": [10, 20, 30][min(count, 2)],
  }[kind]
  o = _run(
    body,
    n,
    x,
    out=_out(*_SLAB, dtype=np.int32),
    cores=small_kernels.one_core,
    scratch_types=[pltpu.SMEM((1,), np.int32), pltpu.VMEM(_SLAB, np.int32)],
  )
  expected = x + total
  expected[0] = total
  np.testing.assert_array_equal(o, expected)


def _nested(kind, depth):
  """A body whose loops or branches are nested to a depth."""

  def inside(level, x, ref):
    if level == depth:
      ref[1] += 1
      return x * 3 + level
    if kind == "branches":
      deeper = lambda x: inside(level + 1, x - 1, ref) + 2
      return lax.cond(x > -level, deeper, lambda x: -x, x)
    # Two rounds near the top and near the bottom, where loops are cheap.
    rounds = 2 if level in (0, depth - 1) else 1
    step = lambda i, x: inside(level + 1, x + i, ref) + level
    return lax.fori_loop(0, rounds, step, x)

  def body(x, o):
    o[1] = 0
    o[0] = inside(0, x[0], o)

  return body


def _nested_expected(kind, depth, x):
  """The same in Python: the result, and how often the innermost runs."""
  runs = 0

  def inside(level, x):
    nonlocal runs
    if level == depth:
      runs += 1
      return x * 3 + level
    if kind == "branches":
      return inside(level + 1, x - 1) + 2 if x > -level else -x
    for i in range(2 if level in (0, depth - 1) else 1):
      x = inside(level + 1, x + i) + level
    return x

  return [inside(0, x), runs]


@pytest.mark.parametrize(
  ("kind", "depth", "x"),
  [
    *(("loops", depth, 1) for depth in (2, 16, 17, 18, 40)),
    *(("branches", depth, 1) for depth in (3, 79, 80, 81)),
    ("branches", 100, 40),  # The last branches are not taken.
  ],
)
def test_loops_and_branches_nest_as_deeply_as_jax_traces_them(kind, depth, x):
  smem = pl.BlockSpec(memory_space=pltpu.SMEM)
  with cm.simulation(timeline=True) as run:
    o = pl.pallas_call(
      _nested(kind, depth),
      _out(2, dtype=np.int32),
      in_specs=[smem],
      out_specs=smem,
    )(np.array([x], np.int32))
  np.testing.assert_array_equal(o, _nested_expected(kind, depth, x))
  assert not run.findings


def test_a_worker_waits_inside_a_deep_nest():
  def body(x_hbm, o_hbm, line):
    other = 1 - lax.axis_index("core")
    sem = pltpu.get_barrier_semaphore()

    def inside(level):
      if level == 24:
        pl.semaphore_signal(sem, 1, device_id={"core": other})
        pl.semaphore_wait(sem, 1)
        line[...] += 1
        return
      pl.loop(0, 3 if level == 20 else 1)(lambda _: inside(level + 1))

    pltpu.sync_copy(x_hbm.at[lax.axis_index("core")], line)
    inside(0)
    pltpu.sync_copy(line, o_hbm.at[lax.axis_index("core")])

  x = _ints(2, *_SLAB)
  o = _run(
    body,
    x,
    out=_out(2, *_SLAB, dtype=np.int32),
    scratch_types=[pltpu.VMEM(_SLAB, np.int32)],
    compiler_params=_ID,
  )
  np.testing.assert_array_equal(o, x + 3)


def test_a_grid_of_eight_dimensions_with_loops_inside():
  grid = (2, 1, 2, 1, 2, 1, 1, 3)
  count = int(np.prod(grid))

  def body(x, o):
    ids = [pl.program_id(i) for i in range(8)]
    assert len({int(pl.num_programs(i)) for i in range(8)}) == 3

    def inside(level, total):
      if level == 14:
        return total + sum(i * (7 + axis) for axis, i in enumerate(ids))
      return lax.fori_loop(0, 1, lambda i, t: inside(level + 1, t), total)

    o[...] = x[...] + inside(0, jnp.int32(0))

  def place(*ids):
    at = 0
    for i, size in zip(ids, grid, strict=True):
      at = at * size + i
    return at, 0, 0

  spec = pl.BlockSpec((1, *_SLAB), place)
  x = _ints(count, *_SLAB)
  with cm.simulation() as run:
    o = pl.pallas_call(
      body,
      _out(*x.shape, dtype=np.int32),
      grid=grid,
      in_specs=[spec],
      out_specs=spec,
    )(x)
  weights = np.arange(7, 15)
  added = [np.dot(ids, weights) for ids in np.ndindex(*grid)]
  np.testing.assert_array_equal(o, x + np.array(added)[:, None, None])
  assert not run.findings


def test_an_operand_of_rank_0():
  def body(scale, x, o):
    o[...] = x[...] * scale[...]

  def call(scale, x):
    specs = [pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()]
    return pl.pallas_call(body, _out(*_SLAB), in_specs=specs)(scale, x)

  x = _floats(*_SLAB)
  with cm.simulation() as run:
    np.testing.assert_array_equal(call(np.float32(3), x), 3 * x)
  assert not run.findings


def test_scopes_inside_loops():
  x = _floats(*_SLAB)

  def body(x_hbm, o_hbm, acc):
    acc[...] = jnp.zeros(_SLAB)

    @pl.loop(0, 3)
    def _(i):
      def inside(held, sem):
        pltpu.async_copy(x_hbm, held, sem).wait()
        acc[...] += held[...] * i.astype(np.float32)

      pl.run_scoped(inside, pltpu.VMEM(_SLAB, np.float32), _DMA)

    pltpu.sync_copy(acc, o_hbm)

  o = _run(
    body,
    x,
    out=_out(*_SLAB),
    cores=small_kernels.one_core,
    scratch_types=[pltpu.VMEM(_SLAB, np.float32)],
  )
  np.testing.assert_array_equal(o, x * 0 + x * 1 + x * 2)


def test_debug_print_says_who_prints(capfd):
  def body(o_hbm):
    core = lax.axis_index("core")
    pl.debug_print("core {}", core)
    pl.debug_print("and after", core, core + 1)

  made = simulating.kernel(body, out=_out(*_SLAB))
  made.run()
  printed = capfd.readouterr().out
  for core in range(2):
    assert f"[device 0, core {core}] core {core}\n" in printed
    assert f"[device 0, core {core}] and after {core} {core + 1}\n" in printed


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_other_generators_give_the_bits_of_jax(impl):
  def draw(seed):
    first, second = jax.random.split(jax.random.key(seed, impl=impl))
    second = jax.random.fold_in(second, seed)
    return jax.random.uniform(first, _SLAB) + jax.random.normal(second, _SLAB)

  def body(seed, o):
    o[...] = draw(seed[0])

  with cm.simulation():
    o = pl.pallas_call(
      body,
      _out(*_SLAB),
      in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)],
    )(np.array([3], np.int32))
  np.testing.assert_allclose(o, draw(jnp.int32(3)), rtol=1e-5, atol=1e-6)


def test_random_bits_depend_on_the_key_only():
  def body(o_hbm, acc):
    pltpu.prng_seed(lax.axis_index("core") % 2)
    acc[...] = pltpu.bitcast(pltpu.prng_random_bits(_SLAB), jnp.uint32)
    pltpu.sync_copy(acc, o_hbm.at[lax.axis_index("core")])

  o = _run(
    body,
    out=_out(2, *_SLAB, dtype=np.uint32),
    scratch_types=[pltpu.VMEM(_SLAB, np.uint32)],
  )
  assert len(np.unique(o)) > 2000
  assert abs(np.unpackbits(o.view(np.uint8)).mean() - 0.5) < 0.02


# --- pipelines ---------------------------------------------------------------


def _scaled(chip, x, *, block):
  def body(x_hbm, o_hbm):
    def step(x_vmem, o_vmem):
      o_vmem[...] = x_vmem[...] * 3 + 1

    grid = tuple(-(-n // b) for n, b in zip(x_hbm.shape, block, strict=True))
    spec = pl.BlockSpec(block, lambda i, j: (i, j))
    pltpu.emit_pipeline(
      step,
      grid=grid,
      in_specs=[spec],
      out_specs=[spec],
      core_axis_name="core",
      dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
    )(x_hbm, o_hbm)

  out = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.kernel(body, out, mesh=chip.tensor_cores("core"))(x)


@_on_chips
@pytest.mark.parametrize(
  ("shape", "block"),
  [
    ((32, 256), (8, 128)),
    ((20, 200), (8, 128)),  # The last blocks are partial.
    ((7, 130), (16, 128)),
    ((64, 128), (16, 128)),
  ],
)
def test_a_pipeline(chip, shape, block):
  x = _ints(*shape)
  found = cm.chip(chip)
  made = simulating.traced(
    lambda x: _scaled(found, x, block=block), x, chip=chip, devices=1
  )
  (o,) = simulating.silent(made, x, seeds=_SEEDS)
  np.testing.assert_array_equal(o, x * 3 + 1)


def test_a_pipeline_that_accumulates():
  x = _ints(32, 128)

  def body(x_hbm, o_hbm):
    def step(x_vmem, o_vmem):
      @pl.when(pl.program_id(0) == 0)
      def _():
        o_vmem[...] = jnp.zeros(_SLAB, jnp.int32)

      o_vmem[...] += x_vmem[...]

    pltpu.emit_pipeline(
      step,
      grid=(4,),
      in_specs=[pl.BlockSpec(_SLAB, lambda i: (i, 0))],
      out_specs=[pl.BlockSpec(_SLAB, lambda i: (0, 0))],
    )(x_hbm, o_hbm)

  o = _run(
    body, x, out=_out(*_SLAB, dtype=np.int32), cores=small_kernels.one_core
  )
  np.testing.assert_array_equal(o, x.reshape(4, 8, 128).sum(0))


@pytest.mark.filterwarnings("ignore:jax.experimental.pallas.core_map")
def test_core_map_with_refs_that_it_closes_over():
  x = _floats(2, *_SLAB)

  def call(x):
    x_ref, o_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))

    @pl.core_map(cm.chip("v5p:2x2x1").tensor_cores("core"))
    def _():
      core = lax.axis_index("core")

      def inside(acc):
        pltpu.sync_copy(x_ref.at[core], acc)
        acc[...] = acc[...] * 2
        pltpu.sync_copy(acc, o_ref.at[1 - core])

      pl.run_scoped(inside, pltpu.VMEM(_SLAB, np.float32))

    return jax.freeze(o_ref)

  _, mesh = support.simulated()
  many = np.tile(x, (mesh.size, 1, 1))
  for seed in _SEEDS:
    with cm.simulation(seed=seed) as run:
      o = np.asarray(support.over_devices(call, mesh, check_vma=False)(many))
    np.testing.assert_array_equal(o[:2], x[::-1] * 2)
    assert len(run.runs) == mesh.size
    assert not run.findings


# --- devices -----------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("cores", [1, 2])
def test_a_ring_over_devices_and_cores(devices, cores):
  x = _floats(devices * cores, *_SLAB)

  def body(x_hbm, o_hbm, mine, theirs, send, recv):
    core, device = lax.axis_index("core"), lax.axis_index("device")
    pltpu.sync_copy(x_hbm.at[core], mine)
    barrier = pltpu.get_barrier_semaphore()
    right = lax.rem(device + 1, devices)
    left = lax.rem(device + devices - 1, devices)
    pl.semaphore_signal(barrier, 1, device_id={"device": left, "core": core})
    pl.semaphore_wait(barrier, 1)
    pltpu.async_remote_copy(
      mine, theirs, send, recv, device_id={"device": right, "core": core}
    ).wait()
    pltpu.sync_copy(theirs, o_hbm.at[core])

  vmem = pltpu.VMEM(_SLAB, np.float32)
  o = _run(
    body,
    x,
    out=_out(cores, *_SLAB),
    cores=lambda chip: chip.tensor_cores("core", cores),
    devices=devices,
    scratch_types=[vmem, vmem, _DMA, _DMA],
    compiler_params=_ID,
    seeds=range(9),
  )
  np.testing.assert_array_equal(o, np.roll(x, cores, 0))


# --- vector subcores ---------------------------------------------------------


_FLAT = pltpu.CompilerParams(
  use_tc_tiling_on_sc=False, needs_layout_passes=False
)


def _on_registers(compute, *args, out_dtypes, chip="v5p:2x2x1", lanes=None):
  """Runs `compute` on one register of each array, on one vector subcore."""
  lanes = lanes or cm.chip(chip).sparse_core_lanes
  num_in = len(args)

  def body(*refs):
    count = num_in + len(out_dtypes)
    hbm, vmem = refs[:count], refs[count:]
    for source, target in zip(hbm[:num_in], vmem[:num_in], strict=True):
      pltpu.sync_copy(source, target)
    results = compute(*(ref[...] for ref in vmem[:num_in]))
    for ref, result in zip(vmem[num_in:], results, strict=True):
      ref[...] = result
    for source, target in zip(vmem[num_in:], hbm[num_in:], strict=True):
      pltpu.sync_copy(source, target)

  outs = tuple(_out(lanes, dtype=d) for d in out_dtypes)
  return _run(
    body,
    *args,
    out=outs,
    cores=lambda c: c.vector_subcores(num_cores=1, num_subcores=1),
    chip=chip,
    scratch_types=[pltpu.VMEM(a.shape, a.dtype) for a in (*args, *outs)],
    compiler_params=_FLAT,
    seeds=[0],
  )


def _lanes_of(chip):
  return cm.chip(chip).sparse_core_lanes


@_on_chips
def test_running_sums_and_maxima(chip):
  x = _ints(_lanes_of(chip), low=-50, high=50)
  sums, maxima = _on_registers(
    lambda x: (plsc.cumsum(x), plsc.cummax(x)),
    x,
    out_dtypes=[np.int32, np.int32],
    chip=chip,
  )
  np.testing.assert_array_equal(sums, np.cumsum(x))
  np.testing.assert_array_equal(maxima, np.maximum.accumulate(x))


@_on_chips
def test_sorted_keys_bring_their_values(chip):
  x = _ints(_lanes_of(chip), high=10_000)
  keys, values = _on_registers(
    lambda x: plsc.sort_key_val(x, x * 2),
    x,
    out_dtypes=[np.int32, np.int32],
    chip=chip,
  )
  np.testing.assert_array_equal(keys, np.sort(x))
  np.testing.assert_array_equal(values, 2 * np.sort(x))


def test_counts_of_equal_lanes():
  x = np.array([3, 1, 3, 3, 1, 7, 7, 3], np.int32)
  counts, last = _on_registers(
    lambda x: (
      (r := plsc.scan_count(x))[0],
      r[1].astype(np.int32),
    ),
    x,
    out_dtypes=[np.int32, np.int32],
  )
  seen: dict[int, int] = {}
  expected = []
  for value in x.tolist():
    seen[value] = seen.get(value, 0) + 1
    expected.append(seen[value])
  np.testing.assert_array_equal(counts - counts[0] + 1, expected)
  is_last = [value not in x[i + 1 :] for i, value in enumerate(x)]
  np.testing.assert_array_equal(last, is_last)


@pytest.mark.parametrize("where", [0, 3, 7, None])
def test_reductions_of_masks(where):
  x = np.zeros(8, np.int32)
  if where is not None:
    x[where:] = 1
  number, first = _on_registers(
    lambda x: (
      plsc.all_reduce_population_count(x > 0),
      plsc.all_reduce_ffs(x > 0),
    ),
    x,
    out_dtypes=[np.int32, np.int32],
  )
  assert set(number.tolist()) == {int(x.sum())}
  assert set(first.tolist()) == {8 if where is None else where}


@pytest.mark.parametrize(
  "format", [plsc.PackFormat.INTERLEAVED, plsc.PackFormat.COMPRESSED]
)
def test_what_is_packed_is_unpacked(format):
  x, y = _floats(8), _floats(8, seed=1)

  def compute(x, y):
    both = plsc.pack(x, y, format=format, preferred_element_type=jnp.bfloat16)
    return plsc.unpack(both, format=format, preferred_element_type=jnp.float32)

  a, b = _on_registers(compute, x, y, out_dtypes=[np.float32, np.float32])
  for got, given_ in ((a, x), (b, y)):
    np.testing.assert_array_equal(
      got, given_.astype(jnp.bfloat16).astype(np.float32)
    )


def _table_body(how):
  def body(i_hbm, x_hbm, o_hbm, index, table, line):
    pltpu.sync_copy(i_hbm, index)
    pltpu.sync_copy(x_hbm, table)
    i = index[...]
    mask = lax.iota(jnp.int32, 8) % 3 != 1
    line[...] = jnp.zeros(8, jnp.int32)
    match how:
      case "load_gather":
        line[...] = plsc.load_gather(table, [i])
      case "masked load_gather":
        value = plsc.load_gather(table, [i], mask=mask)
        line[...] = jnp.where(mask, value, -1)
      case "store_scatter":
        plsc.store_scatter(table, [i], i * 2)
      case "masked store_scatter":
        plsc.store_scatter(table, [i], i * 2, mask=mask)
      case "addupdate_scatter":
        plsc.addupdate_scatter(table, [i // 2], i)
      case "masked addupdate_scatter":
        plsc.addupdate_scatter(table, [i // 2], i, mask=mask)
      case "addupdate":
        plsc.addupdate(table.at[pl.ds(4, 8)], i)
      case "store_compressed":
        plsc.store_compressed(table.at[pl.ds(4, 8)], i, mask=mask)
      case "addupdate_compressed":
        plsc.addupdate_compressed(table.at[pl.ds(4, 8)], i, mask=mask)
      case "load_expanded":
        value = plsc.load_expanded(table.at[pl.ds(4, 8)], mask=mask)
        line[...] = jnp.where(mask, value, -1)
    pltpu.sync_copy(table, o_hbm.at[pl.ds(0, 16)])
    pltpu.sync_copy(line, o_hbm.at[pl.ds(16, 8)])

  return body


def _table_expected(how, i, table):
  table, line = table.copy(), np.zeros(8, np.int32)
  mask = np.arange(8) % 3 != 1
  count = mask.sum()
  match how:
    case "load_gather":
      line = table[i]
    case "masked load_gather":
      line = np.where(mask, table[i], -1)
    case "store_scatter":
      table[i] = i * 2
    case "masked store_scatter":
      table[i[mask]] = i[mask] * 2
    case "addupdate_scatter":
      np.add.at(table, i // 2, i)
    case "masked addupdate_scatter":
      np.add.at(table, i[mask] // 2, i[mask])
    case "addupdate":
      table[4:12] += i
    case "store_compressed":
      table[4 : 4 + count] = i[mask]
    case "addupdate_compressed":
      table[4 : 4 + count] += i[mask]
    case "load_expanded":
      line = np.full(8, -1, np.int32)
      line[mask] = table[4 : 4 + count]
  return np.concatenate([table, line])


@pytest.mark.parametrize(
  "how",
  [
    *("load_gather", "masked load_gather", "store_scatter"),
    *("masked store_scatter", "addupdate_scatter", "masked addupdate_scatter"),
    *("addupdate", "store_compressed", "addupdate_compressed"),
    "load_expanded",
  ],
)
def test_a_table_in_the_memory_of_a_subcore(how):
  i = np.array([5, 4, 15, 0, 7, 6, 2, 9], np.int32)
  table = _ints(16)
  o = _run(
    _table_body(how),
    i,
    table,
    out=_out(24, dtype=np.int32),
    cores=lambda c: c.vector_subcores(num_cores=1, num_subcores=1),
    scratch_types=[
      pltpu.VMEM((8,), np.int32),
      pltpu.VMEM((16,), np.int32),
      pltpu.VMEM((8,), np.int32),
    ],
    compiler_params=_FLAT,
    seeds=[0],
  )
  np.testing.assert_array_equal(o, _table_expected(how, i, table))


@pytest.mark.parametrize("carried", [False, True])
def test_a_parallel_loop(carried):
  x = _ints(64)

  def body(x_hbm, o_hbm, table, line):
    pltpu.sync_copy(x_hbm, table)
    if carried:

      @plsc.parallel_loop(0, 64, 8, carry=jnp.zeros(8, jnp.int32))
      def total(i, total):
        return total + table[pl.ds(i, 8)]

      line[...] = total
    else:

      @plsc.parallel_loop(0, 64, 8, unroll=2)
      def _(i):
        table[pl.ds(i, 8)] = table[pl.ds(i, 8)] * 2

      line[...] = jnp.zeros(8, jnp.int32)
    pltpu.sync_copy(table, o_hbm.at[pl.ds(0, 64)])
    pltpu.sync_copy(line, o_hbm.at[pl.ds(64, 8)])

  o = _run(
    body,
    x,
    out=_out(72, dtype=np.int32),
    cores=lambda c: c.vector_subcores(num_cores=1, num_subcores=1),
    scratch_types=[pltpu.VMEM((64,), np.int32), pltpu.VMEM((8,), np.int32)],
    compiler_params=_FLAT,
  )
  if carried:
    expected = [x, x.reshape(8, 8).sum(0)]
  else:
    expected = [x * 2, np.zeros(8, np.int32)]
  np.testing.assert_array_equal(o, np.concatenate(expected))


@_on_chips
def test_every_subcore_of_every_core_does_its_own_work(chip):
  found = cm.chip(chip)
  lanes, cores = found.sparse_core_lanes, found.sparse_cores_per_device
  x = _ints(cores * 16, lanes)

  def body(x_hbm, o_hbm, line):
    worker = lax.axis_index("core") * 16 + lax.axis_index("subcore")
    pltpu.sync_copy(x_hbm.at[worker], line)
    line[...] = line[...] + worker
    pltpu.sync_copy(line, o_hbm.at[worker])

  o = _run(
    body,
    x,
    out=_out(*x.shape, dtype=np.int32),
    cores=lambda c: c.vector_subcores(),
    chip=chip,
    scratch_types=[pltpu.VMEM((lanes,), np.int32)],
    compiler_params=_FLAT,
  )
  np.testing.assert_array_equal(o, x + np.arange(len(x))[:, None])


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("scatter", [False, True])
def test_indirect_copies(ignored, scatter):
  i = np.array([5, 3, 11, 0, 7, 6, 2, 9], np.int32)
  if ignored:
    i[[1, 6]] = -1
  x = _ints(12, 16)

  def body(i_hbm, x_hbm, o_hbm, index, rows):
    pltpu.sync_copy(i_hbm, index)
    where = plsc.Indices(index, ignored_value=-1) if ignored else index
    rows[...] = jnp.zeros((8, 16), jnp.int32)
    if scatter:
      pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], rows)
      pltpu.sync_copy(rows, o_hbm.at[where])
    else:
      pltpu.sync_copy(x_hbm.at[where], rows)
      pltpu.sync_copy(rows, o_hbm.at[pl.ds(0, 8)])

  o = _run(
    body,
    i,
    x,
    out=_out(12, 16, dtype=np.int32),
    cores=lambda c: c.vector_subcores(num_cores=1, num_subcores=1),
    scratch_types=[pltpu.VMEM((8,), np.int32), pltpu.VMEM((8, 16), np.int32)],
    compiler_params=_FLAT,
  )
  kept = i >= 0
  if scatter:
    np.testing.assert_array_equal(o[i[kept]], x[:8][kept])
  else:
    expected = np.where(kept[:, None], x[i], 0)
    np.testing.assert_array_equal(o[:8], expected)


@pytest.mark.parametrize("over", ["subcore", "core", "device"])
def test_copies_between_subcores_of_cores_and_devices(over):
  devices = 2
  x = _ints(devices * 2 * 4, 16)

  def body(x_hbm, o_hbm, mine, theirs, send, recv):
    core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
    device = lax.axis_index("device")
    row = core * 4 + subcore
    pltpu.sync_copy(x_hbm.at[row], mine)
    target = {"core": core, "subcore": subcore}
    match over:
      case "subcore":
        target["subcore"] = lax.rem(subcore + 1, 4)
      case "core":
        target["core"] = 1 - core
      case "device":
        target["device"] = 1 - device
    barrier = pltpu.get_barrier_semaphore()
    for other_device in range(devices):
      for other_core in range(2):
        for other in range(4):
          pl.semaphore_signal(
            barrier,
            1,
            device_id={
              "device": other_device,
              "core": other_core,
              "subcore": other,
            },
          )
    pl.semaphore_wait(barrier, devices * 8)
    pltpu.async_remote_copy(mine, theirs, send, recv, device_id=target).wait()
    pltpu.sync_copy(theirs, o_hbm.at[row])

  line = pltpu.VMEM((16,), np.int32)
  o = _run(
    body,
    x,
    out=_out(8, 16, dtype=np.int32),
    cores=lambda c: c.vector_subcores(num_cores=2, num_subcores=4),
    devices=devices,
    scratch_types=[line, line, _DMA, _DMA],
    compiler_params=pltpu.CompilerParams(
      use_tc_tiling_on_sc=False, needs_layout_passes=False, collective_id=0
    ),
  )
  by_place = x.reshape(devices, 2, 4, 16)
  axis = {"device": 0, "core": 1, "subcore": 2}[over]
  np.testing.assert_array_equal(
    o.reshape(by_place.shape), np.roll(by_place, 1, axis)
  )


# --- scalar subcores, and several meshes -------------------------------------


@pytest.mark.parametrize("chip", ["v6e:2x2", "tpu7x:2x2x1"])
def test_scalar_subcores_copy_between_memories(chip):
  cores = cm.chip(chip).sparse_cores_per_device
  x = _ints(cores, 128)

  def body(x_hbm, o_hbm, line):
    core = lax.axis_index("core")
    pltpu.sync_copy(x_hbm.at[core], line)

    @pl.loop(0, 128)
    def _(i):
      line[i] = line[i] * 2 + core

    pltpu.sync_copy(line, o_hbm.at[core])

  o = _run(
    body,
    x,
    out=_out(cores, 128, dtype=np.int32),
    cores=lambda c: c.scalar_subcores(),
    chip=chip,
    scratch_types=[pltpu.SMEM((128,), np.int32)],
  )
  np.testing.assert_array_equal(o, x * 2 + np.arange(cores)[:, None])


def test_a_scalar_and_vector_subcores_in_one_kernel():
  x = _ints(4, 16)

  def scalar(x_hbm, o_hbm):
    core = lax.axis_index("core")

    @pl.when(core == 0)
    def _():
      pltpu.sync_copy(x_hbm.at[0], o_hbm.at[0])

  def vector(x_hbm, o_hbm):
    subcore = lax.axis_index("subcore")

    @pl.when((subcore > 0) & (lax.axis_index("core") == 0))
    def _():
      def inside(line):
        pltpu.sync_copy(x_hbm.at[subcore], line)
        line[...] = line[...] + 1
        pltpu.sync_copy(line, o_hbm.at[subcore])

      pl.run_scoped(inside, pltpu.VMEM((16,), np.int32))

  o = _run(
    [scalar, vector],
    x,
    out=_out(4, 16, dtype=np.int32),
    cores=lambda c: [
      c.scalar_subcores(),
      c.vector_subcores(num_subcores=4),
    ],
    chip="v6e:2x2",
    compiler_params=_FLAT,
  )
  np.testing.assert_array_equal(o, np.concatenate([x[:1], x[1:] + 1]))


# --- against JAX's interpreter -----------------------------------------------


def _interpreted(call, *args, devices, cores):
  """What JAX's interpreter makes of a kernel."""
  chip = cm.chip("v5p:2x2x1")
  mesh = chip.device_mesh(
    "device", (devices,), on="simulator", devices=jax.devices()[:devices]
  )
  spec = jax.P("device")
  params = pltpu.InterpretParams(num_cores_or_threads=cores)
  whole = jax.shard_map(
    functools.partial(call, params),
    mesh=mesh,
    in_specs=spec,
    out_specs=spec,
    check_vma=False,
  )
  return np.asarray(jax.jit(whole)(*args))


# XLA may contract a product and a sum into one rounding, the simulator does
# not. All products here are exact, so that values are equal bit for bit.
_STEPS = {
  "double": lambda x: x * 2,
  "negate": lambda x: -x,
  "shift": lambda x: x + 1.25,
  "clamp": lambda x: jnp.clip(x, -0.5, 0.5),
  "choose": lambda x: jnp.where(x > 0, x, x * 0.25),
  "round": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
  "bits": lambda x: lax.bitcast_convert_type(
    lax.bitcast_convert_type(x, jnp.int32) & ~0xFF, jnp.float32
  ),
  "floor": jnp.floor,
  "lane": lambda x: (
    x + lax.broadcasted_iota(jnp.int32, x.shape, 1).astype(np.float32)
  ),
  "abs": jnp.abs,
}


@given(
  st.permutations(sorted(_STEPS)),
  st.integers(1, 3),
  st.integers(1, 2),
  st.sampled_from([(8, 128), (16, 128), (16, 256)]),
  st.integers(1, 2),
  st.integers(1, 2),
  st.integers(0, 99),
)
@settings(max_examples=5)
def test_random_pipelines_equal_those_of_jax(
  names, rows, columns, block, cores, devices, seed
):
  x = _floats(devices * rows * 16, columns * 256, seed=seed)
  count = len(names)

  def call(interpret, x):
    def body(x_hbm, o_hbm):
      def step(x_vmem, o_vmem):
        value = x_vmem[...]
        for i, name in enumerate(names):
          o_vmem[i] = value = _STEPS[name](value)

      spec = pl.BlockSpec(block, lambda i, j: (i, j))
      out_spec = pl.BlockSpec((count, *block), lambda i, j: (0, i, j))
      pltpu.emit_pipeline(
        step,
        grid=(x_hbm.shape[0] // block[0], x_hbm.shape[1] // block[1]),
        in_specs=[spec],
        out_specs=[out_spec],
        core_axis_name="core",
        dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
      )(x_hbm, o_hbm)

    mesh = cm.chip("v5p:2x2x1").tensor_cores("core", cores)
    out = jax.ShapeDtypeStruct((count, *x.shape), x.dtype)
    return pl.kernel(body, out, mesh=mesh, interpret=interpret)(x)

  expected = _interpreted(call, x, devices=devices, cores=cores)
  made = simulating.traced(
    functools.partial(call, None), x, chip="v5p:2x2x1", devices=devices
  )
  (o,) = simulating.silent(made, x, seeds=[seed, seed + 1])
  np.testing.assert_array_equal(o, expected)


_copies = st.lists(
  st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6
)


@given(_copies, st.integers(1, 2), st.integers(1, 2), st.integers(0, 99))
@settings(max_examples=5)
def test_random_chains_of_copies_equal_those_of_jax(
  copies, cores, devices, seed
):
  x = _floats(devices * 4, cores * 8, 128, seed=seed)

  def call(interpret, x):
    def body(x_hbm, o_hbm, slots, sem):
      rows = pl.ds(lax.axis_index("core") * 8, 8)
      pltpu.sync_copy(x_hbm.at[:, rows], slots)
      for source, target in copies:
        if source != target:
          pltpu.async_copy(slots.at[source], slots.at[target], sem).wait()
        old = slots[target]
        slots[target] = old * 2
        slots[source] += old
      pltpu.sync_copy(slots, o_hbm.at[:, rows])

    mesh = cm.chip("v5p:2x2x1").tensor_cores("core", cores)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.kernel(
      body,
      out,
      mesh=mesh,
      scratch_types=[pltpu.VMEM((4, 8, 128), np.float32), _DMA],
      interpret=interpret,
    )(x)

  expected = _interpreted(call, x, devices=devices, cores=cores)
  made = simulating.traced(
    functools.partial(call, None), x, chip="v5p:2x2x1", devices=devices
  )
  (o,) = simulating.silent(made, x, seeds=[seed, seed + 1, seed + 2])
  np.testing.assert_array_equal(o, expected)
