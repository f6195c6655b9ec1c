#!/usr/bin/env bash
# Submits the same command as a SLURM job, one process per node, and follows its log. The job is requeued until the
# run is complete: after a preemption, at the time limit, after a crash. The settings of an experiment are in its config.
#
# The run does not depend on this script: a lost connection, or Ctrl-C here, does not stop it.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/slurm.sh [OPTION ...] -- python -m MODULE [ARG ...]
       launch/slurm.sh [--name=NAME | --job=ID] --attach | --stop

  --name=NAME           name of the job (NAME; pe_lab by default); a second job of the same name is refused
  --nodes=N             nodes (1)
  --tasks-per-node=N    processes per node (1: a process uses all GPUs of its node)
  --gpus-per-node=N     GPUs of each node
  --cpus-per-task=N     CPUs of each process
  --time=LIMIT          time limit of one session, such as 24:00:00
  --partition=NAME      partition
  --account=NAME        account
  --signal-seconds=N    SIGTERM this long before the time limit, for the run to save (120)
  --retries=N           requeues after crashes in a row, each within an hour of its start (3)
  --before=COMMAND      run this on the first node before the run, such as 'module load cuda'
  --logs=DIR            directory of NAME-ID.log and NAME-ID.status (runs/slurm)
  --sbatch=ARGUMENT     another argument of sbatch, such as --qos=high; may be repeated
  --detach              submit, and do not follow the log
  --dry-run             print the commands, run none
  --attach              follow the job again
  --stop                end the run with SIGTERM: it saves a checkpoint first, and is not requeued
  --job=ID              the job of --attach and --stop, if not the one of that name
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
. "$here/common.sh"
checkout=$(dirname "$here")

name=${NAME:-pe_lab} nodes=1 tasks=1 cpus='' warning=120 retries=3 before='' logs='' detach='' dry='' job='' action=run
extra=() program=()
while [ $# -gt 0 ]; do
  case $1 in
    --name=*) name=${1#*=} ;;
    --nodes=*) nodes=${1#*=} ;;
    --tasks-per-node=*) tasks=${1#*=} ;;
    --cpus-per-task=*) cpus=${1#*=} ;;
    --gpus-per-node=* | --time=* | --partition=* | --account=*) extra+=("$1") ;;
    --signal-seconds=*) warning=${1#*=} ;;
    --retries=*) retries=${1#*=} ;;
    --before=*) before=${1#*=} ;;
    --logs=*) logs=${1#*=} ;;
    --sbatch=*) extra+=("${1#*=}") ;;
    --detach) detach=yes ;;
    --dry-run) dry=yes ;;
    --job=*) job=${1#*=} ;;
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

case $name in
  '' | -* | *[!A-Za-z0-9_.-]*) fail "the name '$name' is not usable as a file name. Use letters, digits, . _ and -." ;;
esac
whole_number --nodes "$nodes" 1
whole_number --tasks-per-node "$tasks" 1
[ -z "$cpus" ] || whole_number --cpus-per-task "$cpus" 1
whole_number --signal-seconds "$warning" 1
[ "$warning" -le 65535 ] || fail "--signal-seconds is '$warning'. SLURM allows up to 65535."
whole_number --retries "$retries" 0
[ -z "$job" ] || whole_number --job "$job" 1
if [ "$action" = run ]; then
  [ -z "$job" ] || fail "--job is for --attach and --stop. A new job is named with --name."
  need_program /shared/runs/NAME ${program[@]+"${program[@]}"}
fi
need_tool sbatch "SLURM's commands, or run this on a login node of the cluster"

