#!/usr/bin/env bash
# Runs the same command on TPU slices or GPU nodes of a GKE cluster, as a JobSet, and follows the log of its first host.
# The JobSet starts the run again after a preemption, as often as needed, and after a crash, until it is complete.
#
# The run does not depend on this script: a lost connection, or Ctrl-C here, does not stop it.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/gke.sh --name=NAME --type=TYPE --image=IMAGE [OPTION ...] -- python -m MODULE [ARG ...]
       launch/gke.sh --name=NAME --attach | --stop

  --name=NAME            name of the JobSet (NAME); a run of the same name is refused
  --type=v5e:16x16       TPU and topology of a slice (TYPE): v4, v5e, v5p, v6e, tpu7x
  --type=h100:8          GPU and GPUs per node: a100, l4, h100, h100-mega, h200, b200
  --image=IMAGE          container image with pe_lab, such as one of launch/Dockerfile (IMAGE)
  --slices=N             TPU slices (1)
  --nodes=N              GPU nodes (1)
  --chips-per-host=N     TPU chips of each host (4, or 1 for a topology of one chip)
  --spot                 on spot nodes
  --mount=CLAIM:/PATH    mount a PersistentVolumeClaim; --workdir must be on one; may be repeated
  --queue=NAME           Kueue's LocalQueue
  --service-account=NAME Kubernetes service account of the pods
  --grace-seconds=N      time to save a checkpoint after SIGTERM (120)
  --restarts=N           restarts after crashes (3); preemptions are not counted
  --namespace=NAME       namespace (that of kubectl's context)
  --context=NAME         kubectl's context
  --gcluster             submit through Cluster Toolkit: gcluster job submit
  --gcluster-arg=ARG     another argument of gcluster, such as --cluster=NAME; may be repeated
  --detach               submit, and do not follow the log
  --dry-run              print the commands and the manifest, run nothing
  --attach               follow the run again
  --stop                 delete the JobSet: every host gets SIGTERM, and the run saves a checkpoint
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
. "$here/common.sh"

name=${NAME:-} type=${TYPE:-} image=${IMAGE:-} slices='' nodes='' chips='' spot='' queue='' account='' grace=120
restarts=3 gcluster='' detach='' dry='' action=run
mounts=() kubectl=(kubectl) gcluster_args=() program=()
while [ $# -gt 0 ]; do
  case $1 in
    --name=*) name=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --image=*) image=${1#*=} ;;
    --slices=*) slices=${1#*=} ;;
    --nodes=*) nodes=${1#*=} ;;
    --chips-per-host=*) chips=${1#*=} ;;
    --spot) spot=yes ;;
    --mount=*) mounts+=("${1#*=}") ;;
    --queue=*) queue=${1#*=} ;;
    --service-account=*) account=${1#*=} ;;
    --grace-seconds=*) grace=${1#*=} ;;
    --restarts=*) restarts=${1#*=} ;;
    --namespace=* | --context=*) kubectl+=("$1") ;;
    --gcluster) gcluster=yes ;;
    --gcluster-arg=*) gcluster_args+=("${1#*=}") ;;
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

