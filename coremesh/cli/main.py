"""Entry point of the command `coremesh`."""

import argparse
from collections.abc import Sequence
import sys

from coremesh import errors
from coremesh.cli import (
  cache,
  chips,
  explain,
  guard,
  matrix,
  mutate,
  plan,
  simulate,
)

COMMANDS = {
  "chips": chips,
  "plan": plan,
  "simulate": simulate,
  "mutate": mutate,
  "explain": explain,
  "cache": cache,
  "guard": guard,
  "matrix": matrix,
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: the words after `coremesh`; default those of the process.

  Returns:
    The exit code: 0; 1 if what was asked about is not well; 2 for a request
    that cannot be met.
  """
  parser = argparse.ArgumentParser(
    prog="coremesh", description="Kernels for every core of a TPU."
  )
  commands = parser.add_subparsers(
    dest="command", required=True, metavar="COMMAND"
  )
  for name, module in COMMANDS.items():
    summary = (module.__doc__ or "").splitlines()[0]
    command = commands.add_parser(name, help=summary, description=summary)
    module.add_arguments(command)
    command.set_defaults(run=module.run)
  arguments = parser.parse_args(argv)
  try:
    return arguments.run(arguments)
  except errors.CoreMeshError as error:
    print(f"coremesh {arguments.command}: {error}", file=sys.stderr)
    return 2


def run() -> None:
  """What the installed command calls, and `python -m coremesh`."""
  sys.exit(main())
