"""Every command and every program of the README works as printed."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests import forking

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
  return re.findall(rf"```{language}\n(.*?)```", _README, re.DOTALL)


def _commands() -> list[str]:
  return [line for block in _blocks("sh") for line in block.splitlines()]


def _environment() -> dict[str, str]:
  """What a newcomer has: nothing set for JAX, TPUs or coremesh."""
  own = ("JAX_", "TPU_", "XLA_", "COREMESH_", "LIBTPU_")
  return {k: v for k, v in os.environ.items() if not k.startswith(own)}


def _run(command: list[str], cwd: pathlib.Path = _ROOT) -> str:
  done = subprocess.run(
    command,
    cwd=cwd,
    env=_environment() | {"PYTHONPATH": str(_ROOT)},
    capture_output=True,
    text=True,
    timeout=100,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  return done.stdout


@pytest.fixture(scope="module")
def server():
  """Runs modules with what most of them import imported; others are fresh."""
  imported = [
    "absl.app",
    "coremesh.cli.main",
    "jax.experimental.pallas.tpu_sc",
    "ml_collections.config_flags",
  ]
  environment = _environment() | {"PYTHONPATH": str(_ROOT)}
  server = forking.Server(imported, cwd=_ROOT, env=environment)
  yield server
  server.end()


def test_the_two_commands_come_first_and_are_targets_of_the_makefile():
  assert _commands()[:2] == ["make demo", "make test"]
  makefile = (_ROOT / "Makefile").read_text()
  assert re.search(
    r"^demo:.*\n\t\$\(python\) -m examples\.demo$", makefile, re.M
  )
  assert re.search(r"^test:.*\n\t\$\(python\) -m pytest", makefile, re.M)


@pytest.mark.parametrize("command", _commands()[2:])
def test_a_command_runs_without_a_word_on_stderr(command, server):
  program, *arguments = shlex.split(command)
  if program == "python":
    option, program, *arguments = arguments
    assert option == "-m"
  else:
    assert program == "coremesh"
  done = server.run(program, arguments)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  assert done.stdout


def test_the_demo_prints_what_the_readme_shows():
  printed = _run([sys.executable, "-m", "examples.demo"])
  shown = _blocks("text")[0]

  def still(text: str) -> list[str]:
    # Times differ from run to run, and rich pads a column to its widest cell.
    text = re.sub(r"\d+\.\d\d s", "TIME", text)
    return [re.sub(r"[ ━─]+", " ", line).strip() for line in text.splitlines()]

  assert still(shown) == still(printed)


def test_the_programs_run_in_order_as_one_script(tmp_path):
  script = tmp_path / "readme.py"
  script.write_text("\n".join(_blocks("python")))
  usage, *report = _run([sys.executable, str(script)], tmp_path).splitlines()
  vmem_bytes, code_bytes = map(int, usage.split())
  assert vmem_bytes == 2 * 8 * 128 * 4
  assert code_bytes > 0
  assert "swap_cores" in "\n".join(report)
  assert (tmp_path / "swap.json").exists()


def test_the_error_shown_is_the_one_raised():
  printed = _run([sys.executable, "-m", "examples.sum_blocks", "--wrong=outer"])
  shown = " ".join(_blocks("text")[1].split())
  assert shown.partition(": ")[2] in " ".join(printed.split())
