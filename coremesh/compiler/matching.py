"""Which operation of a compiled program runs each kernel of the traced one.

Kernels are told apart by name, and those of one name by the shapes of their
arguments and of what they hold in scopes, which Mosaic keeps in order.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import re
from typing import Any

import jax.extend.core as jex_core

from coremesh import _compat
from coremesh._compat import aot
from coremesh.compiler import dumps

_MAIN = re.compile(
  r"func\.func (?:public )?@[^(]*\((?P<arguments>.*?)\) attrib"
)
_SHAPE = re.compile(r"memref<((?:\d+x)*)")
_SCOPED = re.compile(
  r"(?:memref\.alloca\(\)|tpu\.sem_alloc)[^:\n]*: memref<((?:\d+x)*)"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Match:
  """What became of a kernel.

  Attributes:
    operation: what runs it; None if nothing does, or it is not certain.
    is_left_out: whether nothing does for certain: no result of the program
      needs it, or another kernel is the same and has the same arguments.
  """

  operation: dumps.Texts | None = None
  is_left_out: bool = False


def of_kernels(
  kernels: Sequence[jex_core.JaxprEqn],
  operations: Sequence[dumps.Texts],
  used_vmem_bytes: Mapping[str, int],
) -> tuple[Match, ...]:
  """What became of each kernel.

  Args:
    kernels: those of the traced program.
    operations: those of the compiled program.
    used_vmem_bytes: by operation, what libtpu says.

  Returns:
    A match for each kernel. Which is which of kernels that are alike is not
    told; where more operations run them than there are, as after a loop is
    unrolled, it is the ones that use most VMEM.
  """
  found: dict[int, Match] = {}
  names = [aot.body_name(eqn) for eqn in kernels]
  made = [o for o in operations if o.kernel is not None]
  made.sort(key=lambda o: -used_vmem_bytes.get(o.name, 0))
  is_certain = {o.kernel for o in made} <= set(names)
  for name in dict.fromkeys(names):
    numbers = [i for i, other in enumerate(names) if other == name]
    named = [o for o in made if o.kernel == name]
    if not named:
      found |= dict.fromkeys(numbers, Match(is_left_out=is_certain))
    elif len(numbers) == len(named) == 1:
      found[numbers[0]] = Match(operation=named[0])
    else:
      found |= _of_one_name({i: kernels[i] for i in numbers}, named)
  return tuple(found[i] for i in range(len(kernels)))


def _of_one_name(
  kernels: Mapping[int, jex_core.JaxprEqn], operations: Sequence[dumps.Texts]
) -> dict[int, Match]:
  traced: dict[Hashable, list[int]] = defaultdict(list)
  for number, eqn in kernels.items():
    traced[_form_of_kernel(eqn)].append(number)
  made: dict[Hashable, list[dumps.Texts]] = defaultdict(list)
  for operation in operations:
    made[_form_of_module(operation.texts.get("mosaic", ""))].append(operation)
  if None in traced or not made.keys() <= traced.keys():
    return dict.fromkeys(kernels, Match())
  return {
    number: Match(operation=operation, is_left_out=operation is None)
    for form, numbers in traced.items()
    for number, operation in zip(
      numbers,
      itertools.chain(made[form][: len(numbers)], itertools.repeat(None)),
      strict=False,
    )
  }


def _form_of_kernel(eqn: jex_core.JaxprEqn) -> Hashable:
  """Shapes of its arguments and scopes; None if it has several programs."""
  bodies = aot.kernel_bodies(eqn)
  if len(bodies) > 1:
    return None
  [body] = bodies
  scoped = (
    v
    for inner in _compat.walk(body)
    if inner.primitive.name == "run_scoped"
    for v in inner.params["jaxpr"].invars
  )
  return (
    tuple(_shape(v.aval) for v in body.invars),
    tuple(sorted(_shape(v.aval) for v in scoped)),
  )


def _form_of_module(text: str) -> Hashable:
  """The same of the text of a module; None if it is of another form."""
  main = _MAIN.search(text)
  if main is None:
    return None
  return (
    tuple(_shapes(_SHAPE.findall(main["arguments"]))),
    tuple(sorted(_shapes(_SCOPED.findall(text)))),
  )


def _shape(aval: Any) -> tuple[int, ...]:
  return _without_ones(aval.shape)


def _shapes(texts: Sequence[str]) -> Iterator[tuple[int, ...]]:
  for text in texts:
    yield _without_ones([int(size) for size in text.split("x") if size])


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
  """A shape as in both: Mosaic keeps axes of one that a block leaves out."""
  return tuple(size for size in shape if size != 1)
