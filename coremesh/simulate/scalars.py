"""Source for numbers: none for what is known already, operators for the rest.

Half of what a pipeline does between its copies is to count, so that this
decides how fast it is simulated.
"""

from collections.abc import Callable, Sequence
import operator
from typing import Any

import numpy as np

# numpy's scalars do by these what the functions do, without a call.
_SIGNS = {
  operator.add: "+",
  operator.sub: "-",
  operator.mul: "*",
  operator.and_: "&",
  operator.or_: "|",
  operator.xor: "^",
  operator.eq: "==",
  operator.ne: "!=",
  operator.lt: "<",
  operator.le: "<=",
  operator.gt: ">",
  operator.ge: ">=",
}

_NEUTRAL = {
  (operator.and_, np.dtype(np.bool_)): True,
  (operator.or_, np.dtype(np.bool_)): False,
  (operator.add, np.dtype(np.int32)): 0,
  (operator.mul, np.dtype(np.int32)): 1,
}


def write(
  em: Any,
  function: Callable[..., Any],
  primitive: str,
  operands: Sequence[Any],
  type_: Any,
) -> Any:
  """Writes the computation of one number, if it needs any.

  Args:
    em: the `Emitter`.
    function: computes it.
    primitive: the operation's name.
    operands: names of the numbers it is computed from, at least one.
    type_: its type.

  Returns:
    Its name.
  """
  values = [em.numbers.get(str(operand)) for operand in operands]
  if all(value is not None for value in values):
    with np.errstate(all="ignore"):
      return em.literal(function(*values), type_)
  if primitive == "select_n" and len(operands) == 3:
    which, first, second = operands
    if values[0] is not None:
      return second if values[0] else first
    return em.let(f"{second} if {which} else {first}")
  sign = _SIGNS.get(function)
  if sign is None and primitive == "rem" and _is_plain(type_, values[1]):
    sign = "%"
  if sign is None:
    return em.let(em.call(function, operands))
  neutral = _NEUTRAL.get((function, type_.dtype))
  if neutral is not None:
    for value, other in zip(values, reversed(operands), strict=True):
      if value is not None and value == neutral:
        return other
  source = f"{operands[0]} {sign} {operands[1]}"
  return em.once(source, source, "v")


def _is_plain(type_: Any, divisor: Any) -> bool:
  """Whether Python's remainder is XLA's: no signs, and no zero."""
  return bool(divisor) and np.issubdtype(type_.dtype, np.unsignedinteger)
