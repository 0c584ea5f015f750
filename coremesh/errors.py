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
