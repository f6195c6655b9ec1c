# shellcheck shell=bash
# Functions of the launchers, which source this file. They set `dry` when a dry run is asked for.

fail() {
  echo "error: $1" >&2
  exit 2
}

# Quotes a word for a POSIX shell, if it needs quotes.
quote() {
  case $1 in
    '' | *[!A-Za-z0-9_./:=,@%+-]*) printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf '%s' "$1" ;;
  esac
}

line() {
  local word separator=
  for word in "$@"; do
    printf '%s' "$separator"
    quote "$word"
    separator=' '
  done
}

show() { printf '%s\n' "$(line "$@")"; }
note() { if [ -n "${dry:-}" ]; then echo "# $1"; else echo "== $1" >&2; fi; }

# In a dry run the command is printed, otherwise run.
do_it() { if [ -n "${dry:-}" ]; then show "$@"; else "$@"; fi; }

# Fails unless the value is a whole number that is not below the minimum.
whole_number() { # OPTION VALUE MINIMUM
  [[ $2 =~ ^[0-9]{1,9}$ ]] && [ "$2" -ge "$3" ] || fail "$1 is '$2'. Give a whole number, $3 or more."
}

# Fails unless the rest of the command line, after --, starts with python -m.
need_program() { # WORKDIR WORD ...
  local workdir=$1
  shift
  if [ $# -lt 3 ] || [ "$1 $2" != "python -m" ]; then
    fail "no command. End with: -- python -m pe_lab.train --config=... --workdir=$workdir"
  fi
}

need_tool() { # TOOL WHAT
  [ -n "${dry:-}" ] || command -v "$1" >/dev/null || fail "$1 is not on the PATH. Install $2, or use --dry-run."
}

# A string of YAML (and of JSON), without control characters.
string() {
  printf '"%s"' "$(printf '%s' "$1" | sed 's/\\/\\\\/g; s/"/\\"/g')"
}

# The software version of TPU VMs for an accelerator type, such as v5litepod-256; empty if it is not known.
tpu_runtime() {
  case $1 in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
  esac
}
