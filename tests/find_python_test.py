"""Tests for tools/find_python.sh."""

import pathlib
import shlex
import subprocess
import sys

import pytest

_SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "tools/find_python.sh"

# Runs the script's own probe in this Python, which then says it is another.
_PRETEND = """
import sys
sys.version_info = (*{version}, "final", 0)
sys.executable = {path!r}
sys._base_executable = {base!r}
sys.modules.update(dict.fromkeys({missing}))
exec(sys.argv[1])
"""


def _write_program(path: pathlib.Path, text: str) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\n{text}\n")
  path.chmod(0o755)
  return path


def _write_python(
  path: pathlib.Path,
  *,
  version: tuple[int, int, int] = (3, 12, 1),
  base: pathlib.Path | None = None,
  missing: tuple[str, ...] = (),
) -> pathlib.Path:
  code = _PRETEND.format(
    version=version,
    path=str(path),
    base=str(base or path),
    missing=missing,
  )
  run = shlex.join([sys.executable, "-c", code])
  return _write_program(path, f'[ "$1" = -c ] && exec {run} "$2"')


def _write_refusing_shim(path: pathlib.Path) -> pathlib.Path:
  return _write_program(
    path, "echo 'pyenv: command not found' >&2\necho hint >&2\nexit 127"
  )


def _run(*path: pathlib.Path, **variables: object):
  environment = {name: str(value) for name, value in variables.items()}
  environment["PATH"] = ":".join(map(str, path))
  return subprocess.run(
    ["/bin/sh", str(_SCRIPT)],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )


def _check_found(result, python: pathlib.Path) -> None:
  assert (result.stdout, result.stderr) == (f"{python}\n", "")
  assert result.returncode == 0


def _check_refused(result, message: str) -> None:
  assert (result.stdout, result.stderr) == ("", f"{message}\n")
  assert result.returncode == 1


_NONE_FOUND = (
  "Found no Python 3.12 or newer that can make virtual environments:"
  " install one (Debian: python3.12 and python3.12-venv; pyenv: pyenv install"
  " 3.12) or name one with PYTHON=/path/to/python."
)


@pytest.mark.parametrize(
  "name", ["python3.14", "python3.13", "python3.12", "python3", "python"]
)
def test_finds_a_python_under_each_usual_name(tmp_path, name):
  good = _write_python(tmp_path / name)
  _check_found(_run(tmp_path), good)


def test_prefers_the_version_the_pins_were_made_with(tmp_path):
  _write_python(tmp_path / "python3", version=(3, 14, 0))
  _write_python(tmp_path / "python3.13", version=(3, 13, 0))
  good = _write_python(tmp_path / "python3.12")
  _check_found(_run(tmp_path), good)


def test_passes_over_a_shim_that_refuses_to_run(tmp_path):
  _write_refusing_shim(tmp_path / "python3.12")
  good = _write_python(tmp_path / "python3.13", version=(3, 13, 0))
  _check_found(_run(tmp_path), good)


def test_finds_the_python_that_a_refusing_shim_hides(tmp_path):
  _write_refusing_shim(tmp_path / "shims/python3.12")
  good = _write_python(tmp_path / "bin/python3.12")
  _check_found(_run(tmp_path / "shims", tmp_path / "bin"), good)


def test_passes_over_a_python_that_is_too_old(tmp_path):
  _write_python(tmp_path / "python3", version=(3, 11, 7))
  good = _write_python(tmp_path / "python")
  _check_found(_run(tmp_path), good)


def test_passes_over_a_program_that_prints_nothing(tmp_path):
  _write_program(tmp_path / "python3.12", "exit 0")
  good = _write_python(tmp_path / "python3")
  _check_found(_run(tmp_path), good)


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_passes_over_a_python_that_cannot_make_environments(tmp_path, module):
  _write_python(tmp_path / "python3.12", missing=(module,))
  good = _write_python(tmp_path / "python3")
  _check_found(_run(tmp_path), good)


def test_prints_the_base_of_a_virtual_environment(tmp_path):
  base = tmp_path / "base/python3.12"
  _write_python(tmp_path / "venv/python3.12", base=base)
  _check_found(_run(tmp_path / "venv"), base)


