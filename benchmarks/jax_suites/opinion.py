"""A second opinion: tests whose kernels are compiled, and not simulated.

A test that expects the TPU compiler's refusal cannot have it of a simulator.
Here each kernel goes to libtpu by `cm.compile`, and what that refuses the test
sees as JAX would have raised it on a TPU.
"""

from typing import Any

import jax
from jax._src.interpreters import mlir  # noqa: TID251  To stand in JAX's place.
from jax._src.pallas import mpmd, pallas_call  # noqa: TID251

import coremesh as cm


class AcceptedError(Exception):
  """The compiler takes the kernel, which has no values therefore."""


def compile_kernels(chip: cm.Chip) -> None:
  """From now on kernels on CPU devices are compiled for a chip, and not run."""
  for primitive in (mpmd.mpmd_map_p, pallas_call.pallas_call_p):
    rule = _Rule(primitive, chip)
    mlir.register_lowering(primitive, rule, platform="cpu")


class _Rule:
  """Lowers a kernel for no device: it always raises."""

  def __init__(self, primitive: Any, chip: cm.Chip):
    self._primitive = primitive
    self._chip = chip

  def __call__(self, ctx: Any, *operands: Any, **params: Any) -> Any:
    del operands

    def kernel(*args):
      return self._primitive.bind(*args, **params)

    shapes = [
      jax.ShapeDtypeStruct(type_.shape, type_.dtype) for type_ in ctx.avals_in
    ]
    try:
      cm.compile(kernel, *shapes, chip=self._chip)
    except cm.CompileError as error:
      if error.__cause__ is not None:  # JAX's own part of the compiler.
        raise error.__cause__ from None
      raise jax.errors.JaxRuntimeError(error.original) from None
    raise AcceptedError(f"{self._chip.name}: the compiler takes the kernel")
