"""Kernels of a line or two, run on one core, for tests of single functions."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import coremesh as cm
from tests import simulating

SLAB = (8, 128)
FLAT = pltpu.CompilerParams(
  use_tc_tiling_on_sc=False, needs_layout_passes=False, collective_id=0
)
BF16 = np.dtype(jnp.bfloat16)
MASK = np.array([0, 1, 1, 0, 1, 0, 1, 1], np.int32)  # of the 8 lanes of v5p


def kinds(*dtypes):
  return pytest.mark.parametrize(
    "dtype", dtypes, ids=lambda d: np.dtype(d).name
  )


any_kind = kinds(np.float32, BF16, np.int32, np.int8)
words = kinds(np.float32, np.int32)


def values(*shape, dtype: Any = np.float32, seed=0, low=-50, high=50):
  """Numbers that all of the dtypes hold exactly."""
  drawn = np.random.default_rng(seed).integers(low, high, shape)
  return np.asarray(drawn).astype(dtype)


def like(x, dtype: Any = None) -> Any:
  return jax.ShapeDtypeStruct(x.shape, x.dtype if dtype is None else dtype)


def one_core(chip):
  return chip.tensor_cores("core", 1)


def one_subcore(chip):
  return chip.vector_subcores(num_cores=1, num_subcores=1)


both_cores = pytest.mark.parametrize(
  "cores", [one_core, one_subcore], ids=["TensorCore", "subcore"]
)


def run(body, *args, out, **options) -> Any:
  """The outputs of a kernel, the same under some seeds, without findings."""
  made = simulating.kernel(
    body, *args, out=out, compiler_params=FLAT, **options
  )
  found = simulating.silent(made, *args, seeds=range(3))
  return tuple(found) if isinstance(out, tuple) else found[0]


def copied_in_and_out(
  compute: Callable[..., Any], num_in: int, num_out: int
) -> Callable[..., None]:
  """A body: inputs to VMEM, `compute(*in VMEM, *scratch)`, outputs back."""
  num = num_in + num_out

  def body(*refs):
    hbm, vmem, rest = refs[:num], refs[num : 2 * num], refs[2 * num :]
    for source, target in zip(hbm[:num_in], vmem[:num_in], strict=True):
      pltpu.sync_copy(source, target)
    compute(*vmem, *rest)
    for source, target in zip(vmem[num_in:], hbm[num_in:], strict=True):
      pltpu.sync_copy(source, target)

  return body


def in_vmem(
  compute: Callable[..., Any],
  *args: np.ndarray,
  out: Any,
  cores: Callable[[cm.Chip], Any] = one_core,
  scratch: Any = (),
  **options: Any,
) -> Any:
  """Runs `compute(*inputs, *outputs, *scratch)` on refs in a core's VMEM."""
  outs = out if isinstance(out, tuple) else (out,)
  types = [pltpu.VMEM(t.shape, t.dtype) for t in (*args, *outs)]
  return run(
    copied_in_and_out(compute, len(args), len(outs)),
    *args,
    out=out,
    cores=cores,
    scratch_types=[*types, *scratch],
    **options,
  )


def on_values(fn: Callable[..., Any], *args, out, **options) -> Any:
  """Runs `fn` on whole values in the registers of a core."""

  def compute(*refs):
    results = fn(*(ref[...] for ref in refs[: len(args)]))
    results = results if isinstance(results, tuple) else (results,)
    for ref, result in zip(refs[len(args) :], results, strict=True):
      ref[...] = result

  return in_vmem(compute, *args, out=out, **options)


def on_lanes(fn: Callable[..., Any], *args, out, **options) -> Any:
  """Runs `fn` on whole values in the registers of a vector subcore."""
  return on_values(fn, *args, out=out, cores=one_subcore, **options)