pause=${POLL_SECONDS:-10}
[ -n "$name" ] || fail "no name for the JobSet. Give --name=NAME or set NAME."
# With the numbers of a slice and of a host, it is part of the names of pods, which have at most 63 characters.
longest=40
[ -z "$gcluster" ] || longest=28
if ! [[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || [ ${#name} -gt $longest ]; then
  fail "the name '$name' is not usable as a host name. Use at most $longest lower-case letters, digits and -."
fi
[ -z "$gcluster" ] || [ ${#kubectl[@]} = 1 ] || fail "--namespace and --context are for kubectl: leave them out with --gcluster."
[ -n "$gcluster" ] || [ ${#gcluster_args[@]} = 0 ] || fail "--gcluster-arg is for --gcluster: give that, too."

# Sets the properties of TYPE: `label`, the value of GKE's node label; `machine`, the machine type that gcluster
# takes; `devices` of a host and `hosts` of a slice.
read_type() {
  local family=${type%%:*} size=${type#*:} dimensions=2 word product=1 digits=()
  case $family in
    v4 | v5p | tpu7x) dimensions=3 ;;
  esac
  case $family in
    v4) label=tpu-v4-podslice machine=ct4p-hightpu- ;;
    v5e) label=tpu-v5-lite-podslice machine=ct5lp-hightpu- ;;
    v5p) label=tpu-v5p-slice machine=ct5p-hightpu- ;;
    v6e) label=tpu-v6e-slice machine=ct6e-standard- ;;
    tpu7x) label=tpu7x machine=tpu7x-standard- ;;
    a100) label=nvidia-tesla-a100 machine=a100-40gb ;;
    l4) label=nvidia-l4 machine=l4 ;;
    h100) label=nvidia-h100-80gb machine=h100-80gb ;;
    h100-mega) label=nvidia-h100-mega-80gb machine=h100-mega-80gb ;;
    h200) label=nvidia-h200-141gb machine=h200-141gb ;;
    b200) label=nvidia-b200 machine=b200 ;;
    *) fail "--type is '$type'. Give a TPU and a topology, such as v5e:16x16, or a GPU and a number, such as h100:8." ;;
  esac
  case $label in
    nvidia-*)
      tpu='' topology='' hosts=${nodes:-1} devices=$size
      [[ $size =~ ^[1-8]$ && $type == *:* ]] || fail "--type is '$type'. Give the GPUs of a node, such as $family:8."
      [ -z "$slices$chips" ] || fail "--slices and --chips-per-host are for TPUs. Give --nodes=N for $family."
      whole_number --nodes "$hosts" 1
      machine=$machine-$devices
      return
      ;;
  esac
  tpu=yes topology=$size slices=${slices:-1}
  [ -z "$nodes" ] || fail "--nodes is for GPUs. The topology says how many hosts a slice has; give --slices=N."
  whole_number --slices "$slices" 1
  IFS=x read -r -a digits <<<"$topology"
  if [[ ! $topology =~ ^[1-9][0-9]{0,2}(x[1-9][0-9]{0,2}){1,2}$ ]] || [ ${#digits[@]} != $dimensions ]; then
    fail "--type is '$type'. Give the topology of $family as $dimensions numbers, such as $family:$([ $dimensions = 2 ] && echo 4x4 || echo 2x2x4)."
  fi
  for word in "${digits[@]}"; do product=$((product * word)); done
  devices=${chips:-$([ $product = 1 ] && echo 1 || echo 4)}
  case $devices in
    1 | 4) ;;
    8) [ $dimensions = 2 ] || fail "--chips-per-host is 8. $family has 4." ;;
    *) fail "--chips-per-host is '$devices'. Give 1, 4 or 8." ;;
  esac
  [ $((product % devices)) = 0 ] || fail "$devices chips per host do not divide the $product chips of $topology."
  hosts=$((product / devices)) machine=$machine${devices}t
}

