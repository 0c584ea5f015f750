"""Why a test of JAX's fails in the simulator: a rule for each reason."""

from collections.abc import Sequence
import dataclasses
import re

from benchmarks.jax_suites.runner import Result

REFUSED = "expects the compiler's refusal, and cm.compile gives it"
NOT_REFUSED = "expects the compiler's refusal, and cm.compile does not give it"
ROUNDED = "expects XLA's rounding on the CPU: off by at most 4 units"
PRODUCT = (
  "expects XLA's product on the CPU, which errs by more than the tolerance"
)
TEST_FAULT = "a fault in the test"
UNEXPLAINED = "unexplained"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
  """A reason, and by what it is known.

  Attributes:
    name: what the tables call it.
    error: a pattern that the error must contain.
    test: a pattern that the test's name must contain.
  """

  name: str
  error: str = ""
  test: str = ""

  def explains(self, result: Result) -> bool:
    """Whether it is why the test failed."""
    return all(
      re.search(pattern, text, re.DOTALL) is not None
      for pattern, text in (
        (self.error, result.error),
        (self.test, result.name),
      )
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
  """A test that is wrong on a TPU as well.

  Attributes:
    test: its class and method, a pattern.
    finding: what the simulator must find in it.
    text: what is wrong.
  """

  test: str
  finding: str
  text: str


_FAULTS: Sequence[Fault] = (
  Fault(
    test="VectorSubcoreTest(WithTCTiling)?.test_barrier",
    finding="race",
    text=(
      "After the barrier each subcore reads its neighbour's row and then writes"
      " its own, which its other neighbour may not have read yet."
    ),
  ),
  Fault(
    test="DistributedMpmdTest.test_mpmd_reduce_scatter",
    finding="race",
    text=(
      "Each step sends into a buffer of the next device, and nothing says that"
      " the device has used what the step before left there."
    ),
  ),
  Fault(
    test="MpmdTest.test_copy_with_cross_core_signaling",
    finding="out of bounds",
    text=(
      "There are 8 rows for each core, and each of its 16 subcores copies the"
      " row of its own number."
    ),
  ),
)

# In a test's error: how far numbers may be off and be rounded alone. XLA's own
# functions on the CPU err by up to 2 units in the last place, ours by 1.
_FOUR_ROUNDINGS = 4 * 2.0**-23
# A product of 512 x 512 matrices of float32: XLA's on the CPU is up to 1.8e-4
# off the exact one, ours 5e-5. On a TPU both sides of a test are rounded alike.
_PRODUCTS_APART = 3e-4
_PRODUCT = re.compile(r"test_\w*matmul\w*$")
_LARGEST = re.compile(r"Max (absolute|relative) difference among .*: (\S+)")

_REASONS: Sequence[Reason] = (
  Reason(
    name="reads what the TPU compiler prints",
    error=r"AssertionError: ("
    r".*xla_ffi_python_cpu_callback|\[\] has length of 0|'%.* not found in)",
  ),
  Reason(
    name="sets an option of the TPU compiler",
    error=r"No such compile option: 'xla_tpu_",
  ),
  Reason(
    name="jax.checkpoint allows no interpreted kernel",
    error=r"Effects not supported in AD of `checkpoint`",
  ),
  Reason(
    # JAX counts the token of an ordered effect for the one and not the other.
    name="JAX cannot lower ordered effects with memory kinds",
    error=r"in lower_jaxpr_to_fun\n.*propagated_out_mem_kinds, "
    r"result_memory_kinds,.*safe_zip",
  ),
  Reason(
    name="pinned values, private to JAX, which XLA lacks on the CPU",
    error=r"AbstractLinVal",
  ),
)
_REFUSAL = re.compile(
  r"AssertionError: (\w+(\.\w+)* not raised|\".*\" does not match )"
  r"|coremesh\.errors\.\w+: ",
  re.DOTALL,
)


def expects_refusal(result: Result) -> bool:
  """Whether a test failed for want of an error, or for one in other words."""
  return _REFUSAL.search(result.error) is not None


def reason(result: Result, compiled: Result | None) -> str:
  """Why a test failed.

  Args:
    result: what the simulator made of it.
    compiled: what came of compiling its kernels in place of simulating them,
      None if that was not tried.
  """
  if expects_refusal(result) and compiled is not None:
    return REFUSED if compiled.outcome == "passed" else NOT_REFUSED
  if fault(result) is not None:
    return TEST_FAULT
  for known in _REASONS:
    if known.explains(result):
      return known.name
  apart = {kind: float(x) for kind, x in _LARGEST.findall(result.error)}
  if apart.get("relative", 1.0) <= _FOUR_ROUNDINGS:
    return ROUNDED
  if (
    _PRODUCT.search(result.name)
    and "tolerance rtol=1e-07" in result.error
    and apart.get("absolute", 1.0) <= _PRODUCTS_APART
  ):
    return PRODUCT
  return UNEXPLAINED


def fault(result: Result) -> str | None:
  """What is wrong with a test, None if that is not known."""
  for known in _FAULTS:
    is_found = known.finding in result.findings
    if is_found and re.fullmatch(known.test, result.name):
      return known.text
  return None
