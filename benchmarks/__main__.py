"""Runs every benchmark in turn, each in a process of its own."""

import pathlib
import subprocess
import sys

for path in sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py")):
  subprocess.run([sys.executable, "-m", f"benchmarks.{path.stem}"], check=True)
