"""Runs every benchmark in turn, each in a process of its own."""

import pathlib
import subprocess
import sys

failed = []
for path in sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py")):
  command = [sys.executable, "-m", f"benchmarks.{path.stem}"]
  if subprocess.run(command).returncode:
    failed.append(path.stem)
if failed:
  sys.exit(f"These benchmarks failed: {', '.join(failed)}.")
