"""What the ordinary primitives of `lax` compute, on numpy values.

A rule is asked once for each equation of a kernel, and decides all that
follows from parameters, shapes and dtypes; the function it returns runs often.
Values are arrays, or numpy's scalars for rank 0. Functions never write to
their arguments, may return views of them, and expect to run inside
`np.errstate(all="ignore")`.

Where the last bits of float32 come from numpy and not XLA is said in
`functions` and `reductions`. Two more differences are chosen: of +0 and -0,
max and min return either; of two NaNs, any.
"""

from collections.abc import Mapping

from coremesh.simulate.values import (
  arithmetic,
  casts,
  dot,
  functions,
  indexing,
  logic,
  reductions,
  shape,
  slices,
  sorting,
)
from coremesh.simulate.values.kinds import Function as Function
from coremesh.simulate.values.kinds import Rule as Rule

RULES: Mapping[str, Rule] = {
  **arithmetic.RULES,
  **casts.RULES,
  **dot.RULES,
  **functions.RULES,
  **indexing.RULES,
  **logic.RULES,
  **reductions.RULES,
  **shape.RULES,
  **slices.RULES,
  **sorting.RULES,
}
"""From a primitive's name to its rule, called with (params, in_avals,
out_avals). The function a rule returns takes the values of the equation's
inputs; it returns the result, of out_avals[0]'s shape and dtype, or a sequence
of them where the primitive has `multiple_results`. A rule that lacks a form
raises NotImplementedError."""