# The log directory must be on the file system that the nodes share, as the checkout is.
logs=${logs:-$checkout/runs/slurm}
case $logs in /*) ;; *) logs=$PWD/$logs ;; esac
case $logs in *%*) fail "--logs is '$logs'. sbatch replaces % in a file name: choose another directory." ;; esac
pause=${POLL_SECONDS:-10}

# The script of the job. Statuses of the run: 0 complete, 2 bad input, 75 saved after a SIGTERM, all others a crash. 143 is
# one of them: srun ends the other processes by SIGTERM when one has crashed.
batch_script() {
  local run=(srun --kill-on-bad-exit=0 --wait=30)
  [ -z "$cpus" ] || run+=("--cpus-per-task=$cpus")
  run+=(.venv/bin/python "${program[@]:1}")
  cat <<TEXT
#!/bin/bash
cd $(quote "$checkout") || exit 2
files=$(quote "$logs/$name")-\$SLURM_JOB_ID
retries=$retries
rm -f "\$files.status"
trap : TERM # the run gets the signal too: wait for it to save
${before:+{ $before
\} && }$(line "${run[@]}")
status=\$?
TEXT
  cat <<'TEXT'
crashes=0
case $status in
  0 | 2) again= ;;
  75) again=yes ;;
  *)
    if [ "$SECONDS" -lt 3600 ] && [ -s "$files.crashes" ]; then read -r crashes <"$files.crashes"; fi
    crashes=$((crashes + 1))
    if [ "$crashes" -le "$retries" ]; then again=yes; else again=; fi
    ;;
esac
echo "$crashes" >"$files.crashes"
echo "== the run ended with status $status on $(date)"
echo "$status" >"$files.status"
if [ -n "$again" ]; then
  # A job that was cancelled, or that SLURM requeues already, is no longer RUNNING: it must not be requeued here.
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
  if [ "$state" != RUNNING ]; then
    echo "== not requeued here: the job is $state"
  else
    echo "== requeue" # SLURM ends this script when it requeues the job
    scontrol requeue "$SLURM_JOB_ID" || echo "== SLURM refused: --stop forbade it"
  fi
fi
exit "$status"
TEXT
}

submission=(sbatch --parsable "--job-name=$name" "--nodes=$nodes" "--ntasks-per-node=$tasks")
[ -z "$cpus" ] || submission+=("--cpus-per-task=$cpus")
submission+=(--requeue "--signal=TERM@$warning" --open-mode=append "--output=$logs/$name-%j.log")
submission+=(${extra[@]+"${extra[@]}"})
find_job=(squeue --me --noheader "--name=$name" --format=%i)

# Sets `job` to the only job of this name, unless --job named it; `job` is empty if there is none.
get_job() {
  [ -z "$job" ] || return 0
  local found
  found=$("${find_job[@]}")
  case $found in
    *$'\n'*) fail "$(wc -l <<<"$found") jobs are named $name. Choose one with --job=ID (squeue --me lists them)." ;;
  esac
  job=$found
}

# The state of the job as SLURM names it, such as RUNNING; empty once SLURM has forgotten the job.
job_state() { scontrol --oneliner show job "$job" 2>/dev/null | sed -n 's/.* JobState=\([A-Z_]*\) .*/\1/p'; }

follow_job() {
  local files state last='' result follower
  files=$logs/$name-$job
  note "job $job; its log is $files.log (Ctrl-C does not end the run; --attach follows it again)"
  tail -n 100 -F "$files.log" 2>/dev/null &
  follower=$!
  # shellcheck disable=SC2064 # the number of now
  trap "kill $follower 2>/dev/null || true" EXIT
  while true; do
    state=$(job_state)
    case $state in
      '' | BOOT_FAIL | CANCELLED | COMPLETED | DEADLINE | FAILED | NODE_FAIL | OUT_OF_MEMORY | TIMEOUT | REVOKED) break ;;
    esac
    if [ "$state" != "$last" ]; then note "job $job is $state"; fi
    last=$state
    sleep "$pause"
  done
  sleep 1 # for the end of the log
  if [ -s "$files.status" ]; then
    read -r result <"$files.status"
    note "the run ended with status $result"
    exit "$result"
  fi
  echo "error: job $job is ${state:-no longer known to SLURM}, and did not write its status. Its log is $files.log;" \
    "the same command submits it again, and the run resumes." >&2
  exit 1
}

end_job() { # STATE; empty in a dry run
  note "a job that waits has nothing to save"
  if [ "$1" != RUNNING ]; then do_it scancel "$job"; fi
  note "a job that runs: no requeue, and SIGTERM to its processes"
  if [ "$1" = RUNNING ] || [ -n "$dry" ]; then
    do_it scontrol update "JobId=$job" Requeue=0
    do_it scancel --signal=TERM "$job"
  fi
}

case $action in
  run)
    note "no other job may have this name"
    if [ -n "$dry" ]; then
      show "${find_job[@]}"
    else
      get_job
      [ -z "$job" ] || fail "job $job is named $name, too. Follow it with --attach, end it with --stop, or set --name."
      [ -x "$checkout/.venv/bin/python" ] || fail "no .venv in $checkout. Run 'make setup EXTRA=gpu' there first."
    fi
    do_it mkdir -p "$logs"
    note "the job"
    if [ -n "$dry" ]; then
      printf '%s\n' "$(line "${submission[@]}") <<'END'"
      batch_script
      echo END
      [ -n "$detach" ] || note "then its log, as with --attach"
      exit 0
    fi
    job=$(batch_script | "${submission[@]}")
    job=${job%%;*}
    if [ -n "$detach" ]; then
      note "job $job; its log is $logs/$name-$job.log"
    else
      follow_job
    fi
    ;;
  *)
    if [ -n "$dry" ]; then
      if [ -z "$job" ]; then
        note "ID is the number of the job"
        show "${find_job[@]}"
        job=ID
      fi
      if [ "$action" = stop ]; then end_job ''; else show tail -n 100 -F "$logs/$name-$job.log"; fi
      exit 0
    fi
    get_job
    [ -n "$job" ] || fail "no job named $name. squeue --me lists your jobs; an ended one can be named with --job=ID."
    if [ "$action" = stop ]; then end_job "$(job_state)"; else follow_job; fi
    ;;
esac