if [ "$action" = run ]; then
  [ -n "$type" ] || fail "no accelerator. Give --type=TYPE or set TYPE, such as v5e:16x16 or h100:8."
  [ -n "$image" ] || fail "no container image. Give --image=IMAGE or set IMAGE; launch/Dockerfile makes one."
  read_type
  whole_number --grace-seconds "$grace" 1
  whole_number --restarts "$restarts" 0
  need_program /mnt/runs/NAME ${program[@]+"${program[@]}"}
  for word in "$image" "$queue" "$account" "${program[@]}" ${mounts[@]+"${mounts[@]}"}; do
    [[ $word != *[[:cntrl:]]* ]] || fail "a control character, such as the end of a line, in '$word'. Remove it."
  done
  for mount in ${mounts[@]+"${mounts[@]}"}; do
    [[ $mount =~ ^[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[^:]*$ ]] || fail "--mount is '$mount'. Give a claim and a path, such as runs:/mnt/runs."
  done
fi
if [ -n "$gcluster" ]; then
  need_tool gcluster "Google's Cluster Toolkit"
else
  need_tool kubectl "kubectl"
fi

strings() { # INDENT WORD ...
  local indent=$1 word
  shift
  for word in "$@"; do printf '%s- %s\n' "$indent" "$(string "$word")"; done
}

# GKE sets the variables by which JAX finds the other hosts of a TPU slice, and the other slices. For GPUs they are here.
environment() {
  if [ -n "$tpu" ] || [ "$hosts" = 1 ]; then return; fi
  cat <<TEXT
                  env:
                    - name: COORDINATOR_ADDRESS
                      value: $(string "$name-host-0-0.$name:12345")
                    - name: PROCESS_COUNT
                      value: "$hosts"
                    - name: PROCESS_INDEX
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
TEXT
}

volumes() {
  local number=0 mount listed=''
  for mount in ${mounts[@]+"${mounts[@]}"}; do
    listed+="
                    - name: claim-$number
                      mountPath: $(string "${mount#*:}")"
    number=$((number + 1))
  done
  [ -n "$tpu" ] || listed+='
                    - name: shared-memory
                      mountPath: /dev/shm'
  [ -z "$listed" ] || printf '                  volumeMounts:%s\n' "$listed"
  listed='' number=0
  for mount in ${mounts[@]+"${mounts[@]}"}; do
    listed+="
                - name: claim-$number
                  persistentVolumeClaim:
                    claimName: ${mount%%:*}"
    number=$((number + 1))
  done
  [ -n "$tpu" ] || listed+='
                - name: shared-memory # of NCCL
                  emptyDir:
                    medium: Memory'
  [ -z "$listed" ] || printf '              volumes:%s\n' "$listed"
}

# Statuses of the run: 2 is bad input, 75 a checkpoint saved after a SIGTERM. A rule that matches makes the Job fail with
# a message, by which the JobSet decides. Without a match it counts the failure as a crash.
manifest() {
  local job=host resource=nvidia.com/gpu
  [ -z "$tpu" ] || job=slice resource=google.com/tpu
  cat <<TEXT
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
TEXT
  [ -z "$queue" ] || printf '  labels:\n    kueue.x-k8s.io/queue-name: %s\n' "$(string "$queue")"
  # All hosts of a slice are in one node pool, and no two slices in the same.
  [ -z "$tpu" ] || [ "$slices" = 1 ] || cat <<'TEXT'
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
TEXT
  cat <<TEXT
spec:
  failurePolicy:
    maxRestarts: $restarts
    rules:
      - name: bad_input
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
        onJobFailureMessagePatterns: ["exit code 2 "]
      - name: preempted
        action: RestartJobSetAndIgnoreMaxRestarts
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: $job
      replicas: ${slices:-1}
      template:
        spec:
          parallelism: $hosts
          completions: $hosts
          completionMode: Indexed
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: run
                  operator: In
                  values: [2, 75]
              - action: FailJob
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: $grace
TEXT
  [ -z "$account" ] || printf '              serviceAccountName: %s\n' "$(string "$account")"
  [ -z "$tpu" ] || cat <<'TEXT'
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
TEXT
  echo '              nodeSelector:'
  if [ -n "$tpu" ]; then
    printf '                cloud.google.com/gke-tpu-%s\n' "accelerator: $label" "topology: $topology"
  else
    printf '                cloud.google.com/gke-accelerator: %s\n' "$label"
  fi
  [ -z "$spot" ] || cat <<'TEXT'
                cloud.google.com/gke-spot: "true"
              tolerations:
                - key: cloud.google.com/gke-spot
                  operator: Equal
                  value: "true"
                  effect: NoSchedule
TEXT
  cat <<TEXT
              containers:
                - name: run
                  image: $(string "$image")
                  command:
$(strings '                    ' "${program[@]}")
TEXT
  [ -z "$tpu" ] || cat <<'TEXT'
                  securityContext:
                    privileged: true
TEXT
  cat <<TEXT
                  resources:
                    requests:
                      $resource: $devices
                    limits:
                      $resource: $devices
TEXT
  environment
  volumes
}

submission() {
  local command mount
  command="exec $(line "${program[@]}")"
  if [ -z "$tpu" ] && [ "$hosts" != 1 ]; then
    # shellcheck disable=SC2016 # expanded in the container
    command="COORDINATOR_ADDRESS=$name-main-job-0-0.$name:12345 PROCESS_COUNT=$hosts "'PROCESS_INDEX=$JOB_COMPLETION_INDEX '$command
  fi
  words=(gcluster job submit "--name=$name" "--image=$image" "--command=$command" "--compute-type=$machine")
  if [ -n "$tpu" ]; then words+=("--topology=$topology" "--num-slices=$slices"); else words+=("--num-nodes=$hosts"); fi
  # shellcheck disable=SC2054 # one argument with commas
  words+=("--restarts=$restarts" --restart-on-exit-codes=1,75,134,137,139,143 "--grace-period=${grace}s")
  [ -z "$spot" ] || words+=(--node-constraint=cloud.google.com/gke-spot=true)
  [ -z "$queue" ] || words+=("--queue=$queue")
  [ -z "$account" ] || words+=("--service-account=$account")
  for mount in ${mounts[@]+"${mounts[@]}"}; do words+=("--mount=$mount:rw"); done
  words+=(${gcluster_args[@]+"${gcluster_args[@]}"})
}

get=("${kubectl[@]}" get jobset "$name" --ignore-not-found "--output=jsonpath={.metadata.name} {.status.terminalState}")
logs=("${kubectl[@]}" logs --follow --tail=100
  "--selector=jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0")
remove=("${kubectl[@]}" delete jobset "$name" --cascade=foreground)

follow_run() {
  local answer found state tries=0
  note "the log of host 0 (Ctrl-C does not end the run; --attach follows it again)"
  if [ -n "$dry" ]; then
    show "${logs[@]}"
    note "at the end of the log: Completed or Failed; otherwise it starts again: follow again"
    show "${get[@]}"
    return
  fi
  while true; do
    if ! answer=$("${get[@]}"); then
      tries=$((tries + 1))
      [ $tries -lt 100 ] || exit 1
      sleep "$pause"
      continue
    fi
    read -r found state <<<"$answer" || true
    if [ -z "$found" ]; then
      echo "error: there is no JobSet $name. The same command submits it again, and the run resumes." >&2
      exit 1
    fi
    case $state in
      Completed)
        note "the run is complete"
        exit 0
        ;;
      Failed)
        echo "error: the run failed. 'kubectl describe jobset $name' says why; its log is above." >&2
        exit 1
        ;;
    esac
    "${logs[@]}" || true
    sleep "$pause"
  done
}

