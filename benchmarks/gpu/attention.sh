#!/bin/sh
# Every feature of attention, on every implementation that honours it, for heads of 64, 128 or 256 channels:
# sh benchmarks/gpu/attention.sh 128   (--tiny: interpreted)
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-benchmarks/results/h100}
mkdir -p "$out"
case "${1:?64, 128, 256 or --tiny}" in
--tiny)
  export JAX_PLATFORMS=cpu
  exec ${PYTHON:-python3} -m benchmarks.attention --tiny --ours-only --parts=features --only=cudnn,pallas_gpu \
    --json "$out/attention-tiny.json"
  ;;
*)
  exec timeout 540 ${PYTHON:-python3} -m benchmarks.attention --parts=features,forward,decode --lengths=8192,32768 \
    --only=auto,pallas,cudnn,tokamax,torch --head-dims="$1" --rounds=3 --json "$out/attention-$1.json"
  ;;
esac
