"""Kernels whose synchronisation is broken on purpose: is it noticed?"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
from typing import Any

from coremesh._compat import kernel_ir
from coremesh.simulate import launch, program, repeat, synchronisation
from coremesh.simulate.findings import error_of
from coremesh.simulate.progress import progress_bar
from coremesh.simulate.transfer import DMA_MODES, DmaMode


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
  """A kernel with one change to its synchronisation.

  Attributes:
    kernel: its name.
    operation: what was changed: "signal of 'barrier'".
    line: the user's line it is on: "swap.py:12 (swap)".
    ordinal: which of the operations that this line makes, from 1.
    change: "delete" or "duplicate" the operation; "own target", it goes to the
      worker itself; "next target", to the one after the right one; "delete
      line", all operations of the line are left out.
    caught_by: the kinds of the findings it led to, "result" if only the result
      was wrong, or the error that was raised; None if nobody noticed.
    detail: what was said of it, "" if nothing.
    is_reached: whether any worker comes to what was changed. If none does, the
      arguments are too small to tell: nothing was run.
  """

  kernel: str
  operation: str
  line: str
  ordinal: int
  change: synchronisation.Kind
  caught_by: str | None
  detail: str = ""
  is_reached: bool = True

  @property
  def place(self) -> str:
    """The file and line: "swap.py:12"."""
    return self.line.split(" ")[0]

  @property
  def brief_operation(self) -> str:
    """The operation in few words: "DMA wait 'sem'"."""
    return self.operation.replace("wait for the copy of", "DMA wait")

  def __str__(self) -> str:
    if self.change == "delete line":
      return f"{self.place} delete line"
    never = "" if self.is_reached else ", where no worker comes"
    change = f"#{self.ordinal} {self.change}"
    return f"{self.place} {change} ({self.brief_operation}{never})"

  def is_named_by(self, words: str) -> bool:
    """Whether words such as "swap.py:12 delete" name it.

    They are its file and line, and of the number "#2" and the change none, one
    or both.
    """
    place, *rest = words.split(" ", 1)
    if place != self.place:
      return False
    [own] = rest or [""]
    number = f"#{self.ordinal}"
    return own in ("", number, self.change, f"{number} {self.change}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MutationReport:
  """What `cm.mutate` found.

  Attributes:
    name: the function's.
    num_runs: under how many seeds each mutant was tried.
    mutants: all of them, kernel by kernel, in the order of the program.
  """

  name: str
  num_runs: int
  mutants: tuple[Mutant, ...]

  @property
  def survivors(self) -> tuple[Mutant, ...]:
    """Those that nobody noticed."""
    return tuple(m for m in self.mutants if m.caught_by is None)

  def __str__(self) -> str:
    caught = len(self.mutants) - len(self.survivors)
    lines = [f"{self.name}: {caught} of {len(self.mutants)} mutants caught."]
    if self.survivors:
      lines += ["Nobody noticed:", *(f"  {m}" for m in self.survivors)]
    if any(m.change != "delete line" for m in self.survivors):
      lines.append("#2 is the second operation that its line makes.")
    lines.append("All of them, with what caught each: print(report.table()).")
    return "\n".join(lines)

  def table(self) -> str:
    """A line for each mutant: what it is, and who caught it."""
    names = [str(m) for m in self.mutants]
    width = max(map(len, names), default=0)
    return "\n".join(
      f"{name:{width}}  {m.caught_by or 'nobody noticed'}"
      for name, m in zip(names, self.mutants, strict=True)
    )


def mutate(
  fn: Callable[..., Any],
  *args: Any,
  seeds: int | Sequence[int] = 3,
  dma: DmaMode | Iterable[DmaMode] = DMA_MODES,
  progress: bool | None = None,
) -> MutationReport:
  """Breaks each synchronisation of a function's kernels, to see who notices.

  Each signal, wait, DMA wait and subcore barrier is deleted and done twice in
  turn; each signal and copy to another worker is sent to the wrong one; and the
  operations of each line, such as a barrier, are deleted together. A mutant is
  caught if its simulation finds a fault or its result differs. One that
  survives is a fault the tests would not see, or an operation not needed.

  Args:
    fn: a function that contains kernels, jitted or not. It is called once for
      each mutant and seed.
    *args: its arguments.
    seeds: how many seeds to try for each mutant, from 0; or which.
    dma: when DMAs move their bytes: one mode, or several to take in turn.
    progress: show how far it is; default on a terminal only.

  Returns:
    A `MutationReport`, with a `Mutant` for each change.

  Raises:
    SimulationError, DeadlockError: the function is wrong as it is.
    UnsupportedError: another value of an argument, or `fn` runs no kernel in
      coremesh's simulator.

  Example:
    assert not cm.mutate(swap, x).survivors
  """
  repeat.check_function(fn)
  chosen, modes = repeat.checked_seeds(seeds), repeat.checked_dma(dma)
  runs: list[tuple[int, DmaMode]] = [
    (seed, modes[i % len(modes)]) for i, seed in enumerate(chosen)
  ]
  session = _Session()
  runner = repeat.Runner(
    fn, args, _Params(on_finding="record", session=session)
  )
  right = _unmutated(runner, runs)
  session.max_turns = 1000 + 20 * max(outcome.turns for outcome in right)
  work = [
    (kernel, mutation)
    for kernel in list(session.kernels)
    for mutation in kernel.mutations()
  ]
  name, mutants = repeat.name_of(fn), []
  with progress_bar(f"mutating {name}", len(work), progress) as advance:
    for kernel, mutation in work:
      session.mutation = kernel, mutation
      seen = session.kernels[kernel]
      caught, is_reached = None, seen.reaches(kernel, mutation)
      if mutation in seen.refused:
        error = seen.refused[mutation]
        caught = type(error).__name__, error
      elif is_reached:
        tries = (_caught(runner, seed, mode, right) for seed, mode in runs)
        caught = next(filter(None, tries), None)
      mutants.append(_mutant(kernel, mutation, caught, is_reached=is_reached))
      advance()
  return MutationReport(name=name, num_runs=len(runs), mutants=tuple(mutants))


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
  """A kernel, known by what it synchronises."""

  name: str
  operations: tuple[synchronisation.Operation, ...]

  def mutations(self) -> Iterator[synchronisation.Mutation]:
    for index, operation in enumerate(self.operations):
      for kind in operation.kinds:
        yield synchronisation.Mutation(index=index, kind=kind)
    for line in dict.fromkeys(o.line for o in self.operations):
      first, *more = self.of_line(line) or [0]
      if more:
        yield synchronisation.Mutation(index=first, kind="delete line")

  def of_line(self, line: str) -> list[int]:
    """The operations of a line that can be left out."""
    return [
      i
      for i, operation in enumerate(self.operations)
      if operation.line == line and operation.primitive != "copy"
    ]


@dataclasses.dataclass(slots=True)
class _Seen:
  """What is known of a kernel.

  Attributes:
    refused: the mutations that cannot be compiled, and why.
    passed: for each time it was compiled, the operations that workers came to.
  """

  refused: dict[synchronisation.Mutation, Exception] = dataclasses.field(
    default_factory=dict
  )
  passed: list[set[int]] = dataclasses.field(default_factory=list)

  def reaches(
    self, kernel: _Kernel, mutation: synchronisation.Mutation
  ) -> bool:
    """Whether some worker comes to what a mutation changes."""
    changed = {mutation.index}
    if mutation.kind == "delete line":
      line = kernel.operations[mutation.index].line
      changed = set(kernel.of_line(line))
    return any(changed & passed for passed in self.passed)


class _Session(repeat.Repetition):
  """The kernels seen, and the mutation that runs."""

  def __init__(self):
    super().__init__()
    self.kernels: dict[_Kernel, _Seen] = {}
    self.mutation: tuple[_Kernel, synchronisation.Mutation] | None = None
    self.max_turns: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Params(repeat.RepeatedParams):
  """Parameters that compile each kernel with all its mutations."""

  def now(self):
    assert isinstance(self.session, _Session)
    return dataclasses.replace(super().now(), max_turns=self.session.max_turns)

  def compile_kernel(self, program: Any) -> kernel_ir.HostFunction:
    return _Launch(program, self)


class _Launch(launch.Launch):
  """A kernel that runs as the session's mutation has it."""

  def __init__(self, kernel: kernel_ir.KernelProgram, params: _Params):
    assert isinstance(params.session, _Session)
    self._session = params.session
    self._noted = synchronisation.Operations()
    super().__init__(kernel, params)
    self._key = _Kernel(kernel.name, tuple(self._noted.found))
    self._mutants: dict[synchronisation.Mutation, program.Program] = {}
    self._seen = self._session.kernels.setdefault(self._key, _Seen())
    self._seen.passed.append(self._noted.passed)
    # Here and not when it runs: JAX's tracer still knows the chip.
    if self._session.mutation is None:
      for mutation in self._key.mutations():
        self._add(mutation)
    elif self._session.mutation[0] == self._key:
      self._add(self._session.mutation[1])

  def _compile(
    self, operations: synchronisation.Operations | None = None
  ) -> program.Program:
    return super()._compile(operations or self._noted)

  def _add(self, mutation: synchronisation.Mutation) -> None:
    changed = synchronisation.Operations(mutation, of=self._key.operations)
    try:
      self._mutants[mutation] = self._compile(changed)
    except Exception as error:  # To be told as what caught the mutant.
      self._seen.refused[mutation] = error

  def _compiled(self) -> program.Program:
    match self._session.mutation:
      case (self._key, mutation):
        return self._mutants[mutation]
    return self._program


