#!/usr/bin/env bash
# Runs the same command as a managed job of SkyPilot, on the cloud or the Kubernetes cluster that it chooses, and
# follows the log. SkyPilot starts the run again after a preemption and after a crash.
#
# The run does not depend on this script: a lost connection, or Ctrl-C here, does not stop it.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/sky.sh --name=NAME --type=TYPE [OPTION ...] -- python -m MODULE [ARG ...]
       launch/sky.sh --name=NAME --attach | --stop

  --name=NAME           name of the job (NAME)
  --type=H100:8         accelerators of a node (TYPE), as SkyPilot names them: A100-80GB:8, tpu-v5litepod-16:1
  --nodes=N             nodes (1; a TPU slice is one node here)
  --spot                on spot instances
  --infra=WHERE         cloud, region, zone or Kubernetes context, such as gcp/us-central1
  --volume=NAME:/PATH   mount a volume of SkyPilot; --workdir must be on one, or on what --before mounts; may be repeated
  --before=COMMAND      run this on every node before the run, for example to mount a shared file system
  --restarts=N          restarts after crashes and after bad input (3); preemptions are not counted
  --detach              submit, and do not follow the log
  --dry-run             print the commands and the task, run nothing
  --attach              follow the job again
  --stop                cancel the job; the run continues from its last checkpoint when it is submitted again
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
. "$here/common.sh"

name=${NAME:-} type=${TYPE:-} nodes=1 spot='' infra='' before='' restarts=3 detach='' dry='' action=run
volumes=() program=()
while [ $# -gt 0 ]; do
  case $1 in
    --name=*) name=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --nodes=*) nodes=${1#*=} ;;
    --spot) spot=yes ;;
    --infra=*) infra=${1#*=} ;;
    --volume=*) volumes+=("${1#*=}") ;;
    --before=*) before=${1#*=} ;;
    --restarts=*) restarts=${1#*=} ;;
    --detach) detach=yes ;;
    --dry-run) dry=yes ;;
    --attach | --stop)
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

[[ $name =~ ^[a-zA-Z]([a-zA-Z0-9-]*[a-zA-Z0-9])?$ ]] || fail "the job's name is '$name'. Give --name=NAME or set NAME: letters, digits and -."
if [ "$action" = run ]; then
  [[ $type =~ ^[A-Za-z0-9.-]+:[1-9][0-9]*$ ]] || fail "--type is '$type'. Give an accelerator and a number, such as H100:8 (sky gpus list shows them)."
  whole_number --nodes "$nodes" 1
  whole_number --restarts "$restarts" 0
  need_program /mnt/runs/NAME ${program[@]+"${program[@]}"}
  for word in "$infra" "${program[@]}" ${volumes[@]+"${volumes[@]}"}; do
    [[ $word != *[[:cntrl:]]* ]] || fail "a control character, such as the end of a line, in '$word'. Remove it."
  done
  for volume in ${volumes[@]+"${volumes[@]}"}; do
    [[ $volume =~ ^[^:]+:/[^:]*$ ]] || fail "--volume is '$volume'. Give a name and a path, such as runs:/mnt/runs."
  done
fi
need_tool sky "SkyPilot (pip install skypilot, in an environment of its own)"

case $type in
  tpu-*) kind=tpu ;;
  *) kind=gpu ;;
esac

task() {
  local volume
  cat <<TEXT
name: $name
num_nodes: $nodes
workdir: .
resources:
  accelerators: $(string "$type")
TEXT
  [ "$kind" = gpu ] || [ -z "$(tpu_runtime "${type#tpu-}")" ] || cat <<TEXT
  accelerator_args:
    runtime_version: $(tpu_runtime "${type#tpu-}")
TEXT
  [ -z "$infra" ] || printf '  infra: %s\n' "$(string "$infra")"
  [ -z "$spot" ] || echo '  use_spot: true'
  # 75: a checkpoint was saved after a SIGTERM.
  cat <<TEXT
  job_recovery:
    max_restarts_on_errors: $restarts
    recover_on_exit_codes: [75]
TEXT
  [ ${#volumes[@]} = 0 ] || echo 'volumes:'
  for volume in ${volumes[@]+"${volumes[@]}"}; do printf '  %s: %s\n' "$(string "${volume#*:}")" "$(string "${volume%%:*}")"; done
  cat <<TEXT
setup: |
  set -e
  python3 -m pip install --user --quiet uv
  PATH="\$HOME/.local/bin:\$PATH" UV_PYTHON_DOWNLOADS=automatic EXTRA=$kind sh launch/venv.sh
run: |
TEXT
  [ -z "$before" ] || printf '%s\n' "set -e" "$before" | sed 's/^/  /'
  # On a TPU slice JAX finds the other hosts by itself.
  # shellcheck disable=SC2016 # expanded on the nodes
  [ "$kind" = tpu ] || [ "$nodes" = 1 ] || printf '  %s\n' \
    'export COORDINATOR_ADDRESS="$(printf "%s\n" "$SKYPILOT_NODE_IPS" | head -n 1):12345"' \
    'export PROCESS_COUNT="$SKYPILOT_NUM_NODES" PROCESS_INDEX="$SKYPILOT_NODE_RANK"'
  printf '  exec %s\n' "$(line .venv/bin/python "${program[@]:1}")"
}

logs=(sky jobs logs "--name=$name" --follow)

cd "$here/.."
case $action in
  run)
    file=sky-task.yaml
    note "the task"
    if [ -n "$dry" ]; then
      echo "cat >$file <<'END'"
      task
      echo END
    else
      file=$(mktemp --suffix=.yaml)
      trap 'rm -f "$file"' EXIT
      task >"$file"
    fi
    note "a managed job"
    do_it sky jobs launch --yes "--name=$name" --detach-run "$file"
    if [ -z "$detach" ]; then
      note "its log (Ctrl-C does not end the run; --attach follows it again)"
      do_it "${logs[@]}"
    fi
    ;;
  attach) do_it "${logs[@]}" ;;
  stop) do_it sky jobs cancel --yes "--name=$name" ;;
esac
