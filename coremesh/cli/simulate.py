"""Simulates the kernels of a function; prints what they did and got wrong."""

import argparse
import contextlib

from coremesh import errors, place
from coremesh.cli import targets
from coremesh.simulate import findings, transfer


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  targets.add_arguments(parser)
  parser.add_argument(
    "--seed", type=int, default=0, help="decides every interleaving"
  )
  parser.add_argument(
    "--dma",
    choices=transfer.DMA_MODES,
    default="late",
    help="when copies move their bytes",
  )
  parser.add_argument(
    "--timeline",
    metavar="OUT.png",
    help="draw when each worker computes, waits and copies, modelled",
  )
  parser.add_argument(
    "--trace",
    metavar="OUT.json",
    help="write that for https://ui.perfetto.dev",
  )


def run(arguments: argparse.Namespace) -> int:
  """Prints the report; 1 if a kernel did what it must not."""
  png, trace = arguments.timeline, arguments.trace
  if png is not None and not png.endswith(".png"):
    raise errors.UnsupportedError(
      f"--timeline must end in '.png'; got {png!r}."
    )
  with targets.working_folder():
    fn, args = targets.loaded(arguments)
    simulation = place.simulation(
      seed=arguments.seed,
      dma=arguments.dma,
      on_finding="record",
      timeline=png is not None or trace is not None,
    )
    # What ends a kernel is among the findings.
    with contextlib.suppress(findings.SimulationError), simulation as session:
      fn(*args)
  if not session.runs:
    raise errors.UnsupportedError(
      f"TARGET {arguments.target!r} ran no kernel in coremesh's simulator. Give"
      " a function that calls kernels, without interpret=."
    )
  print(session.report)
  if png is not None:
    for page in session.timeline.save_png(png):
      print(f"Drawn: {page}")
  if trace is not None:
    path = session.timeline.save_trace(trace)
    print(f"Written: {path}; open it in https://ui.perfetto.dev")
  return 1 if any(not f.is_warning for f in session.findings) else 0
