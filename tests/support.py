"""What several tests share: programs as primitives, meshes, compilation."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import coremesh as cm

# The chips every helper and example must compile for.
COMPILED_CHIPS = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def simulated(chip: str = "v5p:2x2x1", axes="device", shape=None):
  """A chip and a simulated device mesh of it."""
  found = cm.chip(chip)
  return found, found.device_mesh(axes, shape, on="simulator")


def over_devices(
  kernel: Callable[..., Any], mesh, *, in_specs=None, out_specs=None, **kwargs
):
  """The kernel on every device, each with its share of the first axis."""
  spec = P(mesh.axis_names)
  return jax.jit(
    jax.shard_map(
      kernel,
      mesh=mesh,
      in_specs=spec if in_specs is None else in_specs,
      out_specs=spec if out_specs is None else out_specs,
      **kwargs,
    )
  )


def primitives(fn: Callable[..., Any], *args: Any) -> list[str]:
  """The names of a traced program's primitives, in trace order.

  Branches of a `cond` follow one another.
  """
  names: list[str] = []

  def visit(jaxpr):
    for eqn in jaxpr.eqns:
      names.append(eqn.primitive.name)
      for value in eqn.params.values():
        for inner in _programs(value):
          visit(inner)

  visit(jax.make_jaxpr(fn)(*args).jaxpr)
  return names


def _programs(value: Any):
  if hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
    yield value.jaxpr
  elif hasattr(value, "eqns"):
    yield value
  elif isinstance(value, tuple | list):
    for item in value:
      yield from _programs(item)