def test_finds_a_python_in_a_folder_with_a_space(tmp_path):
  good = _write_python(tmp_path / "my tools/python3.12")
  _check_found(_run(tmp_path / "my tools"), good)


def test_searches_the_pyenv_root_when_path_has_none(tmp_path):
  versions = tmp_path / "pyenv/versions"
  _write_python(tmp_path / "python3", version=(3, 11, 7))
  _write_python(versions / "3.11.7/bin/python", version=(3, 11, 7))
  _write_refusing_shim(versions / "3.12.0/bin/python")
  good = _write_python(versions / "3.12.1/bin/python")
  _check_found(_run(tmp_path, PYENV_ROOT=tmp_path / "pyenv"), good)


def test_searches_the_home_folder_for_pyenv(tmp_path):
  good = _write_python(tmp_path / ".pyenv/versions/3.12.1/bin/python")
  _check_found(_run(tmp_path, HOME=tmp_path), good)
  _check_found(_run(tmp_path, HOME=tmp_path, PYENV_ROOT="/nowhere"), good)


def test_prefers_path_to_the_pyenv_root(tmp_path):
  _write_python(tmp_path / ".pyenv/versions/3.12.1/bin/python")
  good = _write_python(tmp_path / "python3", version=(3, 13, 0))
  _check_found(_run(tmp_path, HOME=tmp_path), good)


def test_says_what_to_install_when_there_is_no_python(tmp_path):
  _check_refused(_run(tmp_path), _NONE_FOUND)


def test_says_what_to_install_when_no_python_is_suitable(tmp_path):
  _write_refusing_shim(tmp_path / "python3.12")
  _write_python(tmp_path / "python3", version=(3, 11, 7))
  _write_python(tmp_path / "python", missing=("ensurepip",))
  _check_refused(_run(tmp_path, HOME=tmp_path), _NONE_FOUND)


def test_takes_the_python_that_is_named_by_path(tmp_path):
  _write_python(tmp_path / "python3.12")
  named = _write_python(tmp_path / "elsewhere/mine", version=(3, 13, 0))
  _check_found(_run(tmp_path, PYTHON=named), named)


def test_takes_the_python_that_is_named_by_name(tmp_path):
  _write_python(tmp_path / "python3.12")
  named = _write_python(tmp_path / "python3.13", version=(3, 13, 0))
  _check_found(_run(tmp_path, PYTHON="python3.13"), named)


def test_searches_when_the_named_python_is_empty(tmp_path):
  good = _write_python(tmp_path / "python3.12")
  _check_found(_run(tmp_path, PYTHON=""), good)


def test_refuses_a_named_python_that_is_too_old(tmp_path):
  _write_python(tmp_path / "python3.12")
  old = _write_python(tmp_path / "old", version=(3, 11, 7))
  _check_refused(
    _run(tmp_path, PYTHON=old),
    f"PYTHON={old} is Python 3.11.7, but coremesh needs Python 3.12 or newer.",
  )


def test_refuses_a_named_python_without_ensurepip(tmp_path):
  bare = _write_python(tmp_path / "bare", missing=("ensurepip",))
  _check_refused(
    _run(tmp_path, PYTHON=bare),
    f"PYTHON={bare} is Python 3.12.1 without the modules venv and ensurepip,"
    " which make virtual environments (Debian: install python3.12-venv).",
  )


def test_refuses_a_named_python_that_does_not_run(tmp_path):
  _write_python(tmp_path / "python3.12")
  shim = _write_refusing_shim(tmp_path / "shim")
  _check_refused(
    _run(tmp_path, PYTHON=shim),
    f"PYTHON={shim} does not run as a Python; it says:"
    " pyenv: command not found",
  )


def test_refuses_a_named_python_that_does_not_exist(tmp_path):
  _write_python(tmp_path / "python3.12")
  _check_refused(
    _run(tmp_path, PYTHON="nonesuch"),
    "PYTHON=nonesuch is not a program; name a Python 3.12 or newer.",
  )
