"""The errors coremesh raises: one class for each kind of mistake."""


class CoreMeshError(Exception):
  """Base of every error coremesh raises on purpose."""


class ShapeError(CoreMeshError, ValueError):
  """A shape, block or split that does not fit."""


class DTypeError(CoreMeshError, TypeError):
  """A dtype a TPU kernel cannot hold."""


class ChipError(CoreMeshError, ValueError):
  """A chip, core or memory that does not exist."""


class AxisError(CoreMeshError, ValueError):
  """A name that is no axis of the meshes in scope."""


class CollectiveError(CoreMeshError, ValueError):
  """Barriers or remote copies that could meet another's signals."""


class PipelineError(CoreMeshError, ValueError):
  """A pipeline whose blocks, grid and accumulators contradict each other."""


class UnsupportedError(CoreMeshError, NotImplementedError):
  """Something this chip, this place or this version of JAX cannot do."""


class StageError(CoreMeshError, KeyError):
  """A text of a compiled program that is not there."""

  def __str__(self) -> str:
    return str(self.args[0])  # KeyError would show its repr.


class CompileError(CoreMeshError, RuntimeError):
  """What the TPU compiler refuses, in the user's words.

  Attributes:
    rule: what must hold and does not.
    advice: what to change.
    source: the user's line, "file:line (function)"; None if the compiler
      names none.
    original: what the compiler said; "" if it said nothing.
  """

  def __init__(
    self, *, rule: str, advice: str, source: str | None, original: str
  ):
    super().__init__(rule, advice, source, original)
    self.rule = rule
    self.advice = advice
    self.source = source
    self.original = original

  def __reduce__(self):
    return _compile_error, self.args

  def __str__(self) -> str:
    place = f"\n  at {self.source}" if self.source else ""
    said = f"The compiler: {self.original}" if self.original else ""
    return "\n".join(filter(None, (f"{self.rule} {self.advice}{place}", said)))


def _compile_error(rule, advice, source, original) -> CompileError:
  return CompileError(
    rule=rule, advice=advice, source=source, original=original
  )
