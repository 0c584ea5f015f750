"""Options of kernels that make no sense are refused before anything runs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coremesh import errors, kernels
from coremesh.kernels._attention.blocks import Blocks as AttentionBlocks
from coremesh.kernels._matmul.blocks import Blocks
from tests import support

_X = jax.ShapeDtypeStruct((16, 64), jnp.float32)
_W = jax.ShapeDtypeStruct((64, 64), jnp.float32)
_GROUPS = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)
_Q = jax.ShapeDtypeStruct((2, 4, 16, 64), jnp.float32)
_SIZES = jnp.int32([3, 0, 5])

# By name: the arguments of a call that is right but for one option.
_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
  "attention": ((_Q, _Q, _Q), {}),
  "elementwise": ((_X,), {}),
  "grouped_matmul": ((_X, _GROUPS), dict(group_sizes=_SIZES)),
  "grouped_weight_gradient": ((_X, _X), dict(group_sizes=_SIZES)),
  "layer_norm": ((_X,), {}),
  "matmul": ((_X, _W), {}),
  "reduce_max": ((_X,), {}),
  "reduce_sum": ((_X,), {}),
  "rms_norm": ((_X,), {}),
  "softmax": ((_X,), {}),
}
_PRODUCTS = ("matmul", "grouped_matmul", "grouped_weight_gradient")
_GROUPED = _PRODUCTS[1:]


def _elementwise(x, *, fn=jnp.sin, **options):
  return kernels.elementwise(fn, x, **options)


def _call(kernel: str, *arrays: Any, **options: Any) -> Any:
  fn = _elementwise if kernel == "elementwise" else getattr(kernels, kernel)
  return fn(*arrays, **_CALLS[kernel][1] | options)


def _trace(kernel: str, **options: Any) -> Any:
  fn = functools.partial(_call, kernel, **options)
  return jax.eval_shape(fn, *_CALLS[kernel][0])


def _of(kernel_names, option, must, values):
  """Cases: a kernel, an option, what must hold, and a value that is wrong."""
  for kernel in kernel_names:
    for value in values:
      yield pytest.param(
        kernel, option, must, value, id=f"{kernel} {option} {value!r:.40}"
      )


_BAD = [
  *_of(
    _PRODUCTS,
    "blocks",
    r"None or a Blocks of coremesh\.kernels\._matmul",
    [
      (8, 128, 128),
      {"rows": 8},
      128,
      AttentionBlocks(
        rows=128, keys=128, part=128, tile_rows=128, tile_keys=128
      ),
    ],
  ),
  *_of(
    ["attention"],
    "blocks",
    "None or Blocks",
    [(128, 128), {}, 128, Blocks(rows=8, columns=128, inner=128)],
  ),
  *_of(
    _PRODUCTS,
    "out_dtype",
    "None or a dtype of real numbers of at most 32 bits",
    [
      "float99",
      "",
      0,
      False,
      (),
      [1],
      str,
      support,
      bool,
      float,
      jnp.complex64,
    ],
  ),
  *_of(
    _PRODUCTS,
    "precision",
    "None, a jax.lax.Precision or its name",
    [
      "junk",
      2,
      True,
      [None, None],
      ("high", "highest"),
      jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    ],
  ),
  *(
    case
    for kernel, flag in (
      ("matmul", "transpose_x"),
      ("matmul", "transpose_w"),
      ("grouped_matmul", "transpose_w"),
      ("attention", "is_causal"),
      ("attention", "return_lse"),
      ("reduce_sum", "keepdims"),
    )
    for case in _of(
      [kernel], flag, "True or False", ["no", None, 1, jnp.array(True)]
    )
  ),
  *_of(_PRODUCTS[:2], "epilogue", "None or a function", ["gelu", 3]),
  *_of(["elementwise"], "fn", "a function of parts", ["gelu", None]),
  *_of(
    ["attention"],
    "window",
    "None or two counts of keys",
    [1.5, -1, (1,), (1, 2, 3), (1.5, 0), (-1, 0), (True, 0), "ab"],
  ),
  *_of(
    ["attention"],
    "soft_cap",
    "None or a finite number above 0",
    [0, -1.0, np.nan, np.inf, True, "x", jnp.float32(3)],
  ),
  *_of(
    ["attention"],
    "scale",
    "a finite number",
    [np.nan, np.inf, True, "x", 1j, jnp.ones(3)],
  ),
  *_of(
    ["reduce_sum", "reduce_max"],
    "axis",
    r"ints in \[-2, 2\)|each axis once",
    [1.0, True, 2, -3, "x", (0, 0), (0, -2), (0, 1.0), jnp.array(1)],
  ),
  *_of(
    ["layer_norm", "rms_norm"],
    "epsilon",
    "a finite number of at least 0",
    [-1.0, np.nan, np.inf, True, "1e-6", None, 1j, jnp.ones(3)],
  ),
  *_of(
    ["layer_norm", "rms_norm"],
    "scale",
    "an array|float32 or bfloat16|shape",
    [2.0, [1.0] * 64, jnp.ones(3), jnp.ones(64, jnp.int32)],
  ),
  *_of(
    ["elementwise", "softmax", "reduce_sum", "layer_norm"],
    "block_bytes",
    "None or an int of at least 1",
    [0, 1.5, True],
  ),
  *_of(
    ["softmax"],
    "mask",
    "an array|bool|shape",
    [True, jnp.ones((16, 64)), jnp.ones((3, 64), bool)],
  ),
  *_of(
    _GROUPED,
    "group_sizes",
    r"an array|int32|shape \[(3|groups)\]|at least 0",
    [
      None,
      "x",
      5,
      {"a": 1},
      ["a", "b", "c"],
      [3.0, 0, 5],
      [[3], [0, 5]],
      [2**40, 0, 1],
      [-1, 2, 3],
      [9, 0, 8],
      jnp.ones(3),
      jnp.ones((1, 3), jnp.int32),
      jnp.array([True, False, True]),
      jnp.int32([-1, 0, 5]),
      jnp.int32([9, 0, 8]),
    ],
  ),
  *(
    case
    for option, wrong_shape in (
      ("segment_ids", (2, 15)),
      ("kv_lengths", (3,)),
    )
    for case in _of(
      ["attention"],
      option,
      "an array|int32|shape",
      [
        1,
        "x",
        [[1] * 16] * 2,
        jnp.ones((2, 16)),
        jnp.ones(wrong_shape, jnp.int32),
      ],
    )
  ),
  *_of(
    ["attention"],
    "bias",
    "an array|float32 or bfloat16|broadcast",
    [1.0, jnp.ones((3, 3)), jnp.ones((16, 16), jnp.int32)],
  ),
]


@pytest.mark.parametrize(("kernel", "option", "must", "value"), _BAD)
def test_an_option_that_makes_no_sense_is_refused(kernel, option, must, value):
  message = rf"{option}\b.* must .*({must})"
  with pytest.raises(errors.CoreMeshError, match=message):
    _trace(kernel, **{option: value})


@pytest.mark.parametrize(
  ("kernel", "options"),
  [
    ("matmul", dict(out_dtype="int8", precision="highest")),
    ("matmul", dict(out_dtype=jnp.int4, transpose_w=np.True_)),
    ("grouped_matmul", dict(group_sizes=[3, 0, 5])),
    ("grouped_matmul", dict(group_sizes=np.array([3, 0, 5]))),
    ("attention", dict(window=[np.int64(3), None], soft_cap=np.float32(3))),
    ("reduce_sum", dict(axis=np.int64(1), keepdims=np.False_)),
    ("layer_norm", dict(epsilon=jnp.float32(1e-3))),
  ],
)
def test_what_means_the_same_is_taken(kernel, options):
  _trace(kernel, **options)


@pytest.mark.parametrize("name", ["matmul", "grouped_matmul", "elementwise"])
@pytest.mark.parametrize(
  ("fn", "message"),
  [
    (lambda: 0.0, "cannot take them"),
    (lambda a: (a, "x"), r"result\[1\] of .* must be an array; got a str"),
    (lambda a: a.astype(jnp.complex64), "must be real; got complex64"),
  ],
)
def test_a_function_that_fits_no_block_is_refused(name, fn, message):
  option = "fn" if name == "elementwise" else "epilogue"
  with pytest.raises(errors.CoreMeshError, match=f"{option} of {name}") as it:
    _trace(name, **{option: fn})
  assert it.match(message)


@pytest.mark.parametrize("kernel", _CALLS)
def test_arrays_of_no_numbers_are_refused(kernel):
  first, *others = _CALLS[kernel][0]
  objects = np.full(first.shape, None)
  message = "must be an array of numbers; got one of object"
  with pytest.raises(errors.DTypeError, match=message):
    _call(kernel, objects, *(jnp.ones(a.shape, a.dtype) for a in others))


@pytest.mark.parametrize("kernel", _CALLS)
def test_a_mesh_that_does_not_say_its_chip_is_refused(kernel):
  mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1])
  fn = functools.partial(_call, kernel)
  mapped = jax.shard_map(fn, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
  message = r"mesh of plain CPU devices does not say\. Make the mesh with"
  with pytest.raises(errors.UnsupportedError, match=message):
    jax.eval_shape(mapped, *_CALLS[kernel][0])
