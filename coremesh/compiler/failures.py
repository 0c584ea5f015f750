"""What the compiler's messages mean: the rule broken, and what to change."""

from collections.abc import Sequence
import dataclasses
import re
import signal

import jax.extend.core as jex_core

from coremesh import chips, errors
from coremesh._compat import aot
from coremesh.compiler import rules, sites, workers
from coremesh.compiler.ledger import Ledger

# What libtpu writes of a program of a few kernels, and some room.
_LEAST_FREE_BYTES = 8 * 2**20
_ADVICE_WITHOUT_ROOM = "Make room there, or set TMPDIR to another folder."
_ADVICE_AFTER_CRASH = (
  "That is a fault of libtpu's. Take the program apart until it compiles; an"
  " operand of no elements and a dynamic size are known to do this. The next"
  " compilation has a new process."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
  """A compiler's message in plain words.

  Attributes:
    rule: what must hold and does not.
    advice: what to change.
    is_known: whether the message is one of those in the table.
  """

  rule: str
  advice: str
  is_known: bool = True


def explain(text: str) -> Explanation:
  """The rule a message of the compiler is about."""
  for pattern, rule, advice in rules.TABLE:
    if match := re.search(pattern, text, re.DOTALL):
      groups = {k: v or "" for k, v in match.groupdict().items()}
      return Explanation(
        rule=rule.format(**groups), advice=advice.format(**groups)
      )
  return Explanation(
    rule="The TPU compiler does not accept this program.",
    advice="coremesh has no explanation of this message; it follows.",
    is_known=False,
  )


def of_message(text: str, source: str | None) -> errors.CompileError:
  """The error for what libtpu or JAX said of the user's line."""
  found = explain(text)
  return errors.CompileError(
    rule=found.rule, advice=found.advice, source=source, original=text
  )


def of_program(
  text: str,
  jaxpr: jex_core.Jaxpr,
  frames: aot.Frames,
  *,
  said: str | None = None,
) -> errors.CompileError:
  """The error for a message, with the user's line it is about.

  Args:
    text: the message.
    jaxpr: the program.
    frames: those the message comes with.
    said: the message and its causes, where they name an operation.
  """
  line = sites.users_line(frames)
  return of_message(
    text, line or sites.line_of(said or text, sites.of_program(jaxpr))
  )


def of_devices(platforms: Sequence[str]) -> errors.UnsupportedError:
  """The error for a program that was traced for devices of no compiler."""
  return errors.UnsupportedError(
    f"fn was compiled for {platforms} devices. Make it over a mesh"
    ' of devices that compile: chip.device_mesh(..., on="compiler").'
    ' Or name the chip, for a function of one device: chip="v5p:2x2x1".'
  )


def of_cores(
  kernel: str, asked: int, *, chip: chips.Chip, source: str | None
) -> errors.CompileError:
  """The error for more TensorCores than a device has: libtpu is silent."""
  return errors.CompileError(
    rule=(
      f"A kernel runs on at most the TensorCores a device of {chip.name} has,"
      f" {chip.tensor_cores_per_device}; the mesh of {kernel!r} has {asked}."
    ),
    advice="Take the mesh from the chip: chip.tensor_cores().",
    source=source,
    original="nothing: libtpu compiles such a kernel without a word.",
  )


def of_vmem(found: Ledger, source: str | None) -> errors.CompileError:
  """The error for buffers beyond the VMEM of a core.

  libtpu finds that out last, after minutes if the buffers are used as a whole.
  """
  has = chips.chip(found.chip).vmem_bytes_per_tensor_core
  asked = found.least_vmem_bytes
  largest = sorted(found.least_vmem_entries, key=lambda e: -e.amount_per_core)
  return errors.CompileError(
    rule=(
      "What a kernel holds in VMEM at once must fit the VMEM of a core:"
      f" {asked / 2**20:.2f}M are needed without blocks, {has / 2**20:.2f}M are"
      " there."
    ),
    advice=(
      "Use smaller buffers, or keep them in HBM and copy parts of them in."
    ),
    source=source,
    original="not asked. The largest buffers: "
    + ", ".join(
      f"{e.name} {e.amount_per_core / 2**20:.2f}M" for e in largest[:5]
    ),
  )


def of_silence(
  silence: workers.Silence,
  *,
  seconds: float,
  flags: Sequence[str],
  with_empty: str | None,
  ledgers: Sequence[Ledger],
) -> errors.CompileError:
  """The error for a worker that gave no answer.

  Args:
    silence: what there is to say of it.
    seconds: how long it might take.
    flags: of libtpu.
    with_empty: the line of a kernel with an operand of no elements, if any.
    ledgers: what the kernels hold.
  """
  source, original = None, silence.output.strip()
  unknown = re.search(r"Unknown command line flag '(\w+)'", silence.output)
  if silence.is_late:
    rule = f"The compiler must end within timeout_seconds={seconds:g}."
    advice = (
      "It was ended. Give it more, or make the program smaller: long unrolled"
      " loops and large vectors outside a grid take it longest."
    )
    if ledgers:
      held = "\n".join(map(str, ledgers))
      advice += f"\nWhat the kernels hold, as predicted:\n{held}"
  elif unknown:
    rule = f"libtpu has no flag {unknown[1]!r}."
    advice = f"Leave it out; flags were {' '.join(flags) or 'none'}."
  elif silence.free_bytes < _LEAST_FREE_BYTES:
    rule = (
      f"The folder {silence.folder} must have room for what libtpu writes;"
      f" {silence.free_bytes // 1024} KiB are free, and {_end(silence)}."
    )
    advice = _ADVICE_WITHOUT_ROOM
  elif with_empty:
    rule = (
      "An operand of a kernel must have at least one element: of an empty one"
      f" libtpu dies ({_end(silence)})."
    )
    advice = "Leave it out, pad it, or use cm.kernel, which pads it."
    source = with_empty
  else:
    rule = f"libtpu must not end the process that holds it; {_end(silence)}."
    advice = _ADVICE_AFTER_CRASH
  return errors.CompileError(
    rule=rule, advice=advice, source=source, original=original
  )


def of_start(error: OSError, folder: str) -> errors.CompileError:
  """The error for a worker that cannot be started.

  Args:
    error: why.
    folder: that of temporary files.
  """
  return errors.CompileError(
    rule=f"A process must start for libtpu, and write to {folder}; it cannot.",
    advice=_ADVICE_WITHOUT_ROOM,
    source=None,
    original=str(error),
  )


def of_reading(text: str) -> errors.CompileError:
  """The error for a program that was compiled but could not be reported."""
  return errors.CompileError(
    rule="What libtpu writes must be of the form coremesh reads; it was not.",
    advice="This is a fault of coremesh's, or a libtpu it does not know.",
    source=None,
    original=text,
  )


def _end(silence: workers.Silence) -> str:
  if silence.status is None:
    return "it closed its connection"
  if silence.status < 0:
    name = signal.Signals(-silence.status).name
    return f"the process died of {name}"
  return f"the process exited with status {silence.status}"
