"""What the tests of pipelines share: a kernel around one, run and compiled."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
import numpy as np

import coremesh as cm
from tests import support

# Of the simulated chip, v5p:2x2x1, with 2 cores each.
NUM_DEVICES = 4


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
  """Small whole numbers, so that sums are exact, with no block like another."""
  values = np.random.default_rng(0).integers(0, 100, shape)
  return values.astype(dtype)


def rows(i):
  """The index map of blocks of rows."""
  return i, 0


def add_one(x_vmem, o_vmem):
  o_vmem[...] = x_vmem[...] + 1


def add(x_vmem, sum_vmem):
  sum_vmem[...] += x_vmem[...].astype(sum_vmem.dtype)


def piped(
  body: Callable[..., None],
  in_specs: Any,
  out_specs: Any,
  *,
  grid: Any = None,
  over: Any = "core",
  **options: Any,
) -> Callable[..., None]:
  """A kernel body that is one pipeline; default grid: its blocks of rows."""

  def kernel_body(*refs):
    steps = grid
    if steps is None:
      steps = (pl.cdiv(refs[-1].shape[0], 8),)
    cm.pipeline(
      body,
      grid=steps,
      in_specs=in_specs,
      out_specs=out_specs,
      over=over,
      **options,
    )(*refs)

  return kernel_body


def simulate(
  body: Callable[..., None], *args: Any, out: Any = None, **options: Any
) -> np.ndarray:
  """What a kernel body returns on 4 devices x 2 cores, args shared by rows."""
  chip, mesh = support.simulated()
  kernel = cm.kernel(
    body,
    mesh=chip.tensor_cores("core"),
    out=cm.like(0) if out is None else out,
    **options,
  )
  return np.asarray(support.over_devices(kernel, mesh)(*args))


def compile_for(
  chip_name: str, body: Callable[..., None], *args: Any, out: Any = None
) -> cm.Compiled:
  """Compiles a kernel body for a chip, with as many rows for each device."""
  chip = cm.chip(chip_name)
  mesh = chip.device_mesh("device", on="compiler")
  kernel = cm.kernel(
    body,
    mesh=chip.tensor_cores("core"),
    out=cm.like(0) if out is None else out,
  )
  scale = mesh.size // NUM_DEVICES
  shapes = [
    jax.ShapeDtypeStruct((scale * a.shape[0], *a.shape[1:]), a.dtype)
    for a in args
  ]
  return cm.compile(support.over_devices(kernel, mesh), *shapes)


def on_devices(array: np.ndarray) -> np.ndarray:
  """An array with its first axis split into devices and rows."""
  return array.reshape(NUM_DEVICES, -1, *array.shape[1:])


def in_blocks(array: np.ndarray, size: int = 8) -> np.ndarray:
  """An array with its first axis split into devices, blocks and rows."""
  return array.reshape(NUM_DEVICES, -1, size, *array.shape[1:])
