"""Which public functions of Pallas a test runs in the simulator, as is seen.

`@covers("pltpu.roll")` fails a test that does not call `pltpu.roll`, or whose
kernel reaches the simulator without the operations that the call leaves in the
traced program.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import types
from typing import Any
from unittest import mock

from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.extend.core as jex_core

from coremesh._compat import kernel_ir
from coremesh.simulate import emitter

_MODULES = {"pltpu": pltpu, "plsc": plsc}

# From a name to the tests that cover it.
COVERED: dict[str, list[str]] = {}

# What is done by a method of what the function returns.
_LATER = {
  "pltpu.einshape": {"einshape_lo"},
  "pltpu.make_async_copy": {"tpu.dma_start", "tpu.dma_wait"},
  "pltpu.make_async_remote_copy": {"tpu.dma_start", "tpu.dma_wait"},
  "pltpu.emit_pipeline_with_allocations": {"tpu.dma_start", "tpu.dma_wait"},
  "pltpu.emit_pipeline_with_async_prefetch": {"tpu.dma_start", "tpu.dma_wait"},
}

# What leaves nothing in a kernel: it gives another view of a ref, prepares an
# operand, or tells about the chip. The numbers that come out show it.
_WITHOUT_OPERATIONS = {
  "pltpu.annotate",
  "pltpu.to_pallas_key",
  "pltpu.with_memory_space_constraint",
  "plsc.slice_subcore_vmem_from_shared",
  *("pltpu.get_tpu_info", "pltpu.get_tpu_info_for_chip", "pltpu.is_tpu_device"),
  "plsc.get_sparse_core_info",
  "pltpu.force_tpu_interpret_mode",
  "pltpu.set_tpu_interpret_mode",
  "pltpu.reset_tpu_interpret_mode_state",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
  """What is seen of one function while a test runs.

  Attributes:
    name: such as "pltpu.roll".
    bound: the operations it leaves in traced programs, by qualified name.
    simulated: the operations of all kernels that are simulated.
  """

  name: str
  calls: list[None] = dataclasses.field(default_factory=list)
  bound: set[str] = dataclasses.field(default_factory=set)
  simulated: set[str] = dataclasses.field(default_factory=set)

  def check(self) -> None:
    """Fails unless the function was called and its operations simulated."""
    assert self.calls, f"the test never calls {self.name}"
    if self.name in _WITHOUT_OPERATIONS:
      assert self.simulated, f"no kernel with {self.name} was simulated"
      return
    expected = _LATER.get(self.name, self.bound)
    # Operations of `lax` whose results nobody uses are left out.
    needed = {op for op in expected if "." in op} or expected
    assert needed, f"{self.name} leaves no operation in a kernel"
    lacking = needed - self.simulated
    assert not lacking, f"{sorted(lacking)} of {self.name} were not simulated"


def covers(*names: str) -> Callable[[Any], Any]:
  """Marks a test that calls these functions inside kernels it simulates."""

  def mark(test):
    for name in names:
      COVERED.setdefault(name, []).append(test.__qualname__)

    @functools.wraps(test)
    def run(*args, **kwargs):
      with contextlib.ExitStack() as stack:
        seen = [stack.enter_context(watching(name)) for name in names]
        test(*args, **kwargs)
      for one in seen:
        one.check()

    return run

  return mark


@contextlib.contextmanager
def watching(name: str) -> Iterator[Seen]:
  """Sees the calls of a function, and what is simulated."""
  module, _, attribute = name.partition(".")
  seen = Seen(name)
  function = getattr(_MODULES[module], attribute)
  original = emitter.Emitter.equation

  def equation(self, eqn):
    seen.simulated.add(kernel_ir.qualified_name(eqn.primitive))
    original(self, eqn)

  with (
    mock.patch.object(
      _MODULES[module], attribute, _watched(function, seen), create=True
    ),
    mock.patch.object(emitter.Emitter, "equation", equation),
  ):
    yield seen


def _watched(function: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
  @functools.wraps(function)
  def call(*args, **kwargs):
    seen.calls.append(None)
    with _noting(seen.bound):
      result = function(*args, **kwargs)
    # A decorator, or a pipeline: it does its work when called.
    is_function = isinstance(result, types.FunctionType | functools.partial)
    return _watched(result, seen) if is_function else result

  return call


@contextlib.contextmanager
def _noting(bound: set[str]) -> Iterator[None]:
  """Notes the operations that are put into the program that is traced."""
  original = jex_core.Primitive.bind

  def bind(self, *args, **params):
    bound.add(kernel_ir.qualified_name(self))
    return original(self, *args, **params)

  with mock.patch.object(jex_core.Primitive, "bind", bind):
    yield
