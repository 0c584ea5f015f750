"""What the body of a pipeline may do: read its inputs, write its outputs."""

from collections.abc import Callable, Mapping, Sequence

from coremesh import _compat, errors
from coremesh.pipelines.blocks import Operand


def checked(
  body: Callable[..., None], operands: Sequence[Operand]
) -> Callable[..., None]:
  """The body, checked where it is traced.

  Raises, when called:
    PipelineError: it writes an input, or reads an output it has not written.
  """

  def run(*refs):
    with _compat.recorded_accesses(refs) as touched:
      body(*refs)
    _check(touched, operands)

  return run


def _check(
  touched: Mapping[int, Sequence[str]], operands: Sequence[Operand]
) -> None:
  for position, kinds in sorted(touched.items()):
    operand = operands[position]
    if not operand.is_copied:
      continue
    if not operand.is_output and "write" in kinds:
      raise errors.PipelineError(
        f"The body writes {operand.label}. An input block is a copy in VMEM"
        " that is never written back; write to an output, or to a scratch."
      )
    is_readable = not operand.is_output or operand.accumulator
    if not is_readable and kinds[0] == "read":
      raise errors.PipelineError(
        f"The body reads {operand.label} before it has written it. An output"
        " block starts with garbage: nothing is copied in. To add to it over"
        " several steps, declare it: cm.accumulator(block_shape, index_map)."
      )
