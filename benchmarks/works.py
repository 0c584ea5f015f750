"""What benchmarks.kernels compares: calculations, and who can do them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import jax

from benchmarks.peers import attention, grouped_matmul, matmul
from coremesh import spec
from coremesh.kernels import specs

type Call = Callable[..., Any]
type Contenders = Mapping[str, Sequence[Call]]

# Beside the reference, which XLA compiles too: what JAX itself offers.
_OF_JAX: dict[str, Call] = {
  "softmax": jax.nn.softmax,
  "log_softmax": jax.nn.log_softmax,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
  """A calculation, and who can do it.

  Attributes:
    name: kernel and case.
    args: types of the arguments; values of those that steer a kernel.
    options: keyword arguments of all contenders.
    num_flops: of the calculation.
    num_bytes: that it must read and write.
    contenders: by name; of the functions of each the fastest counts. The first
      is coremesh's.
  """

  name: str
  args: tuple[Any, ...]
  options: Mapping[str, Any]
  num_flops: int
  num_bytes: int
  contenders: Contenders


def works() -> Iterator[Work]:
  """All that is compared."""
  for kernel in specs.by_place().values():
    for case_name, case in kernel.cases.items():
      yield _work(kernel, case_name, case)
      if kernel.name == "attention" and set(case.options) <= {"is_causal"}:
        yield _with_gradients(kernel, case_name, case)


def _work(kernel: spec.KernelSpec, name: str, case: spec.Case) -> Work:
  return Work(
    name=f"{kernel.name} {name}",
    args=case.args,
    options=case.options,
    num_flops=kernel.num_flops(*case.args, **case.options),
    num_bytes=kernel.num_bytes(*case.args, **case.options),
    contenders={"coremesh": [kernel.function], **_peers(kernel, case)},
  )


def _peers(kernel: spec.KernelSpec, case: spec.Case) -> Contenders:
  if kernel.name == "attention":
    q_len = case.args[0].shape[-2]
    return attention.contenders(case.options, q_len, gradients=False)
  if kernel.name == "grouped_matmul":
    return grouped_matmul.contenders()
  if kernel.name == "grouped_weight_gradient":
    return grouped_matmul.gradient_contenders()
  others = {"XLA": [_OF_JAX.get(kernel.name) or kernel.reference]}
  if kernel.name == "matmul" and not case.options:
    others |= matmul.contenders([a.shape for a in case.args])
  return others


def _with_gradients(
  kernel: spec.KernelSpec, name: str, case: spec.Case
) -> Work:
  """Attention and its gradients: 7 products where the forward has 2."""
  q, _, v = case.args
  d_out = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
  forward = _work(kernel, name, case)
  others = attention.contenders(case.options, q.shape[-2], gradients=True)
  found = {"coremesh": [kernel.function], **others}
  return dataclasses.replace(
    forward,
    name=f"{forward.name}, forward + backward",
    args=(*case.args, d_out),
    num_flops=forward.num_flops * 7 // 2,
    num_bytes=2 * forward.num_bytes,
    contenders={
      n: [attention.with_gradients(fn) for fn in fns]
      for n, fns in found.items()
    },
  )
