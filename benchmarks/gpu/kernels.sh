#!/bin/sh
# pe_lab's attention kernels, compiled, against float64: sh benchmarks/gpu/kernels.sh   (--tiny: a few, interpreted)
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-benchmarks/results/h100}
mkdir -p "$out"
tests="tests/attention/test_hopper.py tests/attention/test_hopper_gradient.py tests/attention/test_gpu.py tests/attention/test_gpu_gradient.py"
if [ "${1:-}" = --tiny ]; then
  export JAX_PLATFORMS=cpu
  set -- -k "any_length" -m "not slow"
else
  export JAX_PLATFORMS=cuda
  # What ptxas makes of the kernels for Hopper: registers, spills, and whether it honours setmaxnreg (C7504: it does not).
  MOSAIC_GPU_DUMP_PTXAS=1 timeout 60 ${PYTHON:-python3} -m pytest -q -s -p no:cacheprovider \
    tests/attention/test_hopper.py -k "any_head_dim" >"$out/ptxas.log" 2>&1 || true
  set -- -n 5
fi
# shellcheck disable=SC2086  # a list of files
timeout 480 ${PYTHON:-python3} -m pytest -q -p no:cacheprovider "$@" --junitxml="$out/kernels.xml" $tests >"$out/kernels.log" 2>&1 \
  && status=0 || status=$?
tail -n 40 "$out/kernels.log"
exit $status
