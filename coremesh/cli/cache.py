"""Shows or clears the compiled programs kept on disk."""

import argparse
import pathlib

from rich.console import Console

from coremesh.compiler import cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument("action", choices=("show", "clear"))
  parser.add_argument(
    "--dir",
    type=pathlib.Path,
    default=None,
    help="the folder; default COREMESH_CACHE_DIR, or the user's cache folder",
  )


def run(arguments: argparse.Namespace) -> int:
  """Prints what there is, or what there was and is no more."""
  disk = cache.Cache(folder=arguments.dir or cache.default_folder())
  console = Console(soft_wrap=True, highlight=False)
  if arguments.action == "clear":
    removed = disk.clear()
    console.print(f"{disk.folder}: removed {_text(removed)}.")
    return 0
  found = disk.contents()
  console.print(f"{disk.folder}: {_text(found)}.")
  console.print(f"It is kept below {disk.most_bytes / 2**20:.0f} MiB.")
  if found.oldest_seconds is not None:
    hours = found.oldest_seconds / 3600
    console.print(f"The entry unused for longest: {hours:.1f} hours.")
  return 0


def _text(contents: cache.Contents) -> str:
  programs = "program" if contents.entries == 1 else "programs"
  size = contents.num_bytes / 2**20
  return f"{contents.entries} compiled {programs}, {size:.1f} MiB"
