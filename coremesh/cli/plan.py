"""Prints who owns what when items are split over workers."""

import argparse

from coremesh import partition


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument("items", type=int, help="rows, columns, blocks, ...")
  parser.add_argument("workers", type=int, help="cores, subcores or devices")
  parser.add_argument(
    "--unit",
    type=int,
    default=1,
    help="give out whole groups of this many, such as 8 rows or 128 columns",
  )
  parser.add_argument(
    "--even",
    action="store_true",
    help="refuse what does not divide instead of spreading the remainder",
  )


def run(arguments: argparse.Namespace) -> int:
  """Prints the plan."""
  split = partition.split(
    arguments.items,
    arguments.workers,
    unit=arguments.unit,
    uneven="refuse" if arguments.even else "spread",
  )
  print(split.plan())
  return 0
