#!/bin/sh
# SmolLM2-135M, ten layers dropped, all dropped, or none, 60M tokens each: sh benchmarks/gpu/smollm2_drop.sh
# (--tiny: on a CPU). A call ends after 9 minutes, and the next one goes on. FROM and DATA are a checkpoint and a
# directory of pe_lab.prepare with its tokenizer. docs/claims.md has the gap that was predicted before the first run.
set -eu
cd "$(dirname "$0")/../.."
out=${OUT:-benchmarks/results/h100}/smollm2_drop
work=${WORK:-runs/smollm2_drop}
python=${PYTHON:-python3}
from=${FROM:-runs/smollm2}
data=${DATA:-data/manuals-smollm2}
end=$(($(date +%s) + 540))
if [ "${1:-}" = --tiny ]; then
  export JAX_PLATFORMS=cpu
  ten=0 steps=10 length=32 batch=2 device=cpu set="--config.checkpoint.every_steps=5"
else
  export JAX_PLATFORMS=cuda
  ten=6-7,17,20-21,24-26,28-29  # the cheapest by measured losses (docs/claims.md)
  steps=1832 length=8192 batch=4 device=gpu
  set="--config.model.remat=dots_attention --config.model.loss_chunks=16 --config.phases.0.accumulate=2"
  set="$set --config.checkpoint.every_steps=229 --config.log.validate_every_steps=229 --config.log.validation_batches=16"
fi
mkdir -p "$work" "$out"

# until COMMAND: what it has when the nine minutes are over, it saves.
until_end() {
  left=$((end - $(date +%s)))
  if [ "$left" -lt 20 ]; then
    echo "the nine minutes are over; the same command goes on"
    exit 0
  fi
  status=0
  timeout "$left" "$python" -m "$@" || status=$?
  case $status in 0) ;; 75 | 124) echo "saved; the same command goes on" && exit 0 ;; *) exit $status ;; esac
}

tune="configs/finetune.py:data=$data,device=$device,steps=$steps,length=$length,batch=$batch"
[ -d "$work/ten" ] || "$python" -m pe_lab.surgery --from="$from" --to="$work/ten" --drop --layers="$ten"
[ -d "$work/all" ] || "$python" -m pe_lab.surgery --from="$from" --to="$work/all" --drop
# shellcheck disable=SC2086  # $set has several words
{
  until_end pe_lab.train --config="$tune,from=$from,rate=3e-4" $set --workdir="$work/control"
  until_end pe_lab.train --config="$tune,from=$work/ten,teacher=$from,rate=1e-3" $set --workdir="$work/ten_layers"
  until_end pe_lab.train --config="$tune,from=$work/all,teacher=$from,rate=1e-3" $set \
    --config.phases.0.qk_norm=head --workdir="$work/all_layers"
}
for run in control ten_layers all_layers; do
  mkdir -p "$out/$run"
  cp "$work/$run"/finetune/metrics.jsonl "$work/$run"/finetune/speed.jsonl "$out/$run/"
done
"$python" -m pe_lab.report "$work/control" "$work/ten_layers" "$work/all_layers" --out="$out/report.html"
