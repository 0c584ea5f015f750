"""What a kernel promises, as plain data for tests, tuners and benchmarks."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
  """One call of a kernel, by the types of its arguments.

  Attributes:
    args: types of the array arguments, in order; values of those that steer
      the kernel, such as sizes of groups.
    options: keyword arguments, static.
  """

  args: tuple[Any, ...]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
  """A kernel beside what it is held against.

  Attributes:
    name: the kernel's, as in `coremesh.kernels`.
    function: the public function.
    reference: the same function in plain `jnp`, without the keywords of
      `search_space`.
    cases: calls worth a test, a tuning and a benchmark, by name.
    search_space: for each keyword of `function` that changes its speed and not
      its result: the values worth a trial.
    num_flops: floating-point or integer operations that a call must do, from
      the arguments and options of a case.
    num_bytes: bytes of HBM that a call must at least read and write, from the
      same.
  """

  name: str
  function: Callable[..., Any]
  reference: Callable[..., Any]
  cases: Mapping[str, Case]
  search_space: Mapping[str, Sequence[Any]]
  num_flops: Callable[..., int]
  num_bytes: Callable[..., int]
