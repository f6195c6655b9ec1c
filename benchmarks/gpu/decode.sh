#!/bin/sh
# Prefill and decoding against transformers and the limit of a copy: sh benchmarks/gpu/decode.sh   (--tiny: on a CPU)
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-benchmarks/results/h100}
if [ "${1:-}" = --tiny ]; then
  export JAX_PLATFORMS=cpu
  exec ${PYTHON:-python3} benchmarks/decode.py --tiny --ours-only --cases=1x16,2x40 --new=8 --rounds=1 --out="$out"
fi
export JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false
exec timeout 540 ${PYTHON:-python3} benchmarks/decode.py --cases=1x2048,1x8192,16x2048,64x2048 --out="$out"
