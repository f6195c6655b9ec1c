#!/bin/sh
# Cells of a sweep in one program against one cell alone: sh benchmarks/gpu/stack.sh   (--tiny: on a CPU)
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-benchmarks/results/h100}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ "${1:-}" = --tiny ]; then
  export JAX_PLATFORMS=cpu
  exec ${PYTHON:-python3} benchmarks/stack.py --widths=16 --stacks=2 --jobs=1 --seconds=1 --length=16 --batch=2 --rounds=1 --out="$out/stack-tiny.json"
fi
export JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false
exec timeout 540 ${PYTHON:-python3} benchmarks/stack.py --widths=128,256 --stacks=4,16 --seconds=15 --length=512 --batch=16 --dtype=bfloat16 --rounds=1 --out="$out/stack.json"
