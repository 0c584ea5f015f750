"""Tests for coremesh.shapes."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from coremesh import _compat, shapes
from coremesh.errors import AxisError, DTypeError, ShapeError

_CORES = {"core": 2, "subcore": 4}
_TYPE = jax.ShapeDtypeStruct

# The types of the arguments of a kernel: two arrays, a tree and a scalar.
_TYPES = [
  jax.typeof(jnp.zeros((16, 256), jnp.bfloat16)),
  jax.typeof(jnp.zeros((8,), jnp.int8)),
  {"a": jax.typeof(jnp.zeros((3, 5))), "b": jax.typeof(jnp.zeros((7,)))},
  jax.typeof(3),
]


# --- outputs ---------------------------------------------------------------


@pytest.mark.parametrize(
  ("out", "expected"),
  [
    (cm.like(0), _TYPE((16, 256), jnp.bfloat16)),
    (cm.like(0, dtype=jnp.float32), _TYPE((16, 256), jnp.float32)),
    (cm.like(1), _TYPE((8,), jnp.int8)),
    (
      cm.like(2),
      {"a": _TYPE((3, 5), jnp.float32), "b": _TYPE((7,), jnp.float32)},
    ),
    (cm.like(3), _TYPE((), jnp.int32)),
    (_TYPE((2,), jnp.uint32), _TYPE((2,), jnp.uint32)),
    ((), ()),
    (None, None),
    (
      (cm.like(1), [cm.like(3), _TYPE((2,), jnp.int32)]),
      (_TYPE((8,), jnp.int8), [_TYPE((), jnp.int32), _TYPE((2,), jnp.int32)]),
    ),
    (
      lambda x, *_: {"y": _TYPE(x.shape[::-1], x.dtype), "z": cm.like(1)},
      {"y": _TYPE((256, 16), jnp.bfloat16), "z": _TYPE((8,), jnp.int8)},
    ),
    (lambda *types: types[0], _TYPES[0]),
  ],
)
def test_an_output_follows_from_the_arguments(out, expected):
  assert shapes.resolve_out(out, _TYPES) == expected


@pytest.mark.parametrize("array", [np.ones((2, 3), np.int8), jnp.ones((4,))])
def test_an_array_is_an_output_type(array):
  assert shapes.resolve_out(array, _TYPES) is array


@pytest.mark.parametrize("index", [-1, 4, 100])
@pytest.mark.parametrize("make", [cm.like, cm.vmem_slab])
def test_rejects_an_argument_that_the_kernel_has_not(make, index):
  message = rf"must be in \[0, 4\), .* called with 4 arguments; got {index}\."
  with pytest.raises(ShapeError, match=message):
    if make is cm.like:
      shapes.resolve_out(make(index), _TYPES)
    else:
      shapes.resolve_scratch([make(index)], _TYPES, _CORES)


@pytest.mark.parametrize("index", ["0", 0.0, True, None])
@pytest.mark.parametrize("make", [cm.like, cm.vmem_slab])
def test_rejects_an_argument_that_is_no_position(make, index):
  with pytest.raises(ShapeError, match="the position of a kernel argument"):
    make(index)


def test_rejects_a_slab_as_an_output():
  with pytest.raises(ShapeError, match=r"cm.vmem_slab is for scratch\. Use"):
    shapes.resolve_out([cm.vmem_slab(0)], _TYPES)


@pytest.mark.parametrize("out", ["x", jnp.float32, [3], (cm.like(0), (2, 3))])
def test_rejects_an_output_that_is_no_type(out):
  with pytest.raises(ShapeError, match="must be made of cm.like"):
    shapes.resolve_out(out, _TYPES)


# --- scratch ---------------------------------------------------------------


@pytest.mark.parametrize(
  ("slab", "shape"),
  [
    (cm.vmem_slab(0), (8, 256)),
    (cm.vmem_slab(0, axis=1), (16, 128)),
    (cm.vmem_slab(0, axis=-1), (16, 128)),
    (cm.vmem_slab(0, axis=-2), (8, 256)),
    (cm.vmem_slab(0, over="subcore"), (4, 256)),
    (cm.vmem_slab(0, over=["core", "subcore"]), (2, 256)),
    (cm.vmem_slab(0, axis=1, over=("subcore", "core")), (16, 32)),
    (cm.vmem_slab(1), (4,)),
  ],
)
def test_a_slab_is_the_equal_share_of_a_core(slab, shape):
  found = shapes.resolve_scratch({"mine": slab}, _TYPES, _CORES)["mine"]
  assert found.shape == shape
  assert found.dtype == _TYPES[slab.argument].dtype
  assert found.memory_space == pltpu.VMEM


def test_a_slab_has_the_dtype_asked_for():
  slab = cm.vmem_slab(0, dtype=jnp.float32)
  [found] = shapes.resolve_scratch([slab], _TYPES, _CORES)
  assert found.dtype == jnp.float32


def test_scratch_keeps_its_structure_and_its_other_types():
  sem = pltpu.SemaphoreType.DMA((2,))
  acc = pltpu.VMEM((8, 128), jnp.float32)
  found = shapes.resolve_scratch([sem, (cm.vmem_slab(1), acc)], _TYPES, _CORES)
  assert found[0] is sem and found[1][1] is acc
  assert found[1][0].shape == (4,)
  found = shapes.resolve_scratch(
    lambda x, *_: dict(t=pltpu.VMEM(x.shape, x.dtype), s=cm.vmem_slab(0)),
    _TYPES,
    _CORES,
  )
  assert {k: v.shape for k, v in found.items()} == dict(t=(16, 256), s=(8, 256))


@pytest.mark.parametrize(
  ("slab", "error", "message"),
  [
    (
      cm.vmem_slab(0, axis=0, over=("core", "subcore")),
      ShapeError,
      r"axis 0 of shape \(12, 5\) must divide by the 8 workers along"
      r" \('core', 'subcore'\)\. Pad it to a multiple of 8, .*cm\.split",
    ),
    (cm.vmem_slab(0, axis=-1), ShapeError, r"axis 1 of shape .* the 2 workers"),
    (cm.vmem_slab(0, axis=2), ShapeError, r"in \[-2, 2\) .*\(12, 5\); got 2"),
    (cm.vmem_slab(0, axis=-3), ShapeError, r"in \[-2, 2\) .*; got -3"),
    (cm.vmem_slab(1), ShapeError, r"in \[-0, 0\) for shape \(\); got 0"),
    (cm.vmem_slab(2), ShapeError, "needs an array argument; argument 2 is a"),
    (
      cm.vmem_slab(0, over="device"),
      AxisError,
      r"core axes of the kernel, \['core', 'subcore'\]; got \['device'\]",
    ),
    (
      cm.vmem_slab(0, over=("core", "core")),
      AxisError,
      r"different names; got \('core', 'core'\)",
    ),
    (cm.vmem_slab(0, over=()), AxisError, r"different names; got \(\)"),
    (cm.like(0), ShapeError, r"cm\.like is for out\. Use cm\.vmem_slab"),
    (
      pltpu.VMEM((0, 128), jnp.float32),
      ShapeError,
      r"must not be empty; got shape \(0, 128\)",
    ),
    (
      pltpu.SemaphoreType.DMA((0,)),
      ShapeError,
      r"must not be empty; got shape \(0,\)",
    ),
  ],
)
def test_rejects_a_slab_that_is_no_equal_share(slab, error, message):
  types = [_TYPE((12, 5), jnp.float32), jax.typeof(3), {"a": jax.typeof(3)}]
  with pytest.raises(error, match=message):
    shapes.resolve_scratch([slab], types, _CORES)


@pytest.mark.parametrize("scratch", [None, 3, cm.vmem_slab(0)])
def test_rejects_scratch_that_is_no_dict_and_no_sequence(scratch):
  with pytest.raises(
    ShapeError, match="must be a dict or a sequence of memory"
  ):
    shapes.resolve_scratch(scratch, _TYPES, _CORES)


# --- dtypes ----------------------------------------------------------------


@pytest.mark.parametrize(
  ("dtype", "remedy"),
  [
    ("int64", "int32"),
    ("uint64", "uint32"),
    ("float64", "float32"),
    ("complex64", "float32"),
    ("complex128", "float32"),
  ],
)
@pytest.mark.parametrize(
  "make",
  [
    lambda d: shapes.resolve_out(cm.like(0, dtype=d), _TYPES),
    lambda d: shapes.resolve_out({"y": _TYPE((2,), d)}, _TYPES),
    lambda d: shapes.resolve_out(np.zeros((2,), d), _TYPES),
    lambda d: shapes.resolve_scratch(
      [cm.vmem_slab(0, dtype=d)], _TYPES, _CORES
    ),
    lambda d: shapes.resolve_scratch([pltpu.VMEM((2,), d)], _TYPES, _CORES),
    lambda d: shapes.resolve_scratch([pltpu.SMEM((2,), d)], _TYPES, _CORES),
  ],
)
def test_rejects_elements_of_64_bits_and_complex_ones(make, dtype, remedy):
  message = rf"has dtype {dtype}; .*Convert it with \.astype\(jnp\.{remedy}\)"
  with pytest.raises(DTypeError, match=message):
    make(np.dtype(dtype))


@pytest.mark.parametrize(
  "dtype",
  "bool int4 uint4 int8 uint8 int16 int32 uint32 bfloat16 float16 float32"
  " float8_e4m3fn float8_e5m2 float4_e2m1fn".split(),
)
def test_accepts_every_dtype_of_at_most_32_bits(dtype):
  out = _TYPE((8, 128), jnp.dtype(dtype))
  assert shapes.resolve_out(out, _TYPES) == out


# --- empty arrays ----------------------------------------------------------


@pytest.mark.parametrize(
  ("shape", "stand_in"),
  [((0,), (1,)), ((4, 0, 3), (4, 1, 3)), ((0, 0), (1, 1)), ((2, 3), (2, 3))],
)
def test_an_empty_array_goes_in_as_a_small_one(shape, stand_in):
  type_ = _TYPE(shape, jnp.int32)
  assert shapes.type_without_empty_axes(type_) == _TYPE(stand_in, jnp.int32)
  array = shapes.without_empty_axes(jnp.ones(shape, jnp.int32))
  assert array.shape == stand_in and array.dtype == jnp.int32
  result = shapes.with_empty_axes(jnp.ones(stand_in, jnp.int32), type_)
  assert result.shape == shape


@pytest.mark.parametrize(
  ("out", "is_empty"),
  [
    (_TYPE((0, 3), jnp.int8), True),
    ({"a": _TYPE((0,), jnp.int8), "b": [_TYPE((2, 0), jnp.int8)]}, True),
    ([_TYPE((0,), jnp.int8), _TYPE((), jnp.int8)], False),
    ((), False),
    (None, False),
  ],
)
def test_knows_outputs_without_an_element(out, is_empty):
  assert shapes.all_empty(out) is is_empty


def test_a_random_key_is_no_array():
  with pytest.raises(DTypeError, match=r"^x is a key .*jax\.random\.key_data"):
    shapes.check_dtype("x", jax.typeof(jax.random.key(0)))
  sem = pltpu.SemaphoreType.DMA((2,))
  assert shapes.check_dtype("x", sem) is sem


def test_what_is_not_empty_goes_in_as_it_is():
  x = jnp.ones((2, 3))
  assert shapes.without_empty_axes(x) is x
  assert shapes.with_empty_axes(x, x) is x
  assert shapes.as_empty_ref(x, ref := object()) is ref
  memory = pltpu.VMEM((3, 2), jnp.float32)
  assert shapes.type_without_empty_axes(memory) is memory


def test_a_body_sees_the_empty_part_of_a_stand_in():
  seen = []

  def body(ref):
    seen.append(shapes.as_empty_ref(_TYPE((0, 128), jnp.float32), ref))

  jax.make_jaxpr(
    lambda: pl.run_scoped(body, pltpu.VMEM((1, 128), jnp.float32))
  )()
  [part] = seen
  assert part.shape == (0, 128) and _compat.memory_space(part) == pltpu.VMEM
