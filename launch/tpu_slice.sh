#!/usr/bin/env bash
# Creates or reuses a TPU VM slice, copies the current commit to every host, installs it, starts the same command on
# all hosts and follows the log of host 0. The settings of an experiment are in its config.
#
# The run has its own session on the hosts: a lost ssh connection, or Ctrl-C here, does not stop it.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/tpu_slice.sh --name=NAME --zone=ZONE --project=PROJECT --type=TYPE [OPTION ...] -- python -m MODULE [ARG ...]
       launch/tpu_slice.sh --name=NAME --zone=ZONE --project=PROJECT --attach | --stop | --delete

  --name, --zone, --project   the slice (or: environment variables NAME, ZONE, PROJECT)
  --type=v5litepod-256        accelerator type (TYPE)
  --runtime=VERSION           TPU software version (RUNTIME); known for v4, v5e, v5p and v6e
  --spot                      cheaper, may be preempted
  --queued                    request a queued resource, and wait for it
  --slices=N                  N slices of this type, as one queued resource (1; give it with --attach and --delete too)
  --before=COMMAND            run this on every host first, for example to mount a shared file system
  --dry-run                   print the commands, run none
  --attach                    follow the run on the slice
  --stop                      end the run on every host with SIGTERM: it saves a checkpoint first
  --delete                    delete the slice (with --queued: and its queued resource)
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
. "$here/common.sh"

name=${NAME:-} zone=${ZONE:-} project=${PROJECT:-} type=${TYPE:-} runtime=${RUNTIME:-}
spot='' queued='' slices=1 dry='' before='' action=run
program=()
while [ $# -gt 0 ]; do
  case $1 in
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --project=*) project=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --runtime=*) runtime=${1#*=} ;;
    --spot) spot=yes ;;
    --queued) queued=yes ;;
    --slices=*) slices=${1#*=} ;;
    --before=*) before=${1#*=} ;;
    --dry-run) dry=yes ;;
    --attach | --stop | --delete)
      [ "$action" = run ] || fail "$1 and --$action: choose one."
      action=${1#--}
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    --)
      shift
      program=("$@")
      break
      ;;
    *) fail "unknown argument '$1'. Options are written --name=VALUE; the command comes after --. See --help." ;;
  esac
  shift
done

[ -n "$name" ] || fail "no name for the slice. Give --name=NAME or set NAME."
[ -n "$zone" ] || fail "no zone. Give --zone=ZONE or set ZONE (gcloud compute tpus locations list shows them)."
whole_number --slices "$slices" 1
[ "$slices" = 1 ] || queued=yes
[ -n "$project" ] || fail "no project. Give --project=PROJECT or set PROJECT."
if [ "$action" = run ]; then
  [ -n "$type" ] || fail "no accelerator type. Give --type=TYPE or set TYPE, such as v5litepod-256."
  need_program /mnt/runs/NAME ${program[@]+"${program[@]}"}
  if [ -z "$runtime" ]; then
    runtime=$(tpu_runtime "$type")
    [ -n "$runtime" ] || fail "the software version for '$type' is unknown. Give --runtime=VERSION."
  fi
fi
need_tool gcloud "the Google Cloud CLI"

where=("--project=$project" "--zone=$zone")
tpu=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)
pause=${POLL_SECONDS:-30}

# `0` is the first host of the first slice.
if [ "$slices" = 1 ]; then
  on_hosts() { do_it "${tpu[@]}" ssh "$name" "${where[@]}" "--worker=$1" "--command=$2"; }
  to_hosts() { do_it "${tpu[@]}" scp "$1" "$name:$2" "${where[@]}" --worker=all; }
else
  on_hosts() { do_it "${queue[@]}" ssh "$name" "${where[@]}" "--node=$1" "--worker=$1" "--command=$2"; }
  to_hosts() { do_it "${queue[@]}" scp "$1" "$name:$2" "${where[@]}" --node=all --worker=all; }
fi

# Sets `state` to the state of the slice or of its queued resource; empty if it does not exist.
state=
get_state() { # FIELD COMMAND ...
  local field=$1 errors
  shift
  errors=$(mktemp)
  if ! state=$("$@" describe "$name" "${where[@]}" "--format=value($field)" 2>"$errors"); then
    if ! grep -qi 'not.\{0,1\}found' "$errors"; then
      cat "$errors" >&2
      rm -f "$errors"
      echo "error: gcloud failed to look up $name in $zone." >&2
      exit 1
    fi
    state=
  fi
  rm -f "$errors"
}

options=("${where[@]}" "--accelerator-type=$type")
[ -z "$spot" ] || options+=(--spot)
create() { do_it "${tpu[@]}" create "$name" "${options[@]}" "--version=$runtime"; }
# A slice has the name of its queued resource; several have it as their prefix.
nodes=("--node-id=$name")
[ "$slices" = 1 ] || nodes=("--node-count=$slices" "--node-prefix=$name")
enqueue() { do_it "${queue[@]}" create "$name" "${options[@]}" "${nodes[@]}" "--runtime-version=$runtime"; }

