"""Operations that no simulated kernel can hold, and what to use instead."""

from collections.abc import Mapping
from typing import Any

from coremesh import errors
from coremesh._compat import kernel_ir

_SEND = (
  "Between the devices or cores of a kernel, send with"
  " pltpu.async_remote_copy (in coremesh cm.put) and add what arrives; or call"
  " it outside the kernel, inside the jax.shard_map around it."
)
_RETURN = (
  "A kernel does not call the host: return what the function needs as an"
  " output, and call it outside the kernel."
)
_ALLOCATE = "In a kernel, allocate with pl.run_scoped or scratch_types."
_INLINE = (
  "Call the inner kernel's body on refs instead, and pltpu.emit_pipeline for"
  " its grid; or call the one kernel after the other."
)

# By qualified name, what a kernel can do in its place.
INSTEAD: Mapping[str, str] = {
  "checkify.check": "Use pl.debug_check.",
  "debugging.debug_callback": (
    "To print, use pl.debug_print; to check, pl.debug_check. " + _RETURN
  ),
  "debugging.inspect_sharding": (
    "What is in a kernel is not sharded: inspect its operands outside."
  ),
  "sharding_constraint": (
    "What is in a kernel is not sharded: constrain its operands outside."
  ),
  **dict.fromkeys(("io_callback", "pure_callback", "ffi_call"), _RETURN),
  **dict.fromkeys(
    (
      *("psum", "pmax", "pmin", "ppermute", "pbroadcast", "psend", "precv"),
      *("all_gather", "all_gather_invariant", "all_gather_reduced"),
      *("all_to_all", "ragged_all_to_all", "reduce_scatter"),
      *("psum_invariant", "unreduced_psum", "unreduced_reduce_scatter"),
    ),
    _SEND,
  ),
  **dict.fromkeys(("pallas_call", "mpmd_map"), _INLINE),
  "shard_map": "Put it around the kernel.",
  **dict.fromkeys(
    ("state.create_linear", "state.pin", "state.unpin"), _ALLOCATE
  ),
}
_OTHERWISE = (
  "It knows those of the table in docs/simulator.md, and what jax.numpy and"
  " jax.lax compute from values. Load what you need from refs first and"
  " compute with values; or interpret the kernel with JAX's"
  " pltpu.InterpretParams."
)


def check(eqn: Any, name: str, place: str) -> None:
  """Checks that an operation on values is one that JAX can run by itself.

  Args:
    eqn: the equation.
    name: its qualified name.
    place: the line of the user's code.

  Raises:
    UnsupportedError: it is not.
  """
  if name in INSTEAD or not kernel_ir.runs_by_itself(eqn.primitive):
    raise error(name, place)


def form(
  name: str, place: str, lacking: NotImplementedError
) -> errors.UnsupportedError:
  """What to raise for a form of an operation that its rule lacks."""
  return errors.UnsupportedError(
    f"coremesh's simulator does not know this form of {name!r}, at {place}:"
    f" {str(lacking).rstrip('.')}. Compute it another way, or outside"
    " the kernel."
  )


def error(name: str, place: str) -> errors.UnsupportedError:
  """What to raise for an operation, by its qualified name and line."""
  return errors.UnsupportedError(
    f"coremesh's simulator does not know the operation {name!r} in a kernel, at"
    f" {place}. {INSTEAD.get(name, _OTHERWISE)}"
  )
