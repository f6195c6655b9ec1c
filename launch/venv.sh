#!/bin/sh
# Creates .venv in the root of this checkout, installs the packages of requirements.lock, and pe_lab as editable.
# `make setup` runs it on your machine, launch/tpu_slice.sh on every host of a slice.
#
#   PYTHON=python3.12       use this interpreter; by default the first Python >= 3.11
#   EXTRA=gpu               also install requirements-gpu.lock: CUDA for the locked JAX, 4.3 GB on disk
#   EXTRA=tpu               also install another extra of pyproject.toml, which no lock contains; later runs keep an extra
#   UV=no                   use venv and pip instead of uv
#   UV_PYTHON_DOWNLOADS=automatic   let uv download a Python if the machine has no suitable one
set -eu
cd "$(dirname "$0")/.."
here=$(pwd -P)
stamp=.venv/.installed # contains the path of .venv, and is written last: without it the set-up is incomplete
export UV_PYTHON_DOWNLOADS="${UV_PYTHON_DOWNLOADS:-never}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
  echo "error: $1" >&2
  exit 2
}

new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer. Name another, or unset PYTHON."
    echo "$PYTHON"
    return
  fi
  # A pyenv interpreter may be on the PATH and fail to start: new_enough runs it.
  for candidate in python3 python3.12 python3.11 python3.13 "$HOME"/.pyenv/versions/3.1[123].*/bin/python3; do
    if new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  if [ "$UV_PYTHON_DOWNLOADS" != never ] && [ -n "$uv" ]; then
    echo 3.12
    return
  fi
  fail "pe_lab needs Python 3.11 or newer, and none was found (python3 is: $(python3 --version 2>&1 || true)).
Install one (Debian, Ubuntu: apt-get install python3.12-venv; macOS: brew install python@3.12),
or name it: make setup PYTHON=/path/to/python3.12"
}

uv=
if [ "${UV:-}" != no ] && uv --version >/dev/null 2>&1; then
  uv=uv
fi

# An extra is kept, or else an update of the lock would leave the CUDA packages of another JAX.
extra=${EXTRA:-$(cat .venv/.extra 2>/dev/null || true)}

# In a tree that was moved or copied, the scripts of .venv point to the old path.
if [ -f $stamp ] && [ "$(cat $stamp)" != "$here" ]; then
  rm -rf .venv
fi
rm -f $stamp

if ! new_enough .venv/bin/python; then
  python=$(find_python)
  rm -rf .venv
  if [ -n "$uv" ]; then
    uv venv --quiet --python "$python" .venv
  else
    "$python" -m venv .venv || {
      rm -rf .venv
      fail "$python cannot make a virtual environment. Debian and Ubuntu: apt-get install python3-venv"
    }
  fi
fi

if [ -z "$uv" ] && [ "${UV:-}" != no ]; then
  if .venv/bin/python -m pip install --quiet uv >/dev/null 2>&1; then
    uv=.venv/bin/uv
  fi
fi

also=
[ -z "$extra" ] || also=", and $extra"
echo "setup: $(.venv/bin/python --version) in .venv, packages by ${uv:-pip}$also"

# With --compile-bytecode uv does as pip does. Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every command
# would otherwise compile its imports at every start, for three seconds.
install() {
  if [ -n "$uv" ]; then
    "$uv" pip install --quiet --python .venv/bin/python "$@"
  else
    .venv/bin/python -m pip install --quiet "$@"
  fi
}
compile=
[ -z "$uv" ] || compile=--compile-bytecode
[ -n "$uv" ] || .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null

install $compile -r requirements.lock
install --no-deps -e .
if [ -n "$extra" ]; then
  if [ -f "requirements-$extra.lock" ]; then
    install $compile -r "requirements-$extra.lock"
  else
    install $compile -e ".[$extra]"
  fi
  echo "$extra" >.venv/.extra
fi
echo "$here" >$stamp
