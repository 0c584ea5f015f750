"""Digests that tell machine code, and the arguments it is for, apart."""

from collections.abc import Iterable
import hashlib
import re
from typing import Any

import jax
import numpy as np

from coremesh.compiler.compiled import Operation

# Comments name the user's files.
_COMMENTS_AND_SPACE = re.compile(r"/\*.*?\*/|\s+", re.DOTALL)
# Larger arrays steer no kernel: they do not fit its SMEM.
_MOST_WORDS = 1 << 18


def of_code(operations: Iterable[Operation]) -> str:
  """A digest of the machine code of operations, whatever lines it is from."""
  return _digest(text for o in operations for text in _code(o))


def of_arguments(args: Any) -> str:
  """A digest of types, and of the values of integers, which may steer."""
  return _digest(_described(leaf) for leaf in jax.tree.leaves(args))


def _code(operation: Operation) -> list[str]:
  stages = ("bundles", "sparsecore")
  texts = [operation.texts[s] for s in stages if s in operation.texts]
  return [_COMMENTS_AND_SPACE.sub("", text) for text in texts]


def _described(leaf: Any) -> str:
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return f"{leaf.dtype}{list(leaf.shape)}"
  array = np.asarray(jax.numpy.asarray(leaf))
  text = f"{array.dtype}{list(array.shape)}"
  if array.dtype.kind in "iu" and array.size <= _MOST_WORDS:
    return text + hashlib.sha256(array.tobytes()).hexdigest()
  return text


def _digest(texts: Iterable[str]) -> str:
  """Sixteen digits tell the codes of one kernel apart."""
  digest = hashlib.sha256()
  for text in texts:
    digest.update(f"{len(text)} ".encode() + text.encode())
  return digest.hexdigest()[:16]
