"""Kinds of cores, which the mesh that a worker is on tells."""

from collections.abc import Mapping
from typing import Any, Literal

from jax.experimental.pallas import tpu_sc as plsc

type Kind = Literal["tensor", "vector", "scalar"]

NAMES: Mapping[Kind, str] = {
  "tensor": "TensorCore",
  "vector": "vector subcore",
  "scalar": "scalar subcore",
}


def kind_of(mesh: Any) -> Kind:
  """The kind of the cores of a mesh; of no mesh TensorCores."""
  match mesh:
    case plsc.VectorSubcoreMesh():
      return "vector"
    case plsc.ScalarSubcoreMesh():
      return "scalar"
  return "tensor"


def is_sparse(mesh: Any) -> bool:
  """Whether the cores of a mesh are those of SparseCores."""
  return kind_of(mesh) != "tensor"
