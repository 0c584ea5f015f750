"""Runs the command `coremesh`: python -m coremesh."""

from coremesh.cli import main

if __name__ == "__main__":
  main.run()
