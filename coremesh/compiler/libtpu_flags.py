"""Flags of libtpu, which it reads when it starts."""

from collections.abc import Mapping
import os
import re
from typing import Any

from coremesh import errors

_SCOPED_VMEM = r"--xla_tpu_scoped_vmem_limit_kib=(\d+)"


def words(flags: Mapping[str, Any]) -> tuple[str, ...]:
  """Flags as libtpu takes them: those of the environment, then in one order.

  Raises:
    UnsupportedError: a name or a value could not be one of a flag.
  """
  found = os.environ.get("LIBTPU_INIT_ARGS", "").split()
  for name, value in sorted(flags.items()):
    if not re.fullmatch(r"\w+", name) or re.search(r"\s", str(value)):
      raise errors.UnsupportedError(
        "flags must map names such as 'xla_tpu_scoped_vmem_limit_kib' to values"
        f" without spaces; got {name!r}: {value!r}."
      )
    text = str(value).lower() if isinstance(value, bool) else str(value)
    found.append(f"--{name}={text}")
  return tuple(found)


def scoped_vmem_bytes(flags: tuple[str, ...]) -> int | None:
  """What the flags let a kernel take of VMEM that asks for no more."""
  found = re.findall(_SCOPED_VMEM, " ".join(flags))
  return int(found[-1]) * 1024 if found else None