make_jobset() {
  local answer found state
  note "no run of this name may be in progress; one that ended is replaced"
  if [ -n "$dry" ]; then
    show "${get[@]}"
    show "${remove[@]}"
    note "the JobSet"
    printf "%s <<'END'\n" "$(line "${kubectl[@]}" apply --filename=-)"
    manifest
    echo END
    return
  fi
  answer=$("${get[@]}")
  read -r found state <<<"$answer" || true
  if [ -n "$found" ]; then
    [ -n "$state" ] || fail "a run named $name is in progress. Follow it with --attach, end it with --stop, or set --name."
    "${remove[@]}"
  fi
  manifest | "${kubectl[@]}" apply --filename=-
}

case $action in
  run)
    if [ -n "$gcluster" ]; then
      submission
      note "the JobSet, by Cluster Toolkit"
      do_it "${words[@]}"
    else
      make_jobset
    fi
    if [ -z "$detach" ]; then
      if [ -n "$gcluster" ]; then do_it gcluster job logs "$name" --follow ${gcluster_args[@]+"${gcluster_args[@]}"}; else follow_run; fi
    fi
    ;;
  attach)
    if [ -n "$gcluster" ]; then do_it gcluster job logs "$name" --follow ${gcluster_args[@]+"${gcluster_args[@]}"}; else follow_run; fi
    ;;
  stop)
    if [ -n "$gcluster" ]; then do_it gcluster job cancel "$name" ${gcluster_args[@]+"${gcluster_args[@]}"}; else do_it "${remove[@]}"; fi
    ;;
esac
