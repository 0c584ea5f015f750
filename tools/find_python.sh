#!/bin/sh
# Prints the path of a Python >= 3.12 that can make virtual environments.
#
# Looks along PATH, then under the pyenv root; PYTHON=<name or path> is used
# instead of a search. A name proves nothing: a pyenv shim may refuse to run,
# `python3` may be old, and a distribution may leave out ensurepip. So every
# candidate is run. Uses shell builtins only, so that PATH is free to hold
# nothing but Pythons. Nothing suitable: one sentence on stderr, exit code 1.
set -u

# The path printed is the base interpreter's, never a shim's or that of an
# active virtual environment: it still works once .venv has been removed.
probe='
import sys
sys.version_info >= (3, 12) or sys.exit(
  "is Python %d.%d.%d, but coremesh needs Python 3.12 or newer"
  % tuple(sys.version_info[:3])
)
try:
  import ensurepip, venv
except ImportError:
  sys.exit(
    "is Python %d.%d.%d without the modules venv and ensurepip, which make"
    " virtual environments (Debian: install python%d.%d-venv)"
    % tuple(sys.version_info[:3] + sys.version_info[:2])
  )
print(getattr(sys, "_base_executable", "") or sys.executable)
'

fail() {
  printf '%s\n' "$1" >&2
  exit 1
}

try() {
  found=$("$1" -c "$probe" 2>/dev/null </dev/null) && [ -n "$found" ] || return
  printf '%s\n' "$found"
  exit 0
}

if [ -n "${PYTHON:-}" ]; then
  command -v "$PYTHON" >/dev/null ||
    fail "PYTHON=$PYTHON is not a program; name a Python 3.12 or newer."
  try "$PYTHON"
  reason=$("$PYTHON" -c "$probe" 2>&1 </dev/null)
  case $reason in
    "is Python "*) fail "PYTHON=$PYTHON $reason." ;;
    *) fail "PYTHON=$PYTHON does not run as a Python; it says: ${reason%%"
"*}" ;;
  esac
fi

# The tested version first. All of PATH for each name: a shim that refuses may
# hide a working Python further along.
for name in python3.12 python3.13 python3.14 python3 python; do
  rest=${PATH:-}:
  while [ -n "$rest" ]; do
    folder=${rest%%:*}
    rest=${rest#*:}
    [ -x "${folder:-.}/$name" ] && try "${folder:-.}/$name"
  done
done

for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
  for candidate in "$root"/versions/*/bin/python; do
    [ -x "$candidate" ] && try "$candidate"
  done
done

fail "Found no Python 3.12 or newer that can make virtual environments:\
 install one (Debian: python3.12 and python3.12-venv; pyenv: pyenv install\
 3.12) or name one with PYTHON=/path/to/python."