def _unmutated(
  runner: repeat.Runner, runs: Iterable[tuple[int, DmaMode]]
) -> list[repeat.Outcome]:
  """The runs of the function as it is, which must be right."""
  right: list[repeat.Outcome] = []
  for seed, mode in runs:
    outcome = runner.run(seed, mode)
    first = right[0] if right else None
    faults = (*outcome.faults, *repeat.unstable(outcome, first))
    if faults:
      error = error_of(faults)
      error.add_note(
        f"Found under {outcome.how}, before any change. Mutants tell something"
        " of a function that is right: make it so, see cm.explore."
      )
      raise error
    right.append(outcome)
  return right


def _caught(
  runner: repeat.Runner,
  seed: int,
  dma: DmaMode,
  right: Sequence[repeat.Outcome],
) -> tuple[str, Any] | None:
  """What notices that a mutant is wrong, and what it says."""
  try:
    outcome = runner.run(seed, dma)
  except Exception as error:  # The function's own checks count too.
    return type(error).__name__, error
  known = {f.kind for o in right for f in o.findings}
  found = outcome.faults or [f for f in outcome.findings if f.kind not in known]
  if found:
    kinds = ", ".join(dict.fromkeys(f.kind for f in found))
    return kinds + ("" if outcome.faults else " (warning)"), found[0]
  expected = right[0].outputs
  assert expected is not None and outcome.outputs is not None
  differs = repeat.difference(expected, outcome.outputs)
  return None if differs is None else ("result", differs)


def _mutant(
  kernel: _Kernel,
  mutation: synchronisation.Mutation,
  caught: tuple[str, Any] | None,
  *,
  is_reached: bool,
) -> Mutant:
  operation = kernel.operations[mutation.index]
  before = kernel.operations[: mutation.index]
  return Mutant(
    kernel=kernel.name,
    operation=operation.what,
    line=operation.line,
    ordinal=1 + sum(o.line == operation.line for o in before),
    change=mutation.kind,
    caught_by=None if caught is None else caught[0],
    detail="" if caught is None else str(caught[1]),
    is_reached=is_reached,
  )
