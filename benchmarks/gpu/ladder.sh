#!/bin/sh
# The ladder's larger rungs (claims/ladder_192.py, _256, _384), whose gaps claims/results/ladder.json has predicted:
#   sh benchmarks/gpu/ladder.sh pack      # where data/manuals is: build/ladder/part.*, 40 MiB each, to be carried over
#   sh benchmarks/gpu/ladder.sh unpack    # on the GPU's machine, with all of them there
#   sh benchmarks/gpu/ladder.sh 192       # ends after 9 minutes, and the same command goes on until it has a verdict
#   sh benchmarks/gpu/ladder.sh --tiny    # one layer and 32 steps, on a CPU; it needs the prediction, too
# All seeds of an arm are one program (--stack). FLOPs of a rung with 3 seeds: 1.6e16, 4.6e16 and 2.0e17.
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-benchmarks/results/h100}/ladder
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
case "${1:-}" in
  pack)
    mkdir -p build/ladder
    tar -C data -cf - manuals | xz -T0 -2 | split -b 40m - build/ladder/part.
    exec ls -l build/ladder
    ;;
  unpack)
    mkdir -p data
    cat build/ladder/part.* | tar -C data -xJf -
    exec ls data/manuals
    ;;
  --tiny)
    export JAX_PLATFORMS=cpu
    width=192 options="--size=quick --seeds=2 --config.model.layers=1" work=${WORK:-runs/ladder}
    ;;
  192 | 256 | 384)
    export JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false
    width=$1 options="--seeds=3 --budget=8m" work=${WORK:-runs/ladder}
    ;;
  *) echo "usage: sh benchmarks/gpu/ladder.sh pack|unpack|192|256|384|--tiny" >&2 && exit 2 ;;
esac
mkdir -p "$out"
# shellcheck disable=SC2086  # $options has several words
status=0
"$python" -m pe_lab.claims "ladder_$width" $options --stack=6 --jobs=1 --workdir="$work" --out="$out" || status=$?
case $status in 0) ;; 75) echo "saved; the same command goes on" && exit 0 ;; *) exit $status ;; esac
tar -C "$work" --exclude=checkpoints --exclude=compiled -czf "$out/ladder_$width.tar.gz" .
