#!/bin/sh
# SmolLM2-135M from 8,192 to 32,768 tokens, 20M tokens an arm: sh benchmarks/gpu/extend_smollm2.sh   (--tiny: on a CPU)
# A call ends after 9 minutes, and the next one goes on. FROM and DATA are a checkpoint and a source.
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-benchmarks/results/h100}/extend
work=${WORK:-runs/extend_smollm2_32k}
python=${PYTHON:-python3}
if [ "${1:-}" = --tiny ]; then
  export JAX_PLATFORMS=cpu
  set -- --from="$FROM" --data="$DATA" --length=2x --tokens=20k --batch=256 --long=0 --population=8 --iterations=0 \
    --search-sequences=1 --methods=unchanged,yarn,searched --arms=unchanged,yarn --evaluate.documents=2 \
    --evaluate.tokens=256 --evaluate.fit_tokens=256
else
  export JAX_PLATFORMS=cuda
  set -- --from="${FROM:-runs/smollm2}" --data="${DATA:-prose}" --length=4x --tokens=20M --batch=512k --rate=3e-5 \
    --population=32 --iterations=16 --best=1 --evaluate.documents=16
fi
status=0
timeout 540 "$python" -m pe_lab.extend "$@" --workdir="$work" || status=$?
mkdir -p "$out"
for file in answer.json table.md report.html screening/screening.json screening/search.jsonl screening/search.svg; do
  if [ -f "$work/$file" ]; then cp "$work/$file" "$out/"; fi
done
exit $status
