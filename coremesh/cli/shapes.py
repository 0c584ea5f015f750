"""Types of arguments as words: "f32[128,256]"."""

import re

import jax
import jax.numpy as jnp

from coremesh import errors

_FORM = re.compile(r"(?P<kind>\w+)\[(?P<sizes>[\d,\s]*)\]$")
_SHORT = {
  **{f"f{n}": f"float{n}" for n in (16, 32)},
  **{f"s{n}": f"int{n}" for n in (4, 8, 16, 32)},
  **{f"i{n}": f"int{n}" for n in (4, 8, 16, 32)},
  **{f"u{n}": f"uint{n}" for n in (4, 8, 16, 32)},
  "bf16": "bfloat16",
  "pred": "bool",
}


def parse(text: str) -> jax.ShapeDtypeStruct:
  """A type from words.

  Args:
    text: such as "f32[128,256]", "bfloat16[8]" or "s32[]".

  Raises:
    UnsupportedError: it is not of that form.
  """
  match = _FORM.match(text)
  try:
    if match is None:
      raise TypeError("it is not DTYPE[SIZES]")
    dtype = jnp.dtype(_SHORT.get(match["kind"], match["kind"]))
    sizes = tuple(int(n) for n in match["sizes"].split(",") if n.strip())
  except (TypeError, ValueError) as error:
    raise errors.UnsupportedError(
      f"--arg {text!r} must be a type such as f32[128,256] or s32[]: {error}"
    ) from error
  return jax.ShapeDtypeStruct(sizes, dtype)