make_slice() {
  note "the slice, reused if it exists"
  if [ -n "$dry" ]; then
    [ "$slices" != 1 ] || show "${tpu[@]}" describe "$name" "${where[@]}" "--format=value(state)"
    if [ -n "$queued" ]; then
      note "if it does not exist: a queued resource, unless that exists"
      show "${queue[@]}" describe "$name" "${where[@]}" "--format=value(state.state)"
      enqueue
      note "until its state is ACTIVE"
      show "${queue[@]}" describe "$name" "${where[@]}" "--format=value(state.state)"
    else
      note "if it does not exist"
      create
    fi
    return
  fi
  if [ "$slices" = 1 ]; then
    get_state state "${tpu[@]}"
    while [ "$state" = CREATING ] || [ "$state" = STARTING ]; do
      sleep "$pause"
      get_state state "${tpu[@]}"
    done
    case $state in
      READY) return ;;
      '') ;;
      *)
        echo "error: slice $name is $state. Delete it (--delete) and start again: a run resumes from its workdir." >&2
        exit 1
        ;;
    esac
  fi
  if [ -z "$queued" ]; then
    create
    return
  fi
  get_state state.state "${queue[@]}"
  if [ -z "$state" ]; then
    enqueue
    get_state state.state "${queue[@]}"
  fi
  while [ "$state" != ACTIVE ]; do
    case $state in
      FAILED | SUSPENDING | SUSPENDED | '')
        echo "error: queued resource $name is ${state:-gone}. Delete it (--queued --delete) and request it again." >&2
        exit 1
        ;;
    esac
    echo "   $name: $state" >&2
    sleep "$pause"
    get_state state.state "${queue[@]}"
  done
}

# Commands for the hosts. In ~/pe_lab, run.pid has the session of the run, and run.status its exit status at the end.
# shellcheck disable=SC2016 # expanded on the hosts
busy='if grep -qs run.status "/proc/$(cat ~/pe_lab/run.pid 2>/dev/null)/cmdline"; then echo BUSY; else echo IDLE; fi'
unpack='mkdir -p ~/pe_lab && cd ~/pe_lab && find . -mindepth 1 -maxdepth 1 ! -name .venv ! -name data ! -name runs ! -name "run.*" -exec rm -rf {} + && tar xzf ~/pe_lab.tar.gz'
# shellcheck disable=SC2016
install='python3 -m pip install --user --quiet uv && cd ~/pe_lab && PATH="$HOME/.local/bin:$PATH" UV_PYTHON_DOWNLOADS=automatic EXTRA=tpu sh launch/venv.sh'
# shellcheck disable=SC2016
follow='cd ~/pe_lab && tail --pid="$(cat run.pid)" -n 100 -F run.log'
status='cat ~/pe_lab/run.status'
# shellcheck disable=SC2016
stop='kill -TERM -- "-$(cat ~/pe_lab/run.pid)"'

start_command() {
  local run
  # With the trap, bash survives --stop's SIGTERM and writes the exit status of the command, which gets the signal too.
  run="trap : TERM; $(line .venv/bin/python "${program[@]:1}") >> run.log 2>&1; echo \$? > run.status"
  # A background child of the ssh shell leads no process group, so setsid keeps its pid, which is watched and signalled.
  echo "cd ~/pe_lab && rm -f run.status && { setsid nohup bash -c $(quote "$run") </dev/null >/dev/null 2>&1 & echo \$! > run.pid; }"
}

check_idle() {
  note "no run may be in progress on any host"
  if [ -n "$dry" ]; then
    on_hosts all "$busy"
    return
  fi
  local answer
  answer=$(on_hosts all "$busy")
  case $answer in
    *BUSY*) fail "a run is in progress on $name. Follow it with --attach, or end it with --stop." ;;
  esac
}

copy() {
  local archive=/tmp/pe_lab-$name.tar.gz
  note "the commit, to every host"
  if [ -z "$dry" ] && [ -n "$(git status --porcelain)" ]; then
    echo "   note: uncommitted changes are not copied" >&2
  fi
  do_it git archive --format=tar.gz "--output=$archive" HEAD
  to_hosts "$archive" pe_lab.tar.gz
  on_hosts all "$unpack"
}

# The exit status comes from the run's file: that of ssh may be a lost connection.
follow_run() {
  local result tries=0
  note "the log of host 0 (Ctrl-C does not end the run; --attach follows it again)"
  if [ -n "$dry" ]; then
    on_hosts 0 "$follow"
    note "at the end of the log: the exit status of the run; without one the connection was lost: follow again"
    on_hosts 0 "$status"
    return
  fi
  while true; do
    on_hosts 0 "$follow" || true
    if result=$(on_hosts 0 "$status" 2>/dev/null) && [[ $result =~ ^[0-9]+$ ]]; then
      echo "== the run ended with status $result" >&2
      exit "$result"
    fi
    tries=$((tries + 1))
    if [ $tries -ge 100 ]; then
      echo "error: host 0 of $name could not be reached $tries times. Was the slice preempted? Try --attach." >&2
      exit 1
    fi
    echo "== connection lost; following again in $pause s" >&2
    sleep "$pause"
  done
}

cd "$here/.."
case $action in
  run)
    make_slice
    check_idle
    copy
    note "Python and the locked packages, on every host"
    on_hosts all "$install"
    if [ -n "$before" ]; then
      note "the command of --before, on every host"
      on_hosts all "$before"
    fi
    note "the same command on every host"
    on_hosts all "$(start_command)"
    follow_run
    ;;
  attach) follow_run ;;
  stop) on_hosts all "$stop" ;;
  delete)
    if [ -n "$queued" ]; then
      do_it "${queue[@]}" delete "$name" "${where[@]}" --force --quiet
    else
      do_it "${tpu[@]}" delete "$name" "${where[@]}" --quiet
    fi
    ;;
esac
