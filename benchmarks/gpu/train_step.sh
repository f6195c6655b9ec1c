#!/bin/sh
# The train step against torch.compile: sh benchmarks/gpu/train_step.sh   (--tiny: a tiny model, on a CPU)
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-benchmarks/results/h100}
mkdir -p "$out"
if [ "${1:-}" = --tiny ]; then
  export JAX_PLATFORMS=cpu
  exec ${PYTHON:-python3} -m benchmarks.train_step_gpu --tiny --ours-only --rounds=1 --json "$out/train_step-tiny.json"
fi
exec timeout 540 ${PYTHON:-python3} -m benchmarks.train_step_gpu --json "$out/train_step.json"
